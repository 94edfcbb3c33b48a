"""The passes under every measurement, against the plainest ways to the same numbers."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.helpers.recall_model import noise
from tests.helpers.simple_cache import score
from triforce.eval import scoring
from triforce.eval.scoring import cut_view, draft_view, full_view, greedy, nats, skim
from triforce.kvcache import PAGE
from triforce.llm import LLM

IDS_N = torch.tensor(noise(500))


def plain(llm: LLM, ids_N: Tensor) -> Tensor:
    """Losses of all tokens but the first, in one pass through a dense cache."""
    decoder = llm.target.decoder
    logits_NV = score(decoder, ids_N[None, :-1])[0]
    return F.cross_entropy(logits_NV, ids_N[1:], reduction="none")


@pytest.mark.parametrize("first_token", [1, 2, 17, 300, 499])
def test_losses_equal_one_pass(llm: LLM, first_token: int) -> None:
    found_N = nats(llm.target.decoder, full_view(llm.target.decoder, 500), IDS_N, first_token)
    torch.testing.assert_close(found_N, plain(llm, IDS_N)[first_token - 1 :], atol=2e-4, rtol=1e-4)


def test_losses_independent_of_chunking(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    decoder = llm.target.decoder
    once = cut_view(decoder, 128)
    again = cut_view(decoder, 128)
    once_N = nats(decoder, once, IDS_N, 200)
    monkeypatch.setattr(scoring, "WIDTH", 7)
    again_N = nats(decoder, again, IDS_N, 200)
    torch.testing.assert_close(once_N, again_N, atol=2e-4, rtol=1e-4)


def test_truncated_view_is_exact_within_window(llm: LLM) -> None:
    cut_N = nats(llm.target.decoder, cut_view(llm.target.decoder, 128), IDS_N)
    difference_N = (cut_N - plain(llm, IDS_N)).abs()
    assert difference_N[: 128 - PAGE].max() < 1e-3
    assert difference_N[200:].mean() > 1e-2


def test_draft_view_equals_engine(llm: LLM) -> None:
    decoder = llm.draft.decoder
    view = draft_view(decoder)
    assert (view.sinks, view.window) == (16, 496)
    skim(decoder, view, IDS_N)
    assert int(view.lengths_B[0]) == len(IDS_N)


def test_greedy_scoring_equals_argmax_and_leaves_no_state(llm: LLM) -> None:
    decoder = llm.target.decoder
    view = full_view(llm.target.decoder, 100)
    skim(decoder, view, IDS_N[:60])
    scores = [greedy(decoder, view, IDS_N[60:64], 5) for _ in range(2)]
    ids_N = IDS_N[:64]
    for token in scores[0]:
        assert token == int(score(decoder, ids_N[None])[0, -1].argmax())
        ids_N = torch.cat([ids_N, torch.tensor([token])])
    assert scores[0] == scores[1]
    assert int(view.lengths_B[0]) == 60
