"""Tables, migrations and repositories: the only package that knows SQLAlchemy."""
