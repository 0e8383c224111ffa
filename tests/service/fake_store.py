"""The store of snapshots, as far as deletion and start-up use it."""


class Store:
    """Remembers what was deleted; every document has two objects of ten bytes, every turn one of three."""

    def __init__(self):
        self.deleted = []

    def delete(self, owner_id, kind, id):
        self.deleted.append((owner_id, kind, id))
        return {"disk": (2, 20) if kind == "document" else (1, 3)}

    def places(self, owner_id, document_id):
        return {}

    def left_disk(self, owner_id, document_id):
        return False

    def pin(self, owner_id, document_id, pinned):
        pass

    def pin_only(self, documents):
        pass

    def finish_removals(self):
        return 0

    def turns(self):
        return []
