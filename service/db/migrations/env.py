"""Alembic's entry: the connection is handed in by `service.db.migrations`."""

from alembic import context

from service.db.models import Base

context.configure(
    connection=context.config.attributes["connection"],
    target_metadata=Base.metadata,
    render_as_batch=True,
    compare_type=True,
)
with context.begin_transaction():
    context.run_migrations()
