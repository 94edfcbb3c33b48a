"""Guesses in a row as they are trained: what they see, and the gradient of their loss.

Shape suffixes as in training/distillation.py.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.helpers.mutants.mutation import Mutant
from tests.helpers.mutants.registry import caught_in
from triforce.backends.torch.attention import attend
from triforce.eagle.head import EagleHeadConfig, EagleHeadWeights, shapes
from triforce.eagle.torch_passes import EagleHeadLayer, Entries
from triforce.model.rope import Rope, rotate
from triforce.training import distillation
from triforce.training.distillation import Head, Past, guesses, loss
from triforce.training.episodes import Chunk

torch.set_num_threads(1)
C = 32
M = 20
V = 50
B = 2
CLOSE = dict(atol=2e-5, rtol=2e-5)


def layer(sinks: int = 4, window: int = 20) -> EagleHeadLayer:
    rope = Rope(100.0 ** -(torch.arange(0, 8, 2) / 8), 1.0)
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


def part(full_chunk: Chunk, start: int, stop: int) -> Chunk:
    return Chunk(*(tensor[:, start:stop].clone() for tensor in (
        full_chunk.ids_BT, full_chunk.slots_BT, full_chunk.states_BTX, full_chunk.embeddings_BTC, full_chunk.final_BTC
    )))  # fmt: skip


def outputs(draft: EagleHeadLayer, of: Chunk, past: Past, anchors_N: Tensor, steps: int = 3) -> list[Tensor]:
    return [out_BNC for out_BNC, _ in guesses(draft, of, past, anchors_N, steps)]


def test_chunks_give_outputs_of_one_pass() -> None:
    """The text has sinks and a window shorter than the text, and is cut at any place."""
    draft = layer()
    full_chunk = chunk(90)
    expected = outputs(draft, full_chunk, Past(), torch.arange(88))
    for cuts in ([30, 60], [5, 7, 40], [87]):
        past = Past()
        start = 0
        for stop in [*cuts, 90]:
            anchors_N = torch.arange(max(stop - start - 2, 0))
            if len(anchors_N):
                got = outputs(draft, part(full_chunk, start, stop), past, anchors_N)
                for got_output, expected_output in zip(got, expected, strict=True):
                    torch.testing.assert_close(got_output, expected_output[:, start : start + len(anchors_N)], **CLOSE)
            else:
                outputs(draft, part(full_chunk, start, stop), past, torch.zeros(1, dtype=torch.long), 1)
            start = stop


def test_later_tokens_change_no_guess() -> None:
    draft = layer()
    full_chunk = chunk(40)
    for anchor in (0, 3, 17, 30):
        short_outputs = outputs(draft, part(full_chunk, 0, anchor + 3), Past(), torch.tensor([anchor]))
        changed_chunk = part(full_chunk, 0, 40)
        changed_chunk.states_BTX[:, anchor + 1 :] += 9.0
        long_outputs = outputs(draft, changed_chunk, Past(), torch.tensor([1, anchor]))
        for short_output, long_output in zip(short_outputs, long_outputs, strict=True):
            torch.testing.assert_close(short_output[:, 0], long_output[:, 1], **CLOSE)


def test_state_behind_first_guess_is_its_output() -> None:
    """The target's state before an anchor reaches all guesses behind it."""
    draft = layer()
    full_chunk = chunk(12)
    first_output, *later_outputs = outputs(draft, full_chunk, Past(), torch.tensor([5]))
    changed = part(full_chunk, 0, 12)
    changed.states_BTX[:, 5] += 1.0
    moved = outputs(draft, changed, Past(), torch.tensor([5]))
    pairs = zip([first_output, *later_outputs], moved, strict=True)
    assert not any(torch.equal(output, moved_output) for output, moved_output in pairs)


def test_window_hides_far_entries_but_sinks() -> None:
    draft = layer(sinks=4, window=20)
    full_chunk = chunk(60)
    for slot, visible in ((2, True), (20, False), (30, False), (31, True), (49, True)):
        changed_chunk = part(full_chunk, 0, 60)
        changed_chunk.embeddings_BTC[:, slot] = -changed_chunk.embeddings_BTC[:, slot].clone()
        pair = zip(outputs(draft, full_chunk, Past(), torch.tensor([50]), 1), outputs(draft, changed_chunk, Past(),
                   torch.tensor([50]), 1), strict=True)  # fmt: skip
        assert all(torch.equal(output, changed) != visible for output, changed in pair), slot


