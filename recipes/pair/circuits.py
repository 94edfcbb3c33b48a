"""A head start for heads that look things up: the two-layer circuit of induction (Olsson et al. 2022), set by hand.

Models of this size see too few tokens to find the circuit by themselves (LOG.md); started with it, they keep and
sharpen it. Weights that imitate what training would find are Trockman & Kolter's idea (2023, "mimetic initialization").

* Layer 0, heads 0, 1, 2 look one, two, three tokens back: a constant in the embedding, rotated so that the score peaks
  at that distance. Each writes a short code of the token it finds to its own slot of the residual stream.
* Layer 1, heads 0, 1, 2 look for the places where the last one, two, three tokens stood before, by those codes, in the
  slow dimensions of the rotation alone, so that distance does not matter. They add the embedding of the token there.

With H heads, min(3, H - 1) of each layer are set. Shapes: V vocabulary, C hidden, D head size, S slot, E the dimensions
of the embedding that tell tokens apart, F frequencies (D / 2).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from transformers import LlamaForCausalLM

STD = 0.05  # of the embedding
CONSTANT = 4.0  # first dimension of the embedding, in STD
SLOT = 1 / 8  # of the hidden size, per distance
FASTEST, SLOWEST = 0.02, 1 / 32_768  # radians per token: faster ones tell neighbours apart, slower ones reach far
PEAK = 6.0  # logits per fast frequency at the right distance
MATCH = (15.0, 12.0, 10.0)  # logits of a match one, two, three tokens back
GAIN = 3.0  # of the token found, against the one that is there

LAYERS = 2


@torch.no_grad()
def plant(model: LlamaForCausalLM) -> None:
    """Sets the embedding and the attention of the first two layers; what remains keeps its random start."""
    wires = _Wires.of(model)
    embedding_VC = model.model.embed_tokens.weight
    codes_VE = torch.randn(len(embedding_VC), len(wires.content_E)) * STD
    embedding_VC.zero_()
    embedding_VC[:, wires.content_E] = codes_VE
    embedding_VC[:, 0] = CONSTANT * STD
    for head, slot_S in enumerate(wires.slots):
        wires.look_back(head, slot_S)
        wires.look_up(head)


def parameters(model: LlamaForCausalLM) -> list[torch.nn.Parameter]:
    """The matrices that the circuit lives in, besides the embedding."""
    layers = model.model.layers[:LAYERS]
    return [weight for layer in layers for weight in layer.self_attn.parameters()]


@dataclass(frozen=True)
class _Wires:
    """Where things are in the residual stream, and how tokens are coded."""

    model: LlamaForCausalLM
    content_E: torch.Tensor
    slots: list[torch.Tensor]
    code_SE: torch.Tensor

    @staticmethod
    def of(model: LlamaForCausalLM) -> _Wires:
        config = model.config
        size = config.hidden_size
        width = int(config.hidden_size * SLOT)
        count = min(3, config.num_attention_heads - 1)
        slots = list(torch.arange(size - count * width, size).split(width))
        content_E = torch.arange(1, size - count * width)
        code_SE = torch.linalg.qr(torch.randn(len(content_E), width))[0].T
        return _Wires(model, content_E, slots, code_SE)

    @property
    def share(self) -> float:
        """A coordinate of the normed embedding, where one of the embedding is STD."""
        size = self.model.config.hidden_size
        return math.sqrt(size / (len(self.content_E) + CONSTANT**2))

    def look_back(self, head: int, slot_S: torch.Tensor) -> None:
        """Layer 0: scores PEAK * sum over the fast frequencies of cos(frequency * (distance - head - 1))."""
        rotation = self.model.model.rotary_emb
        size = self.model.config.head_dim
        frequency_F = rotation.inv_freq.double()
        height = math.sqrt(PEAK * math.sqrt(size)) / (rotation.attention_scaling * CONSTANT * self.share)
        height_F = height * (frequency_F > FASTEST)
        turn_F = frequency_F * (head + 1)
        attention, rows = self._clear(0, head)
        query_D = torch.cat([height_F * turn_F.cos(), -height_F * turn_F.sin()])
        attention.q_proj.weight[rows, 0] = query_D.float()
        attention.k_proj.weight[rows, 0] = torch.cat([height_F, torch.zeros_like(height_F)]).float()
        inner_S = rows[: len(slot_S)]
        attention.v_proj.weight[inner_S[:, None], self.content_E] = self.code_SE
        attention.o_proj.weight[slot_S, inner_S] = STD / self.share

    def look_up(self, head: int) -> None:
        """Layer 1: matches the last head + 1 tokens with those before each place, and adds what stands there."""
        rotation = self.model.model.rotary_emb
        size = self.model.config.head_dim
        slow = torch.nonzero(rotation.inv_freq < SLOWEST).flatten()
        attention, rows = self._clear(1, head)
        inner = rows[torch.cat([slow, slow + size // 2])]
        width = len(self.code_SE)
        for back in range(head + 1):
            mix = torch.linalg.qr(torch.randn(max(width, len(inner)), max(width, len(inner))))[0][: len(inner), :width]
            energy = width * len(inner) / max(width, len(inner)) * rotation.attention_scaling**2 / math.sqrt(size)
            mix = mix * math.sqrt(MATCH[back] / max(energy, 1.0))
            attention.k_proj.weight[inner[:, None], self.slots[back]] = mix
            if back == 0:
                attention.q_proj.weight[inner[:, None], self.content_E] = mix @ self.code_SE
            else:
                attention.q_proj.weight[inner[:, None], self.slots[back - 1]] = mix
        part = self.content_E.tensor_split(len(self.slots))[head][:size]
        attention.v_proj.weight[rows[: len(part)], part] = 1.0
        attention.o_proj.weight[part, rows[: len(part)]] = GAIN * STD

    def _clear(self, layer: int, head: int) -> tuple[torch.nn.Module, torch.Tensor]:
        """The attention of a layer with the weights of a head at zero, and the rows of that head."""
        size = self.model.config.head_dim
        attention = self.model.model.layers[layer].self_attn
        rows = torch.arange(head * size, (head + 1) * size)
        for projection in (attention.q_proj, attention.k_proj, attention.v_proj):
            projection.weight[rows] = 0.0
        return attention, rows
