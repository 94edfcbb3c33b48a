"""Weights of GGUF files under Hugging Face's names: in their own types, or dequantized."""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import partial

import numpy as np
from numpy.typing import NDArray

from triforce.arrays import HOST_TYPES, DType, float32
from triforce.checkpoint.gguf.block_types import bit_fields, unpacked_rows
from triforce.checkpoint.gguf.config import FACTORS, LONG_FACTORS
from triforce.checkpoint.gguf.file import GGUFFile
from triforce.checkpoint.hf_config import HFConfig
from triforce.checkpoint.stacked_experts import mxfp4_weight
from triforce.checkpoint.weights import EMBEDDING, HEAD, NORM
from triforce.errors import ModelError
from triforce.model.weights import NUMBER_TYPES, Matrix, QuantizedWeight

OUTSIDE_LAYERS = {"token_embd.weight": EMBEDDING, "output_norm.weight": NORM, "output.weight": HEAD}
IN_BLOCK = {
    "attn_norm.weight": "input_layernorm.weight",
    "attn_q.weight": "self_attn.q_proj.weight",
    "attn_k.weight": "self_attn.k_proj.weight",
    "attn_v.weight": "self_attn.v_proj.weight",
    "attn_output.weight": "self_attn.o_proj.weight",
    "ffn_norm.weight": "post_attention_layernorm.weight",
    "ffn_gate.weight": "mlp.gate_proj.weight",
    "ffn_up.weight": "mlp.up_proj.weight",
    "ffn_down.weight": "mlp.down_proj.weight",
}
QKV_BIAS_NAMES = {f"attn_{x}.bias": f"self_attn.{x}_proj.bias" for x in "qkv"}
OUTPUT_BIAS_NAME = {"attn_output.bias": "self_attn.o_proj.bias"}
MLP_BIAS_NAMES = {f"ffn_{part}.bias": f"mlp.{part}_proj.bias" for part in ("gate", "up", "down")}
NORMS = {f"attn_{x}_norm.weight": f"self_attn.{x}_norm.weight" for x in "qk"}
OUTPUT_NORMS = {
    "post_attention_norm.weight": "post_attention_layernorm.weight",
    "post_ffw_norm.weight": "post_feedforward_layernorm.weight",
}
PRE_NORM = {"ffn_norm.weight": "pre_feedforward_layernorm.weight"}
PROJECTIONS = {name: hf_name for name, hf_name in IN_BLOCK.items() if name.startswith("attn") and "norm" not in name}
EXPERTS = {"ffn_gate_inp.weight": "mlp.gate.weight"} | {
    f"ffn_{part}_exps.weight": f"mlp.experts.{{}}.{part}_proj.weight" for part in ("gate", "up", "down")
}
OLMO = {name: hf_name for name, hf_name in IN_BLOCK.items() if "norm" not in name} | NORMS | OUTPUT_NORMS
FUSED = {"attn_qkv.weight": "self_attn.qkv_proj.weight", "ffn_up.weight": "mlp.gate_up_proj.weight"}
NO_MLP = {name: hf_name for name, hf_name in IN_BLOCK.items() if "mlp" not in hf_name}
FAMILIES = {
    "llama": IN_BLOCK | QKV_BIAS_NAMES | OUTPUT_BIAS_NAME | MLP_BIAS_NAMES,
    "mixtral": NO_MLP
    | {"ffn_gate_inp.weight": "block_sparse_moe.gate.weight"}
    | {
        f"ffn_{part}_exps.weight": f"block_sparse_moe.experts.{{}}.{hf_name}.weight"
        for part, hf_name in {"gate": "w1", "down": "w2", "up": "w3"}.items()
    },
    "phi3": IN_BLOCK | FUSED,
    "glm4": IN_BLOCK
    | QKV_BIAS_NAMES
    | {
        "ffn_up.weight": FUSED["ffn_up.weight"],
        "post_attention_norm.weight": "post_self_attn_layernorm.weight",
        "post_ffw_norm.weight": "post_mlp_layernorm.weight",
    },
    "glm4_moe": {name: hf_name for name, hf_name in IN_BLOCK.items() if name != "ffn_norm.weight"}
    | QKV_BIAS_NAMES
    | NORMS
    | EXPERTS
    | {
        "post_attention_norm.weight": "post_attention_layernorm.weight",
        "exp_probs_b.bias": "mlp.gate.e_score_correction_bias",
    }
    | {f"ffn_{part}_shexp.weight": f"mlp.shared_experts.{part}_proj.weight" for part in ("gate", "up", "down")},
    "qwen2": IN_BLOCK | QKV_BIAS_NAMES,
    "qwen3": IN_BLOCK | NORMS,
    "granite": IN_BLOCK | QKV_BIAS_NAMES | OUTPUT_BIAS_NAME | MLP_BIAS_NAMES,
    "smollm3": IN_BLOCK,
    "olmo2": OLMO,
    "olmo3": OLMO,
    "gemma2": IN_BLOCK | OUTPUT_NORMS | PRE_NORM,
    "gemma3_text": IN_BLOCK | OUTPUT_NORMS | PRE_NORM | NORMS,
    "gpt_oss": PROJECTIONS
    | QKV_BIAS_NAMES
    | OUTPUT_BIAS_NAME
    | {
        "attn_norm.weight": "input_layernorm.weight",
        "post_attention_norm.weight": "post_attention_layernorm.weight",
        "attn_sinks.weight": "self_attn.sinks",
        "ffn_gate_inp.weight": "mlp.router.weight",
        "ffn_gate_inp.bias": "mlp.router.bias",
    }
    | {
        f"ffn_{part}_exps.{kind}": f"mlp.experts.{{}}.{part}_proj.{kind}"
        for part in ("gate", "up", "down")
        for kind in ("weight", "bias")
    },
    "qwen3_moe": NO_MLP | NORMS | EXPERTS,
}
"""Hugging Face's names of a layer's tensors, by family. A name with `{}` stands for a tensor of all experts."""
ROUTER = "ffn_gate_inp.weight"
BLOCK = "blk."
"""Prefix of the names of layers' tensors."""
PERMUTED = ("attn_q", "attn_k")
PERMUTED_FAMILIES = ("llama", "mixtral", "granite", "smollm3")
"""Families whose files have `PERMUTED` tensors in another row order than Hugging Face's."""
_BLOCK = re.compile(r"blk\.(0|[1-9]\d{0,4})\.(.+)")


