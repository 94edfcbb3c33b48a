"""A tiny target with grouped queries and a draft that resembles it, and engine runs on them."""

from __future__ import annotations

from collections import deque

import torch
from torch import Tensor

from tests.helpers.simple_cache import score
from triforce.arrays import DType, to_host
from triforce.backends.decoder import Decoder
from triforce.backends.torch.logits_processor import LogitsProcessor
from triforce.backends.torch.tensor_weights import mapped_weights
from triforce.backends.torch.tensors import torch_dtype
from triforce.engine.sequence import TokenSequence
from triforce.engine.sequence_batch import SequenceBatch
from triforce.engine.sequence_group import prefill_batch
from triforce.engine.tier_builder import MODES, ModelSet, SpeculativeConfig
from triforce.interface.sampling_params import SamplingParams
from triforce.kvcache import Budget, RetrievalConfig
from triforce.model.config import LLAMA, Architecture, Experts, LayerKind, ModelConfig
from triforce.model.rope import Rope
from triforce.model.weights import Layer, Mlp, Weights

V = 6
C = 32
HEADS = 4
GROUPS = 2
D = 8
LAYERS = 2
PROMPTS = [
    torch.randint(V, (length,), generator=torch.Generator().manual_seed(length)).tolist() for length in (150, 163, 121)
]
SETTING = SpeculativeConfig(
    draft_tokens=2, speculative_tokens=4, retrieval=RetrievalConfig(Budget(48)), sinks=4, window=24
)
"""The middle tier sees 48 of at least 121 tokens, the draft 28."""


def decoder(layers: int, noise: float, parts: Architecture = LLAMA, D: int = D, dtype: DType = "float32") -> Decoder:
    """Return the first layers of one random model, with a share `noise` of other weights; perhaps with experts."""
    weights_type = torch_dtype(dtype)
    common = torch.Generator().manual_seed(1)
    layer_random = torch.Generator().manual_seed(layers)

    def weight(*size: int, scale: float) -> Tensor:
        parts_of_weight = (torch.randn(size, generator=g) for g in (common, layer_random))
        return (sum(share * x for share, x in zip((1, noise), parts_of_weight, strict=True)) * scale).to(weights_type)

    def norm() -> Tensor:
        return 1 + weight(C, scale=0.1).float()

    def layer() -> Layer:
        q, k, v = (weight(heads * D, C, scale=s) for heads, s in ((HEADS, 0.4), (GROUPS, 0.4), (GROUPS, 0.3)))
        o, gate, up, down = (
            weight(*size, scale=s)
            for size, s in (((C, HEADS * D), 0.25), ((48, C), 0.15), ((48, C), 0.15), ((C, 48), 0.15))
        )
        if parts.experts is None:
            return Layer(norm(), q, k, v, o, norm(), gate, up, down)
        expert_mlps = [Mlp(gate + weight(48, C, scale=0.15), up, down) for _ in range(parts.experts.count)]
        router = weight(parts.experts.count, C, scale=0.5).float()
        return Layer(norm(), q, k, v, o, norm(), None, None, None, router_EC=router, experts=tuple(expert_mlps))

    embedding = weight(V, C, scale=1.0)
    final = norm()
    head = weight(V, C, scale=0.25)
    rope = Rope((10_000 ** -(torch.arange(0, D, 2) / D)).numpy(), 1.0)
    config = ModelConfig(V, C, 48, layers, HEADS, GROUPS, D, 1e-5, False, 600, rope, parts)
    weights = Weights(embedding, tuple(layer() for _ in range(layers)), final, head)
    return Decoder(config, mapped_weights(weights, to_host))


MODELS = ModelSet(decoder(LAYERS, 0.0), decoder(1, 0.1))
WINDOWED = Architecture(kinds=(LayerKind(window=40), LayerKind()), experts=Experts(4, 2, renormalised=True))
MIXTURE = ModelSet(decoder(LAYERS, 0.0, WINDOWED), MODELS.draft)
"""Models with a target that has a window and experts."""


def native_mixture() -> ModelSet:
    """Return such models with a head size and a type that native kernels take."""
    return ModelSet(decoder(LAYERS, 0.0, WINDOWED, D=16, dtype="bfloat16"), MODELS.draft)


def started(
    mode: str,
    coupling: str,
    params: SamplingParams,
    rows: int,
    first_row: int = 0,
    setting: SpeculativeConfig = SETTING,
    models: ModelSet = MODELS,
) -> SequenceBatch:
    """Return a prefilled ragged batch: row b is choice `first_row + b`, of that prompt modulo their number."""
    sequences = [
        TokenSequence(PROMPTS[row % len(PROMPTS)], params, seed=1234, choice=first_row + row) for row in range(rows)
    ]
    batch = SequenceBatch(models, MODES[mode], setting, coupling, sequences)
    deque(prefill_batch(batch), maxlen=0)
    return batch


def finished(batch: SequenceBatch) -> Tensor:
    """Decode to the end; return the new tokens of each row, (B, max_tokens)."""
    while not batch.done:
        batch.catch_up()
        batch.step()
    return torch.tensor([sequence.tokens for sequence in batch.sequences])


@torch.no_grad()
def laws(texts_BT: Tensor, params: SamplingParams, model: Decoder = MODELS.target) -> Tensor:
    """Return the law of each token given those before, (B, T, V): plain dense passes and the real processor."""
    laws_BTV = torch.empty(*texts_BT.shape, V, dtype=torch.float64)
    for first_row, prompt in enumerate(PROMPTS):
        for rows in torch.arange(first_row, len(texts_BT), len(PROMPTS)).split(64):
            ids_RS = torch.cat([torch.tensor(prompt).repeat(len(rows), 1), texts_BT[rows]], 1)
            at_RT = (len(prompt) - 1 + torch.arange(texts_BT.shape[1])).repeat(len(rows), 1)
            lengths = [len(prompt)] * len(rows)
            processor = LogitsProcessor([params] * len(rows), lengths, V)
            laws_BTV[rows] = processor(score(model, ids_RS, at_BJ=at_RT), ids_RS, torch.tensor(lengths))
    return laws_BTV
