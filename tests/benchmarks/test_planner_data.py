"""Data of the planner's simulator: what is recorded takes the place of what had its name."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

from benchmarks import acceptance_traces, pass_seconds


def test_trace_takes_place_of_one_of_its_name(tmp_path: Path) -> None:
    file = tmp_path / "traces.npz"
    for name, bits in (("b", 1), ("a", 2), ("b", 3)):
        acceptance_traces.add(file, name, np.full(4, bits, np.uint8), np.full((2, 6), bits, np.uint8))
    with np.load(file) as traces_file:
        assert traces_file["names"].tolist() == ["a", "b"]
        assert traces_file["facts"].tolist() == [[2] * 4, [3] * 4] and traces_file["ngrams"].shape == (2, 2, 6)


def test_row_takes_place_of_one_of_its_model_length_and_level(tmp_path: Path) -> None:
    file = tmp_path / "rows.json"
    rows = [{"model": "pair", "length": length, "level": "avx2", "ms": {}} for length in (300, 2048)]
    for row in (*rows, rows[0] | {"ms": {"full": {"1": 2.0}}}):
        pass_seconds.add(file, row)
    assert json.loads(file.read_text()) == [rows[1], rows[0] | {"ms": {"full": {"1": 2.0}}}]
