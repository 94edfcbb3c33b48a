"""Other people's clients, where they are installed: lm_eval, which scores as with the model itself, and LangChain."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.server_process import KEY, ROOT, served
from triforce.checkpoint.hub import SHIPPED

EXAMPLES = ROOT / "examples"
TASK = """
task: said
dataset_path: json
dataset_kwargs: {{data_files: {{test: "{questions}"}}}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{text}}}}"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: answer
metric_list: [{{metric: acc}}]
"""
QUESTIONS = [
    ("It was a dark night, and the", [" wind howled in the trees.", " the of and to a.", " sun"], 0),
    (
        "The Count opened the door and said to me in",
        [" English", " water", " seven thousand, five hundred"],
        0,
    ),
    ("One, two, three,", [" four", " the", " caf\u00e9"], 0),
    ("She looked at him. " * 40 + "She looked at", [" him.", " her own house, which stood upon the hill.", "\n"], 0),
]


def needs(*packages: str) -> None:
    for package in packages:
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"{package} is not installed")


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a task of a few questions."""
    folder = tmp_path_factory.mktemp("task")
    lines = [json.dumps({"text": text, "choices": choices, "answer": n}) for text, choices, n in QUESTIONS]
    (folder / "questions.jsonl").write_text("\n".join(lines))
    (folder / "said.yaml").write_text(TASK.format(questions=folder / "questions.jsonl"))
    return folder


@pytest.fixture(scope="module")
def shipped() -> Iterator[str]:
    with served(SHIPPED[0].parent, "--dtype", "float32") as (_, url):
        yield url


def scores(command: list[str], task: Path, out: Path) -> list[list[float]]:
    """Log-likelihoods of all choices of all questions, as lm_eval wrote them down."""
    options = ["--include_path", str(task), "--output_path", str(out), "--log_samples"]
    offline = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "HF_HOME": str(out / "home")}
    environment = os.environ | offline | {"PYTHON": sys.executable}
    done = subprocess.run([*command, *options], capture_output=True, text=True, env=environment, timeout=900)
    assert done.returncode == 0, done.stderr[-3000:]
    (file,) = out.rglob("samples_said_*.jsonl")
    samples: list[dict[str, Any]] = [json.loads(line) for line in file.read_text().splitlines()]
    samples.sort(key=lambda sample: sample["doc_id"])
    return [[float(choice[0][0]) for choice in sample["resps"]] for sample in samples]


@pytest.mark.slow
@pytest.mark.timeout(2400)
def test_lm_eval_scores_equal_model(shipped: str, task: Path, tmp_path: Path) -> None:
    needs("lm_eval", "tenacity", "aiohttp", "accelerate", "peft")
    model = str(SHIPPED[0])
    example = [shutil.which("sh") or "sh", str(EXAMPLES / "lm_eval.sh"), shipped, KEY, "target", model, "said"]
    itself = [sys.executable, "-m", "lm_eval", "--model", "hf", "--device", "cpu", "--tasks", "said"]
    itself += ["--model_args", f"pretrained={model},dtype=float32"]
    ours, theirs = (scores(command, task, tmp_path / name) for command, name in ((example, "a"), (itself, "b")))
    assert len(ours) == len(QUESTIONS) and all(len(row) == 3 for row in ours)
    assert ours == [pytest.approx(row, abs=1e-3) for row in theirs]
    assert all(max(row) - min(row) > 1 for row in ours)


def test_langchain_example_runs_through(pair: Path) -> None:
    needs("langchain_openai")
    with served(pair) as (_, url):
        command = [sys.executable, str(EXAMPLES / "langchain_client.py"), url, KEY, "target"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.endswith("Both are the same: True\n")
