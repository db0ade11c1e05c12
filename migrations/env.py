"""Run by alembic, inside a transaction that `migrations.upgrade` began, or on `-x url=...`."""

from alembic import context
from sqlalchemy import Connection, create_engine

from tenants.database import parse_url
from tenants.models import Base


def _run(connection: Connection) -> None:
    context.configure(
        connection=connection,
        target_metadata=Base.metadata,
        render_as_batch=connection.dialect.name == "sqlite",
    )
    with context.begin_transaction():
        context.run_migrations()


given = context.config.attributes.get("connection")
if given is not None:
    _run(given)
else:
    url = parse_url(context.get_x_argument(as_dictionary=True)["url"], is_async=False)
    with create_engine(url).begin() as own:
        _run(own)
