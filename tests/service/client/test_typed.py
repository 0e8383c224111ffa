"""The client knows all that the server says, and stands alone."""

import subprocess
import sys

import msgspec
import pytest

from service.api.schemas import documents, questions, sessions, shares
from service.client import models

SAME = [
    (documents.DocumentBody, models.Document),
    (documents.ProgressBody, models.Progress),
    (documents.RetentionBody, models.Retention),
    (documents.SnapshotBody, models.Snapshot),
    (documents.PlaceBody, models.Place),
    (documents.DocumentError, models.Failure),
    (documents.PageBody, models.Page),
    (documents.RemovedBody, models.Removed),
    (questions.AnswerBody, models.Answer),
    (questions.CitationBody, models.Citation),
    (questions.UnsupportedBody, models.Span),
    (questions.ProvenanceBody, models.Provenance),
    (questions.UsageBody, models.Usage),
    (questions.CacheBody, models.Cache),
    (questions.TimingsBody, models.Timings),
    (sessions.SessionDetail, models.SessionDetail),
    (sessions.TurnBody, models.Turn),
    (sessions.UsageTotals, models.UsageTotals),
    (shares.ShareBody, models.Share),
]


def fields(kind):
    return {field.encode_name for field in msgspec.structs.fields(kind)}


@pytest.mark.parametrize(("of_server", "of_client"), SAME, ids=lambda kind: kind.__name__)
def test_every_field_of_the_api_is_one_of_the_client(of_server, of_client):
    missing = fields(of_server) - fields(of_client)
    assert not missing, f"give service/client/models.py {of_client.__name__} a field with a default for: {missing}"


@pytest.mark.parametrize(("of_server", "of_client"), SAME, ids=lambda kind: kind.__name__)
def test_what_a_newer_server_adds_is_ignored_and_what_an_older_one_lacks_has_a_default(of_server, of_client):
    required = {field.encode_name: field.type for field in msgspec.structs.fields(of_client) if field.required}
    values = {str: "x", int: 1, float: 0.5, models.Progress: {"stage": "x"}, models.Snapshot: {"state": "x"}}
    sent = {name: values.get(kind, []) for name, kind in required.items()} | {"of_a_newer_server": [1, {"a": None}]}
    assert msgspec.json.decode(msgspec.json.encode(sent), type=of_client)


def test_it_imports_nothing_of_the_service_but_itself():
    heavy = ["torch", "transformers", "litestar", "sqlalchemy", "pydantic", "numpy", "ingest", "cache_store"]
    code = (
        "import sys, service.client; from service.client import Client\n"
        f"print(sorted(m for m in sys.modules if m in {heavy} or m.startswith('service.') "
        "and not m.startswith('service.client')))"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"
