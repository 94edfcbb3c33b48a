"""GLM-4 (0414, dense): norms before and after, a rotation of half a head whose pairs lie beside each other."""

from triforce.checkpoint.json_fields import Fields
from triforce.checkpoint.model_families.family import LLAMA_NAMES, Family
from triforce.checkpoint.model_families.phi3 import GATE_UP
from triforce.model.architecture import Architecture


def glm4(config: Fields) -> Architecture:
    """Return the arithmetic of a config."""
    return Architecture(qkv_bias=config.flag("attention_bias"), output_norms=True, interleaved=True)


GLM4 = Family(
    {
        "vocab_size": 151_552, "hidden_size": 4096, "intermediate_size": 13_696, "num_hidden_layers": 40,
        "num_attention_heads": 32, "num_key_value_heads": 2, "head_dim": 128, "max_position_embeddings": 131_072,
        "rms_norm_eps": 1.5625e-07, "tie_word_embeddings": False, "attention_bias": True,
    },
    glm4,
    names=LLAMA_NAMES | {
        "attn_out_norm_C": "post_self_attn_layernorm.weight", "mlp_out_norm_C": "post_mlp_layernorm.weight",
        "gate_proj_IC": GATE_UP, "up_proj_IC": GATE_UP,
    },
    accepted={"attention_bias": (False, True)},  # of q, k and v alone
    ropes=("default", "linear", "yarn"),
    rotated=0.5,
    partial=True,
)  # fmt: skip
