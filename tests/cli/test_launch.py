"""`triforce launch`: an agent runs on a server, which starts and ends with it unless it ran before."""

from __future__ import annotations

import http.server
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.helpers.pages import ROOT
from tests.helpers.server_process import KEY, serving

AGENT = f"""#!{sys.executable}
import json, os, signal, sys, time, urllib.request
url = os.environ["URL_OF"].format(**os.environ)
names = {{"args": sys.argv[1:], "env": dict(os.environ)}}
if "-m" in sys.argv and "model_catalog_json" in " ".join(sys.argv):
    (path,) = [a.split("=", 1)[1] for a in sys.argv if a.startswith("model_catalog_json=")]
    names["catalog"] = json.load(open(json.loads(path)))
request = urllib.request.Request(os.environ["ASKED"], headers={{"Authorization": "Bearer {KEY}"}})
names["health"] = urllib.request.urlopen(request).status
if "wait" in sys.argv:
    signal.signal(signal.SIGINT, lambda *_: sys.exit(9))
print(json.dumps(names), flush=True)
if "wait" in sys.argv:
    time.sleep(60)
sys.exit(7)
"""


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    """The environment of a user who has the agents, which are stubs here."""
    programs = tmp_path / "bin"
    programs.mkdir()
    for name in ("claude", "codex", "opencode"):
        (programs / name).write_text(AGENT)
        (programs / name).chmod(0o755)
    path = os.pathsep.join([str(programs), os.environ["PATH"]])
    return os.environ | {"PATH": path, "URL_OF": "", "TRIFORCE_API_KEYS": KEY, "PYTHONPATH": str(ROOT / "src")}


@pytest.fixture
def port() -> int:
    with http.server.HTTPServer(("127.0.0.1", 0), http.server.BaseHTTPRequestHandler) as server:
        return int(server.server_address[1])


def launched(environment: dict[str, str], agent: str, port: int, *arguments: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "triforce", "launch", agent, "--port", str(port), *arguments]
    environment = environment | {"ASKED": f"http://127.0.0.1:{port}/health", "http_proxy": "http://127.0.0.1:9"}
    return subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )


def answered(port: int) -> bool:
    try:
        httpx.get(f"http://127.0.0.1:{port}/health", timeout=5, trust_env=False)
    except httpx.TransportError:
        return False
    return True


def test_launch_starts_and_ends_server(environment: dict[str, str], port: int) -> None:
    """The agent finds the server in its environment, and gets its own arguments."""
    process = launched(environment, "claude", port, "--name", "pair", "--", "-p", "What is --port?")
    out, err = process.communicate(timeout=120)
    assert process.returncode == 7, err
    told: dict[str, Any] = json.loads(out)
    assert told["args"] == ["--model", "pair", "-p", "What is --port?"] and told["health"] == 200
    assert told["env"]["ANTHROPIC_BASE_URL"] == f"http://127.0.0.1:{port}"
    assert (told["env"]["ANTHROPIC_AUTH_TOKEN"], told["env"]["ANTHROPIC_API_KEY"]) == (KEY, "")
    assert not answered(port)
    assert "its log is" in err and "Traceback" not in err


@pytest.fixture(scope="module")
def running() -> Iterator[int]:
    with serving("--name", "pair") as (_, url):
        yield int(url.rpartition(":")[2])


@pytest.mark.parametrize("agent", ["codex", "opencode"])
def test_launch_uses_running_server(environment: dict[str, str], running: int, agent: str) -> None:
    process = launched(environment, agent, running, "--", "exec")
    out, err = process.communicate(timeout=60)
    assert process.returncode == 7 and "serves pair" in err
    told = json.loads(out)
    base = f"http://127.0.0.1:{running}/v1"
    if agent == "codex":
        assert f'model_providers.triforce.base_url="{base}"' in told["args"] and told["args"][-3:] == [
            "-m",
            "pair",
            "exec",
        ]
        assert told["env"]["TRIFORCE_AGENT_KEY"] == KEY
        (entry,) = told["catalog"]["models"]
        assert entry["slug"] == "pair" and entry["context_window"] > 1000
    else:
        config = json.loads(told["env"]["OPENCODE_CONFIG_CONTENT"])
        assert config["provider"]["triforce"]["options"]["baseURL"] == base and config["model"] == "triforce/pair"
    assert answered(running)


def test_launch_refuses_other_model_of_running_server(environment: dict[str, str], running: int) -> None:
    process = launched(environment, "claude", running, "another/model")
    out, err = process.communicate(timeout=60)
    assert (process.returncode, out) == (2, "") and "serves pair; stop it" in err


def test_launch_of_missing_agent_says_how_to_get_it(environment: dict[str, str], port: int, tmp_path: Path) -> None:
    lacking = environment | {"PATH": str(tmp_path), "HOME": str(tmp_path)}
    process = launched(lacking, "codex", port)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 2
    assert err == "triforce: error: codex is not installed; install it with: npm install -g @openai/codex\n"


def test_launch_tells_why_server_did_not_start(environment: dict[str, str], port: int, tmp_path: Path) -> None:
    process = launched(environment, "claude", port, str(tmp_path / "absent.gguf"))
    out, err = process.communicate(timeout=120)
    assert (process.returncode, out) == (2, "")
    assert "absent.gguf" in err.splitlines()[-1] and "Traceback" not in err


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_signal_ends_server_with_launcher(environment: dict[str, str], port: int, number: int) -> None:
    """A closed terminal leaves no server behind."""
    process = launched(environment, "claude", port, "--", "wait")
    assert process.stdout
    process.stdout.readline()
    assert answered(port)
    process.send_signal(number)
    assert process.wait(60) == 128 + number
    process.communicate()
    assert not answered(port)


class Stranger(http.server.BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b"hello")

    def log_message(self, *_: Any) -> None:
        pass


def test_launch_refuses_address_of_program_that_speaks_no_http(environment: dict[str, str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:

        def greet() -> None:
            connection, _ = server.accept()
            with connection:
                connection.sendall(b"SSH-2.0-x\r\n")

        threading.Thread(target=greet, daemon=True).start()
        process = launched(environment, "claude", server.getsockname()[1])
        _, err = process.communicate(timeout=60)
    assert process.returncode == 2 and "Traceback" not in err and "another" in err


def test_launch_refuses_address_of_another_program(environment: dict[str, str]) -> None:
    with http.server.HTTPServer(("127.0.0.1", 0), Stranger) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        process = launched(environment, "claude", server.server_address[1])
        _, err = process.communicate(timeout=60)
        server.shutdown()
    assert process.returncode == 2 and "another program" in err


def test_interrupt_is_for_the_agent(environment: dict[str, str], running: int) -> None:
    """The launcher waits for the agent, whatever that does on Ctrl-C, and returns its code."""
    process = launched(environment, "claude", running, "--", "wait")
    assert process.stdout
    process.stdout.readline()
    os.killpg(process.pid, signal.SIGINT)
    assert process.wait(60) == 9
    process.communicate()
    assert answered(running)
