"""How often two laws give one token: formula, brute force and the engine's own race."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.helpers.recall_model import noise
from triforce.eval import EvalContext, Text, agreement, eval_config
from triforce.eval.agreement import overlap, same_pick
from triforce.llm import LLM
from triforce.speculation.verification import race


def laws(vocab: int, seed: int, hard: bool = False) -> tuple[Tensor, Tensor]:
    """Two float64 laws (1, V); hard ones have zeros, also where the other has none."""
    draw = torch.Generator().manual_seed(seed)
    both_laws = torch.randn(2, 1, vocab, generator=draw, dtype=torch.float64).mul(2).softmax(-1)
    if hard:
        both_laws[0, 0, ::3], both_laws[1, 0, 1::3] = 0, 0
        both_laws /= both_laws.sum(-1, keepdim=True)
    return both_laws[0], both_laws[1]


def brute_force(p_V: Tensor, q_V: Tensor) -> float:
    total = 0.0
    for p, q in zip(p_V.tolist(), q_V.tolist(), strict=True):
        if p and q:
            total += 1 / torch.maximum(p_V / p, q_V / q).sum().item()
    return total


@pytest.mark.parametrize("hard", [False, True])
@pytest.mark.parametrize("seed", range(5))
def test_agreement_running_sums_equal_all_pairs(seed: int, hard: bool) -> None:
    p_TV, q_TV = laws(40, seed, hard)
    assert same_pick(p_TV, q_TV).item() == pytest.approx(brute_force(p_TV[0], q_TV[0]), rel=1e-9)


@pytest.mark.parametrize("hard", [False, True])
def test_agreement_equals_frequency_of_equal_winners(hard: bool) -> None:
    p_TV, q_TV = laws(12, 3, hard)
    noise_NV = torch.empty(200_000, 12, dtype=torch.float64).exponential_(generator=torch.Generator().manual_seed(1))
    share = (race(p_TV, noise_NV) == race(q_TV, noise_NV)).double().mean().item()
    expected = same_pick(p_TV, q_TV).item()
    assert share == pytest.approx(expected, abs=4 * (expected * (1 - expected) / 200_000) ** 0.5)
    assert abs(share - overlap(p_TV, q_TV).item()) > 0.01  # what a test of the wrong formula would have to see


@pytest.mark.parametrize("seed", range(5))
def test_agreement_lies_within_theoretical_bounds(seed: int) -> None:
    p_TV, q_TV = laws(100, seed)
    share = overlap(p_TV, q_TV).item()
    assert share / (2 - share) <= same_pick(p_TV, q_TV).item() <= share  # Daliri et al. 2024, theorem 1


def test_agreement_of_equal_and_disjoint_laws() -> None:
    p_TV = torch.tensor([[0.5, 0.5, 0.0, 0.0], [0.0, 1.0, 0.0, 0.0]], dtype=torch.float64)
    for measure in (overlap, same_pick):
        assert measure(p_TV, p_TV).tolist() == pytest.approx([1, 1])
        assert measure(p_TV, p_TV.flip(-1)).tolist() == pytest.approx([0, 0])


def measured_agreement(llm: LLM) -> dict[str, dict[str, float]]:
    subject = EvalContext(llm, [Text("a", "prose", torch.tensor(noise(600)))], eval_config(512, 512))
    return agreement.measure(subject)["kinds"]["prose"]


def test_agreement_with_itself_is_largest(folders: tuple[str, str], llm: LLM) -> None:
    self_agreement = measured_agreement(LLM(folders[0], folders[0]))
    pair_agreement = measured_agreement(llm)
    for temperature in ("0", "0.6", "1"):
        for coupling in ("rejection", "seeded"):
            assert self_agreement[temperature][coupling] == pytest.approx(1, abs=1e-3)
            assert pair_agreement[temperature][coupling] < 0.9
        assert pair_agreement[temperature]["seeded"] <= pair_agreement[temperature]["rejection"] + 1e-9
