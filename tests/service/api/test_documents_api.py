"""The document calls over the fake engine."""

import pytest

TEXT = b"The keeper of the lighthouse is Marta Kovalenko. " * 20


async def upload(client, data=TEXT, name="notes.txt", **fields):
    return await client.post("/v1/documents", files={"file": (name, data)}, data=fields)


@pytest.mark.anyio
async def test_an_upload_becomes_ready(client, engine, until_ended):
    response = await upload(client, title="Lighthouse")
    assert response.status_code == 202, response.text
    body = response.json()
    assert response.headers["location"] == f"/v1/documents/{body['id']}"
    done = await until_ended(client, body["id"])
    assert (done["status"], done["error"]) == ("ready", None)
    assert done["title"] == "Lighthouse"
    assert done["snapshot"]["state"] == "ready"
    n_tokens = done["token_count"]
    assert done["progress"] == {
        "stage": "ready",
        "done": n_tokens,
        "total": n_tokens,
        "unit": "tokens",
        "eta_s": 0.0,
    }
    assert len(engine.built) == 1
