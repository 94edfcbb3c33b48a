"""Draft tokens in a row as they are trained: what they see, and the gradient of their loss.

Shape suffixes as in training/distillation.py.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.helpers.mutants.mutation import Mutant
from tests.helpers.mutants.registry import caught_in
from triforce.backends.torch.attention import attend
from triforce.backends.torch.rotation import rotate
from triforce.checkpoint.rope_scaling import wavelengths
from triforce.eagle.head import EagleHeadConfig, EagleHeadWeights, shapes
from triforce.eagle.torch_passes import EagleHeadLayer, Entries
from triforce.model.rope import Rope
from triforce.training import distillation
from triforce.training.distillation import OutputHead, PastEntries, draft_outputs, loss
from triforce.training.episodes import Chunk

torch.set_num_threads(1)
C, M, V, B = 32, 20, 50, 2
CLOSE = dict(atol=2e-5, rtol=2e-5)


def layer(sinks: int = 4, window: int = 20) -> EagleHeadLayer:
    rope = Rope(1 / wavelengths(100.0, 8), 1.0)
    config = EagleHeadConfig(V, C, 48, 4, 2, 8, 1e-5, (1, 2), M, rope, sinks, window, True, True, False)
    draw = torch.Generator().manual_seed(0)
    named = {
        name: 1 + 0.2 * torch.randn(shape, generator=draw)
        if "norm" in name
        else torch.randn(shape, generator=draw) * 1.5 * shape[-1] ** -0.5
        for name, shape in shapes(config).items()
    }
    return EagleHeadLayer(config, EagleHeadWeights(**named, tokens_M=torch.arange(M)))


def chunk(T: int, seed: int = 1) -> Chunk:
    draw = torch.Generator().manual_seed(seed)
    states_BTX, embeddings_BTC, final_BTC = (torch.randn(B, T, size, generator=draw) for size in (2 * C, C, C))
    nothing = torch.zeros(B, T, dtype=torch.long)
    return Chunk(nothing, torch.arange(T).expand(B, T), states_BTX, embeddings_BTC, final_BTC)


def part(whole: Chunk, start: int, stop: int) -> Chunk:
    return Chunk(*(tensor[:, start:stop].clone() for tensor in (
        whole.ids_BT, whole.slots_BT, whole.states_BTX, whole.embeddings_BTC, whole.final_BTC
    )))  # fmt: skip


def outputs(draft: EagleHeadLayer, of: Chunk, past: PastEntries, anchors_N: Tensor, steps: int = 3) -> list[Tensor]:
    return [out_BNC for out_BNC, _ in draft_outputs(draft, of, past, anchors_N, steps)]


def test_chunks_give_outputs_of_one_pass() -> None:
    """With sinks and a window that is shorter than the text, wherever it is cut."""
    draft, whole = layer(), chunk(90)
    wanted = outputs(draft, whole, PastEntries(), torch.arange(88))
    for cuts in ([30, 60], [5, 7, 40], [87]):
        past, start = PastEntries(), 0
        for stop in [*cuts, 90]:
            anchors_N = torch.arange(max(stop - start - 2, 0))
            if len(anchors_N):
                got = outputs(draft, part(whole, start, stop), past, anchors_N)
                for one, other in zip(got, wanted, strict=True):
                    torch.testing.assert_close(one, other[:, start : start + len(anchors_N)], **CLOSE)
            else:
                outputs(draft, part(whole, start, stop), past, torch.zeros(1, dtype=torch.long), 1)
            start = stop


def test_later_tokens_change_no_draft_token() -> None:
    draft, whole = layer(), chunk(40)
    for anchor in (0, 3, 17, 30):
        alone = outputs(draft, part(whole, 0, anchor + 3), PastEntries(), torch.tensor([anchor]))
        other = part(whole, 0, 40)
        other.states_BTX[:, anchor + 1 :] += 9.0
        for one, both in zip(alone, outputs(draft, other, PastEntries(), torch.tensor([1, anchor])), strict=True):
            torch.testing.assert_close(one[:, 0], both[:, 1], **CLOSE)


def test_state_behind_first_draft_token_is_its_output() -> None:
    """What the target computed before an anchor reaches all draft tokens behind it."""
    draft, whole = layer(), chunk(12)
    first, *others = outputs(draft, whole, PastEntries(), torch.tensor([5]))
    changed = part(whole, 0, 12)
    changed.states_BTX[:, 5] += 1.0
    moved = outputs(draft, changed, PastEntries(), torch.tensor([5]))
    assert not any(torch.equal(one, other) for one, other in zip([first, *others], moved, strict=True))


def test_window_hides_far_entries_but_sinks() -> None:
    draft, whole = layer(sinks=4, window=20), chunk(60)
    for slot, seen in ((2, True), (20, False), (30, False), (31, True), (49, True)):
        other = part(whole, 0, 60)
        other.embeddings_BTC[:, slot] = -other.embeddings_BTC[:, slot].clone()
        pair = zip(outputs(draft, whole, PastEntries(), torch.tensor([50]), 1), outputs(draft, other, PastEntries(),
                   torch.tensor([50]), 1), strict=True)  # fmt: skip
        assert all(torch.equal(one, changed) != seen for one, changed in pair), slot


def test_attention_equals_that_of_streaming_views() -> None:
    """Of the engine, that is: sinks, a window, and queries that are rotated once more for the sinks."""
    draft, draw = layer(sinks=4, window=20), torch.Generator().manual_seed(7)
    rope, slots_1T = draft.rope, torch.arange(70)[None]
    q_1THD, k_1TGD, v_1TGD = (torch.randn(1, 70, heads, 8, generator=draw) for heads in (4, 2, 2))
    seen = Entries(rotate(k_1TGD, rope.cos_sin(slots_1T)), v_1TGD, slots_1T)
    got_1TQ = draft._attend(q_1THD, slots_1T, seen, slots_1T, ())
    near_THD, far_THD = (rotate(q_1THD, rope.cos_sin(places))[0] for places in (slots_1T, slots_1T.clamp_max(23)))
    keys_GTD, values_GTD = (part[0].transpose(0, 1) for part in seen[:2])
    wanted_THD, _ = attend(near_THD, keys_GTD, values_GTD, False, far_THD, 4, 20)
    torch.testing.assert_close(got_1TQ[0], wanted_THD.flatten(1), **CLOSE)


def test_draft_tokens_in_a_row_are_those_of_single_steps() -> None:
    """Each sees the entries up to the anchor, the draft tokens since, and itself, at slots of their own."""
    draft, whole, anchor = layer(), chunk(30), 11
    slots_BT, embedded_BTC = whole.slots_BT, whole.embeddings_BTC
    fused_BTC = draft.fuse(whole.states_BTX)[:, : anchor + 1]
    seen = draft.entries(fused_BTC, embedded_BTC[:, : anchor + 1], slots_BT[:, : anchor + 1])
    now, entries, one = fused_BTC[:, -1:], list[Entries](), slots_BT[:, anchor : anchor + 1]
    for step, got_BNC in enumerate(outputs(draft, whole, PastEntries(), torch.tensor([anchor]))):
        at = slice(anchor + step, anchor + step + 1)
        out_B1C, now, own = draft.step(now, embedded_BTC[:, at], slots_BT[:, at], seen, one, entries)
        entries += [own] if step else []
        torch.testing.assert_close(got_BNC, out_B1C, **CLOSE)


CHECKS = {
    "later": test_later_tokens_change_no_draft_token,
    "row": test_draft_tokens_in_a_row_are_those_of_single_steps,
    "window": test_window_hides_far_entries_but_sinks,
    "engine": test_attention_equals_that_of_streaming_views,
    "chunks": test_chunks_give_outputs_of_one_pass,
}


@pytest.mark.parametrize("mutant", caught_in("test_draft_token_mutant_is_noticed"), ids=str)
def test_draft_token_mutant_is_noticed(mutant: Mutant, monkeypatch: pytest.MonkeyPatch) -> None:
    mutant.apply(monkeypatch)
    monkeypatch.setitem(globals(), "draft_outputs", distillation.draft_outputs)
    for check in mutant.checks:
        with pytest.raises(AssertionError):
            CHECKS[check]()


def test_gradient_of_loss_equals_that_of_plain_formula() -> None:
    """Every token is an anchor; the later draft tokens go on from some anchors. A share is the best token's."""
    draft, whole, later_N, decay = layer(), chunk(30), torch.tensor([0, 4, 9, 27]), 0.7
    generator = torch.Generator().manual_seed(3)
    norm_C = 1 + 0.3 * torch.randn(C, generator=generator)
    head = OutputHead(norm_C, 1e-5, torch.randn(M, C, generator=generator), greedy_weight=0.3)
    trained = [tensor.requires_grad_() for _, tensor in draft.weights.trained_tensors()]
    value = loss(draft, head, whole, PastEntries(), later_N, 3, decay)
    got = torch.autograd.grad(value, trained)
    final_BTC = whole.final_BTC * (whole.final_BTC.square().mean(-1, keepdim=True) + 1e-5).rsqrt() * head.norm_C
    logits_BTM = final_BTC @ head.rows_MC.T
    law_BTM = 0.7 * logits_BTM.softmax(-1) + 0.3 * torch.nn.functional.one_hot(logits_BTM.argmax(-1), M)
    first, *_ = outputs(draft, whole, PastEntries(), torch.arange(30), 1)
    _, *others = outputs(draft, whole, PastEntries(), later_N)
    plain, weights = torch.zeros(()), [decay**step for step in range(3)]
    for step, (out_BNC, at_N) in enumerate(zip([first, *others], [torch.arange(30), later_N + 1, later_N + 2],
                                               strict=True)):  # fmt: skip
        nats_BN = -(law_BTM[:, at_N] * (out_BNC @ head.rows_MC.T).log_softmax(-1)).sum(-1)
        plain = plain + weights[step] / sum(weights) * nats_BN.mean()
    torch.testing.assert_close(value, plain)
    for one, other in zip(got, torch.autograd.grad(plain, trained), strict=True):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-4)
