"""Counts of the corpus's texts by licence, from the table beside its archives."""

from __future__ import annotations

import csv
from collections import Counter
from pathlib import Path

PARTS = {"books": "books", "code": "code bases", "docs": "documentation sets", "eval": "evaluation texts"}


def counts(folder: Path) -> dict[str, Counter[str]]:
    """Return counts of texts by licence and part, from `SOURCES.tsv` (columns file, bytes, repo, commit, licence)."""
    path = folder / "SOURCES.tsv"
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    licence_counts: dict[str, Counter[str]] = {}
    for line in csv.DictReader(lines, delimiter="\t"):
        part = line["file"].split("/")[0]
        licence_counts.setdefault(line["licence"].split(";")[0].strip(), Counter())[part] += 1
    return dict(sorted(licence_counts.items(), key=lambda item: -item[1].total()))
