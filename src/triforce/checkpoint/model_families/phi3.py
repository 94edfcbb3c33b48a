"""Phi-3 and Phi-4: fused projections, and in Phi-4-mini a rotation of three quarters of a head."""

from triforce.checkpoint.model_families.family import LLAMA_NAMES, Family
from triforce.checkpoint.model_families.llama import every_layer

QKV, GATE_UP = "self_attn.qkv_proj.weight", "mlp.gate_up_proj.weight"

PHI3 = Family(
    {
        "vocab_size": 32_064, "hidden_size": 3072, "intermediate_size": 8192, "num_hidden_layers": 32,
        "num_attention_heads": 32, "max_position_embeddings": 4096, "original_max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5, "tie_word_embeddings": False,
    },
    slides=every_layer,
    names=LLAMA_NAMES | {
        "q_proj_QC": QKV, "k_proj_PC": QKV, "v_proj_PC": QKV, "gate_proj_IC": GATE_UP, "up_proj_IC": GATE_UP,
    },
    ropes=("default", "longrope"),
    partial=True,
)  # fmt: skip
