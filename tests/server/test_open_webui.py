"""Open WebUI in front of the server, where it is installed: OPEN_WEBUI names its program, or it is on the PATH."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys

import httpx
import pytest

from tests.helpers.gguf_files import SMOLLM2
from tests.helpers.pages import ROOT
from tests.helpers.server_process import KEY, serving

PROGRAM = os.environ.get("OPEN_WEBUI") or shutil.which("open-webui")

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.mark.skipif(PROGRAM is None, reason="Open WebUI is not installed: pip install open-webui, 2 GB and more")
@pytest.mark.skipif(not SMOLLM2.is_file(), reason="there is no file of smollm2; fetch it with `make smollm2`")
def test_open_webui_shows_answer_of_server() -> None:
    with serving(str(SMOLLM2), "--name", "smollm2") as (_, url):
        command = [sys.executable, str(ROOT / "examples" / "open_webui.py"), url, KEY, "smollm2"]
        done = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"OPEN_WEBUI": str(PROGRAM)})
        assert done.returncode == 0, done.stderr[-3000:]
        turns = [{"role": "user", "content": "Name a fruit."}]
        body = {"messages": turns, "temperature": 0, "max_tokens": 16}
        headers = {"authorization": f"Bearer {KEY}"}
        answer = httpx.post(f"{url}/v1/chat/completions", json=body, headers=headers, timeout=60).json()
    assert "smollm2" in done.stdout
    assert f"Answer: {answer['choices'][0]['message']['content']}" in done.stdout
