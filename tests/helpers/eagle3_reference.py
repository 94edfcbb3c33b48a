"""EAGLE-3's published formulas in float64: one text, full attention, and no code of the package.

As in the authors' code, entry i has the state after token i and the embedding of token i + 1, at position i.
Shape suffixes: T entries, X = 3 * C.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor


class Eagle3:
    """An EAGLE-3 draft: a checkpoint's tensors by their published names, and the config's fields."""

    def __init__(self, tensors: Mapping[str, Tensor], config: Mapping[str, Any], embedding_VC: Tensor) -> None:
        self.tensors = {name: tensor.double() for name, tensor in tensors.items()}
        self.config = config
        self.embedding_VC = embedding_VC.double()
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []

    def prefill(self, states_TX: Tensor, next_ids: list[int]) -> Tensor:
        """Feed states and tokens; return the last entry's residual stream (C)."""
        for state_X, token in zip(states_TX.double(), next_ids, strict=True):
            if self.config.get("fc_norm"):
                parts = state_X.view(3, -1)
                state_X = torch.cat([self.norm(part, f"fc_norm.{i}.weight") for i, part in enumerate(parts)])
            hidden_C = self.entry(self.tensors["fc.weight"] @ state_X, token)
        return hidden_C

    def entry(self, state_C: Tensor, token: int) -> Tensor:
        layer, (H, G) = "midlayer.", (self.config["num_attention_heads"], self.config["num_key_value_heads"])
        normed_C = self.norm(state_C, f"{layer}hidden_norm.weight")
        both_E = torch.cat([self.norm(self.embedding_VC[token], f"{layer}input_layernorm.weight"), normed_C])
        q_HD, k_GD, v_GD = (
            (self.tensors[f"{layer}self_attn.{name}_proj.weight"] @ both_E).view(heads, -1)
            for name, heads in (("q", H), ("k", G), ("v", G))
        )
        position = len(self.keys)
        self.keys.append(self.turn(k_GD, position))
        self.values.append(v_GD)
        q_HD = self.turn(q_HD, position)
        mixed = []
        for h in range(H):
            keys_TD, values_TD = (torch.stack([x[h * G // H] for x in cached]) for cached in (self.keys, self.values))
            mixed.append((keys_TD @ q_HD[h] / len(q_HD[h]) ** 0.5).softmax(0) @ values_TD)
        residual_C = normed_C if self.config.get("norm_before_residual") else state_C
        x_C = residual_C + self.tensors[f"{layer}self_attn.o_proj.weight"] @ torch.cat(mixed)
        y_C = self.norm(x_C, f"{layer}post_attention_layernorm.weight")
        gate_I, up_I = (self.tensors[f"{layer}mlp.{name}_proj.weight"] @ y_C for name in ("gate", "up"))
        return x_C + self.tensors[f"{layer}mlp.down_proj.weight"] @ (gate_I * gate_I.sigmoid() * up_I)

    def logits(self, hidden_C: Tensor) -> Tensor:
        """Return logits (M) of the tokens that the draft can propose."""
        return self.tensors["lm_head.weight"] @ self.norm(hidden_C, "norm.weight")

    def handed_on(self, hidden_C: Tensor) -> Tensor:
        return self.norm(hidden_C, "norm.weight") if self.config.get("norm_output") else hidden_C

    def norm(self, x_C: Tensor, name: str) -> Tensor:
        return x_C / (x_C.square().mean() + self.config["rms_norm_eps"]).sqrt() * self.tensors[name]

    def turn(self, x_HD: Tensor, position: int) -> Tensor:
        half = x_HD.shape[1] // 2
        angle_F = position * self.config["rope_theta"] ** -(torch.arange(half, dtype=torch.float64) / half)
        z_HF = torch.complex(x_HD[:, :half], x_HD[:, half:]) * torch.polar(torch.ones_like(angle_F), angle_F)
        return torch.cat([z_HF.real, z_HF.imag], 1)


def random_checkpoint(seed: int = 0, **changes: Any) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return tiny random tensors and a config in EAGLE-3's published format; the draft proposes 20 of 97 tokens."""
    config: dict[str, Any] = {
        "architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", "hidden_act": "silu",
        "num_hidden_layers": 1, "hidden_size": 64, "intermediate_size": 80, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 16, "rms_norm_eps": 1e-5, "vocab_size": 97, "draft_vocab_size": 20,
        "rope_theta": 500.0, "max_position_embeddings": 128,
    } | changes  # fmt: skip
    C, I, M = config["hidden_size"], config["intermediate_size"], config["draft_vocab_size"]  # noqa: E741
    Q, P = (config[f"num_{name}_heads"] * config["head_dim"] for name in ("attention", "key_value"))
    draw = torch.Generator().manual_seed(seed)
    layer = "midlayer."
    shapes = {
        "fc.weight": (C, 3 * C), "norm.weight": (C,), "lm_head.weight": (M, C),
        f"{layer}self_attn.q_proj.weight": (Q, 2 * C), f"{layer}self_attn.k_proj.weight": (P, 2 * C),
        f"{layer}self_attn.v_proj.weight": (P, 2 * C), f"{layer}self_attn.o_proj.weight": (C, Q),
        f"{layer}mlp.gate_proj.weight": (I, C), f"{layer}mlp.up_proj.weight": (I, C),
        f"{layer}mlp.down_proj.weight": (C, I), f"{layer}hidden_norm.weight": (C,),
        f"{layer}input_layernorm.weight": (C,), f"{layer}post_attention_layernorm.weight": (C,),
    }  # fmt: skip
    if config.get("fc_norm"):
        shapes |= {f"fc_norm.{i}.weight": (C,) for i in range(3)}
    tensors = {
        name: 1 + 0.3 * torch.randn(shape, generator=draw)
        if len(shape) == 1
        else torch.randn(shape, generator=draw) * 2 * shape[1] ** -0.5
        for name, shape in shapes.items()
    }
    chosen = torch.randperm(config["vocab_size"], generator=draw)[:M].sort().values
    mask_V = torch.zeros(config["vocab_size"], dtype=torch.bool)
    mask_V[chosen] = True
    return tensors | {"d2t": chosen - torch.arange(M), "t2d": mask_V}, config
