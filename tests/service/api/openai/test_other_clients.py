"""Other programs than OpenAI's own package: aisuite, and curl with the examples of the guide."""

import os
import re
import shutil
import subprocess
from pathlib import Path

import aisuite
import pytest

from tests.service.api.openai.conftest import REPLY

GUIDE = (Path(__file__).parents[4] / "docs" / "openai.md").read_text(encoding="utf-8")


def test_aisuite_asks_about_a_document(world):
    file = world.file()
    client = aisuite.Client({"openai": {"base_url": f"{world.url}/v1", "api_key": "none"}})
    part = {"type": "file", "file": {"file_id": file.id}}
    content = [part, {"type": "text", "text": "How much is the fee?"}]
    asked = client.chat.completions.create(
        "openai:demo", messages=[{"role": "user", "content": content}], temperature=0
    )
    assert asked.choices[0].message.content == "".join(REPLY)


@pytest.mark.skipif(shutil.which("curl") is None, reason="there is no curl")
def test_the_examples_with_curl_work(world):
    document_id = world.file().id.replace("file-", "doc_")
    (example,) = re.findall(r"```sh\n(.*?)```", GUIDE, re.DOTALL)
    env = {**os.environ, "P": world.url, "DOC": document_id}
    done = subprocess.run(["bash", "-ec", f"curl() {{ command curl -sS --fail-with-body \"$@\"; }}\n{example}"],
                          env=env, capture_output=True, text=True, timeout=300, check=True)  # fmt: skip
    assert '"cached_tokens":' in done.stdout
    assert "".join(REPLY) in done.stdout
