"""Writes what is generated of README.md and docs/: python -m scripts.docs [--check].

Tables of docs/data and benchmarks/results, pictures of docs/data, and the reference, from argparse, pydantic and
docstrings. --check writes nothing, and fails where something is stale.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from scripts import docs_pictures, docs_reference, docs_tables

ROOT = Path(__file__).resolve().parents[1]


def stale(root: Path = ROOT) -> dict[Path, str]:
    """Return files that are missing or not what they should be, and what that is."""
    files = docs_tables.files(root) | docs_pictures.files(root) | docs_reference.files(root)
    return {file: text for file, text in files.items() if not file.exists() or file.read_text("utf-8") != text}


def main(arguments: list[str] | None = None, root: Path = ROOT) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing, and fail where something is stale")
    check = parser.parse_args(arguments).check
    files = stale(root)
    for file, text in files.items():
        print(f"{file.name} is stale: python -m scripts.docs" if check else f"{file.name} is written")
        if not check:
            file.write_text(text, encoding="utf-8")
    return int(check and bool(files))


if __name__ == "__main__":
    raise SystemExit(main())
