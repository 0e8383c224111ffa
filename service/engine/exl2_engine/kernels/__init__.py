"""Triton kernels over records of `cache_store.layout`; importing a module of this package needs triton."""