def test_attention_equals_that_of_streaming_views() -> None:
    """Views of the engine: sinks, a window, and queries that are rotated once more for the sinks."""
    draft = layer(sinks=4, window=20)
    draw = torch.Generator().manual_seed(7)
    rope = draft.config.rope
    slots_1T = torch.arange(70)[None]
    q_1THD, k_1TGD, v_1TGD = (torch.randn(1, 70, heads, 8, generator=draw) for heads in (4, 2, 2))
    cached_entries = Entries(rotate(k_1TGD, rope.cos_sin(slots_1T)), v_1TGD, slots_1T)
    got_1TQ = draft._attend(q_1THD, slots_1T, cached_entries, slots_1T, ())
    near_THD, far_THD = (rotate(q_1THD, rope.cos_sin(places))[0] for places in (slots_1T, slots_1T.clamp_max(23)))
    keys_GTD, values_GTD = (part[0].transpose(0, 1) for part in cached_entries[:2])
    wanted_THD, _ = attend(near_THD, keys_GTD, values_GTD, False, far_THD, 4, 20)
    torch.testing.assert_close(got_1TQ[0], wanted_THD.flatten(1), **CLOSE)


def test_guesses_in_a_row_are_those_of_single_steps() -> None:
    """A guess attends to the entries up to the anchor, the guesses since, and itself, at their own slots."""
    draft = layer()
    full_chunk = chunk(30)
    anchor = 11
    slots_BT = full_chunk.slots_BT
    embedded_BTC = full_chunk.embeddings_BTC
    fused_BTC = draft.fuse(full_chunk.states_BTX)[:, : anchor + 1]
    cached_entries = draft.entries(fused_BTC, embedded_BTC[:, : anchor + 1], slots_BT[:, : anchor + 1])
    last_states = fused_BTC[:, -1:]
    entries = list[Entries]()
    anchor_slot = slots_BT[:, anchor : anchor + 1]
    for step, got_BNC in enumerate(outputs(draft, full_chunk, Past(), torch.tensor([anchor]))):
        at = slice(anchor + step, anchor + step + 1)
        out_B1C, last_states, own_entries = draft.step(
            last_states, embedded_BTC[:, at], slots_BT[:, at], cached_entries, anchor_slot, entries
        )
        entries += [own_entries] if step else []
        torch.testing.assert_close(got_BNC, out_B1C, **CLOSE)


CHECKS = {
    "later": test_later_tokens_change_no_guess,
    "row": test_guesses_in_a_row_are_those_of_single_steps,
    "window": test_window_hides_far_entries_but_sinks,
    "engine": test_attention_equals_that_of_streaming_views,
    "chunks": test_chunks_give_outputs_of_one_pass,
}


@pytest.mark.parametrize("mutant", caught_in("test_guess_mutant_is_noticed"), ids=str)
def test_guess_mutant_is_noticed(mutant: Mutant, monkeypatch: pytest.MonkeyPatch) -> None:
    mutant.apply(monkeypatch)
    monkeypatch.setitem(globals(), "guesses", distillation.guesses)
    for check in mutant.checks:
        with pytest.raises(AssertionError):
            CHECKS[check]()


def test_gradient_of_loss_equals_that_of_plain_formula() -> None:
    """All tokens are guessed behind; the guesses that follow go on from some places. A share is the best token's."""
    draft = layer()
    full_chunk = chunk(30)
    later_N = torch.tensor([0, 4, 9, 27])
    decay = 0.7
    dice = torch.Generator().manual_seed(3)
    head = Head(1 + 0.3 * torch.randn(C, generator=dice), 1e-5, torch.randn(M, C, generator=dice), greedy=0.3)
    trained = [tensor.requires_grad_() for _, tensor in draft.weights.trained()]
    value = loss(draft, head, full_chunk, Past(), later_N, 3, decay)
    got = torch.autograd.grad(value, trained)
    final_BTC = (
        full_chunk.final_BTC * (full_chunk.final_BTC.square().mean(-1, keepdim=True) + 1e-5).rsqrt() * head.norm_C
    )
    logits_BTM = final_BTC @ head.rows_MC.T
    law_BTM = 0.7 * logits_BTM.softmax(-1) + 0.3 * torch.nn.functional.one_hot(logits_BTM.argmax(-1), M)
    first_output, *_ = outputs(draft, full_chunk, Past(), torch.arange(30), 1)
    _, *later_outputs = outputs(draft, full_chunk, Past(), later_N)
    plain = torch.zeros(())
    weights = [decay**step for step in range(3)]
    guesses = [first_output, *later_outputs]
    places = [torch.arange(30), later_N + 1, later_N + 2]
    for step, (out_BNC, at_N) in enumerate(zip(guesses, places, strict=True)):
        nats_BN = -(law_BTM[:, at_N] * (out_BNC @ head.rows_MC.T).log_softmax(-1)).sum(-1)
        plain = plain + weights[step] / sum(weights) * nats_BN.mean()
    torch.testing.assert_close(value, plain)
    for got_gradient, expected_gradient in zip(got, torch.autograd.grad(plain, trained), strict=True):
        torch.testing.assert_close(got_gradient, expected_gradient, atol=1e-5, rtol=1e-4)
