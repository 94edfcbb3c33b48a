"""Where KV streams from a store, the draft goes on meanwhile; elsewhere it does not, and no text knows of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_checkpoint import save, tiny_model
from tiny_llm import ask, ids

from tests.laws.ahead import handed
from tests.laws.mutants import Edit
from triforce import kernels
from triforce.llm import LLM
from triforce.request import RequestOutput
from triforce.speculation import ahead

pytestmark = pytest.mark.skipif(kernels.extension.native is None, reason="a store is for the native kernels")

LONG = 1300
SHAPE = dict(hidden_size=32, intermediate_size=32, head_dim=64, num_attention_heads=4, num_key_value_heads=4)
SETTINGS: dict[str, Any] = dict(budget=1200, gamma_2=2, full_layers="none")
STREAMED: dict[str, Any] = dict(kv_memory="4750KiB", kv_layers=0)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A draft that is nearly the target, if the context were short."""
    folder = tmp_path_factory.mktemp("large")
    for name, noise in (("target", 0.0), ("draft", 0.002)):
        model = tiny_model(max_position_embeddings=LONG + 200, num_hidden_layers=6, **SHAPE)
        for weight in model.parameters():
            weight.data += noise * torch.randn_like(weight)
        save(model, folder / name)
    return folder


def answer(folder: Path, mode: str, **how: Any) -> tuple[RequestOutput, list[int]]:
    model = LLM(folder / "target", folder / "draft", **SETTINGS | how)
    with handed() as counts:
        return model.generate(ids(LONG), ask(max_tokens=40, temperature=0.3), mode=mode)[0], counts


def compare(folder: Path, mode: str, coupling: str, kind: str) -> int:
    """The drafts that were handed over, where text and guesses are those of KV in memory."""
    wanted, never = answer(folder, mode, coupling=coupling)
    found, counts = answer(folder, mode, coupling=coupling, kv_offload=kind, **STREAMED)
    assert not never and counts
    assert found.outputs[0].token_ids == wanted.outputs[0].token_ids
    for tier, own in zip(found.tiers, wanted.tiers, strict=True):
        assert (tier.proposed, tier.accepted, tier.histogram) == (own.proposed, own.accepted, own.histogram)
    return sum(counts)


@pytest.mark.parametrize(("coupling", "kind"), [("seeded", "file"), ("rejection", "host"), ("block", "file")])
@pytest.mark.parametrize("mode", ["draft", "triforce", "hybrid"])
def test_text_and_guesses_are_those_of_kv_in_memory(folder: Path, mode: str, coupling: str, kind: str) -> None:
    handed_over = compare(folder, mode, coupling, kind)
    assert handed_over > 0 or mode == "draft"  # which sees too little of the text, and has nothing between


def test_a_draft_that_sees_what_it_had_not_seen_shows(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: then it is fed in other passes, and its bits are others."""
    again = "tier.cache.rewind(seen_B)\n"
    changes = [(again + f"{after}", f"pass\n{after}") for after in ("            draft =", "        counters.passes")]
    broken = Edit(ahead, "draft_on", *changes)
    monkeypatch.setattr(ahead, "draft_on", broken.function())
    with pytest.raises(AssertionError):
        compare(folder, "triforce", "rejection", "host")


def test_a_tier_that_reads_what_is_being_verified_does_not_go_on(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ahead, "draft_on", lambda *_: pytest.fail("the retrieval tier goes on"))
    answer(folder, "retrieval", kv_offload="host", **STREAMED)


def test_nothing_is_drafted_ahead_where_all_fits(folder: Path) -> None:
    _, counts = answer(folder, "triforce", kv_offload="host", kv_memory="64MiB")
    assert not counts
