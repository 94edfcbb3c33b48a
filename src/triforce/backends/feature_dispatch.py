"""Dispatch of a feature draft's kernels, and of the embedding that it reads."""

from __future__ import annotations

from functools import partial

import torch

from triforce.backends import dispatch, native_loader
from triforce.backends.dispatch import FusedDraft
from triforce.backends.feature_api import EntryMemory, FeaturePasses
from triforce.backends.kernel_api import PAGE, Device, Embedder
from triforce.backends.torch.feature_passes import TorchFeaturePasses
from triforce.model.config import ModelConfig
from triforce.model.feature_draft import FeatureDraftConfig, FeatureDraftWeights
from triforce.model.weights import Matrix, Weights


def embedding(config: ModelConfig, table_VC: Matrix, device: torch.device) -> Embedder:
    """Return a model's embedding alone, whole, for who has a part of the model only. Raises ModelError."""
    if dispatch.suits_native(config, table_VC.dtype, device):
        from triforce.backends.cpu.model import NativeEmbedding

        return NativeEmbedding(config, table_VC, table_VC.dtype)
    return dispatch.model(config, Weights(table_VC, (), torch.empty(0, device=device), table_VC))


def feature_passes(
    config: FeatureDraftConfig, weights: FeatureDraftWeights, target: Embedder, dtype: torch.dtype, device: Device
) -> FeaturePasses:
    """Passes of a feature draft for this target, by the fastest kernels that take it; weights of any type, anywhere."""
    if dispatch.suits_native(config, dtype, torch.device(device)):
        from triforce.backends.cpu.feature_passes import NativeFeaturePasses
        from triforce.backends.cpu.model import NativeEmbedding

        if isinstance(target, NativeEmbedding):
            if config.hidden_size % 16 == 0 and config.sinks % PAGE == 0:
                return NativeFeaturePasses(config, weights, target, dtype)
            dtype = torch.float32  # of what native memories take and native embeddings give
    return TorchFeaturePasses(config, weights.to(dtype, device), target.embed)


def fused_features_with(passes: FeaturePasses, memory: EntryMemory) -> FusedDraft | None:
    """`NativeFeaturePasses.fused_draft` with this memory; None for other passes."""
    if native_loader.native:
        from triforce.backends.cpu.feature_passes import NativeFeaturePasses

        if isinstance(passes, NativeFeaturePasses):
            return partial(passes.fused_draft, memory)
    return None
