"""Attention in torch: correct on any device, and the slow reference that faster kernels are compared with.

Shape suffixes: T queries, H query heads, G KV heads, R = T * H / G query rows of one KV head, S keys, D head size.
"""

from __future__ import annotations

import torch
from torch import Tensor

SCORES = 1 << 21
"""Most scores in memory at once. With more scores KV heads take turns, so that scores stay in the cache."""


def attend(
    q_THD: Tensor,
    k_GSD: Tensor,
    v_GSD: Tensor,
    return_mass: bool = True,
    q_sinks_THD: Tensor | None = None,
    sinks: int = 0,
    window: int = 0,
    attention_sink_logits_H: Tensor | None = None,
    cap: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """Attend with a few queries, whose own keys are the last ones: query t does not see keys after S - T + t.

    With a `window` query t sees only the first `sinks` and the last `window` keys up to its own; `q_sinks`, if given,
    are the queries for the sinks. Returns the mixed values (T, H, D) and the attention mass of each key, summed over
    the queries that share a KV head: float32 (G, S), of total T * H / G per head; (G, 0) unless `return_mass`.

    cap: soft cap of scores before masking; 0: none. attention_sink_logits: one float32 logit per query head, a term of
    the softmax's denominator without a key or a value.
    """
    T, _, D = q_THD.shape
    G, S, _ = k_GSD.shape
    q_GRD = fold(q_THD, G) * D**-0.5
    q_sinks_GRD = fold(q_sinks_THD, G) * D**-0.5 if q_sinks_THD is not None else None
    hidden_TS = _hidden(T, S, sinks, window, q_THD.device)
    attention_sink_logits_GR = (
        None if attention_sink_logits_H is None else attention_sink_logits_H[:, None].expand(-1, T).reshape(G, -1)
    )
    at_once = max(1, SCORES // (q_GRD.shape[1] * S))
    blocks = []
    for g in range(0, G, at_once):
        heads = slice(g, g + at_once)
        scores_GRS = torch.bmm(q_GRD[heads], k_GSD[heads].transpose(1, 2)).float()
        if q_sinks_GRD is not None:
            scores_GRS[..., :sinks] = torch.bmm(q_sinks_GRD[heads], k_GSD[heads, :sinks].transpose(1, 2)).float()
        scores_GRS = capped(scores_GRS, cap)
        scores_GRS.view(len(scores_GRS), -1, T, S)[..., S - hidden_TS.shape[1] :].masked_fill_(hidden_TS, -torch.inf)
        sinks_GR = None if attention_sink_logits_GR is None else attention_sink_logits_GR[heads]
        blocks.append(_mix(scores_GRS, v_GSD[heads], return_mass, sinks_GR))
    attn_out_GRD, mass_GS = (torch.cat(parts) if len(parts) > 1 else parts[0] for parts in zip(*blocks, strict=True))
    return unfold(attn_out_GRD, T), mass_GS


def _hidden(T: int, S: int, sinks: int, window: int, device: torch.device) -> Tensor:
    """Return a mask of hidden keys, bool: (T, S) with a window, else (T, T) over the queries' own keys."""
    if not window:
        return torch.ones(T, T, dtype=torch.bool, device=device).triu(1)
    key_S = torch.arange(S, device=device)
    query_T1 = torch.arange(S - T, S, device=device)[:, None]
    return (key_S > query_T1) | ((key_S >= sinks) & (key_S <= query_T1 - window))


def capped(scores: Tensor, cap: float) -> Tensor:
    """Return cap * tanh(scores / cap), of the scores' shape, in place; the scores as they are where `cap` is 0."""
    return scores.div_(cap).tanh_().mul_(cap) if cap else scores


def _mix(
    scores_GRS: Tensor, v_GSD: Tensor, return_mass: bool, attention_sink_logits_GR: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return softmax times values, and mass. Scores are overwritten. A sink logit adds to the denominator."""
    top_GR1 = scores_GRS.amax(-1, keepdim=True)
    if attention_sink_logits_GR is not None:
        top_GR1 = torch.maximum(top_GR1, attention_sink_logits_GR[..., None])
    weights_GRS = scores_GRS.sub_(top_GR1).exp_()
    sum_GR1 = weights_GRS.sum(-1, keepdim=True)
    if attention_sink_logits_GR is not None:
        sum_GR1 += (attention_sink_logits_GR[..., None] - top_GR1).exp()
    # Normalised before the product: a sum over a long context overflows float16 otherwise.
    weights_GRS.div_(sum_GR1)
    attn_out_GRD = torch.bmm(weights_GRS.to(v_GSD.dtype), v_GSD)
    return attn_out_GRD, weights_GRS.sum(1) if return_mass else weights_GRS.new_empty(len(weights_GRS), 0)


def attend_causal(q_THD: Tensor, k_GSD: Tensor, v_GSD: Tensor) -> Tensor:
    """Attend causally with many queries, whose own keys are the last T. Returns (T, H, D).

    Keys before the queries need no mask; the queries' own keys need the causal mask. So there are two calls of torch's
    fused attention, merged by their log-sum-exp, and no (T, S) mask or scores are ever in memory.
    """
    T, H, D = q_THD.shape
    G, S, _ = k_GSD.shape
    own_k, own_v = (x[:, S - T :].repeat_interleave(H // G, 0) for x in (k_GSD, v_GSD))
    own_HTD, own_HT = _fused(q_THD.transpose(0, 1), own_k, own_v, causal=True)
    if S == T:
        return own_HTD.transpose(0, 1)
    past_GRD, past_GR = _fused(fold(q_THD, G), k_GSD[:, : S - T], v_GSD[:, : S - T], causal=False)
    own_GRD = own_HTD.reshape(G, -1, D)
    own_GR = own_HT.reshape(G, -1)
    past_share_GR = torch.sigmoid(past_GR - own_GR)
    attn_out_GRD = torch.lerp(own_GRD.float(), past_GRD.float(), past_share_GR[..., None])
    return unfold(attn_out_GRD.to(q_THD.dtype), T)


def fold(q_THD: Tensor, G: int) -> Tensor:
    """Return queries as (G, H / G * T, D): heads that share a KV head become rows of one product."""
    T, H, D = q_THD.shape
    return q_THD.transpose(0, 1).reshape(G, H // G * T, D)


def unfold(attn_out_GRD: Tensor, T: int) -> Tensor:
    """Return the inverse of `fold`: (T, H, D)."""
    return attn_out_GRD.reshape(-1, T, attn_out_GRD.shape[-1]).transpose(0, 1)


def has_flash(device: torch.device) -> bool:
    """Return whether torch's flash attention supports this GPU: NVIDIA's from Ampere on, or AMD's."""
    return torch.version.hip is not None or torch.cuda.get_device_capability(device) >= (8, 0)


def _fused(q_HTD: Tensor, k_HSD: Tensor, v_HSD: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
    """Return torch's fused attention (H, T, D), and its log-sum-exp (H, T), float32."""
    q = q_HTD[None]
    k = k_HSD[None]
    v = v_HSD[None]
    if q.device.type == "cpu":
        out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, is_causal=causal)
    elif q.dtype != torch.float32 and q.shape[3] % 8 == 0 and q.shape[3] <= 256 and has_flash(q.device):
        out, lse, *_ = torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, is_causal=causal)
    else:
        out, lse, *_ = torch.ops.aten._scaled_dot_product_efficient_attention(q, k, v, None, True, is_causal=causal)
    return out[0], lse[0, :, : q.shape[2]].float()
