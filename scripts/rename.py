# ruff: noqa
"""Rename classes and functions of triforce wherever they are meant: python scripts/rename.py NAMES.

NAMES has lines `module:Old New` (module dotted below `triforce`, where it is defined), and `*:old new` for a word that
means one thing throughout: as identifier, keyword argument, attribute and quoted key, but not in prose.
"""

from __future__ import annotations

import ast
import io
import re
import subprocess
import sys
import tokenize
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SOURCE = ROOT / "src" / "triforce"
WHERE = ["src", "tests", "benchmarks", "scripts", "recipes", "examples"]
DOCS = ["docs", "README.md", "csrc"]


def dotted(path: Path) -> str:
    parts = list(path.relative_to(SOURCE).with_suffix("").parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


class Origins:
    """Where each name that a module of triforce offers was defined."""

    def __init__(self) -> None:
        self.modules = {dotted(path): ast.parse(path.read_text()) for path in SOURCE.rglob("*.py")}

    def of(self, module: str, name: str, depth: int = 0) -> str | None:
        tree = self.modules.get(module)
        if tree is None or depth > 6:
            return None
        for node in ast.walk(tree):
            if (
                isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
                and node.name == name
                and node in tree.body
            ):
                return f"{module}:{name}"
            if (
                isinstance(node, ast.Assign)
                and node in tree.body
                and any(isinstance(t, ast.Name) and t.id == name for t in node.targets)
            ):
                return f"{module}:{name}"
            if (
                isinstance(node, ast.AnnAssign)
                and node in tree.body
                and isinstance(node.target, ast.Name)
                and node.target.id == name
            ):
                return f"{module}:{name}"
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("triforce"):
                for alias in node.names:
                    if (alias.asname or alias.name) == name:
                        return self.of(node.module[9:], alias.name, depth + 1)
        return None


def offsets(raw: bytes) -> list[int]:
    starts = [0]
    for line in raw.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    return starts


def renamed(path: Path, code: str, names: dict[str, str], words: dict[str, str], origins: Origins) -> str:
    tree, raw = ast.parse(code), code.encode()
    starts = offsets(raw)
    local: dict[str, str] = {}  # what is bound here, under its old name
    own = dotted(path) if path.is_relative_to(SOURCE) else None
    modules: dict[str, str] = {}
    edits: set[tuple[int, int, str]] = set()

    def at(line: int, column: int) -> int:
        return starts[line - 1] + column

    def word_at(begin: int, end: int, old: str, new: str) -> None:
        found = re.search(rf"\b{re.escape(old)}\b".encode(), raw[begin:end])
        if found:
            edits.add((begin + found.start(), begin + found.end(), new))

    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "triforce":
            for alias in node.names:
                target = f"{node.module[9:]}.{alias.name}".lstrip(".")
                if target in origins.modules:
                    modules[alias.asname or alias.name] = target
                    continue
                origin = origins.of(node.module[9:], alias.name)
                if origin in names:
                    word_at(
                        at(alias.lineno, alias.col_offset),
                        at(alias.end_lineno, alias.end_col_offset),
                        alias.name,
                        names[origin],
                    )
                    if alias.asname is None:
                        local[alias.name] = names[origin]
        elif isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.startswith("triforce.") and alias.asname:
                    modules[alias.asname] = alias.name[9:]
    if own is not None:
        for key, new in names.items():
            module, old = key.split(":")
            if module == own:
                local[old] = new
    bound = {n.arg for n in ast.walk(tree) if isinstance(n, ast.arg)} | {
        n.id for n in ast.walk(tree) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)
    }
    for old, new in local.items():
        if new in {n.id for n in ast.walk(tree) if isinstance(n, ast.Name)} | {
            a.asname or a.name for n in ast.walk(tree) if isinstance(n, ast.ImportFrom | ast.Import) for a in n.names
        }:
            print(f"{path.relative_to(ROOT)}: {new} (was {old}) is taken here: look")
        if old in bound and old.islower():
            print(f"{path.relative_to(ROOT)}: {old} is bound here to something else, too: look")
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and node.id in local:
            edits.add((at(node.lineno, node.col_offset), at(node.end_lineno, node.end_col_offset), local[node.id]))
        elif (
            isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
            and node.name in local
            and node in tree.body
        ):
            word_at(
                at(node.lineno, node.col_offset), at(node.lineno, node.col_offset) + 200, node.name, local[node.name]
            )
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in modules:
            origin = origins.of(modules[node.value.id], node.attr)
            if origin in names:
                end = at(node.end_lineno, node.end_col_offset)
                edits.add((end - len(node.attr.encode()), end, names[origin]))
    quoted = {**local}
    for token in tokenize.generate_tokens(io.StringIO(code).readline):
        begin = (
            at(token.start[0], len(token.line[: token.start[1]].encode()))
            if token.start[0] == token.end[0] or token.type == tokenize.STRING
            else 0
        )
        if token.type == tokenize.NAME and token.string in words:
            edits.add((begin, begin + len(token.string.encode()), words[token.string]))
        elif token.type in (tokenize.COMMENT, tokenize.STRING) and token.string:
            text = token.string
            begin = starts[token.start[0] - 1] + len(code.splitlines()[token.start[0] - 1][: token.start[1]].encode())
            for old, new in {**quoted, **words}.items():
                for found in re.finditer(rf"`[^`\n]*`", text):
                    for inner in re.finditer(rf"(?<![\w.-]){re.escape(old)}\b", found[0]):
                        first = begin + len(text[: found.start() + inner.start()].encode())
                        edits.add((first, first + len(old.encode()), new))
                bare = text.strip("rbfRBF")
                if token.type == tokenize.STRING and bare in (f'"{old}"', f"'{old}'"):
                    first = begin + len(text[: text.index(old)].encode())
                    edits.add((first, first + len(old.encode()), new))
                elif (
                    token.type == tokenize.STRING
                    and "\n" not in text
                    and old in local
                    and re.search(rf"\b{old}\b", text)
                    and "`" not in text
                    and re.fullmatch(r"[\w\s\[\],|.\"']+", text)
                ):
                    for inner in re.finditer(rf"\b{re.escape(old)}\b", text):  # an annotation in quotes
                        first = begin + len(text[: inner.start()].encode())
                        edits.add((first, first + len(old.encode()), new))
    for begin, end, new in sorted(edits, reverse=True):
        raw = raw[:begin] + new.encode() + raw[end:]
    return raw.decode()


