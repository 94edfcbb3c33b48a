"""Several draft tokens of an EAGLE head in one native call equal those of single passes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.engine.test_eagle_head import features
from tests.helpers.engine_scene import prompt
from tests.helpers.mutants.mutation import Mutant
from tests.helpers.mutants.registry import caught_in
from tests.helpers.tiny_llm import ask, llm
from triforce.backends import dispatch
from triforce.engine import tier_builder
from triforce.ragged import Bools
from triforce.speculation import Draft, SequenceState, Tier, TokenSampler

__all__ = ["features"]
pytestmark = pytest.mark.skipif(dispatch.native is None, reason="bursts are of the native kernels")


@pytest.mark.parametrize("coupling", ["seeded", "rejection"])
def test_burst_gives_draft_tokens_of_single_passes(coupling: str, features: Path) -> None:
    """Tokens and laws are equal bit for bit, wherever a window moves on."""
    same_in_a_burst(features, coupling)


def same_in_a_burst(features: Path, coupling: str) -> None:
    once, singly = (proposals(features, coupling, several) for several in (True, False))
    assert len(once) == len(singly) > 20
    for burst_draft, single_draft in zip(once, singly, strict=True):
        assert np.array_equal(burst_draft.tokens_BK, single_draft.tokens_BK) and np.array_equal(
            burst_draft.counts_B, single_draft.counts_B
        )
        assert np.array_equal(burst_draft.probs_BKV, single_draft.probs_BKV)


def proposals(features: Path, coupling: str, several: bool) -> list[Draft]:
    """Return the draft's proposals for three texts, in bursts or pass by pass."""
    drafts = list[Draft]()
    propose = Tier.propose
    drawn = list[int]()
    plain = tier_builder.fused_draft

    def proposed(self: Tier[Any], prefix: SequenceState, sampling: TokenSampler, live_B: Bools) -> Draft:
        draft = propose(self, prefix, sampling, live_B)
        drafts.extend([draft] if self.name == "draft" else [])
        return draft

    def drafted(*arguments: Any) -> Draft | None:
        draft = plain(*arguments) if several else None
        drawn.append(int(draft.counts_B.max()) if draft else 0)
        return draft

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Tier, "propose", proposed)
        patch.setattr(tier_builder, "fused_draft", drafted)
        model = llm(features, coupling=coupling, mode="draft", draft_tokens=5)
        for length in (3, 40, 150):
            model.generate(prompt(length), ask(max_tokens=40, temperature=0.8))
    assert (max(drawn) > 3) == several, "or there was no burst"
    return drafts


@pytest.mark.parametrize("mutant", caught_in("test_burst_mutant_is_noticed"), ids=str)
def test_burst_mutant_is_noticed(mutant: Mutant, features: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mutant.apply(monkeypatch)
    with pytest.raises((AssertionError, ValueError)):
        same_in_a_burst(features, "rejection")