def hugging_face_names(file: GGUFFile, family: str, extra: tuple[str, ...] = ()) -> dict[str, str]:
    """Return Hugging Face's name of each tensor by its GGUF name.

    Frequency factors and tensors with a prefix in `extra` are left out. Raises ModelError for a tensor that the
    architecture does not have.
    """
    factors = FACTORS, *LONG_FACTORS
    read = (name for name in file.tensors if name not in factors and not name.startswith(extra))
    return {name: _hugging_face_name(file, family, name) for name in read}


def row_order(family: str, name: str, heads: int, kv_heads: int, head_dim: int) -> NDArray[np.int64] | None:
    """Return each row's place in the file, int64 (N,), so that `rows[order]` is in Hugging Face's order.

    None if the order is the same. In files of `PERMUTED_FAMILIES`, the two channels of queries and keys that rotate
    together are neighbours; in Hugging Face's files they are half a head apart. All other tensors and families have
    Hugging Face's order.
    """
    block = _BLOCK.fullmatch(name)
    part = block[2].partition(".")[0] if block else ""
    if family not in PERMUTED_FAMILIES or part not in PERMUTED:
        return None
    count = heads if part == "attn_q" else kv_heads
    return np.arange(count * head_dim).reshape(count, head_dim // 2, 2).swapaxes(1, 2).reshape(-1)


def _hugging_face_name(file: GGUFFile, family: str, name: str) -> str:
    block = _BLOCK.fullmatch(name)
    if name in OUTSIDE_LAYERS:
        return OUTSIDE_LAYERS[name]
    if block and block[2] in FAMILIES[family]:
        return f"model.layers.{block[1]}.{FAMILIES[family][block[2]]}"
    raise ModelError(
        f"{file.path}: tensor {name} is not part of a {family} model as it can be computed here; give the model's "
        "Hugging Face folder"
    )


class GGUFWeights:
    """Archive of a GGUF file.

    packed: matrices keep their types, for packed kernels; else quantized ones become float32.
    """

    def __init__(self, file: GGUFFile, hf: HFConfig, *, packed: bool) -> None:
        """Raises ModelError for a tensor that the architecture does not have."""
        self._file = file
        self._hf = hf
        self.packed = packed
        self._places: dict[str, tuple[str, int | None]] = {}
        for gguf_name, name in hugging_face_names(file, hf.model_type, hf.extra_layer_prefixes(BLOCK)).items():
            if "{}" in name:
                self._places |= {name.format(n): (gguf_name, n) for n in range(self._experts(gguf_name))}
            else:
                self._places[name] = gguf_name, None

    def names(self) -> Iterable[str]:
        return self._places

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor."""
        gguf_name, expert = self._places[name]
        return self._file.tensors[gguf_name].shape[0 if expert is None else 1 :]

    def dtype(self, name: str) -> DType:
        """Return the type of a tensor's view, or of the inputs of a packed matrix's products."""
        if self._is_packed(name):
            return "bfloat16"
        dtype = NUMBER_TYPES.get(self._file.tensors[self._places[name][0]].type, "float32")
        return "float32" if self.packed and dtype == "float16" else dtype

    def view(self, name: str) -> Matrix:
        """Return a tensor in its shape, rows in Hugging Face's order. A view of the file if the order is the same."""
        (gguf_name, expert), hf = self._places[name], self._hf
        tensor = self._file.tensors[gguf_name]
        shape = self.shape(name)
        order = row_order(hf.model_type, gguf_name, hf.num_attention_heads, hf.num_key_value_heads, hf.head_dim)
        rows = self._file.raw(gguf_name)
        if expert is not None:
            rows = rows.reshape(tensor.shape[0], -1, rows.shape[1])[expert]
        matrix = len(shape) == 2
        dtype = NUMBER_TYPES.get(tensor.type)
        packed = self._is_packed(name)
        if not packed and (dtype is not None or not matrix):
            numbers = unpacked_rows(tensor.type, rows) if dtype is None else rows.reshape(-1).view(HOST_TYPES[dtype])
            numbers = numbers.reshape(shape) if order is None else numbers.reshape(shape)[order]
            return float32(numbers) if self.packed and dtype == "float16" else numbers
        rows = rows if order is None else rows[order]
        if packed and tensor.type == "MXFP4":
            return mxfp4_matrix(rows)
        if packed:
            return QuantizedWeight(tensor.type, rows, shape[-1], partial(self._file.release, gguf_name))
        return unpacked_rows(tensor.type, rows)

    transient_view = view

    def _is_packed(self, name: str) -> bool:
        """Return whether a tensor keeps its type. Routers and vectors are computed in float32."""
        return self.packed and len(self.shape(name)) == 2 and not self._places[name][0].endswith(ROUTER)

    def _experts(self, gguf_name: str) -> int:
        """Return a tensor's number of experts. Raises ModelError if the config has another, or lacks the layer."""
        shape = self._file.tensors[gguf_name].shape
        experts = self._hf.architecture.experts
        count = experts.count if experts else 0
        layer = int(gguf_name.split(".")[1])
        if layer >= self._hf.num_hidden_layers:
            raise ModelError(
                f"{self._file.path}: tensor {gguf_name} is of layer {layer}, but the config has "
                f"{self._hf.num_hidden_layers} layers; download it again"
            )
        if shape[0] != count:
            raise ModelError(f"tensor {gguf_name} has shape {list(shape)}, but the config asks for {count} experts")
        return count


def mxfp4_matrix(rows: NDArray[np.uint8]) -> Matrix:
    """Return the matrix (O, 32 B) of packed rows, uint8 (O, 17 B).

    A block has a scale and 16 bytes, whose lower nibbles are its first half.
    """
    blocks = rows.reshape(len(rows), -1, 17)
    scales_OB = blocks[..., 0]
    codes_OB32 = bit_fields(blocks[..., 1:], 4)
    return mxfp4_weight(codes_OB32, scales_OB, packed=True)
