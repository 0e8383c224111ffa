"""The REST interface over Litestar."""
