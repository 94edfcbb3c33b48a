"""Acceptance by selection, budget, chunk size and full layers, the draft's agreement, and locality, on given texts.

Nothing is generated.
"""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from math import gcd
from time import perf_counter
from typing import Any

from tqdm import tqdm

from benchmarks.acceptance.measure import SELECTIONS, Case, acceptance, cases, drafting, locality
from benchmarks.acceptance.report import Report
from benchmarks.acceptance.teacher_forcing import Walk
from benchmarks.acceptance.workloads import Size, Workload, copy, needle, plain
from triforce.bench.prompts import Sources
from triforce.cli.bench.parts import texts
from triforce.cli.options import described, draft, json_file, model, placement
from triforce.errors import RequestError
from triforce.interface.sampling_params import SamplingParams
from triforce.kvcache import PAGE
from triforce.llm import LLM


@dataclass(frozen=True)
class SweepConfig:
    """Tokens of a prompt and of what is measured after it (needle has its own), and what is varied.

    `retrieval_budget` is that while something else is varied; a verification scores `speculative_tokens` positions and
    one more. Fields are called as the arguments are.
    """

    context: int = 32_000
    positions: int = 259
    retrieval_budget: int = 2048
    budgets: Sequence[int] = (256, 512, 1024, 2048, 4096)
    chunks: Sequence[int] = (8, 16, 32, 64)
    full_layer_counts: Sequence[int] = (0, 1, 2)
    speculative_tokens: int = 6
    temperature: float = 0.6
    top_p: float = 0.9

    @property
    def usual(self) -> Case:
        return Case("observed", self.retrieval_budget, chunk=PAGE, full_layers=0)

    @property
    def params(self) -> SamplingParams:
        return SamplingParams(temperature=self.temperature, top_p=self.top_p)

    @property
    def size(self) -> Size:
        return Size(self.context, self.positions, self.speculative_tokens + 1)

    def about(self) -> dict[str, Any]:
        """Return the settings that the page names."""
        named = {name: getattr(self, name) for name in ("context", "temperature", "top_p")}
        return {"width": self.size.width, "usual": self.usual._asdict(), **named}


QUICK = SweepConfig(4096, 126, 512, (256, 512, 1024), (8, 16, 32))


def add_walk(parser: ArgumentParser) -> None:
    """Add what to read, and with which models."""
    model(parser)
    draft(parser)
    texts(parser)
    add = parser.add_argument
    add("--context", type=int, metavar="N", help="tokens of the prompts (default: 32000; --quick: 4096)")
    add("--positions", type=int, metavar="N", help="that are measured after each (default: 259; --quick: 126)")
    text = "tokens that retrieval sees while something else is varied (default: 2048; --quick: 512)"
    add("--retrieval-budget", type=int, metavar="N", help=text)
    text = described("a verification scores one position more")
    add("--speculative-tokens", type=int, default=6, metavar="N", help=text)
    add("--temperature", type=float, default=0.6, metavar="X", help=described("0 is greedy"))
    add("--top-p", type=float, default=0.9, metavar="X", help=described("1: off"))
    add("--quick", action="store_true", help="short prompts and few settings: a minute")
    placement(parser, context=False)
    json_file(parser)


def sweep(options: Namespace) -> SweepConfig:
    """Return the settings that the arguments ask for, the rest as usual or as in a quick look.

    Raises RequestError for a number below 1.
    """
    names = [field.name for field in fields(SweepConfig)]
    chosen_values = {name: value for name in names if (value := getattr(options, name, None)) is not None}
    plan = replace(QUICK if options.quick else SweepConfig(), **chosen_values)
    numbers = plan.context, plan.positions, plan.retrieval_budget, plan.speculative_tokens
    if min(*numbers, *plan.budgets, *plan.chunks) < 1:
        raise RequestError("contexts, positions, budgets, chunks and gammas must be at least 1")
    return plan


def measured(llm: LLM, sources: Sources, plan: SweepConfig) -> Report:
    """Walk every workload, and measure the sweeps on prose. Raises RequestError for texts that are too short."""
    started = perf_counter()
    sweeps = cases(plan.budgets, plan.chunks, plan.full_layer_counts, plan.usual)
    works = list(workloads(sources, plan.size))
    report: Report = plan.about() | {"acceptance": [], "draft": [], "locality": []}
    steps = sum(len(sweeps) if work.name == "prose" else len(SELECTIONS) for work in works)
    with tqdm(total=steps, disable=None, unit="setting") as progress:
        for work in works:
            settings = sweeps if work.name == "prose" else cases([], [], [], plan.usual)
            for unit, unit_settings in by_unit(settings).items():
                walk = Walk(llm.models, work, plan.params, unit)
                for case in unit_settings:
                    report["acceptance"].append(acceptance(walk, case))
                    progress.update()
                if unit == PAGE:
                    report["draft"] += drafting(walk, plan.usual) if llm.models.draft else []
                    report["locality"] += locality(walk, plan.usual) if work.name == "prose" else []
    return report | {"seconds": perf_counter() - started}


def by_unit(settings: list[Case]) -> dict[int, list[Case]]:
    """Group cases: those of whole pages, which the fast kernels take, and those of parts of pages."""
    groups: dict[int, list[Case]] = {PAGE: []}
    parts = gcd(PAGE, *(case.chunk for case in settings))
    for case in settings:
        groups.setdefault(PAGE if case.chunk % PAGE == 0 else parts, []).append(case)
    return groups


def workloads(sources: Sources, size: Size) -> Iterator[Workload]:
    """Yield each text as it stands, and prose with repetitions."""
    for text in sources.texts:
        ids = text.ids_N.tolist()
        if text.kind == "code":
            yield plain("code", text.name, ids, size)
            continue
        yield plain("prose", text.name, ids, size)
        yield copy(text.name, ids, size)
        yield needle(text.name, ids, size, sources.encode, sources.tokenizer.decode)
