"""Settings as a command sees them."""

from typing import Any

from service.settings import Settings


def read_settings(**overrides: Any) -> Settings:
    """Settings with what the command line says instead; None says nothing."""
    return Settings(**{name: value for name, value in overrides.items() if value is not None})
