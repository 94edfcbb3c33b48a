"""OLMo 2: norms after attention and MLP only, and norms of all queries and all keys together."""

from triforce.checkpoint.json_fields import Fields
from triforce.checkpoint.model_families.family import LLAMA_NAMES, Family
from triforce.checkpoint.model_families.llama import LLAMA
from triforce.model.architecture import Architecture


def olmo2(config: Fields) -> Architecture:
    """Return the arithmetic of all of them."""
    return Architecture(qk_norm="row", input_norms=False, output_norms=True)


OLMO2 = Family(
    {**LLAMA.defaults, "vocab_size": 50_304, "rms_norm_eps": 1e-5},
    olmo2,
    names=LLAMA_NAMES | {
        "attn_out_norm_C": "post_attention_layernorm.weight", "mlp_out_norm_C": "post_feedforward_layernorm.weight",
    },
)  # fmt: skip
