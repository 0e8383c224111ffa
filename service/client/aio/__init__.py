"""The client for asyncio. Its methods are those of `service.client.sync`, awaited."""
