"""`benchmarks/gpu.py` on a CPU, with a shape that is small: that its rows are what they say, not how large they are."""

from __future__ import annotations

import ast
import json
import shlex
import sys
import tomllib
from collections.abc import Iterator
from importlib.util import find_spec
from itertools import chain
from pathlib import Path

import pytest

from benchmarks import gpu, study
from benchmarks.gpu import FIGURES
from benchmarks.on_gpu import ours
from benchmarks.on_gpu.lease import PARTS
from benchmarks.on_gpu.piece import Piece, Setup
from tests.helpers.tiny_checkpoint import tiny_pair
from triforce.backends import dispatch
from triforce.bench import shapes
from triforce.bench.roofline import DeviceClock
from triforce.checkpoint import hub
from triforce.cli.parser import parse
from triforce.engine import model_loader

ROOT = Path(__file__).parents[2]
OFFLOADED = [
    "full pass, width 1, offloaded", "full pass, width 8, offloaded", "triforce, paper acceptance, offloaded",
    "triforce, ours acceptance, offloaded", "transformers generate, offloaded cache", "DeepSpeed ZeRO-Inference",
]  # fmt: skip
FIELDS = {"figure", "shape", "acceptance", "machine", "command", "seconds", "fraction_of_limit", "speedup"}


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(shapes.SHAPES, "small", shapes.ModelShape(64, 96, 2, 4, 2, 300, 16, tied=False))
    monkeypatch.setitem(shapes.SHAPES, "small-draft", shapes.ModelShape(32, 48, 1, 2, 2, 300, 16))
    monkeypatch.setattr(ours, "TURNS", 1)


def measure(figure: str, folder: Path, *extra_options: str, contexts: str = "512") -> list[dict[str, object]]:
    argv = ["--device", "cpu", "--shape", "small", "--draft", "small-draft", "--contexts", contexts, "--tokens", "12"]
    assert gpu.main([figure, "--out", str(folder), *argv, *extra_options]) == 0
    file = folder / f"gpu_{figure}.json"
    return json.loads(file.read_text()) if file.exists() else []


def test_gpu_benchmark_resumes_in_second_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert measure("a", tmp_path, "--max-seconds", "0") == []
    assert "not yet: full pass small 512" in capsys.readouterr().out
    rows = measure("a", tmp_path)
    assert [row["what"] for row in rows] == [
        "full pass", "full pass, width 8", "retrieval pass", "draft pass", "prefill",
        "triforce, 1 rows, paper acceptance", "triforce, 1 rows, ours acceptance", "transformers generate",
    ]  # fmt: skip
    assert all(set(row) >= FIELDS and row["seconds"] > 0 for row in rows)  # type: ignore[operator]
    weights = 2 * (2 * 64 * (64 + 32) + 3 * 64 * 96) + 300 * 64
    assert [row["bytes"] for row in rows[:3]] == [4 * (weights + 2 * 2 * 2 * 16 * length) for length in (512, 512, 256)]
    assert [row["acceptance"] for row in rows[5:]] == ["paper", "ours", "none"]
    paper = rows[5]
    assert paper["speedup"] == pytest.approx(paper["plain_seconds"] / paper["seconds"])  # type: ignore[operator]
    measured_tokens = paper["tokens_per_verification"]
    expected = paper["expected_tokens_per_verification"]
    assert paper["expected_speedup"] == pytest.approx(paper["speedup"] * expected / measured_tokens)  # type: ignore[operator]
    assert measure("a", tmp_path) == rows, "what was measured is measured again"


def test_gpu_benchmark_batches_have_rows(tmp_path: Path) -> None:
    rows = measure("d", tmp_path, contexts="256")
    assert [row["what"] for row in rows] == [f"triforce, 2 rows, {rates} acceptance" for rates in ("paper", "ours")]


