"""Writes the tables of docs/ that are data, from docs/data/: python scripts/docs_tables.py [--check].

Each stands between two comments that name its file. --check writes nothing, and fails where one is stale.
"""

from __future__ import annotations

import argparse
import tomllib
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]


def layers(data: dict[str, Any]) -> list[list[str]]:
    rows = [["level", "modules", "what"]]
    for level, row in enumerate(data["levels"]):
        shown = [code(name.removeprefix("triforce.")) for name in row["modules"]]
        rows.append([str(level), ", ".join(shown), row["what"]])
    return rows


def kernel_errors(data: dict[str, Any]) -> list[list[str]]:
    rows = [["kernel", "error, in units of", "float32", "bfloat16"]]
    for kernel in data["kernels"]:
        rows.append([kernel["name"], kernel["unit"], f"2^{kernel['float32']}", f"2^{kernel['bfloat16']}"])
    return rows


def gpu_runs(data: dict[str, Any]) -> list[list[str]]:
    rows = [["#", "what", "command", "minutes"]]
    for number, run in enumerate(data["runs"]):
        rows.append([str(number), run["what"], ", ".join(map(code, run["commands"])), run["minutes"]])
    return rows


PAGES = {"design.md": layers, "kernels.md": kernel_errors, "gpu.md": gpu_runs}
"""What makes the table of each page; its file in docs/data/ has the same name."""


def code(text: str) -> str:
    return f"`{text}`"


def table(rows: list[list[str]]) -> str:
    header, *others = (f"| {' | '.join(row)} |" for row in rows)
    return "\n".join([header, "|---" * len(rows[0]) + "|", *others])


def filled(page: str, name: str, table: str) -> str:
    """`page` with `table` between the comments that name it, which must be there."""
    begin, end = f"<!-- data/{name}.toml, by scripts/docs_tables.py -->", f"<!-- end of data/{name}.toml -->"
    head, rest = page[: page.index(begin)], page[page.index(begin) :]
    return f"{head}{begin}\n\n{table}\n\n{rest[rest.index(end) :]}"


def stale(docs: Path) -> dict[Path, str]:
    """Pages of `docs` whose table isn't that of the data, and what they should be."""
    found = {}
    for page, rows in PAGES.items():
        data = tomllib.loads((docs / "data" / f"{rows.__name__}.toml").read_text(encoding="utf-8"))
        text = (docs / page).read_text(encoding="utf-8")
        wanted = filled(text, rows.__name__, table(rows(data)))
        if wanted != text:
            found[docs / page] = wanted
    return found


def main(arguments: list[str] | None = None, docs: Path = ROOT / "docs") -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing, and fail where a table is stale")
    check = parser.parse_args(arguments).check
    pages = stale(docs)
    for page, text in pages.items():
        print(f"{page.name} is stale: python scripts/docs_tables.py" if check else f"{page.name} is written")
        if not check:
            page.write_text(text, encoding="utf-8")
    return int(check and bool(pages))


if __name__ == "__main__":
    raise SystemExit(main())
