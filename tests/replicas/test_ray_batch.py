"""`triforce batch --replicas 2`: the lines that one engine writes, and a run of one engine is taken up."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from asking import SAMPLED
from process import ROOT

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]
LINES = 6


def batch(pair: Path, file: Path, *arguments: str) -> str:
    """What is said at the end."""
    models = (str(pair / "target"), "--draft", str(pair / "draft"), "--budget", "64")
    path = os.pathsep.join([str(ROOT / "src"), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, "-m", "triforce", "batch", str(file), *models, *arguments]
    environment = os.environ | {"PYTHONPATH": path}
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, env=environment)
    assert done.returncode == 0, done.stderr
    return done.stderr.splitlines()[-1]


def texts(output: Path) -> dict[str, str]:
    answers = [json.loads(line) for line in output.read_text().splitlines()]
    return {a["custom_id"]: a["response"]["body"]["choices"][0]["text"] for a in answers}


def test_two_engines_write_what_one_writes(pair: Path, tmp_path: Path) -> None:
    file, output, alone = tmp_path / "in.jsonl", tmp_path / "in.out.jsonl", tmp_path / "alone.jsonl"
    asked = [{"prompt": f"the cat {i}", **SAMPLED, "seed": i} for i in range(LINES)]
    head = {"method": "POST", "url": "/v1/completions"}
    file.write_text("".join(json.dumps(head | {"custom_id": f"c{i}", "body": b}) + "\n" for i, b in enumerate(asked)))
    batch(pair, file, "-o", str(alone))
    output.write_text("".join(alone.read_text().splitlines(keepends=True)[:2]))
    assert batch(pair, file, "--replicas", "2").startswith("4 answered, 0 refused, 2 there already")
    assert texts(output) == texts(alone) and len(set(texts(alone).values())) == LINES
