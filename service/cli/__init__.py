"""The command line. `main` is the entry point `preread`; each command is imported when it is used."""

from service.cli.group import main

__all__ = ["main"]
