"""Who is asking. There is one owner until API keys exist; every query already names it."""

OWNER = "local"


def owner_id() -> str:
    """Dependency `owner_id` of every handler."""
    return OWNER
