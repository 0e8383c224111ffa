"""The migrations make exactly the tables the models describe, and can be taken back."""

import os
import stat

import pytest
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from sqlalchemy import inspect

from service.db.engine import create_engine
from service.db.migrations import downgrade, upgrade
from service.db.models import Base


async def _run(url, step):
    engine = create_engine(url)
    async with engine.connect() as connection:
        result = await connection.run_sync(step)
    await engine.dispose()
    return result


@pytest.mark.anyio
async def test_upgrade_from_empty_equals_the_models(tmp_path):
    url = f"sqlite+aiosqlite:///{tmp_path / 'a.sqlite3'}"
    await upgrade(url)
    await upgrade(url)
    difference = await _run(
        url,
        lambda c: compare_metadata(MigrationContext.configure(c, opts={"compare_type": True}), Base.metadata),
    )
    assert difference == []
    assert stat.S_IMODE(os.stat(tmp_path / "a.sqlite3").st_mode) == 0o600


@pytest.mark.anyio
async def test_downgrade_leaves_nothing_but_the_version_table(tmp_path):
    url = f"sqlite+aiosqlite:///{tmp_path / 'a.sqlite3'}"
    await upgrade(url)
    await downgrade(url, "base")
    assert await _run(url, lambda c: inspect(c).get_table_names()) == ["alembic_version"]
