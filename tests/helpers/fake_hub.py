"""A server with the part of the Hugging Face hub's API that its client uses."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import urlsplit

COMMIT = "ab810cf68114990406fdf996510dd3d3c6adbdf5"
SOURCE = Path(__file__).parents[2] / "src"
UNREACHABLE = "http://127.0.0.1:9"


class FakeHub(ThreadingHTTPServer):
    """One repository, `user/repo`, with files by their names. `asked` lists the requests."""

    def __init__(self, files: Mapping[str, bytes], repository: str = "user/repo", seconds: float = 0.0) -> None:
        super().__init__(("127.0.0.1", 0), _Answers)
        self.files = files
        self.repository = repository
        self.seconds = seconds
        self.asked = list[str]()
        self.url = f"http://127.0.0.1:{self.server_address[1]}"

    def fetched(self) -> list[str]:
        """Return the names of files whose bytes were requested."""
        return [line.rpartition("/")[2] for line in self.asked if line.startswith("GET") and "/resolve/" in line]


class _Answers(BaseHTTPRequestHandler):
    server: FakeHub

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def _answer(self) -> None:
        hub = self.server
        path = urlsplit(self.path).path
        hub.asked.append(f"{self.command} {path}")
        begins = (f"/api/models/{hub.repository}", f"/{hub.repository}/resolve/")
        if path.startswith(f"{begins[0]}/tree/"):
            self._json([_entry(name, data) for name, data in hub.files.items()])
        elif path.startswith(begins[0]):
            files = [{"rfilename": name} for name in hub.files]
            self._json({"id": hub.repository, "sha": COMMIT, "siblings": files})
        elif path.startswith(begins[1]) and (name := path.removeprefix(begins[1]).split("/", 1)[1]) in hub.files:
            self._file(hub.files[name])
        else:
            self.send_response(404)
            self.send_header("X-Error-Code", "RepoNotFound" if hub.repository not in path else "EntryNotFound")
            self.send_header("Content-Length", "0")
            self.end_headers()

    def _json(self, value: object) -> None:
        self._send(json.dumps(value).encode(), {"Content-Type": "application/json"})

    def _file(self, data: bytes) -> None:
        self._send(data, {"ETag": f'"{hashlib.sha256(data).hexdigest()}"', "X-Repo-Commit": COMMIT})

    def _send(self, data: bytes, headers: Mapping[str, str]) -> None:
        self.send_response(200)
        for name, value in {**headers, "Content-Length": str(len(data))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "GET":
            half = len(data) // 2
            self.wfile.write(data[:half])
            if "ETag" in headers:
                threading.Event().wait(self.server.seconds)
            self.wfile.write(data[half:])

    def log_message(self, *_: object) -> None:
        pass


def _entry(name: str, data: bytes) -> dict[str, object]:
    return {"type": "file", "path": name, "size": len(data), "oid": hashlib.sha1(data).hexdigest()}


@contextmanager
def fake_hub(files: Mapping[str, bytes], repository: str = "user/repo", seconds: float = 0.0) -> Iterator[FakeHub]:
    """Run a hub within a block. seconds: its pause in the middle of a file."""
    hub = FakeHub(files, repository, seconds)
    threading.Thread(target=hub.serve_forever, args=(0.05,), daemon=True).start()
    try:
        yield hub
    finally:
        hub.shutdown()
        hub.server_close()


def started(code: str, home: Path, endpoint: str = UNREACHABLE, **environment: str) -> subprocess.Popen[str]:
    """Start a process, as the hub's client reads its variables once; it reaches no other index or hub."""
    variables = {name: value for name, value in os.environ.items() if not name.startswith(("HF_", "PIP_", "TRIFORCE_"))}
    variables |= {"HF_ENDPOINT": endpoint, "HF_HOME": str(home / "hf"), "XDG_CACHE_HOME": str(home / "cache")}
    variables |= {
        "PIP_CONFIG_FILE": os.devnull,
        "PIP_NO_INDEX": "1",
        "HF_HUB_DISABLE_TELEMETRY": "1",
        "HF_HUB_DISABLE_XET": "1",
    }
    path = os.pathsep.join([str(SOURCE), str(SOURCE.parent), os.environ.get("PYTHONPATH", "")])
    variables |= {"PYTHONPATH": path, "HF_HUB_DISABLE_PROGRESS_BARS": "1", **environment}
    command = [sys.executable, "-c", code]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=variables)


def ended(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    """Wait for a process; return its exit code, stdout and stderr."""
    out, err = process.communicate(timeout=100)
    return process.returncode, out.strip(), err.strip()
