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
from triforce.errors import ModelError, RequestError
from triforce.interface.sampling_params import SamplingParams
from triforce.llm import LLM
from triforce.training.distillation import Head
from triforce.training.episodes import HELD_OUT, Episodes, Readings, TargetStream, Texts
from triforce.training.initial_weights import last_norm
from triforce.training.trainer import FILE, TrainingState
from triforce.training.training_card import measure, table

torch.set_num_threads(1)
CLOSE = dict(atol=1e-3, rtol=2e-2)  # the target rounds its last norm


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_training.target_folder(tmp_path_factory.mktemp("target"))


def test_training_raises_acceptance_of_heldout_texts(target: Path, tmp_path: Path) -> None:
    new_trainer = trainer(target, tmp_path)
    greedy_before = new_trainer.heldout.greedy(new_trainer.subject, CONFIG.steps)
    new_trainer.run(90)
    greedy_after = new_trainer.heldout.greedy(new_trainer.subject, CONFIG.steps)
    assert new_trainer.state.updates == 90 and len(new_trainer.state.history) == 90 // CONFIG.check_every
    assert min(greedy_after["texts"]) > max(greedy_before["texts"]) + 0.1, (greedy_before, greedy_after)


def test_training_cut_off_equals_unbroken_one(target: Path, tmp_path: Path) -> None:
    """Wherever an episode ends, through files alone."""
    whole_run = trainer(target, tmp_path / "whole")
    whole_run.run(90)
    for _ in range(20):
        cut = trainer(target, tmp_path / "cut")
        if cut.state.updates >= 90:
            break
        assert cut.resumed == (cut.state.updates > 0)
        cut._episode(90, lambda state: None)
        cut.save()
    assert cut.state.updates == whole_run.state.updates and cut.state.history == whole_run.state.history
    for name, tensor in whole_run.state.weights.items():
        assert torch.equal(tensor, cut.state.weights[name]), name


def test_episodes_are_trained_on_again(target: Path, tmp_path: Path) -> None:
    """Two and five episodes later, with one reading. A training that goes on reads again what was kept before."""
    new_trainer = trainer(target, tmp_path)
    asked = list[int]()
    read = Episodes.__call__
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Episodes, "__call__", lambda self, index: asked.append(index) or read(self, index))
        for _ in range(9):
            new_trainer._episode(math.inf, lambda state: None)
    assert asked == list(range(9)) and sorted(new_trainer.readings._kept) == [3, 4, 5, 6, 7, 8]
    episode_tokens = CONFIG.groups * CONFIG.rows * CONFIG.width
    assert new_trainer.state.updates == CONFIG.groups * (9 + 7 + 4) and new_trainer.state.tokens == episode_tokens * 9
    new_readings = Readings(new_trainer.decoder, new_trainer.draft.state_layers, new_trainer.episodes, CONFIG)
    next(new_readings(4)), next(new_readings(5))  # neither is read to its end
    for number in (4, 5):  # answers are the second ones
        chunks = [
            [chunk for text in readings(number) for chunk in text] for readings in (new_readings, new_trainer.readings)
        ]
        for new_part, kept_part in zip(*chunks, strict=True):
            assert torch.equal(new_part.states_BTX, kept_part.states_BTX)
            assert torch.equal(new_part.ids_BT, kept_part.ids_BT)


