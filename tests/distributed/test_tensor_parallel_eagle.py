"""Ranks with an EAGLE head: texts and drafts have the bits of one process."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from shutil import copytree
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.helpers.eagle_pair import eagle_pair
from tests.helpers.mutants.mutation import Mutant
from tests.helpers.mutants.registry import caught_in
from tests.helpers.thread_ranks import together
from tests.helpers.tiny_checkpoint import edit
from tests.helpers.tiny_llm import ask, ids
from triforce.arrays import Array
from triforce.backends import dispatch
from triforce.backends.torch.tensors import as_tensor
from triforce.distributed.group import ALONE, TPGroup
from triforce.eagle.eagle_draft import EagleHead
from triforce.eagle.torch_passes import TorchEagleHeadPasses
from triforce.engine import tier_builder
from triforce.engine.model_loader import load
from triforce.errors import ModelError, RequestError, TriforceError
from triforce.llm import LLM

NATIVE = pytest.mark.skipif(dispatch.native is None, reason="the native kernels were not built")
SETTINGS: dict[str, Any] = dict(retrieval_budget=64, speculative_tokens=4, searched_layers="none")
PROMPTS = [ids(150), ids(40, 1)]


@pytest.fixture(scope="module")
def features(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return eagle_pair(tmp_path_factory.mktemp("features"))


def texts(
    folder: Path, ranks: TPGroup, mode: str, temperature: float = 0.8, prompts: int = 2, **settings: Any
) -> list[Any]:
    """Return for each prompt its tokens, its exactness, and of each tier the proposed and the accepted tokens."""
    llm = LLM(folder / "target", folder / "draft", ranks=ranks, **(SETTINGS | settings))
    outputs = llm.generate(PROMPTS[:prompts], ask(temperature=temperature), mode=mode)
    tiers = [[(tier.name, tier.proposed, tier.accepted) for tier in output.outputs[0].tiers] for output in outputs]
    return [(output.outputs[0].token_ids, output.exactness, tier) for output, tier in zip(outputs, tiers, strict=True)]


@NATIVE
@pytest.mark.parametrize("temperature", [0.0, 0.8], ids=["greedy", "seeded"])
@pytest.mark.parametrize("mode", ["ar", "draft", "triforce", "draft-ngram"])
def test_texts_of_drafting_ranks_equal_one_process(mode: str, temperature: float, features: Path) -> None:
    """Proposed and accepted counts agree, too: several draft tokens are one native call."""
    one_process = texts(features, ALONE, mode, temperature)
    assert together(2, lambda ranks: texts(features, ranks, mode, temperature)) == [one_process, one_process]
    plain = texts(features, ALONE, "ar", temperature)
    assert [tokens for tokens, *_ in one_process] == [tokens for tokens, *_ in plain]


DraftTokens = dict[int, list[Tensor]]


def draft_logits(
    folder: Path, count: int, monkeypatch: pytest.MonkeyPatch, exact: bool = True, **options: Any
) -> list[Any]:
    """Return by rank the logits of all draft tokens and the text. One text, as clocks decide when another one joins."""
    logits_by_thread = DraftTokens()
    call = EagleHead.__call__

    def spy(self: EagleHead, *arguments: Any) -> Array:
        logits_BJV = call(self, *arguments)
        logits_by_thread.setdefault(threading.get_ident(), []).append(as_tensor(logits_BJV).clone())
        return logits_BJV

    def run(ranks: TPGroup) -> tuple[list[Tensor], list[Any]]:
        generated = texts(folder, ranks, "triforce", prompts=1, **options)
        return logits_by_thread.pop(threading.get_ident()), generated

    with monkeypatch.context() as patch:
        patch.setattr(EagleHead, "__call__", spy)
        patch.setattr(tier_builder, "fused_draft", lambda *draft_arguments: None)
        return [run(ALONE)] if count == 1 else together(count, run, exact)


def check_draft_logits(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ((single_logits, single_text),) = draft_logits(folder, 1, monkeypatch)
    for rank_logits, text in draft_logits(folder, 2, monkeypatch):
        assert (
            len(single_logits) > 8
            and len(rank_logits) == len(single_logits)
            and all(map(torch.equal, rank_logits, single_logits))
        )
        assert text == single_text


@NATIVE
def test_draft_tokens_of_ranks_have_the_bits_of_one_process(features: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    check_draft_logits(features, monkeypatch)


@NATIVE
@pytest.mark.parametrize("mutant", caught_in("test_rank_eagle_mutant_is_noticed"), ids=str)
def test_rank_eagle_mutant_is_noticed(features: Path, mutant: Mutant, monkeypatch: pytest.MonkeyPatch) -> None:
    mutant.apply(monkeypatch)
    # Memory that a fault leaves unwritten may hold NaN, which the sampler refuses.
    with pytest.raises((AssertionError, RuntimeError, ValueError, TriforceError)):
        check_draft_logits(features, monkeypatch)


@pytest.mark.parametrize("exact", [True, False])
def test_draft_tokens_of_ranks_agree_on_the_torch_path(
    exact: bool, features: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dispatch, "native", None)
    (first_logits, text), (second, second_text) = draft_logits(features, 2, monkeypatch, exact, dtype="float32")
    assert len(first_logits) == len(second) > 8 and all(map(torch.equal, first_logits, second)) and text == second_text


@NATIVE
def test_drafts_of_ranks_have_the_native_passes(features: Path) -> None:
    """With the whole embedding the passes are native: ranks exchange nothing between draft tokens."""

    def run(ranks: TPGroup) -> bool:
        draft = LLM(features / "target", features / "draft", ranks=ranks, **SETTINGS).models.eagle_head
        return draft is not None and not isinstance(draft.passes, TorchEagleHeadPasses)

    assert together(2, run) == [True, True]


def test_ranks_know_what_target_a_draft_was_trained_for(features: Path, tmp_path: Path) -> None:
    """Ranks compare the fingerprint of the whole model; a rank's own fingerprint is that of its part."""
    folder = copytree(features, tmp_path / "pair")
    card = json.loads((folder / "draft" / "config.json").read_text())["triforce"]
    fingerprint = load(folder / "target", device="cpu").fingerprint
    edit(folder / "draft" / "config.json", triforce=card | {"target": fingerprint})
    assert together(2, lambda ranks: LLM(folder / "target", folder / "draft", ranks=ranks).models.has_draft) == [
        True,
        True,
    ]
    edit(folder / "draft" / "config.json", triforce=card | {"target": "that of another"})
    with pytest.raises(ModelError, match="trained on the hidden states of another model"):
        together(2, lambda ranks: LLM(folder / "target", folder / "draft", ranks=ranks))


def test_offloaded_kv_of_drafting_ranks_is_refused(features: Path) -> None:
    with pytest.raises(RequestError, match="reads hidden states, which cannot be had with kv_offload='"):
        together(2, lambda ranks: texts(features, ranks, "draft", kv_offload="host"))