def main() -> None:
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    names: dict[str, str] = {}
    words: dict[str, str] = {}
    for line in Path(sys.argv[1]).read_text().splitlines():
        if line := line.partition("#")[0].strip():
            old, new = line.split()
            if old.startswith("*:"):
                words[old[2:]] = new
            else:
                names[old] = new
    origins = Origins()
    for key in names:
        module, name = key.split(":")
        if origins.of(module, name) != key:
            sys.exit(f"{key} is not defined there, but at {origins.of(module, name)}")
    changed = 0
    for top in WHERE:
        for path in sorted((ROOT / top).rglob("*.py")):
            if path.name in ("move.py", "rename.py", "split.py") and path.parent.name == "scripts":
                continue
            code = path.read_text(encoding="utf-8")
            new = renamed(path, code, names, words, origins)
            if new != code:
                path.write_text(new, encoding="utf-8")
                changed += 1
    everywhere = {key.split(":")[1]: new for key, new in names.items()} | words
    for top in DOCS:
        for path in [ROOT / top] if (ROOT / top).is_file() else sorted((ROOT / top).rglob("*")):
            if path.suffix in (".md", ".cpp", ".hpp"):
                text = path.read_text(encoding="utf-8")
                new = re.sub(
                    r"`[^`\n]*`",
                    lambda m: re.sub(
                        r"(?<![\w.-])(" + "|".join(map(re.escape, everywhere)) + r")\b(?!\.py)",
                        lambda n: everywhere[n[1]],
                        m[0],
                    ),
                    text,
                )
                if new != text:
                    path.write_text(new, encoding="utf-8")
                    changed += 1
    python = sys.executable
    subprocess.run([python, "-m", "ruff", "check", "-q", "--select", "I", "--fix", "."], cwd=ROOT, check=False)
    subprocess.run([python, "-m", "ruff", "format", "-q", "."], cwd=ROOT, check=False)
    print(f"{changed} files changed")


if __name__ == "__main__":
    main()
