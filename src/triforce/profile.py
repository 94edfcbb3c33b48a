"""A first look at what passes cost: a few of each tier over random KV, once for a machine and its models."""

from __future__ import annotations

import hashlib
import os
import platform
from importlib.metadata import PackageNotFoundError, version
from itertools import product
from pathlib import Path
from time import perf_counter

import numpy as np
import torch

from triforce import kernels
from triforce.batch import Batch
from triforce.cache import PAGE, Full, Pool
from triforce.errors import CacheError
from triforce.job import Job
from triforce.ladder import MODES, Models, Speculation
from triforce.planner import Costs, Pilot, Plan
from triforce.request import SamplingParams
from triforce.shapes import ints
from triforce.speculation import Tier

CONTEXTS = (1024, 1), (1024, 4), (4096, 1), (16_384, 1)
"""Tokens, and rows."""

STEPS = 4  # proposals of each plan; the first pays for what is done once
SECONDS = 2.5  # after which no further plan is tried
BLOCK = 4096
"""Tokens of random KV, repeated over the context."""


def home(*models: str) -> Path | None:
    """Where the costs of some models, told apart by these words, on this machine are kept: as XDG has it.

    None for a user without a home.
    """
    level = kernels.extension.native.level() if kernels.extension.native else "torch"
    threads = kernels.extension.native.threads() if kernels.extension.native else torch.get_num_threads()
    about = [*models, _version(), platform.node(), platform.machine(), level, str(threads)]
    key = hashlib.sha256("\n".join(about).encode()).hexdigest()[:16]
    try:
        cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    except RuntimeError:
        return None
    return cache / "triforce" / f"costs-{key}.json"


def _version() -> str:
    """What is installed: other kernels may be faster, and what is kept may look different."""
    try:
        return version("triforce")
    except PackageNotFoundError:  # run from a folder
        return ""


def profile(models: Models, setting: Speculation, costs: Costs) -> None:
    """Let `costs` see passes of all tiers, as far as a few seconds allow."""
    began = perf_counter()
    for context, rows in CONTEXTS:
        if context + 512 > models.target.config.context:
            return
        try:
            batch = read(models, "auto", setting, context, 256, rows)
        except CacheError:  # there is no room for so many at a time
            continue
        pilot = Pilot(batch.top, rows, costs)
        batch.tiers = pilot.tiers  # which have one more, and other levels
        view = next(part.cache for part in pilot.tiers if isinstance(part, Tier) and part.name == "retrieval")
        for plan, layers in product(_plans(pilot), (0, 1)):
            view.searched_layers = frozenset(range(layers))  # so that it sees more and fewer keys
            pilot.wire(plan, batch.prefix, np.ones(rows, dtype=bool))
            for step in range(STEPS):
                if models.target.ranks.agree(perf_counter() - began > SECONDS):
                    return
                lengths, started = batch.prefix.lengths_B.tolist(), perf_counter()
                batch.step()
                if step:
                    pilot.time(lengths, perf_counter() - started)
                else:
                    pilot.forget()


def read(
    models: Models,
    mode: str,
    setting: Speculation,
    context: int,
    tokens: int,
    rows: int = 1,
    memory: Full | None = None,
) -> Batch:
    """A batch whose prompts of random tokens have been read, as far as its caches can tell: its KV is noise.

    `memory`: that of an earlier such batch of one row, to be used again.
    """
    params = SamplingParams(temperature=0.6, top_p=0.9, seed=1, max_tokens=tokens, ignore_eos=True)
    vocabulary = min(1000, models.target.config.vocab_size)
    prompt = torch.randint(vocabulary, (context,), generator=torch.Generator().manual_seed(2)).tolist()
    if memory:
        memory.rewind(ints([context - PAGE]))
    batch = Batch(models, MODES[mode], setting, "seeded", [Job(prompt, params, seed=1) for _ in range(rows)], memory)
    if memory is None:
        fill(batch.top.cache.pool, context - PAGE)  # the other rows' is copied from there
    for _ in batch.prefill():
        pass
    return batch


def fill(pool: Pool, length: int) -> None:
    """Random K and V for the first `length` tokens of the first row. The draft's own cache will catch up."""
    config = pool.config
    block_GND = torch.randn(config.kv_heads, BLOCK, config.head_dim, generator=torch.Generator().manual_seed(3))
    for start in range(0, length, BLOCK):
        slots_N = pool.slots(0, start, min(start + BLOCK, length))
        some_GND = block_GND[:, : len(slots_N)].to(pool.device, pool.dtype)
        for layer in range(config.layers):
            pool.memory.put(layer, slots_N, some_GND, some_GND)
    pool.lengths_B[0] = length


def _plans(pilot: Pilot) -> list[Plan]:
    """Enough to see each tier, narrow and wide."""
    lowest = [part.name for part in pilot.tiers if part.name in ("lookup", "draft")]
    deep = [Plan((name, "retrieval", "full"), (2, 6)) for name in lowest[-1:]]
    return [Plan(), *deep, *(Plan((name, "full"), (4,)) for name in reversed([*lowest, "retrieval"]))]
