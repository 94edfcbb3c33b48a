"""A tiny target and a random EAGLE head for it, and checks of its draft tokens by text, and of its entries by row."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.helpers.tiny_llm import CONTEXT, ask
from tests.helpers.tiny_training import target_folder
from triforce.arrays import Array, to_host
from triforce.backends.torch.tensors import as_tensor
from triforce.eagle.head import EagleHeadWeights, shapes
from triforce.eagle.head_files import EagleHeadFile, new_config, write_eagle_head
from triforce.eagle.torch_passes import EagleHeadLayer, eagle_head_tensors
from triforce.engine import tier_builder
from triforce.engine.engine import Engine
from triforce.engine.model_loader import Checkpoint, load
from triforce.engine.sequence import TokenSequence
from triforce.engine.sequence_batch import SequenceBatch
from triforce.engine.tier_builder import ModelSet, SpeculativeConfig, TierBuilder
from triforce.kvcache.eagle_memory import EagleHeadSlots
from triforce.llm import LLM
from triforce.ragged import Bools, ints
from triforce.speculation import Draft, SequenceState, Tier
from triforce.training.distillation import PastEntries, draft_outputs
from triforce.training.episodes import Chunk
from triforce.training.initial_weights import initial_weights

CHOICES = 200
WINDOW = 40


def eagle_pair(folder: Path, **sizes: Any) -> Path:
    """Write a target of three layers and a draft whose attention has weight and whose window texts exceed."""
    target = target_folder(folder / "target", **({"max_position_embeddings": CONTEXT} | sizes))
    random_draft(folder / "draft", load(target, device="cpu", dtype="float32"))
    return folder


def random_draft(folder: Path, target: Checkpoint, seed: int = 0, **changes: Any) -> EagleHeadFile:
    """Write a draft that is sometimes right, and whose inputs all change its draft tokens."""
    config = replace(new_config(target.config, CHOICES), **({"window": WINDOW} | changes))
    weights = initial_weights(target, config, seed)
    generator = torch.Generator().manual_seed(seed)
    for name, shape in shapes(config).items():
        if scale := {"o_proj_CQ": 0.5, "down_proj_CI": 0.5, "embedding_proj_CC": 0.05}.get(name):
            weights[name] = torch.randn(shape, generator=generator) * scale * shape[-1] ** -0.5
    arrays = {name: to_host(weight) for name, weight in weights.items()}
    draft = EagleHeadFile(config, EagleHeadWeights(**arrays, tokens_M=np.arange(2, 2 + CHOICES)))
    folder.mkdir(exist_ok=True)
    write_eagle_head(folder, draft)
    return draft


@dataclass(frozen=True)
class DraftToken:
    """A pass of the draft: its row's choice, the text before it, its committed tokens, and its logits."""

    choice: int
    text: list[int]
    committed: int
    logits_V: Tensor


@contextmanager
def spied() -> Iterator[list[DraftToken]]:
    """Record the tokens that the draft proposes within a block, pass by pass."""
    draft_tokens: list[DraftToken] = []
    rows: list[TokenSequence] = []
    step = SequenceBatch.step
    plain = Tier.score

    def stepped(self: SequenceBatch) -> list[int]:
        rows[:] = self.sequences
        return step(self)

    def score(self: Tier[Any], prefix: SequenceState, draft: Draft, live_B: Bools) -> Array:
        logits_BJV = plain(self, prefix, draft, live_B)
        if self.name == "draft":
            for b in live_B.nonzero()[0].tolist():
                text = prefix.ids_BS[b, : prefix.lengths_B[b]].tolist()
                committed = int(self.cache.full.lengths_B[b])
                draft_tokens.append(DraftToken(rows[b].choice, text, committed, as_tensor(logits_BJV)[b, 0].clone()))
        return logits_BJV

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Tier, "score", score)
        patch.setattr(tier_builder, "fused_draft", lambda *arguments: None)
        patch.setattr(SequenceBatch, "step", stepped)
        yield draft_tokens


def check_consistent(draft_tokens: Sequence[DraftToken]) -> None:
    """Check that draft tokens after the same text and the same verifications are equal bit for bit."""
    first_draft_tokens: dict[tuple[int, int, tuple[int, ...]], DraftToken] = {}
    for draft_token in draft_tokens:
        earlier = first_draft_tokens.setdefault(
            (draft_token.choice, draft_token.committed, tuple(draft_token.text)), draft_token
        )
        assert torch.equal(earlier.logits_V, draft_token.logits_V)
    assert len(first_draft_tokens) < len(draft_tokens), "or nothing was compared"


@torch.no_grad()
def check_draft_token(llm: LLM, draft: EagleHeadFile, draft_token: DraftToken) -> None:
    """Compare a draft token that only the full tier verifies with that of the torch layer over the whole text."""
    decoder = llm.models.target
    ids_1T = torch.tensor([draft_token.text])
    at = draft_token.committed
    states_1TX = torch.zeros(1, len(draft_token.text), len(draft.config.state_layers) * draft.config.hidden_size)
    view = TierBuilder(ModelSet(decoder), SpeculativeConfig(), [len(draft_token.text)]).full_view()
    _, output = decoder.observe(ids_1T[:, :at].numpy(), ints([at]), view, None, draft.config.state_layers)
    assert output.states_SBTC is not None
    states_1TX[:, 1 : at + 1] = as_tensor(output.states_SBTC)[:, 0].transpose(0, 1).flatten(1).float()
    slots_1T = torch.arange(len(draft_token.text))[None]
    nothing = torch.empty(0)
    embeddings_1TC = as_tensor(decoder.model.embed(ids_1T[0].numpy())).float()[None]
    chunk = Chunk(ids_1T, slots_1T, states_1TX, embeddings_1TC, nothing, nothing)
    steps = len(draft_token.text) - at
    layer = EagleHeadLayer(draft.config, eagle_head_tensors(draft.weights, "float32", "cpu"))
    *_, (out_11C, _) = draft_outputs(layer, chunk, PastEntries(), torch.tensor([at]), steps)
    tokens_M = draft.weights.tokens_M
    wanted_M = as_tensor(decoder.head_rows(tokens_M)) @ out_11C[0, 0]
    torch.testing.assert_close(draft_token.logits_V[tokens_M], wanted_M, atol=5e-3, rtol=5e-3)


def entries(engine: Engine) -> Iterator[tuple[list[int], EagleHeadSlots]]:
    """Yield the committed tokens of each decoding row, and the draft's entries of them."""
    for batch in engine.core.batches.values():
        pool = batch.top.cache.pool
        assert pool.eagle_memory
        for b, length in enumerate(batch.top.cache.lengths_B.tolist()):
            yield batch.prefix.ids_BS[b, :length].tolist(), pool.eagle_memory.read(pool.slots(b, 0, length))


def check_entries(llm: LLM, engine: Engine) -> None:
    """Check that the draft's entries of committed tokens equal those of the same text as a prompt, bit for bit."""
    for text, reused_entries in entries(engine):
        replayed = llm.open(1, len(text) + 64)
        replayed.submit([llm.request([*text, 2], ask(max_tokens=8), "ar")])
        while not replayed.core.batches:
            replayed.step()
        ((longer, computed_entries),) = entries(replayed)
        assert longer[: len(text)] == text
        for mine, theirs in zip(map(as_tensor, reused_entries), map(as_tensor, computed_entries), strict=True):
            assert torch.equal(mine, theirs.narrow(-2 if theirs.ndim == 3 else 0, 0, len(text)))
        replayed.close()
