"""Messages of the page in each language, and which language a browser wants."""

import json
from collections.abc import Mapping
from functools import cache
from pathlib import Path

LANGUAGES = {"en": "English", "zh": "中文"}
"""By the value of `lang`, each in its own words. The first one is for whoever wants none of them."""
_FOLDER = Path(__file__).with_name("messages")
_IN_BROWSER = "js."


@cache
def messages(language: str) -> Mapping[str, str]:
    """All of a language, by their keys."""
    return json.loads((_FOLDER / f"{language}.json").read_text(encoding="utf-8"))


@cache
def browser_messages(language: str) -> str:
    """JSON of those that the ES module uses."""
    return json.dumps({key: text for key, text in messages(language).items() if key.startswith(_IN_BROWSER)})


class Catalogue:
    """What templates call: `t(key, name=value)`, and `tn(key, n)` for what is counted."""

    def __init__(self, language: str) -> None:
        self.language = language
        self._messages = messages(language)

    def t(self, key: str, **values: object) -> str:
        """Raises KeyError for an unknown key."""
        return self._messages[key].format(**values)

    def tn(self, key: str, n: int) -> str:
        """The form for one, or for other numbers; `{n}` has separators."""
        return self.t(f"{key}.{'one' if n == 1 else 'other'}", n=f"{n:,}")

    def known(self, key: str, fallback: str) -> str:
        """For names that come from the API, which may have new ones."""
        return self._messages.get(key, fallback)


def language_of(chosen: str | None, accepted: str) -> str:
    """The one that was chosen with the switch, else the best of `Accept-Language`."""
    if chosen in LANGUAGES:
        return chosen
    ranked = sorted((_weighed(part) for part in accepted.split(",")), key=lambda pair: -pair[1])
    found = (name for name, weight in ranked if name in LANGUAGES and weight > 0)
    return next(found, next(iter(LANGUAGES)))


def _weighed(part: str) -> tuple[str, float]:
    name, _, weight = part.strip().partition(";q=")
    try:
        return name.partition("-")[0].lower(), float(weight or 1)
    except ValueError:
        return "", 0.0
