"""Weights of a draft before its training, and attention that begins by expecting what stood behind a token before.

Shape suffixes as in eagle/head.py.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from triforce.backends.torch.model import norm
from triforce.checkpoint.weights import NORM
from triforce.eagle.head import EagleHeadConfig, shapes
from triforce.engine.model_loader import Checkpoint
from triforce.model.weights import numbers


def initial_weights(target: Checkpoint, config: EagleHeadConfig, seed: int) -> dict[str, Tensor]:
    """Return float32 tensors by field: it repeats the latest of the states it reads, under the target's own last norm.

    What the layer adds begins at zero, so that its depth costs nothing.
    """
    dice = torch.Generator().manual_seed(seed)
    found = {}
    for name, shape in shapes(config).items():
        if "norm" in name:
            found[name] = torch.ones(shape)
        elif name in ("o_proj_CQ", "down_proj_CI", "embedding_proj_CC"):
            found[name] = torch.zeros(shape)
        else:
            found[name] = torch.randn(shape, generator=dice) * shape[-1] ** -0.5
    C = config.hidden_size
    found["fc_CX"] *= 0.1
    found["fc_CX"][:, -C:] += torch.eye(C)
    found["norm_C"] = last_norm(target)
    return found


def last_norm(target: Checkpoint) -> Tensor:
    """Return the weights (C) of the target's last norm, float32, with the factor of its logits."""
    parts = target.config.architecture
    norm_C = numbers(target.files.archives(packed=False)[NORM].view(NORM)).float()
    return (norm_C + parts.norm_offset) * parts.logit_scale


MATCH = 10.0
"""Mean score, in nats, of an entry behind an equal token, were its state to tell that exactly, and from nearby."""
BUMP = 4.0
"""Mean of what the token of such an entry gains, in nats, under the initial norm."""
MOST = 8
"""One direction of so many of the fused state is taken for names."""
RIDGE = 0.05
"""Of the mean square of what is fitted from: keeps what a sample has little of from being told too well."""


@dataclass(frozen=True, slots=True)
class Sample:
    """Tokens as the target reads them, and the tokens that can be proposed."""

    states_NX: Tensor
    """Behind each token."""
    embeddings_NC: Tensor
    choices_MC: Tensor
    """Embeddings of the tokens that can be proposed."""
    head_MC: Tensor
    """Their rows of the head, float32."""


def add_induction(weights: dict[str, Tensor], config: EagleHeadConfig, sample: Sample, seed: int) -> None:
    """Change weights of a new draft, by field, so that each of its KV heads copies what followed an equal token.

    Channels of a head that rotate slowly carry names of tokens: random numbers, alike for no two. The earliest state
    tells the name of its token, in those directions of the fused state that the latest one hardly uses.
    """
    eps = config.norm_eps
    C = config.hidden_size
    D = config.head_dim
    ones_C = torch.ones(C)
    choices_MC = norm(sample.choices_MC, ones_C, eps)
    first_NC, last_NC = (norm(sample.states_NX[:, part], ones_C, eps) for part in (slice(C), slice(-C, None)))
    slow_K = _slow(D, C // MOST)
    names_KC = _names(choices_MC, len(slow_K), seed)
    told_KC = _fit(first_NC, norm(sample.embeddings_NC, ones_C, eps) @ names_KC.T)
    unused_CK = torch.linalg.eigh(last_NC.T @ last_NC).eigenvectors[:, : len(slow_K)]
    fc_CX = weights["fc_CX"]
    fc_CX -= unused_CK @ (unused_CK.T @ fc_CX)
    fc_CX[:, :C] += unused_CK @ told_KC
    values_PC, outputs_CP = _copied(choices_MC, sample.head_MC * weights["norm_C"], config.kv_heads * D)
    sharp = (MATCH * D**0.5 / len(slow_K)) ** 0.5
    group = config.heads // config.kv_heads
    weights["v_proj_PE"][: len(values_PC)] = torch.cat((values_PC, torch.zeros_like(values_PC)), 1)
    for head in range(config.heads):
        rows_K = head * D + slow_K
        of_kv = slice(head // group * D, (head // group + 1) * D)
        weights["q_proj_QE"][rows_K] = torch.cat((sharp * names_KC, torch.zeros_like(names_KC)), 1)
        part_CD = outputs_CP[:, of_kv]
        weights["o_proj_CQ"][:, head * D : head * D + part_CD.shape[1]] = part_CD / group
    for head in range(config.kv_heads):
        rows_K = head * D + slow_K
        weights["k_proj_PE"][rows_K] = torch.cat((torch.zeros_like(names_KC), sharp * unused_CK.T), 1)


def _slow(head_dim: int, most: int) -> Tensor:
    """Return the channels of a head that make the slower half of its rotations, or of those the slowest ones."""
    slow = torch.arange(head_dim // 2 - min(head_dim // 4, max(most // 2, 1)), head_dim // 2)
    return torch.cat((slow, slow + head_dim // 2))


def _names(choices_MC: Tensor, count: int, seed: int) -> Tensor:
    """Return the map (K, C) from embeddings to names, whose numbers have a mean square of one over all tokens."""
    spread, directions_CC = torch.linalg.eigh(choices_MC.T @ choices_MC / len(choices_MC))
    whitened_CC = directions_CC / (spread + RIDGE * spread.mean()).sqrt() @ directions_CC.T
    dice = torch.Generator().manual_seed(seed)
    drawn_CK = torch.linalg.qr(torch.randn(len(whitened_CC), count, generator=dice)).Q
    names_KC: Tensor = drawn_CK.T @ whitened_CC
    return names_KC / (choices_MC @ names_KC.T).square().mean().sqrt()


def _copied(choices_MC: Tensor, head_MC: Tensor, most: int) -> tuple[Tensor, Tensor]:
    """Return maps (P, C) from embeddings to values and (C, P) from values to what raises the token's own logit."""
    centered_MC = head_MC - head_MC.mean(0)
    fitted_CC = _fit(choices_MC, centered_MC)
    wanted_MC = choices_MC @ fitted_CC.T
    outputs_CP = torch.linalg.eigh(wanted_MC.T @ wanted_MC).eigenvectors[:, -most:]
    values_PC = outputs_CP.T @ fitted_CC
    values_PC /= (choices_MC @ values_PC.T).square().mean().sqrt()
    gain = (choices_MC @ values_PC.T @ outputs_CP.T * centered_MC).sum(-1).mean()
    return values_PC, outputs_CP * (BUMP / gain)


def _fit(from_NC: Tensor, to_NO: Tensor) -> Tensor:
    """Return the matrix (O, C) by which `from` tells `to` with the least squares, and a ridge."""
    squares_CC = from_NC.T @ from_NC
    ridge_CC = RIDGE * squares_CC.diagonal().mean() * torch.eye(len(squares_CC))
    found_CO: Tensor = torch.linalg.solve(squares_CC + ridge_CC, from_NC.T @ to_NO)
    return found_CO.T
