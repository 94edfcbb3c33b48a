"""Acceptance by selection, budget, chunk size and full layers, the draft's agreement, and locality, on given texts.

    python -m benchmarks.acceptance [MODEL] --texts BOOK ... --code SOURCES ... --json FILE --docs docs

`--quick` takes about a minute. Without `--code` the code is the source of triforce itself.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
from collections.abc import Iterator
from functools import partial
from importlib import resources
from math import gcd
from pathlib import Path
from time import perf_counter

import torch
from benchmarks.acceptance import pictures
from benchmarks.acceptance.locality import locality
from benchmarks.acceptance.measure import SELECTIONS, Case, acceptance, cases, drafting
from benchmarks.acceptance.report import Report, markdown
from benchmarks.acceptance.walk import Walk
from benchmarks.acceptance.workloads import Size, Workload, copy, needle, plain
from tqdm import tqdm

from triforce import LLM, SamplingParams
from triforce.cache import PAGE
from triforce.checkpoint.tokenizer import Tokenizer
from triforce.errors import RequestError, TriforceError

PACKAGE = Path(str(resources.files("triforce")))
QUICK = {"context": 4096, "positions": 126, "budget": 512, "budgets": [256, 512, 1024], "chunks": [8, 16, 32]}


def main(arguments: list[str] | None = None) -> None:
    options = parse(sys.argv[1:] if arguments is None else arguments)
    try:
        for folder in (options.docs, options.json and options.json.parent):
            if folder:
                folder.mkdir(parents=True, exist_ok=True)  # now, rather than after the measurement
        report = json.loads(options.render.read_text(encoding="utf-8")) if options.render else measured(options)
    except (TriforceError, OSError) as error:
        sys.exit(f"error: {error}")
    page = markdown(report)
    if options.json:
        options.json.write_text(dumps(report), encoding="utf-8")
    if options.docs:
        (options.docs / "acceptance.md").write_text(page, encoding="utf-8")
        pictures.draw(report, options.docs / "pictures")
    if not options.docs:
        print(page)


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.acceptance", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("model", nargs="?", help="folder or hub name; the shipped pair if left out")
    parser.add_argument("--draft", default="auto")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--texts", type=Path, nargs="+", default=[PACKAGE / "data" / "dracula.txt"])
    parser.add_argument("--code", type=Path, nargs="+", default=[PACKAGE], help="files, or folders of Python files")
    parser.add_argument("--context", type=int, default=32_000)
    parser.add_argument("--positions", type=int, default=259, help="of prose, code and copy; needle has its own")
    parser.add_argument("--gamma-2", type=int, default=6, help="a verification scores one position more")
    parser.add_argument("--budgets", type=int, nargs="+", default=[256, 512, 1024, 2048, 4096])
    parser.add_argument("--chunks", type=int, nargs="+", default=[8, 16, 32, 64])
    parser.add_argument("--full-layers", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--budget", type=int, default=2048, help="while something else is varied")
    parser.add_argument("--temperature", type=float, default=0.6)
    parser.add_argument("--top-p", type=float, default=0.9)
    parser.add_argument("--quick", action="store_true", help="4K of context and fewer settings, where not given")
    parser.add_argument("--json", type=Path, help="write the rows there")
    parser.add_argument("--docs", type=Path, help="write acceptance.md and pictures/ in that folder")
    parser.add_argument("--render", type=Path, help="measure nothing: make the page from these rows")
    if "--quick" in arguments:
        parser.set_defaults(**QUICK)
    return parser.parse_args(arguments)


def measured(options: argparse.Namespace) -> Report:
    """Walks every workload, and measures the sweeps on prose."""
    started = perf_counter()
    llm = LLM(options.model, options.draft, device=options.device, dtype=options.dtype)
    params = SamplingParams(temperature=options.temperature, top_p=options.top_p)
    usual = Case("observed", options.budget, chunk=16, full_layers=0)
    sweeps = cases(options.budgets, options.chunks, options.full_layers, usual)
    if llm.tokenizer is None:
        raise RequestError("the model has no tokenizer, but the workloads are texts; name a folder with tokenizer.json")
    works = list(workloads(llm.tokenizer, options))
    report = about(options, usual) | {"acceptance": [], "draft": [], "locality": []}
    steps = sum(len(sweeps) if work.name == "prose" else len(SELECTIONS) for work in works)
    with tqdm(total=steps, disable=None, unit="setting") as progress:
        for work in works:
            settings = sweeps if work.name == "prose" else cases([], [], [], usual)
            for unit, some in by_unit(settings).items():
                walk = Walk(llm.models, work, params, unit)
                for case in some:
                    report["acceptance"].append(acceptance(walk, case))
                    progress.update()
                if unit == PAGE:
                    report["draft"] += drafting(walk, usual) if llm.models.draft else []
                    report["locality"] += locality(walk, usual) if work.name == "prose" else []
    return report | {"seconds": perf_counter() - started}


def by_unit(settings: list[Case]) -> dict[int, list[Case]]:
    """Cases of whole pages together, which the fast kernels take; those of parts of pages together."""
    groups: dict[int, list[Case]] = {PAGE: []}
    parts = gcd(PAGE, *(case.chunk for case in settings))
    for case in settings:
        groups.setdefault(PAGE if case.chunk % PAGE == 0 else parts, []).append(case)
    return groups


def about(options: argparse.Namespace, usual: Case) -> Report:
    """What was asked for, and on which machine."""
    threads, device = torch.get_num_threads(), options.device
    return {
        "machine": f"{platform.machine()}, {threads} threads, torch {torch.__version__}, device {device}",
        "command": " ".join(["python -m benchmarks.acceptance", *sys.argv[1:]]),
        "model": options.model or "the shipped pair",
        "width": options.gamma_2 + 1,
        "usual": usual._asdict(),
        **{name: getattr(options, name) for name in ("context", "temperature", "top_p")},
    }


def workloads(tokenizer: Tokenizer, options: argparse.Namespace) -> Iterator[Workload]:
    """Each text as it stands, and with something that comes again."""
    encode = partial(tokenizer.encode, add_special=False)
    size = Size(options.context, options.positions, options.gamma_2 + 1)
    for path in options.texts:
        ids = encode(text_of(path))
        yield plain("prose", path.name, ids, size)
        yield copy(path.name, ids, size)
        yield needle(path.name, ids, size, encode, tokenizer.decode)
    for path in options.code:
        yield plain("code", path.name, encode(text_of(path)), size)


def text_of(path: Path) -> str:
    """A file, or the Python files of a folder."""
    files = sorted(path.rglob("*.py")) if path.is_dir() else [path]
    return "\n".join(file.read_text(encoding="utf-8") for file in files)


def dumps(report: Report) -> str:
    """JSON with a line for each row."""
    lines = []
    for name, value in report.items():
        rows = ",\n  ".join(map(json.dumps, value)) if isinstance(value, list) else ""
        lines.append(f" {json.dumps(name)}: " + (f"[\n  {rows}\n ]" if rows else json.dumps(value)))
    return "{\n" + ",\n".join(lines) + "\n}\n"


if __name__ == "__main__":
    main()
