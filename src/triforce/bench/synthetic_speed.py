"""`triforce bench speed --synthetic`: modes over random weights and random KV, at a given acceptance."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from statistics import median

from triforce.backends.decoder import Decoder
from triforce.bench import family_shapes, roofline, shapes
from triforce.bench.model_work import ModelWork
from triforce.bench.roofline import Roofline
from triforce.bench.speed import Row, timing
from triforce.bench.synthetic import SyntheticDecoding, decode, read, verified
from triforce.engine.speculative_config import SpeculativeConfig
from triforce.engine.tier_builder import ModelSet
from triforce.interface.stats import TierStats
from triforce.model.weights import Weights, nbytes
from triforce.planner.cost_model import CostModel, kernel_level
from triforce.planner.tier_work import TierWork


def rows(
    shape: str,
    contexts: Sequence[int],
    kept: tuple[float, float],
    setting: SpeculativeConfig,
    tokens: int,
    repeats: int,
    kv_int8: bool = False,
    layers: int | None = None,
) -> Iterator[Row]:
    """Plain decoding, and modes with and without a draft, if the shape has one.

    kept: shares of guesses of the retrieval tier, and of the draft. kv_int8: of all rows but the first, which is plain
    decoding over KV in bfloat16, and what speedups are over. layers: of the target; all of them if None.
    """
    longest = max(contexts) + tokens + 2 * setting.reach
    config, weights = family_shapes.parts(shape, longest, kv_int8=kv_int8, layers=layers)
    lower = Decoder(config, weights, setting.lower_bits) if setting.lower_bits else None
    drafted, draft, works = f"{shape}-draft" in shapes.SHAPES, None, {"full": ModelWork(config, weights)}
    if drafted:
        parts = shapes.parts(f"{shape}-draft", longest, kv_int8=kv_int8)
        draft, works["draft"] = Decoder(*parts, setting.lower_bits), ModelWork(*parts)
    models = ModelSet(Decoder(config, weights), draft, lower)
    shares = dict(zip(("retrieval", "draft"), kept, strict=True))
    runs = [(mode, models) for mode in ("ar", "retrieval", *["triforce"] * drafted, "auto")]
    if kv_int8:
        runs.insert(0, ("ar", ModelSet(Decoder(replace(config, kv_int8=False), weights))))
    for context in contexts:
        turns: list[list[SyntheticDecoding]] = [[] for _ in runs]
        costs = costs_of(models, weights, setting)
        for turn in range(repeats):
            for (mode, of_run), made in zip(runs, turns, strict=True):
                batch = read(of_run, mode, setting, context, tokens, costs=costs if mode == "auto" else None)
                made.append(decode(batch, shares, turn, tokens))
        roof, texts = roofline.measure(), [[_seconds(turn, tokens) for turn in made] for made in turns]
        for (mode, of_run), made, times in zip(runs, turns, texts, strict=True):
            int8, last = of_run.target.config.kv_int8, made[-1]
            least = (
                None if mode == "auto" else least_seconds(last.tiers, works, roof, context, int8, setting.lower_bits)
            )
            yield {
                "mode": mode, "context": context, "batch": 1, "temperature": 0.6, "workload": "synthetic",
                "kv_dtype": "int8" if int8 else "bfloat16", "layers": config.layers,
                **timing(times, texts[0], tokens),
                "least_seconds": least and least * tokens / last.tokens, "prefill_tokens_per_second": None,
                "full_passes": tokens * sum(turn.verifications for turn in made) / sum(turn.tokens for turn in made),
                **verified(made), "first_seconds": median(turn.first_seconds for turn in made),
                "acceptance": dict(shares) if mode != "ar" else {},
            }  # fmt: skip


def _seconds(turn: SyntheticDecoding, tokens: int) -> float:
    """Seconds of a text of so many tokens, at the rate of whole verifications."""
    return turn.seconds * tokens / turn.tokens


def least_seconds(
    tiers: Sequence[TierStats],
    works: Mapping[str, ModelWork],
    roof: Roofline,
    context: int,
    int8: bool,
    lower_bits: int = 0,
) -> float:
    """Seconds that the passes of a text take at least, those of a tier over as many tokens each as in the mean.

    int8: whether the full tier's KV is. Sampling takes none.
    """
    full, least, proposed = works["full"], 0.0, 0
    for tier in tiers:
        work, keys = works.get(tier.name, full), min(tier.visible_tokens or context, context)
        width = 1 + proposed / max(1, tier.passes)
        if tier.name != "full" and lower_bits:
            each = work.of_lower(width, keys, lower_bits)
        else:
            each = work.of(width, keys, replace(work.config, kv_int8=int8))
        least, proposed = least + tier.passes * roof.least_seconds(each), tier.proposed
    return least


def costs_of(models: ModelSet, weights: Weights, setting: SpeculativeConfig) -> CostModel:
    """Return what the planner knows before it has seen a pass of these models."""
    target = models.target
    matrices = [*weights.multiplied()]
    size = sum(map(nbytes, matrices)) / sum(math.prod(matrix.shape) for matrix in matrices)
    lower = setting.lower_bits / 8 if weights.has_numbers else 0
    works = TierWork.of_target(
        target.config, (size, lower or size), target.dtype.itemsize, setting.lower_bits > 0, target.unions
    )
    if models.draft:
        works["draft"] = TierWork.of(models.draft.config, target.dtype.itemsize, target.dtype.itemsize, sequential=True)
    return CostModel(None, works, kernel_level(target.device))
