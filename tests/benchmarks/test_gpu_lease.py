"""A lease of a GPU, rehearsed on a CPU: a file a part, what happens where something fails, and that a run goes on."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks import gpu
from benchmarks.on_gpu import lease, machine_checks, ours
from benchmarks.on_gpu.lease import LOST, PARTS, Part
from benchmarks.on_gpu.piece import Piece, Row, Setup
from tests.helpers.cuda.stub import machine
from triforce.backends import dispatch
from triforce.bench import results_file, shapes
from triforce.ragged import ints
from triforce.speculation import Draft

Run = Callable[[], Row]
PutParts = Callable[..., list[str]]


def measured() -> Row:
    return {"seconds": 1e-3, "fraction_of_limit": None, "speedup": None}


def leased(folder: Path, *extra_options: str, device: str = "cpu") -> int:
    return gpu.main(["lease", "--device", device, "--out", str(folder), *extra_options])


def rows(folder: Path, part: str) -> list[Row]:
    file = folder / f"lease_{part}.json"
    return json.loads(file.read_text()) if file.exists() else []


@pytest.fixture
def parts(monkeypatch: pytest.MonkeyPatch) -> PutParts:
    """Replace the parts: a name, and what each of its pieces does. Returns the calls of pieces."""

    def put(**pieces_of: list[Run]) -> list[str]:
        calls = list[str]()

        def part(name: str, runs: list[Run]) -> Part:
            def called(n: int) -> Row:
                calls.append(f"{name} {n}")
                return runs[n]()

            def pieces(setup: Setup) -> Iterator[Piece]:
                for n in range(len(runs)):
                    yield Piece(f"piece {n}", "tiny", 0, lambda n=n: called(n))

            return Part(name, 60, pieces, gate=name == "doctor")

        monkeypatch.setattr(lease, "PARTS", [part(*piece_args) for piece_args in pieces_of.items()])
        return calls

    return put


def raising(error: Exception) -> Run:
    def run() -> Row:
        raise error

    return run


@pytest.mark.skipif(dispatch.native is None, reason="on a CPU a store is for the native kernels")
def test_lease_rehearsal_writes_file_of_each_part(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A rehearsal measures the first pieces of each part; a second run measures nothing again."""
    tiny = shapes.ModelShape(256, 256, 2, 4, 2, 320, 16, tied=False)
    monkeypatch.setitem(shapes.SHAPES, "tiny", tiny)
    monkeypatch.setattr(ours, "TURNS", 1)
    monkeypatch.setattr(machine_checks, "INT8_TESTS", {"codes": "codes_of_odd_rows"})
    short_parts = [Part(part.name, part.seconds, first(part), part.gate) for part in PARTS]
    monkeypatch.setattr(lease, "PARTS", short_parts)
    assert leased(tmp_path, "--contexts", "64", "--kv-memory", "3MiB") == 0, capsys.readouterr().out
    assert {file.stem for file in tmp_path.glob("*.json")} == {f"lease_{part.name}" for part in PARTS}
    part_rows = {part.name: rows(tmp_path, part.name) for part in PARTS}
    fields = {"what", "shape", "context", "seconds", "command", *results_file.FIELDS}
    assert all(set(row) >= fields and "error" not in row for rows in part_rows.values() for row in rows)
    assert part_rows["int8_tests"][0]["passed"] == 2 and part_rows["int8_tests"][0]["exit_code"] == 0
    assert all(row["verifications"] for row in part_rows["offloaded"])
    mtimes_before = {file: file.stat().st_mtime_ns for file in tmp_path.glob("*.json")}
    assert leased(tmp_path, "--contexts", "64", "--kv-memory", "3MiB") == 0
    assert mtimes_before == {file: file.stat().st_mtime_ns for file in tmp_path.glob("*.json")}, "measured again"


def first(part: Part) -> Callable[[Setup], Iterator[Piece]]:
    def pieces(setup: Setup) -> Iterator[Piece]:
        all_pieces = [*part.pieces(setup)]
        yield from all_pieces[:: 2 if part.name == "offloaded" else 8]

    return pieces


def test_lease_ends_at_check_that_fails(tmp_path: Path, parts: PutParts, capsys: pytest.CaptureFixture[str]) -> None:
    """--only names other pieces and does not pass by a check; what failed is checked anew, what passed is not."""
    calls = parts(doctor=[measured, raising(ValueError("picks differ")), measured], token_time=[measured])
    assert leased(tmp_path, "--only", "token") == 1
    assert calls == ["doctor 0", "doctor 1"] and "nothing is measured" in capsys.readouterr().out
    assert rows(tmp_path, "doctor")[1]["error"] == "ValueError: picks differ" and not rows(tmp_path, "token_time")
    for _ in range(2):
        assert leased(tmp_path) == 1
    assert calls[2:] == ["doctor 1", "doctor 1"]


