"""GLM-4.5: experts and one that all tokens share, chosen by sigmoids with a correction; MLPs in the first layers."""

from triforce.checkpoint.json_fields import MOST_LAYERS, Fields
from triforce.checkpoint.model_families.family import DENSE, LLAMA_NAMES, SHARED, Family
from triforce.model.architecture import Architecture, Experts


def _experts(config: Fields) -> Experts:
    count, groups = config.whole("n_routed_experts", most=4096), config.whole("n_group", most=2048)
    if count % groups or (groups > 1 and count < 2 * groups):
        raise config.refusal("n_group", [f"divisors of {count} up to half of it"])
    best = config.whole("topk_group", most=groups)
    return Experts(
        count, config.whole("num_experts_per_tok", most=count // groups * best), config.flag("norm_topk_prob"),
        function="sigmoid", corrected=True, scale=config.number("routed_scaling_factor", least=1e-6), groups=groups,
        chosen_groups=best, shared=config.whole("n_shared_experts", most=64),
    )  # fmt: skip


def glm4_moe(config: Fields) -> Architecture:
    """Return the arithmetic of a config. Raises ModelError."""
    layers = config.whole("num_hidden_layers", most=MOST_LAYERS)
    return Architecture(
        qkv_bias=config.flag("attention_bias"), qk_norm="head" if config.flag("use_qk_norm") else "",
        experts=_experts(config), dense_layers=config.whole("first_k_dense_replace", least=0, most=layers - 1),
        dense_size=config.whole("intermediate_size"),
    )  # fmt: skip


GLM4_MOE = Family(
    {
        "vocab_size": 151_552, "hidden_size": 4096, "intermediate_size": 10_944, "num_hidden_layers": 46,
        "num_attention_heads": 96, "num_key_value_heads": 8, "max_position_embeddings": 131_072, "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False, "attention_bias": False, "use_qk_norm": False, "moe_intermediate_size": 1408,
        "num_experts_per_tok": 8, "n_shared_experts": 1, "n_routed_experts": 128, "routed_scaling_factor": 1.0,
        "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1, "norm_topk_prob": True,
    },
    glm4_moe,
    names=LLAMA_NAMES | {
        "router_EC": "mlp.gate.weight", "router_correction_E": "mlp.gate.e_score_correction_bias",
    } | {
        f"{kind}{field}_proj_{shape}": f"mlp.{within}{field}_proj.weight"
        for kind, within in {"": "experts.{}.", SHARED: "shared_experts.", DENSE: ""}.items()
        for field, shape in {"gate": "IC", "up": "IC", "down": "CI"}.items()
    },
    accepted={"attention_bias": (False, True)},  # of q, k and v alone
    inner="moe_intermediate_size",
    rotated=0.5,
    partial=True,
)  # fmt: skip
