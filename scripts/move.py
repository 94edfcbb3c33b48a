# ruff: noqa
"""Move modules of triforce, and rewrite all that names them: python scripts/move.py MOVES.

MOVES is a file of lines `old new`, dotted below `triforce`; `old:Name new` moves what is imported of a public name only
(its definition is moved by hand). Paths in other files follow where they are written whole (`src/triforce/a/b.py`), or
below the package as `a/b.py`. It says what it could not decide.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SOURCE = ROOT / "src" / "triforce"
WHERE = ["src", "tests", "benchmarks", "scripts", "docs", "recipes", "examples"]
SINGLE = [
    "README.md",
    "Makefile",
    "CMakeLists.txt",
    "pyproject.toml",
    "CHANGELOG.md",
    ".pre-commit-config.yaml",
    ".ci/run",
]
KINDS = {".py", ".md", ".toml", ".json", ".sh", ".txt", ".pyi", ".cpp", ".hpp", ".yaml", ".yml", ".html", ".js", ""}
SKIP = re.compile(r"src/triforce/(pair|data|assets)/|benchmarks/results/|scripts/(move|rename|split)\.py|\.so$")

Moves = dict[str, str]


def read(file: Path) -> tuple[Moves, Moves]:
    """Of modules, packages with all in them, and of names of a module."""
    modules: Moves = {}
    names: Moves = {}
    for line in file.read_text().splitlines():
        if line := line.partition("#")[0].strip():
            old, new, *only_text = line.split()
            (names if ":" in old else modules)[old.replace(":", ".")] = new
            if only_text:
                NO_FILE.add(old)
    return modules, names


def module_file(name: str) -> Path | None:
    path = SOURCE / Path(*name.split("."))
    if (path / "__init__.py").exists():
        return path / "__init__.py"
    return path.with_suffix(".py") if path.with_suffix(".py").exists() else None


def move(old: str, new: str) -> None:
    """Move a module's file; of a package `__init__` only, where others have lines of their own."""
    source = module_file(old)
    assert source, f"no module {old}"
    target = SOURCE / Path(*new.split("."))
    if source.name == "__init__.py" and not old.endswith("__init__"):
        target = target / "__init__.py" if new not in BECOMES_FILE else target.with_suffix(".py")
    else:
        target = target.with_suffix(".py")
    target.parent.mkdir(parents=True, exist_ok=True)
    subprocess.run(["git", "mv", "-k", str(source), str(target)], cwd=ROOT, check=True)


MADE = "@@"  # before what is rewritten already
BECOMES_FILE: set[str] = set()
NO_FILE: set[str] = set()


