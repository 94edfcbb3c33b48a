"""A seed gives one text, with one probability of each token, at every instruction level."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.gguf_models import MIXED, write_model
from tests.helpers.paged_kv import at_level, native
from tests.helpers.tiny_llm import ask, ids
from triforce.llm import LLM

if native is None:
    pytest.skip("the native kernels were not built", allow_module_level=True)

FILES: dict[str, dict[str, Any]] = {
    "Q4_K": dict(kind="Q4_K", others=MIXED),
    "Q4_0": dict(kind="Q4_0", others={"attn_v": "Q8_0", "ffn_down": "Q5_1", "ffn_up": "Q4_1"}),
    "F16": dict(kind="F16", others={"attn_q": "BF16", "attn_output": "Q5_K", "token_embd": "Q5_0"}),
}


def texts(llm: LLM, level: str) -> list[Any]:
    """Return ids and logprobs: greedy and sampled, plain and with lower tiers whose numbers differ."""
    results = []
    with at_level(level):
        for mode, temperature in product(("ar", "triforce"), (0.0, 1.0)):
            params = ask(temperature=temperature, logprobs=1)
            (text,) = llm.generate(ids(250, seed=2), params, mode=mode)[0].outputs
            results.append((text.token_ids, text.logprobs))
    return results


@pytest.mark.parametrize("name", FILES)
def test_text_is_the_same_at_all_levels(name: str, tmp_path: Path) -> None:
    target, draft = (
        write_model(tmp_path / part, num_hidden_layers=layers, **FILES[name]).gguf
        for part, layers in (("target", 3), ("draft", 1))
    )
    llm = LLM(target, draft, retrieval_budget=160, speculative_tokens=4, lower_tiers="int8")
    best = texts(llm, native.levels()[-1])
    assert best[0][0] != best[1][0]
    assert all(texts(llm, level) == best for level in native.levels())


def test_shipped_pair_text_is_the_same_at_all_levels() -> None:
    llm = LLM(retrieval_budget=128)
    best = texts(llm, native.levels()[-1])
    assert all(texts(llm, level) == best for level in native.levels())
