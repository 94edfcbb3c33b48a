"""llama.cpp as an oracle: its Python package in an interpreter of its own, which LLAMA_CPP_PYTHON names."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

VARIABLE = "LLAMA_CPP_PYTHON"
WORKER = Path(__file__).with_name("llama_worker.py")
NEEDED = pytest.mark.skipif(not os.environ.get(VARIABLE), reason=f"{VARIABLE} names no Python with llama-cpp-python")


def ask(what: str, *arguments: object) -> None:
    """Run the worker. An error has its output."""
    command = [os.environ[VARIABLE], str(WORKER), what, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-2000:]


def logits(model: Path, texts: Sequence[list[int]]) -> list[Tensor]:
    """Return the logits (T, V) after each token of each text."""
    with TemporaryDirectory() as folder:
        texts_file = Path(folder, "texts.json")
        out = Path(folder, "logits.npz")
        texts_file.write_text(json.dumps(texts))
        ask("logits", model, texts_file, out)
        with np.load(out) as arrays:
            return [torch.from_numpy(arrays[name]) for name in arrays.files]


def quantized(model: Path, kind: str) -> Path:
    """Write a file of f16 weights as one of another type, such as Q4_K_M, beside it."""
    out = model.with_name(f"{kind}.gguf")
    ask("quantize", model, kind, out)
    return out


def tokenized(model: Path, texts: Sequence[str]) -> dict[str, Any]:
    """Return ids of texts, bytes of all tokens, ids that end a text, and whether a first and a last token are added."""
    with TemporaryDirectory() as folder:
        texts_file = Path(folder, "texts.json")
        out = Path(folder, "ids.json")
        texts_file.write_text(json.dumps(texts))
        ask("tokenize", model, texts_file, out)
        report: dict[str, Any] = json.loads(out.read_text())
        return report
