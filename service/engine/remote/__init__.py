"""The engine in a process of its own: frames on a Unix socket, a client, a supervisor."""
