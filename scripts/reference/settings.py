"""The page of all settings, and `.env.example`, from `service/settings.py`."""

import textwrap
import typing
from pathlib import Path
from typing import Any

from annotated_types import Ge, Gt, Le, Lt
from pydantic.fields import FieldInfo

from service.settings import Settings

UNITS = ((1 << 30, "GiB"), (1 << 20, "MiB"))
OTHERS = {
    "PREREAD_CONFIG": "A TOML file with settings, in small letters and without the prefix; the environment wins.",
    "PREREAD_SECRETS_DIR": "A folder with secrets, one a file, called as the settings in small letters.",
    "PREREAD_ADMIN_KEY": "The first API key itself, in place of `PREREAD_ADMIN_KEY_FILE`.",
    "PREREAD_ENCRYPTION_KEY": "The key of snapshots itself, in place of `PREREAD_ENCRYPTION_KEY_FILE`.",
    "PREREAD_SERVER": "Of the command line: the server that `ask`, `ingest`, `documents` and `sessions` are for.",
    "PREREAD_KEY": "Of the command line: the API key for it.",
}
"""Variables that are no settings of the server."""
PAGE = """\
# Settings

This page is made from `service/settings.py` by `make docs`. [Operations](operations.md#settings) has the same settings
by subject, with what they are good for.

Each is an environment variable, or a line of the TOML file that `PREREAD_CONFIG` names (`port = 9000` for
`PREREAD_PORT`). A variable that is empty is as one that is not there. [`.env.example`](../.env.example) has them all
with their defaults.

| setting | value | default | meaning |
|---|---|---|---|
{rows}

## Variables that are no settings

They are read from the environment alone.

| variable | meaning |
|---|---|
{others}
"""
ENV = """\
# Every setting of Preread with its default, made from service/settings.py by `make docs`.
# Copy it to .env and change what should differ. `preread` does not read that file by itself:
#
#   set -a; . ./.env; set +a; preread serve
#   docker run --env-file .env ...
#
# Docker Compose reads .env too, for the variables that docker-compose.yml names.
"""


def settings_page() -> str:
    rows = "\n".join(_row(name, field) for name, field in Settings.model_fields.items())
    others = "\n".join(f"| `{name}` | {_cell(meaning)} |" for name, meaning in OTHERS.items())
    return PAGE.format(rows=rows, others=others)


def env_example() -> str:
    parts = [ENV]
    for name, field in Settings.model_fields.items():
        said = textwrap.wrap(f"{field.description or ''} ({_kind(field)})".replace("`", ""), 117)
        parts.append("\n".join([*(f"# {line}" for line in said), f"# PREREAD_{name.upper()}={_value(name, field)}"]))
    return "\n\n".join(part.strip() for part in parts) + "\n"


def _row(name: str, field: FieldInfo) -> str:
    value = _value(name, field)
    amount = _amount(value)
    shown = f"`{value}`{f' ({amount})' if amount else ''}" if value else "empty"
    return f"| `PREREAD_{name.upper()}` | {_cell(_kind(field))} | {_cell(shown)} | {_cell(field.description or '')} |"


def _value(name: str, field: FieldInfo) -> str:
    """The default as it is written into the environment."""
    if name == "data_dir":  # of whoever reads it, not of whoever made the page
        return "~/.local/share/preread"
    default = field.get_default(call_default_factory=True)
    if isinstance(default, float) and default.is_integer():
        default = int(default)
    return str(default).lower() if isinstance(default, bool) else str(default)


def _kind(field: FieldInfo) -> str:
    """What a value may be."""
    kind: Any = field.annotation
    if choices := typing.get_args(kind):
        return ", ".join(f"`{choice}`" for choice in choices)
    names = {bool: "true or false", int: "whole number", float: "number", str: "text", Path: "path"}
    limits = [_limit(each) for each in field.metadata]
    return " ".join([names[kind], *(limit for limit in limits if limit)])


def _limit(rule: Any) -> str:
    words = {Ge: "from", Gt: "above", Le: "to", Lt: "below"}
    word = words.get(type(rule))
    if word is None:
        return ""
    return f"{word} {getattr(rule, type(rule).__name__.lower()):,}"


def _amount(value: str) -> str:
    """A number of bytes in a larger unit, where it is whole."""
    number = int(value) if value.isdigit() else 0
    return next((f"{number // size} {unit}" for size, unit in UNITS if number and number % size == 0), "")


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")