def test_lease_checks_again_at_another_commit(tmp_path: Path, parts: PutParts, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = parts(doctor=[measured], token_time=[measured])
    for commit in ("1", "1", "2"):
        monkeypatch.setattr(gpu, "provenance", lambda _, commit=commit: {"machine": "", "commit": commit})
        assert leased(tmp_path) == 0
    assert calls == ["doctor 0", "token_time 0", "doctor 0"]


def test_lease_goes_on_behind_piece_that_fails(
    tmp_path: Path, parts: PutParts, capsys: pytest.CaptureFixture[str]
) -> None:
    """A piece may fail for want of memory. One more run tries it, later ones do not."""
    calls = parts(
        doctor=[measured], offloaded=[raising(torch.cuda.OutOfMemoryError("2 GiB")), measured], states=[measured]
    )
    for _ in range(3):
        assert leased(tmp_path) == 1
        assert "1 pieces failed" in capsys.readouterr().out
    assert calls == ["doctor 0", "offloaded 0", "offloaded 1", "states 0", "offloaded 0"]
    broken, whole_rows = rows(tmp_path, "offloaded")
    assert broken["error"] == "OutOfMemoryError: 2 GiB" and broken["tries"] == 2 and whole_rows["seconds"]


def test_lease_stops_at_lost_device_and_goes_on(
    tmp_path: Path,
    parts: PutParts,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A lost device gives the same error to any call."""
    with machine():
        synchronize = torch.cuda.synchronize
        answers = [True]

        def lose() -> Row:
            answers[0] = False
            raise RuntimeError("CUDA error: an illegal memory access was encountered")

        def synchronized(device: Any = None) -> None:
            if not answers[0]:
                raise RuntimeError("CUDA error: an illegal memory access was encountered\nand more")
            synchronize(device)

        monkeypatch.setattr(torch.cuda, "synchronize", synchronized)
        calls = parts(doctor=[measured], offloaded=[measured, lose, measured], states=[measured])
        assert leased(tmp_path, device="cuda") == LOST
        assert calls == ["doctor 0", "offloaded 0", "offloaded 1"]
        assert [("error" in row) for row in rows(tmp_path, "offloaded")] == [False, True]
        assert "illegal memory access was encountered); rows are kept" in capsys.readouterr().out
        answers[0] = True  # a process of its own
        calls = parts(doctor=[measured], offloaded=[measured] * 3, states=[measured])
        assert leased(tmp_path, device="cuda") == 0
        assert calls == ["offloaded 1", "offloaded 2", "states 0"] and len(rows(tmp_path, "offloaded")) == 3
        monkeypatch.undo()


def test_lease_leaves_part_whose_time_is_over(
    tmp_path: Path, parts: PutParts, capsys: pytest.CaptureFixture[str]
) -> None:
    calls = parts(doctor=[measured], offloaded=[measured, measured], states=[measured])
    lease.PARTS[1] = Part("offloaded", -1, lease.PARTS[1].pieces)
    with machine():
        assert leased(tmp_path, device="cuda") == 0
    assert calls == ["doctor 0", "states 0"] and "not yet: offloaded, piece 0" in capsys.readouterr().out


def test_lease_part_without_its_package_has_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def pieces(setup: Setup) -> Iterator[Piece]:
        import no_such_package  # type: ignore[import-not-found]  # noqa: F401

        yield Piece("never", "tiny", 0, measured)

    monkeypatch.setattr(lease, "PARTS", [Part("tiles", 60, pieces)])
    assert leased(tmp_path) == 1
    assert "no_such_package" in rows(tmp_path, "tiles")[0]["error"]


def test_rehearsal_stays_out_of_results(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for figure in ("lease", "a"):
        assert gpu.main([figure, "--device", "cpu", "--out", str(gpu.RESULTS)]) == 2
        assert "name another folder" in capsys.readouterr().err
    setup = Setup("cpu", None, None, None, 8)
    assert gpu._folder(None, setup) == gpu.RESULTS.parents[1] / "build" / "lease"


def test_tokens_of_one_graph_equal_single_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokens of the target, behind all of its KV: a lease measures plain decoding."""
    from benchmarks.on_gpu import token_time

    monkeypatch.setitem(shapes.SHAPES, "tiny", shapes.ModelShape(32, 48, 2, 2, 1, 300, 16))
    setup = lease.rehearsed(Setup("cpu", None, None, [64], 8))
    with token_time._interpreted(setup):
        text = token_time.PlainDecoding(setup, lease.TINY, 64)
        graph_tokens = text.tokens_of(3)()[0].flatten().tolist()
        tokens = [0]
        prefix = text.prefix
        for _ in range(3):
            logits_BJV = text.decoder(ints(tokens[-1:])[None], ints([1]), text.view)
            drawn = text.sampling.verify(Draft.empty(1, 0), logits_BJV, prefix, np.ones(1, np.bool_), 0)
            prefix = prefix.append(drawn)
            tokens.append(int(drawn.tokens_BK[0, 0]))
    assert graph_tokens == tokens[1:]
