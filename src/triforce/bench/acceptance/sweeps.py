"""Acceptance by selection, budget, chunk size and full layers, the draft's agreement, and locality, on given texts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import gcd
from time import perf_counter
from typing import Any

from tqdm import tqdm

from triforce.bench.acceptance.locality import locality
from triforce.bench.acceptance.measure import SELECTIONS, Case, acceptance, cases, drafting
from triforce.bench.acceptance.report import Report
from triforce.bench.acceptance.walk import Walk
from triforce.bench.acceptance.workloads import Size, Workload, copy, needle, plain
from triforce.bench.prompts import Sources
from triforce.interface.sampling_params import SamplingParams
from triforce.kvcache import PAGE
from triforce.llm import LLM


@dataclass(frozen=True)
class SweepConfig:
    """Tokens of a prompt and of what is measured after it (needle has its own), and what is varied.

    `budget` is that while something else is varied; a verification scores `speculative_tokens` positions and one more.
    """

    context: int = 32_000
    positions: int = 259
    budget: int = 2048
    budgets: Sequence[int] = (256, 512, 1024, 2048, 4096)
    chunks: Sequence[int] = (8, 16, 32, 64)
    full_layers: Sequence[int] = (0, 1, 2)
    speculative_tokens: int = 6
    temperature: float = 0.6
    top_p: float = 0.9

    @property
    def usual(self) -> Case:
        return Case("observed", self.budget, chunk=PAGE, full_layers=0)

    @property
    def params(self) -> SamplingParams:
        return SamplingParams(temperature=self.temperature, top_p=self.top_p)

    @property
    def size(self) -> Size:
        return Size(self.context, self.positions, self.speculative_tokens + 1)

    def about(self) -> dict[str, Any]:
        """What the page says of it."""
        named = {name: getattr(self, name) for name in ("context", "temperature", "top_p")}
        return {"width": self.size.width, "usual": self.usual._asdict(), **named}


QUICK = SweepConfig(4096, 126, 512, (256, 512, 1024), (8, 16, 32))


def measured(llm: LLM, sources: Sources, plan: SweepConfig) -> Report:
    """Walks every workload, and measures the sweeps on prose. Raises RequestError for texts that are too short."""
    started = perf_counter()
    sweeps = cases(plan.budgets, plan.chunks, plan.full_layers, plan.usual)
    works = list(workloads(sources, plan.size))
    report: Report = plan.about() | {"acceptance": [], "draft": [], "locality": []}
    steps = sum(len(sweeps) if work.name == "prose" else len(SELECTIONS) for work in works)
    with tqdm(total=steps, disable=None, unit="setting") as progress:
        for work in works:
            settings = sweeps if work.name == "prose" else cases([], [], [], plan.usual)
            for unit, some in by_unit(settings).items():
                walk = Walk(llm.models, work, plan.params, unit)
                for case in some:
                    report["acceptance"].append(acceptance(walk, case))
                    progress.update()
                if unit == PAGE:
                    report["draft"] += drafting(walk, plan.usual) if llm.models.draft else []
                    report["locality"] += locality(walk, plan.usual) if work.name == "prose" else []
    return report | {"seconds": perf_counter() - started}


def localities(llm: LLM, sources: Sources, plan: SweepConfig) -> Report:
    """Locality on prose, and nothing else."""
    started = perf_counter()
    rows = []
    for work in workloads(sources, plan.size):
        if work.name == "prose":
            rows += locality(Walk(llm.models, work, plan.params), plan.usual)
    return plan.about() | {"locality": rows, "seconds": perf_counter() - started}


def by_unit(settings: list[Case]) -> dict[int, list[Case]]:
    """Cases of whole pages together, which the fast kernels take; those of parts of pages together."""
    groups: dict[int, list[Case]] = {PAGE: []}
    parts = gcd(PAGE, *(case.chunk for case in settings))
    for case in settings:
        groups.setdefault(PAGE if case.chunk % PAGE == 0 else parts, []).append(case)
    return groups


def workloads(sources: Sources, size: Size) -> Iterator[Workload]:
    """Each text as it stands, and prose with something that comes again."""
    for text in sources.texts:
        ids = text.ids_N.tolist()
        if text.kind == "code":
            yield plain("code", text.name, ids, size)
            continue
        yield plain("prose", text.name, ids, size)
        yield copy(text.name, ids, size)
        yield needle(text.name, ids, size, sources.encode, sources.tokenizer.decode)
