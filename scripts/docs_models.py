"""The table of published models: the cost of a token, and the context from which speculation should pay."""

from __future__ import annotations

from typing import Any

from triforce.checkpoint.hf_config import checked, model_config
from triforce.engine.tier_builder import SpeculativeConfig
from triforce.model.config import ModelConfig
from triforce.planner.break_even import Balance, SelfSpeculationRoofline
from triforce.planner.pass_costs import BALANCE_OF_LEVEL

LENGTH = 32_768
BUDGET = SpeculativeConfig().retrieval.budget.of(LENGTH)
Q4_K_M_BYTES = 4.85 / 8
"""Mean bytes of a weight of a Q4_K_M file."""
BFLOAT16_BYTES = 2.0
BALANCE = Balance(BALANCE_OF_LEVEL["avx512bf16"], BALANCE_OF_LEVEL["avx512bf16"])


def models(data: dict[str, Any]) -> list[list[str]]:
    """Return the rows of the table; the first row is the head."""
    head = ["model", "parameters", "read by a token", "KV of a token", "KV / weights at 32K", "pays from", "source"]
    return [head, *(row(model) for model in data["models"])]


def row(published: dict[str, Any]) -> list[str]:
    """Return the cells of one model."""
    hf = checked({"model_type": published["model_type"], **published["config"]})
    config = model_config(hf, vocab_size=hf.vocab_size, context=None)
    ratio = BFLOAT16_BYTES * config.kv_numbers_read(LENGTH) / (Q4_K_M_BYTES * config.weights_read)
    return [
        published["name"],
        f"{config.parameters / 1e9:.2f} B",
        f"{config.weights_read / 1e9:.2f} B",
        f"{BFLOAT16_BYTES * config.kv_size / 1024:.0f} KiB",
        f"{ratio:.2f}" if config.context >= LENGTH else "beyond its positions",
        break_even_text(config),
        published["source"],
    ]


def break_even_text(config: ModelConfig) -> str:
    """Return the contexts from which speculation should pay with a Q4_K_M file and with bfloat16, or why not."""
    weight_bytes = Q4_K_M_BYTES, BFLOAT16_BYTES
    break_evens = [SelfSpeculationRoofline(config, BUDGET, weight, BFLOAT16_BYTES, BALANCE) for weight in weight_bytes]
    first_contexts = [break_even.pays_from() for break_even in break_evens]
    if first_contexts == [None, None]:
        return f"not: {break_evens[0].why_not()}"
    return ", ".join("not" if context is None else f"{context:,}" for context in first_contexts)