@pytest.mark.parametrize("mutant", caught_in("test_mutant_of_episodes_is_noticed"), ids=str)
def test_mutant_of_episodes_is_noticed(
    mutant: Mutant, target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mutant.apply(monkeypatch)
    with pytest.raises((AssertionError, ValueError)):
        test_episodes_are_trained_on_again(target, tmp_path)


def test_training_whose_time_went_into_its_beginning_has_an_update(target: Path, tmp_path: Path) -> None:
    new_trainer = trainer(target, tmp_path)
    new_trainer.clock, new_trainer.state.seconds = lambda: 0.0, 30.0
    new_trainer.run(20)
    assert new_trainer.state.updates == 1 and new_trainer.state.seconds == 30 and (tmp_path / FILE).exists()


def test_interrupted_training_loses_no_update(target: Path, tmp_path: Path) -> None:
    new_trainer = trainer(target, tmp_path)

    def interrupt(state: TrainingState) -> None:
        if state.updates == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        new_trainer.run(9, interrupt)
    again = trainer(target, tmp_path)
    assert again.resumed and again.state.updates == 3
    assert torch.equal(again.state.weights["fc_CX"], new_trainer.state.weights["fc_CX"])


def test_training_of_other_texts_or_target_is_refused(target: Path, tmp_path: Path) -> None:
    new_trainer = trainer(target, tmp_path / "draft")
    new_trainer.save()
    with pytest.raises(ModelError, match="another texts"):
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
    final_NC = torch.randn(3, 8, generator=draw)
    rows_MC = 9 * torch.randn(20, 8, generator=draw)
    plain, capped = (Head(torch.ones(8), 1e-6, rows_MC, cap) for cap in (0.0, 30.0))
    logits_NM = plain.logits(final_NC * torch.rsqrt(final_NC.square().mean(-1, keepdim=True) + 1e-6))
    torch.testing.assert_close(plain.law(final_NC), logits_NM.softmax(-1), **CLOSE)
    torch.testing.assert_close(capped.law(final_NC), (30 * (logits_NM / 30).tanh()).softmax(-1), **CLOSE)


def test_states_of_stream_are_those_before_each_token(target: Path) -> None:
    """Read in chunks, whose first state is the last one of the chunk before."""
    llm = LLM(target, None, mode="ar")
    ids_BT = Texts.of(llm, {"a": text()}, 32).trained_N[:80].view(2, 40)
    decoder = llm.target.decoder
    tokens_M = torch.arange(5, 60)
    streams = [TargetStream(decoder, (1, 2), 2, 40) for _ in range(2)]
    full_reading = streams[0].read(ids_BT, logits=True)
    parts = [streams[1].read(chunk_ids) for chunk_ids in ids_BT.split(16, 1)]
    for name in ("ids_BT", "slots_BT", "states_BTX", "embeddings_BTC", "final_BTC"):
        joined = torch.cat([getattr(chunk_reading, name) for chunk_reading in parts], 1)
        assert torch.equal(getattr(full_reading, name), joined), name
    single_reading = TargetStream(decoder, (1, 2), 1, 40).read(ids_BT[1:])
    assert torch.equal(single_reading.states_BTX[0], full_reading.states_BTX[1])
    assert not full_reading.states_BTX[:, 0].any() and full_reading.states_BTX[:, 1:].any(-1).all()
    head = Head(last_norm(llm.target), llm.target.config.norm_eps, decoder.head_rows(tokens_M))
    probs_BTM = full_reading.logits_BTV[..., tokens_M].softmax(-1)
    torch.testing.assert_close(head.law(full_reading.final_BTC), probs_BTM, **CLOSE)


@pytest.mark.parametrize("mutant", caught_in("test_stream_mutant_is_noticed"), ids=str)
def test_stream_mutant_is_noticed(mutant: Mutant, target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mutant.apply(monkeypatch)
    with pytest.raises(AssertionError):
        test_states_of_stream_are_those_before_each_token(target)


def test_texts_of_target_stay_as_they_were(target: Path, tmp_path: Path) -> None:
    params = SamplingParams(temperature=0.8, seed=3, max_tokens=20, ignore_eos=True)
    new_trainer = trainer(target, tmp_path)
    (output_before,) = new_trainer.llm.generate("the cat", params)
    new_trainer.run(4)
    (output_after,) = new_trainer.llm.generate("the cat", params)
    assert output_before.outputs[0].token_ids == output_after.outputs[0].token_ids


def test_card_has_each_kind_of_text(target: Path, tmp_path: Path) -> None:
    new_trainer = trainer(target, tmp_path)
    new_trainer.run(3)
    card = measure(new_trainer)
    rows = [(row["kind"], row["context"], row["temperature"]) for row in card["acceptance"]]
    assert rows == [(kind, context, temperature) for kind, context in (("texts", 32), ("texts", 64), ("answers", 32))
                    for temperature in ("0", "0.8")]  # fmt: skip
    assert all(0 <= share <= 1 for row in card["acceptance"] for share in row["kept"])
    assert len(table(card).plain().splitlines()) >= 8


def test_card_leaves_out_long_texts_that_take_too_much_time(
    target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    new_trainer = trainer(target, tmp_path)
    new_trainer.run(3)
    ticks = iter(range(10, 1_000_000, 10))
    monkeypatch.setattr(new_trainer, "clock", lambda: next(ticks))
    assert {row["context"] for row in measure(new_trainer)["acceptance"]} == {32}
