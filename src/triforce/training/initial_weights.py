"""Weights of a draft before its training, with attention that starts as induction: it copies what followed a token.

Shape suffixes as in eagle/head.py.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from triforce.arrays import float32
from triforce.backends.torch.model import norm
from triforce.backends.torch.tensors import tensor_of
from triforce.checkpoint.weights import NORM
from triforce.eagle.head import EagleHeadConfig, shapes
from triforce.engine.model_loader import Checkpoint
from triforce.model.weights import numbers


def initial_weights(target: Checkpoint, config: EagleHeadConfig, seed: int) -> dict[str, Tensor]:
    """Return float32 tensors by field.

    The draft's output is at first about the state after the last of the target's layers that the draft reads, under the
    target's last norm. The contributions of attention and MLP start at zero, so that random weights do no harm.
    """
    generator = torch.Generator().manual_seed(seed)
    weights = {}
    for name, shape in shapes(config).items():
        if "norm" in name:
            weights[name] = torch.ones(shape)
        elif name in ("o_proj_CQ", "down_proj_CI", "embedding_proj_CC"):
            weights[name] = torch.zeros(shape)
        else:
            weights[name] = torch.randn(shape, generator=generator) * shape[-1] ** -0.5
    C = config.hidden_size
    weights["fc_CX"] *= 0.1
    weights["fc_CX"][:, -C:] += torch.eye(C)
    weights["norm_C"] = last_norm(target)
    return weights


def last_norm(target: Checkpoint) -> Tensor:
    """Return the weights (C) of the target's last norm, float32, times its logit scale."""
    parts = target.config.architecture
    norm_C = tensor_of(float32(numbers(target.files.archives(packed=False)[NORM].view(NORM))))
    return (norm_C + parts.norm_offset) * parts.logit_scale


MATCH_SCORE = 10.0
"""Mean attention score, in nats, between a token and a nearby entry whose preceding token is the same.

It holds for states that identify their token exactly."""
LOGIT_GAIN = 4.0
"""Mean increase of the logit of that entry's token, in nats, under the initial norm."""
CHANNELS_PER_NAME = 8
"""Directions of the fused state for each direction that holds names."""
RIDGE = 0.05
"""Ridge, relative to the mean square of the inputs of a fit. It keeps rare directions from being overfitted."""


@dataclass(frozen=True, slots=True)
class Sample:
    """Hidden states and embeddings of sampled tokens, and the tokens that can be proposed."""

    states_NX: Tensor
    """States after each token."""
    embeddings_NC: Tensor
    choices_MC: Tensor
    """Embeddings of the tokens that can be proposed."""
    head_MC: Tensor
    """Rows of the head for the tokens that can be proposed, float32."""


def add_induction(weights: dict[str, Tensor], config: EagleHeadConfig, sample: Sample, seed: int) -> None:
    """Change a new draft's weights in place so that each KV head copies the token that followed an equal token.

    The slowly rotating channels of a head carry a token's name: random numbers that differ from token to token. The
    earliest layer's state predicts the name of its token. The name is stored in the directions of the fused state that
    the latest layer's state hardly uses.
    """
    eps = config.norm_eps
    C = config.hidden_size
    D = config.head_dim
    ones_C = torch.ones(C)
    choices_MC = norm(sample.choices_MC, ones_C, eps)
    first_NC, last_NC = (norm(sample.states_NX[:, part], ones_C, eps) for part in (slice(C), slice(-C, None)))
    slow_K = _slow_channels(D, C // CHANNELS_PER_NAME)
    names_KC = _name_map(choices_MC, len(slow_K), seed)
    predicted_KC = _ridge_fit(first_NC, norm(sample.embeddings_NC, ones_C, eps) @ names_KC.T)
    unused_CK = torch.linalg.eigh(last_NC.T @ last_NC).eigenvectors[:, : len(slow_K)]
    fc_CX = weights["fc_CX"]
    fc_CX -= unused_CK @ (unused_CK.T @ fc_CX)
    fc_CX[:, :C] += unused_CK @ predicted_KC
    values_PC, outputs_CP = _copy_maps(choices_MC, sample.head_MC * weights["norm_C"], config.kv_heads * D)
    sharpness = (MATCH_SCORE * D**0.5 / len(slow_K)) ** 0.5
    group = config.heads // config.kv_heads
    weights["v_proj_PE"][: len(values_PC)] = torch.cat((values_PC, torch.zeros_like(values_PC)), 1)
    for head in range(config.heads):
        rows_K = head * D + slow_K
        kv_columns = slice(head // group * D, (head // group + 1) * D)
        weights["q_proj_QE"][rows_K] = torch.cat((sharpness * names_KC, torch.zeros_like(names_KC)), 1)
        part_CD = outputs_CP[:, kv_columns]
        weights["o_proj_CQ"][:, head * D : head * D + part_CD.shape[1]] = part_CD / group
    for head in range(config.kv_heads):
        rows_K = head * D + slow_K
        weights["k_proj_PE"][rows_K] = torch.cat((torch.zeros_like(names_KC), sharpness * unused_CK.T), 1)


def _slow_channels(head_dim: int, max_channels: int) -> Tensor:
    """Return the channels of a head with the slower half of its rotations, at most `max_channels`, the slowest ones."""
    slow = torch.arange(head_dim // 2 - min(head_dim // 4, max(max_channels // 2, 1)), head_dim // 2)
    return torch.cat((slow, slow + head_dim // 2))


def _name_map(choices_MC: Tensor, count: int, seed: int) -> Tensor:
    """Return the map (K, C) from embeddings to names. Names have a mean square of one over all tokens."""
    spread, directions_CC = torch.linalg.eigh(choices_MC.T @ choices_MC / len(choices_MC))
    whitened_CC = directions_CC / (spread + RIDGE * spread.mean()).sqrt() @ directions_CC.T
    generator = torch.Generator().manual_seed(seed)
    drawn_CK = torch.linalg.qr(torch.randn(len(whitened_CC), count, generator=generator)).Q
    names_KC: Tensor = drawn_CK.T @ whitened_CC
    return names_KC / (choices_MC @ names_KC.T).square().mean().sqrt()


def _copy_maps(choices_MC: Tensor, head_MC: Tensor, max_width: int) -> tuple[Tensor, Tensor]:
    """Return maps (P, C) from embeddings to values and (C, P) from values to outputs that raise the token's logit."""
    centered_MC = head_MC - head_MC.mean(0)
    fitted_CC = _ridge_fit(choices_MC, centered_MC)
    raised_MC = choices_MC @ fitted_CC.T
    outputs_CP = torch.linalg.eigh(raised_MC.T @ raised_MC).eigenvectors[:, -max_width:]
    values_PC = outputs_CP.T @ fitted_CC
    values_PC /= (choices_MC @ values_PC.T).square().mean().sqrt()
    gain = (choices_MC @ values_PC.T @ outputs_CP.T * centered_MC).sum(-1).mean()
    return values_PC, outputs_CP * (LOGIT_GAIN / gain)


def _ridge_fit(from_NC: Tensor, to_NO: Tensor) -> Tensor:
    """Return the matrix (O, C) that predicts `to_NO` from `from_NC` by ridge regression."""
    squares_CC = from_NC.T @ from_NC
    ridge_CC = RIDGE * squares_CC.diagonal().mean() * torch.eye(len(squares_CC))
    solution_CO: Tensor = torch.linalg.solve(squares_CC + ridge_CC, from_NC.T @ to_NO)
    return solution_CO.T
