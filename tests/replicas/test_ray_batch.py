"""`triforce batch --replicas 2`: the lines that one engine writes, and a run of one engine is taken up."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.helpers.asgi_client import SAMPLED
from tests.helpers.server_process import ROOT

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]
LINES = 6
HEAD = {"method": "POST", "url": "/v1/completions"}
LOOPBACK = {"127.0.0.1", "::ffff:127.0.0.1", "::1"}


def command(pair: Path, file: Path, *arguments: str) -> list[str]:
    models = (str(pair / "target"), "--draft", str(pair / "draft"), "--retrieval-budget", "64")
    return [sys.executable, "-m", "triforce", "batch", str(file), *models, *arguments]


def environment() -> dict[str, str]:
    return os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT / "src"), os.environ.get("PYTHONPATH", "")])}


def batch(*arguments: Any) -> str:
    """Return the last line of stderr."""
    options = {"capture_output": True, "text": True, "timeout": 300, "env": environment()}
    done = subprocess.run(command(*arguments), **options)
    assert done.returncode == 0, done.stderr
    return done.stderr.splitlines()[-1]


def write(file: Path, longest: int = 120) -> None:
    """Requests, the later the longer, and lines that are none or ask for what there is not."""
    asked = [{"prompt": f"the cat {i}", **SAMPLED, "seed": i} for i in range(LINES)]
    for i, body in enumerate(asked, 1):
        body |= {"max_tokens": longest * i // LINES}
    lines = [{"custom_id": f"c{i}", **HEAD, "body": body} for i, body in enumerate(asked)]
    wrong = [lines[0], {"custom_id": "wrong", **HEAD, "body": {"prompt": "a", "max_tokens": -1}}]
    file.write_text("".join(json.dumps(line) + "\n" for line in [*lines, *wrong]) + "{\n")


def answered(output: Path) -> dict[str, Any]:
    """Return the text or the error of each line."""
    answers = [json.loads(line) for line in output.read_text().splitlines()]
    bodies = {}
    for answer in answers:
        body = (answer["response"] or {"body": {}})["body"]
        name = answer["custom_id"] or answer["error"]["line"]
        bodies[name] = body["choices"][0]["text"] if "choices" in body else (answer["error"], body.get("error"))
    assert len(bodies) == len(answers)
    return bodies


def test_ray_batch_equals_one_engine(pair: Path, tmp_path: Path) -> None:
    file = tmp_path / "in.jsonl"
    output = tmp_path / "in.out.jsonl"
    direct = tmp_path / "alone.jsonl"
    write(file)
    batch(pair, file, "-o", str(direct))
    texts = [line for line in direct.read_text().splitlines(keepends=True) if '"custom_id": "c' in line]
    output.write_text("".join(texts[:2]))
    assert batch(pair, file, "--replicas", "2").startswith(f"{LINES - 2} answered, 3 refused, 2 skipped")
    assert answered(output) == answered(direct) and len(set(map(str, answered(direct).values()))) == LINES + 3


def test_ray_batch_killed_run_resumes(pair: Path, tmp_path: Path) -> None:
    file = tmp_path / "in.jsonl"
    output = tmp_path / "in.out.jsonl"
    direct = tmp_path / "alone.jsonl"
    write(file, longest=1800)
    with subprocess.Popen(command(pair, file, "--replicas", "2"), env=environment()) as process:
        while output.read_bytes().count(b"\n") < 4 if output.exists() else process.poll() is None:
            time.sleep(0.02)  # three lines are refused at once
        process.send_signal(signal.SIGSTOP)
        family = psutil.Process(process.pid).children(recursive=True)
        assert any("MapWorker" in " ".join(child.cmdline()) for child in family)
        sockets = [c for p in family for c in p.net_connections("inet") if c.status == "LISTEN"]
        assert sockets and {c.laddr.ip for c in sockets} <= LOOPBACK
        process.kill()
    _, alive = psutil.wait_procs(family, timeout=180)  # a minute of it Ray's agents try to tell what is dead
    assert not alive, "Ray was to go with the command"
    kept_bytes = output.read_bytes()
    assert kept_bytes.endswith(b"\n") and kept_bytes.count(b"\n") < LINES + 3, "it was too fast to be killed"
    batch(pair, file, "--replicas", "2")
    batch(pair, file, "-o", str(direct))
    assert output.read_bytes().startswith(kept_bytes) and answered(output) == answered(direct)


def test_ray_batch_mistakes_are_reported(pair: Path, tmp_path: Path) -> None:
    """By the first answer, as an actor's constructor would say them with a traceback."""
    write(tmp_path / "in.jsonl")
    asked = command(pair, tmp_path / "in.jsonl", "--replicas", "1", "--draft-tokens", "0")
    done = subprocess.run(asked, capture_output=True, text=True, timeout=300, env=environment())
    assert done.returncode == 2 and "Traceback" not in done.stderr
    assert done.stderr.splitlines()[-1].startswith("triforce: error: ") and "draft_tokens" in done.stderr
