"""Every controller of the API."""

from litestar import Controller

CONTROLLERS: list[type[Controller]] = []
