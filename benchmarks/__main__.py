"""Lists the studies, one a line.

python -m benchmarks
"""

from __future__ import annotations

import ast
from pathlib import Path

ROOT = Path(__file__).parent


def main() -> int:
    """Print each study's command and what it measures: the first line of its docstring."""
    summaries = {}
    for file in [*ROOT.glob("[!_]*.py"), *ROOT.glob("*/__main__.py")]:
        code = file.read_text(encoding="utf-8")
        if '__name__ == "__main__"' in code:
            name = file.parent.name if file.stem == "__main__" else file.stem
            summaries[name] = (ast.get_docstring(ast.parse(code)) or "").split("\n")[0]
    width = max(map(len, summaries))
    for name, summary in sorted(summaries.items()):
        print(f"python -m benchmarks.{name:<{width}}  {summary}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