@pytest.mark.skipif(dispatch.native is None, reason="on a CPU a store is for the native kernels")
def test_gpu_benchmark_offloaded_kv_has_rows(tmp_path: Path) -> None:
    """The figure's second shape would be the same one here, and is not measured twice."""
    rows = measure("f", tmp_path, "--kv-memory", "2MiB")
    assert [row["what"] for row in rows] == OFFLOADED
    assert all(set(row) >= FIELDS for row in rows)
    assert all(row["seconds"] > 0 for row in rows[:5])  # type: ignore[operator]
    assert rows[5]["seconds"] or rows[5]["error"]


@pytest.mark.skipif(dispatch.native is None, reason="on a CPU a store is for the native kernels")
def test_gpu_benchmark_sharded_paper_setup_has_rows(tmp_path: Path) -> None:
    (row,) = measure("c", tmp_path, "--kv-memory", "2MiB", "--only", "triforce, paper acceptance, offloaded, 24")
    assert set(row) >= FIELDS and row["shape"] == "small" and row["bus"]


def test_gpu_benchmark_grouped_queries_have_rows(tmp_path: Path) -> None:
    rows = measure("e", tmp_path, "--only", "paper acceptance", contexts="256")
    assert [row["what"] for row in rows] == [f"triforce, {rows} rows, paper acceptance" for rows in (1, 6)]


def test_gpu_benchmark_shipped_pair_has_rows(tmp_path: Path) -> None:
    (row,) = measure("b", tmp_path, "--only", "temperature 0.6")
    assert set(row) >= FIELDS and row["acceptance"] == "real" and row["same_text_as_ar"]
    assert set(row["kept"]) == {"draft", "retrieval"}  # type: ignore[call-overload]


