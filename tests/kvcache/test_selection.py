"""One contract for every selection policy.

The slow path takes queries, keys and attention from the dense cache (small_decoder.py) and scores one chunk at a time.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import pytest
import torch
from torch import Tensor

from tests.helpers.simple_cache import DEVICE
from tests.helpers.small_decoder import CLOSE, Dense, dense, feed, make_pool, prefill, small_decoder, text
from triforce.backends.decoder import Decoder
from triforce.kvcache import FullView
from triforce.kvcache.selection import POLICIES, Policy, Recent
from triforce.ragged import ints

torch.set_num_threads(1)

ALL: dict[str, Callable[[], Policy]] = {**POLICIES, "recent": Recent}

DECODER = small_decoder()

SINGLE = small_decoder(seed=1, kv_heads=4)  # every KV head has one query head


LENGTH, KEPT = 163, 3  # tokens of a prompt, and accepted ones of the five draft tokens verified behind it


@cache
def scene(decoder: Decoder) -> tuple[FullView, Dense, Dense]:
    """Return row 1 of two after a prefill and a verification, its fresh prefill, and one with the rejected tokens."""
    full = FullView(make_pool(decoder, 2, 224, fragmented=True))
    ids = text(LENGTH)
    draft_tokens = text(5, seed=1)
    prefill(decoder, full, 0, text(90, seed=2))
    prefill(decoder, full, 1, ids)
    feed(decoder, full, [[], draft_tokens])
    full.rewind(ints([90, LENGTH + KEPT]))
    verified = dense(decoder, ids)
    feed(decoder, verified, [draft_tokens])
    return full, dense(decoder, ids + draft_tokens[:KEPT]), verified


def chunk_of(memory_NGD: Tensor, c: int, chunk: int, g: int) -> Tensor:
    return memory_NGD[c * chunk : (c + 1) * chunk, g]


def slow_scores(name: str, decoder: Decoder, layer: int, chunk: int, chunks: int) -> Tensor:
    """Return scores (G, N), computed from scratch."""
    _, truth, verified = scene(decoder)
    group = decoder.config.heads // decoder.config.kv_heads
    queries_HD = verified.queries[layer][KEPT - 1]  # of the last committed token
    scores = torch.zeros(decoder.config.kv_heads, chunks, dtype=torch.float64, device=DEVICE)
    for g in range(decoder.config.kv_heads):
        queries = [queries_HD[g * group + i] for i in range(group)]
        for c in range(chunks):
            keys_CD = chunk_of(truth.keys[layer], c, chunk, g)
            if name == "observed":
                scores[g, c] = verified.mass[layer][g, c * chunk : (c + 1) * chunk].sum()
            elif name == "mean_key":
                scores[g, c] = sum(q @ keys_CD.sum(0) / chunk for q in queries)
            else:
                corners = [torch.maximum(q * keys_CD.min(0).values, q * keys_CD.max(0).values) for q in queries]
                scores[g, c] = sum(corner.sum() for corner in corners)
    return scores


CUTS = [(8, range(2, 18), 5), (16, range(1, 9), 3), (16, range(1, 9), 8), (32, range(1, 5), 2), (100, range(0, 1), 1)]
CUTS += [(5, range(4, 30), 11), (16, range(1, 1), 0), (16, range(3, 9), 0)]


@pytest.mark.parametrize(("chunk", "candidates", "picks"), CUTS)
@pytest.mark.parametrize("decoder", [DECODER, SINGLE], ids=["grouped", "single"])
@pytest.mark.parametrize("name", ALL)
def test_policy_selection_meets_contract(
    name: str, decoder: Decoder, chunk: int, candidates: range, picks: int
) -> None:
    full = scene(decoder)[0]
    policy = ALL[name]()
    G = decoder.config.kv_heads
    ids_LGN = policy.pick(full, 1, chunk, candidates, picks)
    assert len(ids_LGN) == decoder.config.layers
    for layer, ids_GN in enumerate(ids_LGN):
        assert ids_GN.dtype == torch.long and ids_GN.device.type == DEVICE
        assert ids_GN.shape == (G, 0 if name == "recent" else picks)
        assert (ids_GN.diff(dim=1) > 0).all(), "ascending, each once"
        assert all(n in candidates for n in ids_GN.flatten().tolist())
        if name != "recent" and picks:
            scores_GN = slow_scores(name, decoder, layer, chunk, candidates.stop)
            scores_GN[:, : candidates.start] = -torch.inf
            expected_GN = scores_GN.topk(picks, dim=1).indices.sort(dim=1).values
            assert torch.equal(ids_GN, expected_GN)


@pytest.mark.parametrize("name", POLICIES)
def test_policy_selects_per_head_and_layer(name: str) -> None:
    """A policy that scores one head for all heads, or one layer for all layers, fails."""
    full = scene(DECODER)[0]
    policy = POLICIES[name]()
    picks = policy.pick(full, 1, 8, range(2, 18), 5)
    assert not torch.equal(picks[0], picks[1])
    assert any(not torch.equal(head, ids_GN[0]) for ids_GN in picks for head in ids_GN)


@pytest.mark.parametrize("name", POLICIES)
def test_policy_reselection_follows_growing_text(name: str) -> None:
    """Summaries are extended, not recomputed. The selection equals that of a fresh policy."""
    full = scene(DECODER)[0]
    grown = POLICIES[name]()
    neighbour = POLICIES[name]()
    for stop in (1, 3, 3, 9, 7, 9):
        ids_LGN = grown.pick(full, 1, 16, range(0, stop), min(stop, 2))
        assert torch.equal(ids_LGN, POLICIES[name]().pick(full, 1, 16, range(0, stop), min(stop, 2)))
        neighbour_request = (full, 0, 16, range(0, min(stop, 5)), 1)  # a neighbour has its own policy
        assert torch.equal(neighbour.pick(*neighbour_request), POLICIES[name]().pick(*neighbour_request))
    grown_picks, neighbour_picks = (
        policy.pick(full, row, 16, range(5), 2) for policy, row in ((grown, 1), (neighbour, 0))
    )
    assert not any(torch.equal(*pair) for pair in zip(grown_picks, neighbour_picks, strict=True))


def test_quest_score_bounds_every_product() -> None:
    """The score is at least q . k of each token with one query head per KV head, and equals it for chunks of one."""
    from triforce.kvcache.selection import Quest, last_query

    full, truth, _ = scene(SINGLE)
    for layer in range(2):
        q_GD = last_query(full, 1)[layer, :, 0].double()
        for chunk in (1, 7, 16):
            chunks = (LENGTH + KEPT) // chunk
            least_GND, most_GND = Quest().bounds.of(full, 1, chunk, chunks)[layer].double().unbind(2)
            bound_GN = torch.maximum(q_GD[:, None] * least_GND, q_GD[:, None] * most_GND).sum(2)
            exact_GNC = torch.einsum(
                "gd,ncgd->gnc", q_GD, truth.keys[layer][: chunks * chunk].unflatten(0, (chunks, chunk))
            )
            assert (bound_GN[..., None] >= exact_GNC - 1e-4).all()
            if chunk == 1:
                torch.testing.assert_close(bound_GN, exact_GNC[..., 0], **CLOSE)
            torch.testing.assert_close(bound_GN, slow_scores("quest", SINGLE, layer, chunk, chunks), **CLOSE)


def test_observed_mass_is_of_verification_only() -> None:
    """The mass covers all five queries of the verification, rejected ones too. Its total is always T * H / G."""
    full, _, verified = scene(DECODER)
    for layer in range(2):
        mass_GS = full.observations[1].mass_LGU[layer, :, : verified.mass[layer].shape[1]]
        torch.testing.assert_close(mass_GS.double(), verified.mass[layer], **CLOSE)
        torch.testing.assert_close(mass_GS.sum(1), torch.full_like(mass_GS[:, 0], 5 * 2.0))
