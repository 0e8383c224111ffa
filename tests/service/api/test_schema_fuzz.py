"""The short form of `make fuzz`: a few requests to every call of the schema, and a few damaged files."""

import asyncio
import warnings

import hypothesis
import pytest

from tests.fuzz.uploads import cases, upload_all

N_FILES = 6
FEW = hypothesis.settings(
    max_examples=1,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=list(hypothesis.HealthCheck),
)


@pytest.fixture
def live(serve):
    with serve(parse_timeout_s=60.0, ocr_languages="none") as live:
        yield live


@pytest.mark.slow
def test_requests_made_from_the_schema(live):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import schemathesis
    from schemathesis.checks import CHECKS, load_all_checks

    load_all_checks()
    document = live.document()
    session = live.session(document)
    schema = schemathesis.openapi.from_url(f"{live.url}/schema/openapi.json")
    # Without keys nothing is refused for want of one; what is right in form may still be refused.
    left_out = {"ignored_auth", "positive_data_acceptance", "negative_data_rejection"}
    checks = [check for check in CHECKS.get_all() if check.__name__ not in left_out]
    tried = 0
    for result in schema.get_all_operations():
        operation = result.ok()

        @FEW
        @hypothesis.given(case=operation.as_strategy())
        def send(case):
            nonlocal tried
            if "document_id" in (case.path_parameters or {}):
                case.path_parameters["document_id"] = document
            if "session_id" in (case.path_parameters or {}):
                case.path_parameters["session_id"] = session
            case.call_and_validate(checks=checks, timeout=60)
            tried += 1

        if operation.method != "delete":
            send()
    assert tried > 25


@pytest.mark.slow
def test_damaged_files(live):
    tally = asyncio.run(upload_all(live.url, cases(N_FILES, seed=2), limit_s=60))
    assert not tally.failures
    assert tally.total == N_FILES
    with live.client() as client:
        assert client.get("/v1/documents").json()["data"] == []
    assert list(live.services.settings.files_dir.iterdir()) == []
