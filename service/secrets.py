"""Secrets from files, one a file, as container engines mount them: so that no password is in a configuration."""

import os
from collections.abc import MutableMapping
from pathlib import Path

from service.errors import Invalid

DIRECTORY = "PREREAD_SECRETS_DIR"
_OURS = ("PREREAD_", "AWS_", "GOOGLE_", "AZURE_")


def read_secrets(environment: MutableMapping[str, str] = os.environ) -> None:
    """Set what the files of the folder in PREREAD_SECRETS_DIR hold: `preread_redis_url` is PREREAD_REDIS_URL, and so on
    for names that begin with PREREAD_, AWS_, GOOGLE_ or AZURE_. What is set already wins; blanks at the ends are not
    part of a secret.

    Raises Invalid for a folder or a file that cannot be read.
    """
    directory = environment.get(DIRECTORY)
    if not directory:
        return
    try:
        for path in sorted(Path(directory).iterdir()):
            name = path.name.upper()
            if name.startswith(_OURS) and path.is_file() and name not in environment:
                environment[name] = path.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not text"
        where = error.filename if isinstance(error, OSError) else directory
        raise Invalid(f"{DIRECTORY}: {where} cannot be read: {reason}.", code="settings") from None
