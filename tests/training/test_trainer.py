"""Trainings of a tiny target: drafts become better, go on where they were cut off, and leave the target alone."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from tests.helpers import tiny_training
from tests.helpers.mutants.mutation import Mutant
from tests.helpers.mutants.registry import caught_in
from tests.helpers.tiny_training import CONFIG, text, trainer
from triforce.backends.torch.tensors import as_tensor
from triforce.errors import ModelError, RequestError
from triforce.interface.sampling_params import SamplingParams
from triforce.llm import LLM
from triforce.training.distillation import OutputHead
from triforce.training.episodes import HELD_OUT, EpisodeReader, Episodes, TargetStream, Texts
from triforce.training.initial_weights import last_norm
from triforce.training.trainer import FILE, TrainingState
from triforce.training.training_card import measure, table

torch.set_num_threads(1)
CLOSE = dict(atol=1e-3, rtol=2e-2)  # the target rounds its last norm


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_training.target_folder(tmp_path_factory.mktemp("target"))


def test_training_raises_acceptance_of_heldout_texts(target: Path, tmp_path: Path) -> None:
    made = trainer(target, tmp_path)
    before = made.heldout.greedy_shares(made.subject, CONFIG.steps)
    made.run(90)
    after = made.heldout.greedy_shares(made.subject, CONFIG.steps)
    assert made.state.updates == 90 and len(made.state.history) == 90 // CONFIG.check_every
    assert min(after["texts"]) > max(before["texts"]) + 0.1, (before, after)


def test_training_cut_off_equals_unbroken_one(target: Path, tmp_path: Path) -> None:
    """Wherever an episode ends, through files alone."""
    whole = trainer(target, tmp_path / "whole")
    whole.run(90)
    for _ in range(20):
        cut = trainer(target, tmp_path / "cut")
        if cut.state.updates >= 90:
            break
        assert cut.resumed == (cut.state.updates > 0)
        cut._episode(90, lambda state: None)
        cut.save()
    assert cut.state.updates == whole.state.updates and cut.state.history == whole.state.history
    for name, tensor in whole.state.weights.items():
        assert torch.equal(tensor, cut.state.weights[name]), name


def test_episodes_are_trained_on_again(target: Path, tmp_path: Path) -> None:
    """An episode is trained on again two and five episodes later, and read once. A new reader reads them again."""
    made, asked = trainer(target, tmp_path), list[int]()
    read = Episodes.__call__
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Episodes, "__call__", lambda self, index: asked.append(index) or read(self, index))
        for _ in range(9):
            made._episode(math.inf, lambda state: None)
    assert asked == list(range(9)) and sorted(made.reader._cached_texts) == [3, 4, 5, 6, 7, 8]
    each = CONFIG.groups * CONFIG.rows * CONFIG.width
    assert made.state.updates == CONFIG.groups * (9 + 7 + 4) and made.state.tokens == each * 9
    fresh = EpisodeReader(made.decoder, made.draft.state_layers, made.episodes, CONFIG)
    next(fresh(4)), next(fresh(5))  # these two are not read to their ends
    for number in (4, 5):  # answers are the second ones
        chunks = [[chunk for text in readings(number) for chunk in text] for readings in (fresh, made.reader)]
        for one, other in zip(*chunks, strict=True):
            assert torch.equal(one.states_BTX, other.states_BTX) and torch.equal(one.ids_BT, other.ids_BT)


@pytest.mark.parametrize("mutant", caught_in("test_mutant_of_episodes_is_noticed"), ids=str)
def test_mutant_of_episodes_is_noticed(
    mutant: Mutant, target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mutant.apply(monkeypatch)
    with pytest.raises((AssertionError, ValueError)):
        test_episodes_are_trained_on_again(target, tmp_path)


def test_training_whose_time_went_into_its_beginning_has_an_update(target: Path, tmp_path: Path) -> None:
    made = trainer(target, tmp_path)
    made.clock, made.state.seconds = lambda: 0.0, 30.0
    made.run(20)
    assert made.state.updates == 1 and made.state.seconds == 30 and (tmp_path / FILE).exists()


def test_interrupted_training_loses_no_update(target: Path, tmp_path: Path) -> None:
    made = trainer(target, tmp_path)

    def interrupt(state: TrainingState) -> None:
        if state.updates == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        made.run(9, interrupt)
    again = trainer(target, tmp_path)
    assert again.resumed and again.state.updates == 3
    assert torch.equal(again.state.weights["fc_CX"], made.state.weights["fc_CX"])


def test_training_of_other_texts_or_target_is_refused(target: Path, tmp_path: Path) -> None:
    made = trainer(target, tmp_path / "draft")
    made.save()
    with pytest.raises(ModelError, match="with other texts"):
        trainer(target, tmp_path / "draft", {"a": text(seed=1)})
    (tmp_path / "draft" / FILE).write_bytes(b"PK no zip")
    with pytest.raises(ModelError, match="damaged"):
        trainer(target, tmp_path / "draft")


def test_too_few_texts_are_refused(target: Path, tmp_path: Path) -> None:
    for texts in ({"a": "x"}, {"a": ""}, {"a": "the cat " * 40}):
        with pytest.raises(RequestError, match="a training needs"):
            trainer(target, tmp_path, texts)


def test_many_short_texts_are_held_out_from_together(target: Path) -> None:
    """A sixteenth of all, though no text has sixteen tokens."""
    llm = LLM(target, None, mode="ar")
    texts = Texts.of(llm, {str(number): "the cat sat on the mat" for number in range(400)}, 32)
    assert len(texts.heldout_N) == (len(texts.heldout_N) + len(texts.trained_N)) // HELD_OUT


def test_law_of_a_capped_target_is_capped() -> None:
    draw = torch.Generator().manual_seed(0)
    final_NC, rows_MC = torch.randn(3, 8, generator=draw), 9 * torch.randn(20, 8, generator=draw)
    plain, capped = (OutputHead(torch.ones(8), 1e-6, rows_MC, cap) for cap in (0.0, 30.0))
    logits_NM = plain.logits(final_NC * torch.rsqrt(final_NC.square().mean(-1, keepdim=True) + 1e-6))
    torch.testing.assert_close(plain.probs(final_NC), logits_NM.softmax(-1), **CLOSE)
    torch.testing.assert_close(capped.probs(final_NC), (30 * (logits_NM / 30).tanh()).softmax(-1), **CLOSE)


def test_states_of_stream_are_those_before_each_token(target: Path) -> None:
    """Read in chunks, whose first state is the last one of the chunk before."""
    llm = LLM(target, None, mode="ar")
    ids_BT = Texts.of(llm, {"a": text()}, 32).trained_N[:80].view(2, 40)
    decoder, tokens_M = llm.target.decoder, torch.arange(5, 60)
    streams = [TargetStream(decoder, (1, 2), 2, 40) for _ in range(2)]
    whole, parts = streams[0].read(ids_BT, logits=True), [streams[1].read(some) for some in ids_BT.split(16, 1)]
    for name in ("ids_BT", "slots_BT", "states_BTX", "embeddings_BTC", "final_BTC"):
        assert torch.equal(getattr(whole, name), torch.cat([getattr(each, name) for each in parts], 1)), name
    alone = TargetStream(decoder, (1, 2), 1, 40).read(ids_BT[1:])
    assert torch.equal(alone.states_BTX[0], whole.states_BTX[1])
    assert not whole.states_BTX[:, 0].any() and whole.states_BTX[:, 1:].any(-1).all()
    rows_MC = as_tensor(decoder.head_rows(tokens_M.numpy()))
    head = OutputHead(last_norm(llm.target), llm.target.config.norm_eps, rows_MC)
    torch.testing.assert_close(head.probs(whole.final_BTC), whole.logits_BTV[..., tokens_M].softmax(-1), **CLOSE)


@pytest.mark.parametrize("mutant", caught_in("test_stream_mutant_is_noticed"), ids=str)
def test_stream_mutant_is_noticed(mutant: Mutant, target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mutant.apply(monkeypatch)
    with pytest.raises(AssertionError):
        test_states_of_stream_are_those_before_each_token(target)


def test_texts_of_target_stay_as_they_were(target: Path, tmp_path: Path) -> None:
    params = SamplingParams(temperature=0.8, seed=3, max_tokens=20, ignore_eos=True)
    made = trainer(target, tmp_path)
    (before,) = made.llm.generate("the cat", params)
    made.run(4)
    (after,) = made.llm.generate("the cat", params)
    assert before.outputs[0].token_ids == after.outputs[0].token_ids


def test_card_has_each_kind_of_text(target: Path, tmp_path: Path) -> None:
    made = trainer(target, tmp_path)
    made.run(3)
    card = measure(made)
    rows = [(row["kind"], row["context"], row["temperature"]) for row in card["acceptance"]]
    assert rows == [(kind, context, temperature) for kind, context in (("texts", 32), ("texts", 64), ("answers", 32))
                    for temperature in ("0", "0.8")]  # fmt: skip
    assert all(0 <= share <= 1 for row in card["acceptance"] for share in row["kept"])
    assert len(table(card).plain().splitlines()) >= 8


def test_card_leaves_out_long_texts_that_take_too_much_time(
    target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = trainer(target, tmp_path)
    made.run(3)
    ticks = iter(range(10, 1_000_000, 10))
    monkeypatch.setattr(made, "clock", lambda: next(ticks))
    assert {row["context"] for row in measure(made)["acceptance"]} == {32}
