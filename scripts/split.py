# ruff: noqa
"""split.py OLD NEW "docstring" Name,Name...: top-level definitions go from one module of triforce to a new one."""

import ast, sys, subprocess, re
from pathlib import Path

if len(sys.argv) != 5:
    sys.exit(__doc__)
S = Path("src/triforce")
old, new, doc, names = sys.argv[1:5]
names = names.split(",")
po, pn = S / (old.replace(".", "/") + ".py"), S / (new.replace(".", "/") + ".py")
code = po.read_text()
lines = code.split("\n")
tree = ast.parse(code)


def bound(n):
    if isinstance(n, (ast.ClassDef, ast.FunctionDef)):
        return {n.name}
    if isinstance(n, ast.Assign):
        return {e.id for t in n.targets for e in ast.walk(t) if isinstance(e, ast.Name)}
    if isinstance(n, ast.AnnAssign):
        return {n.target.id}
    return set()


moved = []
imports = []
kept = set()
cut = set()
body = tree.body
i = 0
while i < len(body):
    n = body[i]
    if isinstance(n, (ast.Import, ast.ImportFrom)) or (isinstance(n, ast.If) and "TYPE_CHECKING" in ast.dump(n.test)):
        imports.append("\n".join(lines[n.lineno - 1 : n.end_lineno]))
    elif bound(n) & set(names):
        start = min([n.lineno] + [d.lineno for d in getattr(n, "decorator_list", [])])
        while lines[start - 2].startswith("#"):
            start -= 1
        end = n.end_lineno
        if (
            i + 1 < len(body)
            and isinstance(body[i + 1], ast.Expr)
            and isinstance(body[i + 1].value, ast.Constant)
            and not isinstance(n, (ast.ClassDef, ast.FunctionDef))
        ):
            end = body[i + 1].end_lineno
        gap = "\n\n\n" if isinstance(n, (ast.ClassDef, ast.FunctionDef)) else "\n\n"
        moved.append((gap, "\n".join(lines[start - 1 : end])))
        cut |= set(range(start - 1, end))
    else:
        kept |= bound(n)
    i += 1
text = "".join(g + t for g, t in moved)
rest = "\n".join(l for k, l in enumerate(lines) if k not in cut)
used = lambda src: (
    {x.id for x in ast.walk(ast.parse(src)) if isinstance(x, ast.Name)}
    | set(
        re.findall(
            r"[A-Za-z_]\w*",
            " ".join(
                x.value
                for x in ast.walk(ast.parse(src))
                if isinstance(x, ast.Constant) and isinstance(x.value, str) and len(x.value) < 60
            ),
        )
    )
)
back = sorted(kept & {x.id for x in ast.walk(ast.parse(text)) if isinstance(x, ast.Name)})
forth = sorted(set(names) & {x.id for x in ast.walk(ast.parse(rest)) if isinstance(x, ast.Name)})
print("from old:", back, "to old:", forth)
imports = [x for x in imports if "__future__" not in x]
if pn.exists():
    cur = pn.read_text()
    t2 = ast.parse(cur)
    last = max((n.end_lineno for n in t2.body if isinstance(n, (ast.Import, ast.ImportFrom))), default=1)
    L = cur.split("\n")
    pn.write_text(
        "\n".join(
            L[:last] + imports + ([f"from triforce.{old} import {', '.join(back)}"] if back else []) + L[last:]
        ).rstrip("\n")
        + text
        + "\n"
    )
else:
    pn.write_text(
        f'"""{doc}"""\n\nfrom __future__ import annotations\n\n'
        + "\n".join(imports)
        + (f"\nfrom triforce.{old} import {', '.join(back)}" if back else "")
        + text
        + "\n"
    )
if forth:
    L = rest.split("\n")
    k = max(n.end_lineno for n in ast.parse(rest).body if isinstance(n, (ast.Import, ast.ImportFrom))) - 1
    L.insert(k + 1, f"from triforce.{new} import {', '.join(forth)}")
    rest = "\n".join(L)
po.write_text(rest)
moves = Path("build/split_moves")
moves.parent.mkdir(exist_ok=True)
moves.write_text("".join(f"{old}:{n} {new}\n" for n in names if not n.startswith("_")))
subprocess.run([sys.executable, "-m", "ruff", "check", "-q", "--select", "F401,I", "--fix", str(po), str(pn)])
if moves.read_text():
    subprocess.run([sys.executable, "scripts/move.py", str(moves)])
subprocess.run([sys.executable, "-m", "ruff", "check", "-q", "--select", "F401,I", "--fix", str(po), str(pn)])
subprocess.run([sys.executable, "-m", "ruff", "format", "-q", str(po), str(pn)])
