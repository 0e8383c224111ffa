"""Settings as a command sees them."""

from typing import Any

from service.secrets import read_secrets
from service.settings import Settings


def read_settings(**overrides: Any) -> Settings:
    """Settings with what the command line says instead; None says nothing. Secrets in files are read first.

    Raises Invalid for secrets that cannot be read.
    """
    read_secrets()
    return Settings(**{name: value for name, value in overrides.items() if value is not None})
