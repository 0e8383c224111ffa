"""What a draft model keeps of documents beside the main one: snapshots, rows in memory, tails of sessions."""
