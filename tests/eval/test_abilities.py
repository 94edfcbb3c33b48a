"""Each measurement on models that can, and that cannot, do what it asks for."""

from __future__ import annotations

import random

import pytest
import torch

from tests.helpers.recall_model import Recaller, noise, subject
from triforce.eval import (
    EvalConfig,
    Text,
    bits_per_byte,
    context_gain,
    copying,
    eval_config,
    needles,
    positions,
    repetition,
)
from triforce.eval.positions import buckets
from triforce.interface.repeated_grams import repeated_share
from triforce.llm import LLM


def again(llm: LLM, reach: int) -> dict[int, dict[str, float]]:
    found = copying.measure(subject(llm, Recaller(llm, reach), noise(600)))
    return {row["distance"]: row for row in found["distances"]}


def test_copying_ability_is_measured(llm: LLM) -> None:
    far, near = again(llm, 10**9), again(llm, 300)
    assert set(far) == set(near) == {128, 256, 512}
    assert all(row["again"] == 1 and row["first"] < 0.05 for row in far.values())
    assert near[128]["again"] == near[256]["again"] == 1
    assert near[512]["again"] < 0.05


def test_copying_distance_is_exact(llm: LLM) -> None:
    assert again(llm, 512)[512]["again"] < 0.05  # the token after a match lies 511 tokens back, the match itself more
    assert again(llm, 528)[512]["again"] == 1


def cells(llm: LLM, reach: int) -> list[dict[str, float]]:
    numbers = eval_config(512, 512)
    text = subject(llm, Recaller(llm, reach), noise(2000), numbers)
    return needles.measure(text)["cells"]


def test_needles_in_view_are_found(llm: LLM) -> None:
    assert all(cell["right"] == cell["asked"] > 0 and cell["confused"] == 0 for cell in cells(llm, 10**9))


def test_needles_beyond_view_are_missed(llm: LLM) -> None:
    found = cells(llm, 150)
    assert {cell["depth"] for cell in found} == set(needles.DEPTHS)
    assert all(cell["right"] == (cell["asked"] if cell["depth"] == 1 else 0) for cell in found)
    assert any(cell["confused"] for cell in found)  # it takes the nearest number


def test_haystack_has_length_and_needle_depth(llm: LLM) -> None:
    text = subject(llm, Recaller(llm), noise(2000))
    haystack = needles.build_haystack(text, text.texts[0], 512, random.Random(0))
    assert haystack is not None
    longest = max(len(question) + count for _, question, _, count in haystack.questions)
    assert len(haystack.ids_N) + longest == 512
    whole = text.tokenizer.decode(haystack.ids_N.tolist())
    places = [whole.index(f"is {number}.\n") / len(whole) for _, _, number, _ in haystack.questions]
    assert places == sorted(places)
    assert whole.startswith("\nThe secret number of") and whole.endswith(f"{haystack.questions[-1][2]}.\n")
    assert needles.build_haystack(text, text.texts[0], 300, random.Random(0)) is None


def gains(llm: LLM, period: int, reach: int = 10**9) -> dict[str, dict[str, float]]:
    ids = noise(period) * (600 // period + 1)
    found = context_gain.measure(subject(llm, Recaller(llm, reach), ids[:512]))
    return {side: found[side]["prose"] for side in ("model", "control")}


def test_context_gain_passes_and_control_fails(llm: LLM) -> None:
    found = gains(llm, period=200)  # the last 128 tokens carry no information
    assert found["model"]["passes"] and found["model"]["mean"] > 4
    assert not found["control"]["passes"] and abs(found["control"]["mean"]) < 0.01
    assert found["model"]["tokens"] == 128


@pytest.mark.parametrize(("period", "reach"), [(90, 10**9), (200, 128)])
def test_context_gain_of_near_context_is_zero(llm: LLM, period: int, reach: int) -> None:
    found = gains(llm, period, reach)
    assert not found["model"]["passes"] and abs(found["model"]["mean"]) < 0.01


def test_truncated_model_sees_stated_tokens(llm: LLM) -> None:
    model = Recaller(llm)
    text = subject(llm, model, noise(512))
    losses_N = context_gain._recent_losses(text, text.texts[0])
    assert len(losses_N) == len(model.sights) == 128
    assert (min(model.sights), max(model.sights)) == (113, 128)


def test_eval_short_text_is_reported(llm: LLM) -> None:
    for module in (context_gain, repetition, needles):
        assert "skipped" in module.measure(subject(llm, Recaller(llm), noise(40)))


def test_position_buckets_are_powers_of_two() -> None:
    trace_N = torch.arange(1, 1024, dtype=torch.float32)  # the loss of a token is its position
    found = buckets([trace_N, trace_N + 2])
    assert [(one["from"], one["to"], one["tokens"]) for one in found] == [
        (0, 256, 510), (256, 512, 512), (512, 1024, 1024)
    ]  # fmt: skip
    assert [one["nats"] for one in found] == pytest.approx([129, 384.5, 768.5])


def test_position_losses_fall_with_context(llm: LLM) -> None:
    ids = noise(256) * 2
    near, far = positions.measure(subject(llm, Recaller(llm), ids))["kinds"]["prose"]
    assert near["nats"] > 5 and far["nats"] < 0.2


def test_bits_per_byte_of_uniform_model(llm: LLM) -> None:
    ids = llm.tokenizer.encode("the cat sat on the mat — naïve café. " * 20)
    found = bits_per_byte.measure(subject(llm, Recaller(llm, reach=1), ids, eval_config(64, 64)))["texts"]["text"]
    assert found["target"] == pytest.approx(
        found["tokens"] / found["bytes"] * torch.tensor(float(llm.target.config.vocab_size)).log2().item(), 1e-4
    )


def test_repetition_counts_repeated_ngrams() -> None:
    assert repeated_share(range(100)) == 0
    assert repeated_share([1, 2, 3] * 30) == pytest.approx(1 - 3 / 83)
    assert repeated_share([1] * 5) == 0
    assert repeated_share(range(20), prompt=range(12)) == pytest.approx(5 / 13)


def test_continuations_are_counted_per_kind(llm: LLM) -> None:
    text = subject(llm, Recaller(llm), noise(600), eval_config(512, 512, longest=512))
    text.llm = llm
    found = repetition.measure(text)
    assert len(found["shares"]) == 8 and found["tokens"] == 64 and found["texts"] == 0


def test_long_positions_use_two_longest_texts_per_kind(llm: LLM) -> None:
    numbers = EvalConfig(span=128, longest_window=512)
    several = subject(llm, Recaller(llm), noise(600), numbers)
    several.texts += [Text(f"{n}", "prose", torch.tensor(noise(n))) for n in (130, 520, 700)]
    several.texts += [Text("brief", "code", torch.tensor(noise(300)))]
    found = positions.measure_far(several)["kinds"]
    assert [one["tokens"] for one in found["prose"]] == [2 * 255, 2 * 256]
    assert [one["tokens"] for one in found["code"]] == [255]
    assert "skipped" in positions.measure_far(
        subject(llm, Recaller(llm), noise(600), EvalConfig(span=128, longest_window=128))
    )
