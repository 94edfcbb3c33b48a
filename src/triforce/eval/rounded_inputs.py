"""Divergence that the rounding of products' inputs adds: packed weights beside the same numbers in float32.

The reference is the engine itself with weights unpacked to float32, so it rounds nothing. Shape suffixes: T tokens, V
vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from triforce.backends.decoder import Decoder
from triforce.engine.model_loader import load
from triforce.eval.context import EvalContext, Text, group_by_kind
from triforce.eval.scoring import full_view, parts, read
from triforce.eval.time_budget import ReadingForecast
from triforce.tables import Table

COMPARED_TOKENS = 512
"""Tokens of a window, all of them scored."""
REFERENCE_SLOWDOWN = 8
"""Approximate time of a pass in float32, by the time of a pass over packed weights."""


def measure(subject: EvalContext) -> dict[str, Any]:
    """Return the mean KL divergence from the reference in nats, and the share of equal best tokens, by kind of text.

    Both are measured with inputs of int16 and of int8, over the KV of the subject.
    """
    target = subject.llm.target
    lower = target.decoder.with_int8_inputs()
    if lower is target.decoder:
        return {"skipped": "it compares int16 with int8 inputs of packed weights, on a CPU and with int16 inputs"}
    reference = load(target.path, device=target.decoder.device, dtype="float32", context=target.config.context).decoder
    decoders = {"int16": target.decoder, "int8": lower}
    windows = subject.windows(COMPARED_TOKENS)
    figures = [(window.kind, _figures(reference, decoders, window)) for window in subject.with_progress(windows)]
    kinds = {}
    for kind, window_figures in group_by_kind(figures).items():
        mean_I2 = torch.stack(window_figures).mean(0)
        kinds[kind] = {"windows": len(window_figures)} | {
            inputs: {"kl": kl, "same_best": share}
            for inputs, (kl, share) in zip(decoders, mean_I2.tolist(), strict=True)
        }
    return {"tokens": COMPARED_TOKENS, "kinds": kinds}


def _figures(reference: Decoder, decoders: dict[str, Decoder], window: Text) -> Tensor:
    """Return the mean divergence and the share of equal best tokens by type of inputs: float64 (types, 2)."""
    count = len(window.ids_N)
    exact_view = full_view(reference, count)
    views = [full_view(decoder, count) for decoder in decoders.values()]
    sums = torch.zeros(len(decoders), 2, dtype=torch.float64)
    for part_T in parts(window.ids_N, COMPARED_TOKENS):
        exact_TV = torch.cat([*read(reference, exact_view, part_T)]).double().log_softmax(-1)
        for n, (decoder, view) in enumerate(zip(decoders.values(), views, strict=True)):
            logits_TV = torch.cat([*read(decoder, view, part_T)]).double().log_softmax(-1)
            sums[n, 0] += (exact_TV.exp() * (exact_TV - logits_TV)).sum()
            sums[n, 1] += (exact_TV.argmax(-1) == logits_TV.argmax(-1)).sum()
    return sums / count


def seconds(subject: EvalContext, forecast: ReadingForecast) -> float:
    if subject.target.with_int8_inputs() is subject.target:
        return 0.0
    return len(subject.windows(COMPARED_TOKENS)) * REFERENCE_SLOWDOWN * forecast.target.reading_seconds(COMPARED_TOKENS)


def tables(result: dict[str, Any]) -> list[Table]:
    rows = [
        [f"{kind}, {inputs}", f"{figures['kl']:.5f}", f"{figures['same_best']:.1%}"]
        for kind, by_inputs in result["kinds"].items()
        for inputs, figures in by_inputs.items()
        if inputs != "windows"
    ]
    windows = sum(by_inputs["windows"] for by_inputs in result["kinds"].values())
    note = (
        "Divergence from the same weights in float32, in nats per token, and tokens whose best continuation is the "
        f"same. {windows} windows of {result['tokens']:,} tokens. KV and other numbers are those of the engine."
    )
    return [Table("Rounding of products' inputs", note, ["", "KL divergence", "same best token"], rows)]
