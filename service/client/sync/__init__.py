"""The client for code that waits."""
