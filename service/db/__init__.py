"""SQLAlchemy models, repositories and migrations."""
