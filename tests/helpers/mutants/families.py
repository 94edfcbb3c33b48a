"""Faults of families: windows, experts, rotations in part, scalings, norms."""

from __future__ import annotations

from tests.helpers.mutants.mutation import Edit, Mutant

TEST = "tests/checkpoint/test_family_logits.py::test_family_mutant_differs_from_transformers"
LAYER, SOURCES = "triforce.backends.torch.model:TorchLayer", "triforce.checkpoint.tensor_sources"
FAULTS: dict[str, tuple[str, str, tuple[str, str]]] = {
    "a window one too long": (
        "mistral-window", "triforce.kvcache.views.windows:windowed", ("window=window", "window=window + 1"),
    ),
    "a window in every layer": (
        "qwen2-upper-windows", "triforce.checkpoint.hf_config:_with_windows", ("if slides[layer] else 0", ""),
    ),
    "experts are summed unweighted": (
        "mixtral", "triforce.backends.torch.experts:choose", (
            "weights_NE[:, : experts.chosen]", "torch.ones_like(ids[:, : experts.chosen])",
        ),
    ),
    "weights of experts do not add up": (
        "qwen3-moe", "triforce.backends.torch.experts:choose", (
            "(logits[:, : experts.chosen] if experts.renormalised else logits)", "logits",
        ),
    ),
    "the second best experts": (
        "qwen3-moe", "triforce.backends.torch.experts:choose", (
            "return ids[:, : experts.chosen]", "return ids[:, 1 : experts.chosen + 1]",
        ),
    ),
    "pairs of a rotation half a head apart": (
        "glm-4-whole", f"{SOURCES}:rotation_order", (
            "torch.arange(rotated).view(-1, 2).T if parts.interleaved else torch.arange(rotated).view(2, -1)",
            "torch.arange(rotated).view(2, -1)",
        ),
    ),
    "channels that stay are in the middle": (
        "phi-4-mini", f"{SOURCES}:rotation_order", (
            "torch.cat([pairs, torch.arange(rotated, head_dim).view(2, -1)], 1)", "torch.arange(head_dim)",
        ),
    ),
    "keys of a fused matrix are queries": (
        "phi-3", f"{SOURCES}:_behind", ("slice(first + start, first + stop)", "slice(start, stop)"),
    ),
    "every layer is rotated": (
        "smollm3", "triforce.model.config:ModelConfig.rotations", ("self.architecture.kind(layer).rope", "0"),
    ),
    "queries are not scaled": (
        "granite-3", f"{LAYER}.qkv", ("q_NHD if scale == 1 else q_NHD * scale", "q_NHD"),
    ),
    "the residual stream is not scaled": (
        "granite-3", f"{LAYER}._add", (", alpha=self.config.architecture.residual_scale", ""),
    ),
    "logits are not scaled": (
        "granite-3", "triforce.backends.torch.model:TorchModel.head", (
            "logits_NV if scale == 1 else logits_NV.mul_(scale)", "logits_NV",
        ),
    ),
    "outputs are added without their norms": (
        "olmo-2", f"{LAYER}._add", ("self._normed(part_NC, norm_C)", "part_NC"),
    ),
}  # fmt: skip
MUTANTS = [
    *(Mutant(name, TEST, (Edit(target, change),), (model,)) for name, (model, target, change) in FAULTS.items()),
    Mutant(
        "ties go to the highest ids",
        "tests/checkpoint/test_family_logits.py::test_expert_tie_mutant_is_noticed",
        (
            Edit(
                "triforce.backends.torch.experts:choose",
                ("logits, ids = logits_NE.sort(", "logits, ids = logits_NE.flip(1).sort("),
                ("return ids[", "return (logits_NE.shape[1] - 1 - ids)["),
            ),
        ),
    ),
]
