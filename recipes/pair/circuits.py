"""Initial weights with the two-layer induction circuit (Olsson et al. 2022), set by hand.

Models of this size see too few tokens to form the circuit (LOG.md). If they start with it, training keeps and sharpens
it. Initial weights that imitate trained ones are due to Trockman & Kolter (2023, "mimetic initialization").

* Heads 0, 1, 2 of layer 0 attend one, two, three tokens back. Query and key are a constant of the embedding, rotated so
  that the score has its peak at this distance. Each head writes a short code of the token to its slot of the residual
  stream.
* Heads 0, 1, 2 of layer 1 attend to the tokens after earlier occurrences of the last one, two, three tokens. They match
  these codes in the slow dimensions of the rotation alone, so distance does not matter. They add the embedding of the
  token that they attend to.

With H heads, min(3, H - 1) heads of each layer are set. Shapes: V vocabulary, C hidden size, D head size, S slot, E
embedding dimensions that identify a token, F frequencies (D / 2).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from transformers import LlamaForCausalLM

STD = 0.05  # standard deviation of the embedding
CONSTANT = 4.0  # first dimension of the embedding, in units of STD
SLOT = 1 / 8  # size of a slot, as a share of the hidden size
MIN_FAST_FREQUENCY = 0.02  # radians per token: fast frequencies distinguish neighbouring tokens
MAX_SLOW_FREQUENCY = 1 / 32_768  # radians per token: slow frequencies hardly turn over long distances
PEAK = 6.0  # logits per fast frequency at the distance of the head
MATCH = (15.0, 12.0, 10.0)  # logits of a match one, two, three tokens back
GAIN = 3.0  # size of the added embedding, relative to the embedding of the current token

LAYERS = 2


@torch.no_grad()
def plant(model: LlamaForCausalLM) -> None:
    """Set the embedding and the first heads of the first two layers. All other weights keep their random values."""
    layout = _ResidualLayout.of(model)
    embedding_VC = model.model.embed_tokens.weight
    codes_VE = torch.randn(len(embedding_VC), len(layout.content_E)) * STD
    embedding_VC.zero_()
    embedding_VC[:, layout.content_E] = codes_VE
    embedding_VC[:, 0] = CONSTANT * STD
    for head, slot_S in enumerate(layout.slots):
        layout.set_previous_token_head(head, slot_S)
        layout.set_lookup_head(head)


def parameters(model: LlamaForCausalLM) -> list[torch.nn.Parameter]:
    """Return the matrices of the circuit, without the embedding."""
    layers = model.model.layers[:LAYERS]
    return [weight for layer in layers for weight in layer.self_attn.parameters()]


@dataclass(frozen=True)
class _ResidualLayout:
    """Positions of content and slots in the residual stream, and the codes of tokens."""

    model: LlamaForCausalLM
    content_E: torch.Tensor
    slots: list[torch.Tensor]
    code_SE: torch.Tensor

    @staticmethod
    def of(model: LlamaForCausalLM) -> _ResidualLayout:
        config = model.config
        size = config.hidden_size
        width = int(config.hidden_size * SLOT)
        count = min(3, config.num_attention_heads - 1)
        slots = list(torch.arange(size - count * width, size).split(width))
        content_E = torch.arange(1, size - count * width)
        code_SE = torch.linalg.qr(torch.randn(len(content_E), width))[0].T
        return _ResidualLayout(model, content_E, slots, code_SE)

    @property
    def normed_std(self) -> float:
        """Standard deviation of the normed embedding."""
        size = self.model.config.hidden_size
        return math.sqrt(size / (len(self.content_E) + CONSTANT**2))

    def set_previous_token_head(self, head: int, slot_S: torch.Tensor) -> None:
        """Set a head of layer 0. Scores: PEAK * sum over fast frequencies of cos(frequency * (distance - head - 1))."""
        rotation = self.model.model.rotary_emb
        size = self.model.config.head_dim
        frequency_F = rotation.inv_freq.double()
        height = math.sqrt(PEAK * math.sqrt(size)) / (rotation.attention_scaling * CONSTANT * self.normed_std)
        height_F = height * (frequency_F > MIN_FAST_FREQUENCY)
        turn_F = frequency_F * (head + 1)
        attention, rows = self._clear(0, head)
        query_D = torch.cat([height_F * turn_F.cos(), -height_F * turn_F.sin()])
        attention.q_proj.weight[rows, 0] = query_D.float()
        attention.k_proj.weight[rows, 0] = torch.cat([height_F, torch.zeros_like(height_F)]).float()
        inner_S = rows[: len(slot_S)]
        attention.v_proj.weight[inner_S[:, None], self.content_E] = self.code_SE
        attention.o_proj.weight[slot_S, inner_S] = STD / self.normed_std

    def set_lookup_head(self, head: int) -> None:
        """Set a head of layer 1, which matches the last head + 1 tokens and adds the token after the matching ones."""
        rotation = self.model.model.rotary_emb
        size = self.model.config.head_dim
        slow = torch.nonzero(rotation.inv_freq < MAX_SLOW_FREQUENCY).flatten()
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
        """Set the weights of a head to zero. Returns the attention of the layer, and the rows of the head."""
        size = self.model.config.head_dim
        attention = self.model.model.layers[layer].self_attn
        rows = torch.arange(head * size, (head + 1) * size)
        for projection in (attention.q_proj, attention.k_proj, attention.v_proj):
            projection.weight[rows] = 0.0
        return attention, rows
