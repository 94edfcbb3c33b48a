"""Parts of the model card: counts of sources by licence, and pictures that are the same each time."""

from __future__ import annotations

from pathlib import Path

from recipes.pair import pictures, sources
from tests.helpers.extras import needs

BUCKETS = [{"from": 0, "to": 256, "tokens": 255, "nats": 3.0}, {"from": 256, "to": 512, "tokens": 256, "nats": 2.5}]
CELLS = [
    {"length": length, "depth": depth, "asked": 4, "right": 3, "confused": 0}
    for length in (2048, 4096)
    for depth in (0.0, 0.5, 1.0)
]


def test_card_counts_sources_by_licence(tmp_path: Path) -> None:
    rows = ["file\tbytes\trepo\tcommit\tlicence", "code/a.txt\t1\to/a\tc\tMIT"]
    rows += [f"books/{n}.txt\t1\to/b\tc\tpublic domain (US); first published {n}" for n in (1850, 1860)]
    (tmp_path / "SOURCES.tsv").write_text("\n".join(rows) + "\n", encoding="utf-8")
    assert sources.counts(tmp_path) == {"public domain (US)": {"books": 2}, "MIT": {"code": 1}}
    assert sources.counts(tmp_path / "nowhere") == {}


@needs("matplotlib")
def test_card_pictures_are_deterministic(tmp_path: Path) -> None:
    results = {"positions": {"kinds": {"prose": BUCKETS}}, "far": {"skipped": "short"}, "needle": {"cells": CELLS}}
    drawn = [pictures.draw(results, tmp_path / folder) for folder in ("a", "b")]
    assert [name for name, _ in drawn[0]] == list(pictures.PICTURES)
    for name, _ in drawn[0]:
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()
        assert b"<svg" in (tmp_path / "a" / name).read_bytes()


@needs("matplotlib")
def test_card_missing_measurements_are_not_drawn(tmp_path: Path) -> None:
    results = {"positions": {"kinds": {"prose": BUCKETS}}, "far": {"skipped": "short"}, "needle": {"skipped": "short"}}
    assert [name for name, _ in pictures.draw(results, tmp_path)] == ["positions.svg"]
