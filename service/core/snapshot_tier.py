"""What of the snapshot store the server process itself touches: deletion."""


class NoSnapshotFiles:
    """For an engine that keeps its snapshots to itself (`FakeEngine`)."""

    def delete(self, owner_id: str, kind: str, id: str) -> tuple[int, int]:
        return 0, 0
