"""An EAGLE head that knows nothing of grammars and penalties still gives the texts of plain decoding."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.engine.test_eagle_head import features
from tests.helpers.engine_scene import prompt
from tests.helpers.tiny_llm import ask, llm
from triforce.interface.grammar import Grammar

__all__ = ["features"]
REQUESTS: dict[str, dict[str, Any]] = {
    "regex": dict(grammar=Grammar.regex("[a-z ]{5,40}"), ignore_eos=False),
    "json": dict(grammar=Grammar.json({"type": "array", "items": {"type": "boolean"}}), ignore_eos=False),
    "penalties": dict(presence_penalty=0.4, frequency_penalty=0.2, repetition_penalty=1.1),
    "bias": dict(logit_bias={5: 1.5, 290: 4.0}, top_p=0.9),  # the draft cannot propose the second one
}


@pytest.mark.parametrize("mode", ["draft", "triforce"])
@pytest.mark.parametrize("name", REQUESTS)
def test_constrained_texts_are_those_of_plain_decoding(name: str, mode: str, features: Path) -> None:
    """Texts are seeded and greedy. Where the draft can propose allowed tokens, some are accepted."""
    model = llm(features)
    accepted_tokens = 0
    for length in (3, 40, 150):
        for temperature in (0.0, 0.8):
            params = ask(temperature=temperature, max_tokens=32, **REQUESTS[name])
            (plain,), (drafted,) = (model.generate(prompt(length), params, mode=decoding) for decoding in ("ar", mode))
            assert drafted.outputs[0].token_ids == plain.outputs[0].token_ids
            assert drafted.outputs[0].finish_reason == plain.outputs[0].finish_reason
            accepted_tokens += sum(tier.accepted for tier in drafted.outputs[0].tiers if tier.name == "draft")
    assert accepted_tokens > 0 or name == "json"


@pytest.mark.parametrize("coupling", ["rejection", "block"])
def test_constrained_texts_of_other_couplings_obey(coupling: str, features: Path) -> None:
    """The grammar's forbidden tokens are never emitted, though the draft can hardly propose an allowed one."""
    model = llm(features, coupling=coupling)
    for seed in range(3):
        params = ask(seed=seed, max_tokens=32, **REQUESTS["json"])
        (output,) = model.generate(prompt(40), params, mode="triforce")
        answer_text = output.outputs[0].text.removesuffix("!")  # a token that may end a text
        assert set(answer_text) <= set("[]truefals, \n\t")
