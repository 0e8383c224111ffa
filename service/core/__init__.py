"""Use cases: documents, jobs, sessions and answers. No HTTP, no SQL statements."""
