"""What `demo.py` is made of: a server to start and stop, a client, a screen, and a report."""