def test_gpu_benchmark_shipped_pair_fits_its_context(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """At 128K the pair has no further positions; here at 512."""
    monkeypatch.setattr(hub, "SHIPPED", (tiny_pair(tmp_path, 512) / "target", tmp_path / "draft"))
    monkeypatch.setattr(model_loader, "SHIPPED", hub.SHIPPED)
    (row,) = measure("b", tmp_path, "--only", "temperature 0.6", contexts="512")
    assert row["context"] == 512 and row["same_text_as_ar"]
    options = ["b", "--device", "cpu", "--only", "temperature 0.6", "--contexts", "513", "--out", str(tmp_path)]
    assert gpu.main(options) == 2 and "the pair 512 positions" in capsys.readouterr().err


@pytest.mark.skipif(find_spec("triton") is None, reason="there is no Triton")
@pytest.mark.parametrize("what", [
    "g, width 8, 16 x 32", "g, Q4_K, 256 x 512, 8", "g, numbers, 256 x 512, 8", "g, 400 tokens, 8",
    "h, width 8, 16 x 32", "h, retrieval pass", "h, paper",
])  # fmt: skip
def test_gpu_benchmark_kernels_have_rows(what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    figure, _, what = what.partition(", ")
    monkeypatch.setitem(shapes.SHAPES, "small", shapes.ModelShape(256, 512, 2, 4, 2, 300, 16, tied=False))
    monkeypatch.setattr("benchmarks.on_gpu.kernels.VOCABULARIES", (400,))
    rows = measure(figure, tmp_path, "--only", what, contexts="64")
    assert rows and all(set(row) >= FIELDS and row["seconds"] > 0 for row in rows)  # type: ignore[operator]


@pytest.mark.skipif(find_spec("triton") is None, reason="there is no Triton")
def test_gpu_benchmark_tries_each_tile_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """One piece of each width is the tile that `attend` takes, in a GPU's type."""
    monkeypatch.setattr(DeviceClock, "dtype", "bfloat16")
    pieces = FIGURES["g"](Setup("cpu", None, None, None, 1))
    names = [piece.what for piece in pieces if piece.shape == "llama-3.1-8b" and piece.what.startswith("attention")]
    tried = [what.removesuffix(", our own") for what in names]
    assert len(set(tried)) == len(tried) == 3 * (8 + 2)
    assert [what.split(",")[1] for what in names if what.endswith("our own")] == [" width 1", " width 8", " width 16"]


def test_gpu_page_names_packages_of_its_tests() -> None:
    """Packages that tests/backends/cuda and the modules behind it import, or that those packages bring."""
    brought = {"numpy", "tokenizers", "safetensors", "huggingface_hub", "tqdm", "jinja2", "torch"}
    page = (ROOT / "docs" / "contributing" / "gpu-runs.md").read_text(encoding="utf-8")
    named = {name.replace("-", "_") for name in page.partition("torch's CUDA build, ")[2].partition(" (the")[0].replace(
        " and ", ", ").replace("\n", " ").split(", ")}  # fmt: skip
    files = [ROOT / "tests" / "conftest.py", *(ROOT / "tests" / "backends" / "cuda").glob("*.py")]
    assert packages(files) - brought == named - {"pytest_timeout"}, "which pyproject.toml asks for"


def packages(files: list[Path]) -> set[str]:
    """Return packages of others that these files import when they are imported, and what they import of ours."""
    packages_found = set()
    visited = set[Path]()
    while files:
        file = files.pop()
        if file in visited or not file.exists():
            continue
        visited.add(file)
        for node in ast.parse(file.read_text(encoding="utf-8")).body:
            if not isinstance(node, ast.Import | ast.ImportFrom):
                continue
            names = [node.module or ""] if isinstance(node, ast.ImportFrom) else [alias.name for alias in node.names]
            names += [f"{node.module}.{alias.name}" for alias in node.names] if isinstance(node, ast.ImportFrom) else []
            for name in names:
                top = name.split(".")[0]
                path = ROOT / ("src" if name.startswith("triforce") else "") / name.replace(".", "/")
                if top in ("triforce", "tests", "benchmarks"):
                    files += [path.with_suffix(".py"), path / "__init__.py"]
                elif top not in sys.stdlib_module_names:
                    packages_found.add(top)
    return packages_found


def test_gpu_benchmark_paper_cards_match_paper() -> None:
    pieces = list(FIGURES["c"](Setup("cpu", None, None, None, 128)))
    assert [piece.what for piece in pieces] == [f"{what}, {cap} GiB" for cap in (24, 48) for what in OFFLOADED]
    assert {piece.shape for piece in pieces} == {"llama-2-7b-128k", "llama-2-13b-128k"}


def pieces_of(figure: str) -> Iterator[Piece]:
    setup = Setup("cpu", None, None, None, 128)
    if figure != gpu.LEASE:
        return FIGURES[figure](setup)
    return chain.from_iterable(part.pieces(setup) for part in PARTS)


@pytest.mark.skipif(find_spec("triton") is None, reason="there is no Triton")
def test_gpu_run_list_commands_parse() -> None:
    """Commands of docs/data/gpu_runs.toml parse, and their pieces and tests exist."""
    runs = tomllib.loads((ROOT / "docs" / "data" / "gpu_runs.toml").read_text(encoding="utf-8"))["runs"]
    lines = [command.partition("PY -m ")[2] for run in runs for command in run["commands"] if "PY -m " in command]
    asked: dict[str, list[str]] = {}
    for module, *arguments in map(shlex.split, lines):
        if module == "benchmarks.gpu":
            options = study.parse("gpu", None, gpu.add_arguments, arguments)
            run_pieces = [piece.what for piece in pieces_of(options.figure) if options.only in piece.what]
            assert run_pieces, arguments
            asked[options.figure] = asked.get(options.figure, []) + run_pieces
        elif module == "triforce":
            parse(arguments)
        elif module == "pytest":
            assert all((ROOT / path).exists() for path in arguments if path.startswith("tests/"))
    assert set(asked) == {gpu.LEASE, *FIGURES}
    measured = [what for what in asked["c"] if "48" not in what]
    assert sorted(measured) == sorted(f"{what}, 24 GiB" for what in OFFLOADED)


SMALL = ["--device", "cpu", "--shape", "small", "--draft", "small-draft", "--contexts", "512"]


@pytest.mark.parametrize(("arguments", "message"), [(["c", *SMALL], "fits on the device"), (["a"], "no CUDA device")])
def test_gpu_benchmark_impossible_setups_raise(
    arguments: list[str],
    message: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert gpu.main([*arguments, "--out", str(tmp_path)]) == 2
    error = capsys.readouterr().err
    assert message in error and "Traceback" not in error