class Rewriter:
    def __init__(self, modules: Moves, names: Moves, known: set[str]) -> None:
        self.modules, self.names, self.known = modules, names, known
        dotted = {**modules, **names}
        olds = sorted(dotted, key=len, reverse=True)
        self._dotted = re.compile(rf"(?<!{MADE})\btriforce\.(" + "|".join(map(re.escape, olds)) + r")(?![\w])")
        self._targets = {
            old: new if old in modules else f"{new}.{old.rpartition('.')[2]}" for old, new in dotted.items()
        }
        paths = {old.replace(".", "/"): new.replace(".", "/") for old, new in modules.items()}
        ordered = sorted(paths, key=len, reverse=True)
        self._paths = re.compile(
            r"(?<![\w/.-])(src/triforce/|triforce/)?(" + "|".join(map(re.escape, ordered)) + r")\.py\b"
        )
        self._to = paths

    def text(self, text: str) -> str:
        text = self._dotted.sub(lambda m: "triforce." + self._targets[m[1]], text)
        return self._paths.sub(self._path, text).replace(MADE, "")

    def _path(self, match: re.Match[str]) -> str:
        lead, old = match[1] or "", match[2]
        if not lead and "/" not in old:
            return match[0]  # `engine.py` alone may be anything
        return f"{lead}{self._to[old]}.py"

    def python(self, code: str, where: str) -> str:
        tree = ast.parse(code)
        lines = code.splitlines(keepends=True)
        starts = [0]
        for line in lines:
            starts.append(starts[-1] + len(line.encode()))
        raw = code.encode()
        edits: list[tuple[int, int, bytes]] = []
        renamed: dict[str, str] = {}
        bound = {n.id for n in ast.walk(tree) if isinstance(n, ast.Name) and not isinstance(n.ctx, ast.Load)}
        bound |= {n.arg for n in ast.walk(tree) if isinstance(n, ast.arg)}
        bound |= {n.name for n in ast.walk(tree) if isinstance(n, ast.FunctionDef | ast.ClassDef)}
        self._bound = bound
        self._taken = bound | {n.id for n in ast.walk(tree) if isinstance(n, ast.Name)}
        self._taken |= {
            (a.asname or a.name) for n in ast.walk(tree) if isinstance(n, ast.ImportFrom | ast.Import) for a in n.names
        }
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "triforce":
                new = self._import(node, renamed, where)
                if new is not None:
                    begin, end = (
                        starts[node.lineno - 1] + node.col_offset,
                        starts[node.end_lineno - 1] + node.end_col_offset,
                    )
                    indent = " " * node.col_offset
                    edits.append((begin, end, ("\n" + indent).join(new).encode()))
        for node in ast.walk(tree):
            if isinstance(node, ast.Name) and node.id in renamed:
                begin = starts[node.lineno - 1] + node.col_offset
                edits.append((begin, begin + len(node.id), renamed[node.id].encode()))
        for begin, end, new_text in sorted(edits, reverse=True):
            raw = raw[:begin] + new_text + raw[end:]
        return raw.decode()

    def _import(self, node: ast.ImportFrom, renamed: dict[str, str], where: str) -> list[str] | None:
        module = node.module.removeprefix("triforce").lstrip(".")
        groups: dict[str, list[str]] = {}
        changed = False
        for alias in node.names:
            full = f"{module}.{alias.name}".lstrip(".")
            name = alias.name
            if full in self.modules or (full in self.known and module in self.modules):
                target = self.modules.get(full, f"{self.modules.get(module, module)}.{alias.name}")
                parent, _, name = target.rpartition(".")
                if alias.asname is None and name != alias.name:
                    if name in self._taken or alias.name in self._bound:
                        print(f"{where}: {name} is imported as {alias.name}")
                        name = f"{name} as {alias.name}"
                    else:
                        renamed[alias.name] = name
            elif full in self.names:
                parent = self.names[full]
            else:
                parent = self.modules.get(module, module)
            changed |= parent != module or name != alias.name
            groups.setdefault(parent, []).append(name + (f" as {alias.asname}" if alias.asname else ""))
        if not changed and self.modules.get(module, module) == module:
            return None  # else it is marked, lest the text be taken for what has moved
        return [
            f"from {MADE}{'triforce.' + parent if parent else 'triforce'} import {', '.join(each)}"
            for parent, each in groups.items()
        ]


def files() -> list[Path]:
    found = [ROOT / name for name in SINGLE if (ROOT / name).exists()]
    for top in WHERE:
        for path in sorted((ROOT / top).rglob("*")):
            name = str(path.relative_to(ROOT))
            if path.is_file() and path.suffix in KINDS and "__pycache__" not in name and not SKIP.search(name):
                found.append(path)
    return found


def main() -> None:
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    modules, names = read(Path(sys.argv[1]))
    known = {
        ".".join(p.relative_to(SOURCE).with_suffix("").parts).removesuffix(".__init__") for p in SOURCE.rglob("*.py")
    }
    whole = dict(modules)
    for old, new in modules.items():  # a package takes along what has no line of its own
        if (SOURCE / Path(*old.split(".")) / "__init__.py").exists() and not new.endswith("!"):
            for name in known:
                if name.startswith(old + ".") and name not in modules:
                    best = max((o for o in modules if name.startswith(o + ".")), key=len)
                    whole[name] = modules[best] + name[len(best) :]
    for old, new in list(whole.items()):
        if new.endswith("!"):
            for name in known:  # what was in it, and has no line of its own, stays where it is
                if name.startswith(old + ".") and name not in whole:
                    whole[name] = name
        if new.endswith("!"):  # `a b.c!`: the package's `__init__` becomes the file b/c.py, and the package ends
            whole[old] = new[:-1]
            BECOMES_FILE.add(new[:-1])
    rewriter = Rewriter(whole, names, known)
    changed = {}
    for path in files():
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue
        new = rewriter.python(text, str(path.relative_to(ROOT))) if path.suffix == ".py" else text
        new = rewriter.text(new)
        if new != text:
            changed[path] = new
    for path, text in changed.items():
        path.write_text(text, encoding="utf-8")
    for old, new in sorted(whole.items(), key=lambda pair: -pair[0].count(".")):
        if old not in NO_FILE and old != new:
            move(old, new)
    for folder in {path.parent for path in SOURCE.rglob("*.py")}:
        if folder != SOURCE and not (folder / "__init__.py").exists():
            (folder / "__init__.py").write_text("")
            print(f"new package {folder.relative_to(SOURCE)}: write its docstring")
    python = sys.executable
    subprocess.run([python, "-m", "ruff", "check", "-q", "--select", "I", "--fix", "."], cwd=ROOT, check=False)
    subprocess.run([python, "-m", "ruff", "format", "-q", "."], cwd=ROOT, check=False)
    print(f"{len(whole)} modules moved, {len(changed)} files changed")


if __name__ == "__main__":
    main()
