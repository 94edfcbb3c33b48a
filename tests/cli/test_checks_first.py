"""Mistakes that need no model are reported before a model, or torch, is loaded."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.extras import needs_torch
from triforce.checkpoint.tokenizer import Tokenizer
from triforce.cli import main
from triforce.engine.inputs import PROBE_CHARACTERS_PER_TOKEN

ROOT = Path(__file__).parents[2]
ENVIRONMENT = os.environ | {"PYTHONPATH": str(ROOT / "src")}
LIGHT = """
import sys
from triforce.cli import main
code = main(sys.argv[1:])
print(*{"torch", "fastapi", "transformers"} & set(sys.modules))
sys.exit(code)
"""
REFUSED = [
    "serve --host no.such.host.invalid",
    "serve --host 0.0.0.0",
    "serve --port 70000",
    "serve --max-connections 0",
    "serve --cors-origin example.org",
    "generate hello --chat",
    "generate x --prompt-file missing",
    "generate x y --temperature -1",
    "generate x y --disk-cache missing/cache",
    "chat x --file missing",
    "batch missing",
    "batch requests -o missing/out",
]


def python(code: str, *arguments: str, **how: Any) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", code, *arguments]
    return subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, timeout=100, **how)


@pytest.mark.parametrize("line", REFUSED)
def test_mistake_is_told_before_heavy_imports(line: str, tmp_path: Path) -> None:
    (tmp_path / "requests").write_text("{}\n")
    done = python(LIGHT, *line.split(), cwd=tmp_path)
    assert done.returncode == 2 and done.stderr.startswith("triforce: error: "), done.stderr
    assert done.stdout == "\n", "a module that takes seconds is imported"


def test_deleted_current_folder_is_one_line(tmp_path: Path) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    code = (
        f"import os; os.rmdir({str(gone)!r}); import sys; from triforce.cli import main; sys.exit(main(sys.argv[1:]))"
    )
    done = python(code, "generate", "x y", cwd=gone)
    assert done.returncode == 2 and "the current folder does not exist any more" in done.stderr
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize("command", [["chat", "--file"], ["generate", "--chat", "--prompt-file"]])
def test_document_of_megabytes_is_refused_by_its_beginning(
    command: list[str],
    pair: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "book").write_text("the cat sat on the mat " * 2_000_000)
    read = list[int]()
    encode = Tokenizer.encode

    def counted(self: Tokenizer, text: str, *rest_args: Any, **keywords: Any) -> list[int]:
        read.append(len(text))
        return encode(self, text, *rest_args, **keywords)

    monkeypatch.setattr(Tokenizer, "encode", counted)
    name, *options = command
    line = [name, str(pair / "target"), "--draft", "none", "--context", "256", *options, str(tmp_path / "book")]
    assert main(line) == 2
    assert "raise --context, up to 32768" in capsys.readouterr().err
    assert max(read) <= PROBE_CHARACTERS_PER_TOKEN * 256


@needs_torch
def test_import_of_torch_keeps_no_model_of_its_caller() -> None:
    code = """
import weakref
from triforce.backends.torch.torch_import import import_torch
class Model: pass
def command():
    import_torch()
    model = Model()
    return weakref.ref(model)
print(command()() is None)
"""
    assert python(code).stdout == "True\n"
