"""Engines on several machines as one: workers register in Redis, and every API process uses all of them.

``client``  the `EngineClient` of an API process: chooses a worker, sends it the request, follows its events.
``worker``  serves one engine to all API processes, for as long as its heartbeat is believed.
"""
