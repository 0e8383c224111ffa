"""Requests that carry their whole conversation: put in the place where the KV of most of it is already."""
