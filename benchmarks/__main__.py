"""Lists the studies, one a line.

python -m benchmarks
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parent


def main() -> int:
    """Print each study's command and what it measures."""
    found = dict(studies())
    width = max(map(len, found))
    for name, summary in found.items():
        print(f"python -m benchmarks.{name:<{width}}  {summary}")
    return 0


def studies() -> Iterator[tuple[str, str]]:
    """Yield name and first line of the docstring of each module here, and each package, that can be run."""
    for file in sorted([*ROOT.glob("[!_]*.py"), *ROOT.glob("*/__main__.py")], key=_name):
        code = file.read_text(encoding="utf-8")
        if '__name__ == "__main__"' in code:
            yield _name(file), (ast.get_docstring(ast.parse(code)) or "").split("\n")[0]


def _name(file: Path) -> str:
    return file.parent.name if file.stem == "__main__" else file.stem


if __name__ == "__main__":
    raise SystemExit(main())
