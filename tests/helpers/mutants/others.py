"""Faults of configurations, of a store that is read layer by layer, and of a certificate's texts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from math import ceil
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tests.helpers.mutants.mutation import Edit, Mutant, Swap


def in_float64(theta: float, D: int) -> NDArray[np.float32]:
    """Powers of exponents that are not rounded to float32."""
    return (theta ** (np.arange(0, D, 2) / D)).astype(np.float32)


def linear(_: Any) -> Any:
    from triforce.checkpoint.rope_scaling import Linear

    return lambda factor, _: Linear(factor)


def another(**changes: Any) -> Callable[[Any], Any]:
    """The family with other rules."""
    return lambda family: replace(family, **changes)


def with_default(**values: Any) -> Callable[[Any], Any]:
    """The family with other defaults."""
    return lambda family: replace(family, defaults={**family.defaults, **values})


def in_every_layer(config: Any) -> list[bool]:
    return [True] * config.integer("num_hidden_layers")


ROPE, FAMILIES = "triforce.checkpoint.rope_scaling", "triforce.checkpoint.model_families:FAMILIES"
CONFIGS: dict[str, tuple[str, Swap]] = {
    "rope: another precision": ("llama default", Swap(f"{ROPE}:wavelengths", lambda _: in_float64)),
    "rope: another theta": ("mistral linear", Swap(f"{FAMILIES}.mistral", another(theta=10_001.0))),
    "rope: yarn ramp rounded inwards": ("llama yarn", Swap(f"{ROPE}:floor", lambda _: ceil)),
    "rope: no yarn temperature": (
        "qwen2 yarn", Swap(f"{ROPE}:_yarn_attention_factor", lambda _: lambda rope, factor: 1.0),
    ),
    "rope: longrope temperature without its root": ("llama longrope", Swap(f"{ROPE}:sqrt", lambda _: float)),
    "rope: turns counted by radians": ("llama llama3", Swap(f"{ROPE}:pi", lambda _: 0.5)),
    "rope: dynamic scales positions": ("llama dynamic", Swap(f"{ROPE}:Dynamic", linear)),
    "config: heads of another size": ("qwen3 default", Swap(f"{FAMILIES}.qwen3", with_default(head_dim=64))),
    "config: head always tied": (
        "mistral default", Swap(f"{FAMILIES}.mistral", with_default(tie_word_embeddings=True)),
    ),
    "config: every layer has a window": (
        "qwen2 default", Swap(f"{FAMILIES}.qwen2", another(windowed_layers=in_every_layer)),
    ),
}  # fmt: skip


def wrong_token(texts: Any) -> Any:
    """The last token of n-gram texts above temperature 0 is another."""

    def wrong(llm: Any, asked: Any, params: Any, mode: str, earlier: Any) -> list[list[int]]:
        found: list[list[int]] = texts(llm, asked, params, mode, earlier)
        if mode == "ngram" and params.temperature > 0:
            found[-1][-1] += 1
        return found

    return wrong


def negated(one_layer: Any) -> Any:
    """A prompt's states are negated before the third layer."""

    def wrong(model: Any, layer: int, ids_1T: Any, x_1TC: Any, kv: Any, batch: Any) -> None:
        if layer == 2:
            x_1TC *= -1
        one_layer(model, layer, ids_1T, x_1TC, kv, batch)

    return wrong


ORDER, VIEW = "triforce.checkpoint.gguf.weights:row_order", "triforce.checkpoint.gguf.weights:GGUFWeights.view"
GGUF: dict[str, Edit | Swap] = {
    "gguf: rows of queries and keys stay woven": Swap(ORDER, lambda _: lambda *_: None),
    "gguf: rows are unwoven in all families": Swap(ORDER, lambda order: lambda family, *rest: order("llama", *rest)),
    "gguf: rows are unwoven by halves of heads": Swap(
        ORDER, lambda order: lambda family, name, H, G, D: order(family, name, 2 * H, 2 * G, D // 2),
    ),
    "gguf: packed rows stay woven": Edit(VIEW, ("rows = rows if order is None else rows[order]", "pass")),
    "gguf: vectors of packed weights are rounded": Edit(
        "triforce.checkpoint.weights:_Reader.take", ("source_dtype if archive.packed else self.dtype", "self.dtype"),
    ),
}  # fmt: skip
HEADER, FILE = "triforce.checkpoint.gguf.file:_HeaderReader", "triforce.checkpoint.gguf.file:_Part"
DAMAGE: dict[str, Edit | Swap] = {
    "gguf: counts are believed": Edit(
        f"{HEADER}.require", ("if count * size > self._end - self.position:", "if False:")
    ),
    "gguf: a header may end anywhere": Edit(
        f"{HEADER}._take", ("if self.position + form.size > self._end:", "if False:")
    ),
    "gguf: tensors may end behind the file": Edit(
        f"{FILE}._tensor", ("if start + tensor.size > len(self.data):", "if False:")
    ),
    "gguf: tensors are taken whatever their shape": Swap(
        "triforce.checkpoint.weights:require_shape", lambda plain: lambda *given: None
    ),
}

COMPARE = "benchmarks.compare"
COMPARISONS: dict[str, Edit | Swap] = {
    "compare: turns all go one way": Edit(f"{COMPARE}.worker_pool:in_turns", ("1 if turn % 2 == 0 else -1", "1")),
    "compare: a failed contender is asked again": Edit(
        f"{COMPARE}.worker_pool:in_turns", ("if not mine.trouble:", "if True:")
    ),
    "compare: the slowest setting is best": Edit(f"{COMPARE}.worker_pool:best", ("max(kind_rows", "min(kind_rows")),
    "compare: medians are divided, not turns": Edit(
        f"{COMPARE}.on_file_tables:over",
        ("median(ratios) if ratios else None", "median(rates[0]) / median(rates[1])"),
    ),
    "compare: a text of one engine is enough": Edit(
        f"{COMPARE}.texts:_try_prompt", ("if repeats[engine] >= LOOP_SHARE:", "if True:")
    ),
    "compare: what repeats in the prompt is new": Swap(
        f"{COMPARE}.texts:repeated_share", lambda repeated_share: lambda ids, prompt: repeated_share(ids)
    ),
}

MUTANTS = [
    *(
        Mutant(name, "tests/bench/test_compare_parts.py::test_compare_mutant_is_noticed", (edit,))
        for name, edit in COMPARISONS.items()
    ),
    *(
        Mutant(
            name,
            "tests/checkpoint/test_config_oracle.py::test_config_mutant_differs_from_transformers",
            (swap,),
            (where,),
        )
        for name, (where, swap) in CONFIGS.items()
    ),
    *(
        Mutant(name, "tests/checkpoint/test_gguf_weights.py::test_gguf_weights_mutant_is_noticed", (edit,))
        for name, edit in GGUF.items()
    ),
    *(
        Mutant(name, "tests/checkpoint/test_gguf_damage.py::test_damage_mutant_is_noticed", (edit,))
        for name, edit in DAMAGE.items()
    ),
    Mutant(
        "one token of one text is another",
        "tests/bench/test_lossless.py::test_certificate_mutant_is_found",
        (Swap("triforce.bench.lossless:_texts", wrong_token),),
    ),
    Mutant(
        "an offloaded layer reads other states",
        "tests/distributed/test_tensor_parallel_offload.py::test_offload_mutant_changes_the_text",
        (Swap("triforce.backends.cpu.offload:one_layer", negated),),
    ),
]
