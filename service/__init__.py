"""The Preread service: HTTP, terminal, use cases, engines and database."""
