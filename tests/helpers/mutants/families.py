"""Faults of families: windows, experts, rotations in part, scalings, norms."""

from __future__ import annotations

from tests.helpers.mutants.mutation import Edit, Mutant

TEST = "tests/checkpoint/test_family_logits.py::test_family_mutant_differs_from_transformers"
ATTENTION = "triforce.backends.torch.attention"
KV, UNCAPPED = "triforce.backends.torch.kv:TorchKV", ("self.config.architecture.score_cap", "0.0")
CHOOSE, RANKING = "triforce.backends.torch.model:choose", "triforce.backends.torch.model:ranking_scores"
LAYER, SOURCES = "triforce.backends.torch.model:TorchLayer", "triforce.checkpoint.weights"
FAULTS: dict[str, tuple[str, str, tuple[str, str]]] = {
    "a window one too long": (
        "mistral-window", "triforce.kvcache.views.full:table_by_window", ("window=window", "window=window + 1"),
    ),
    "a window in every layer": (
        "qwen2-upper-windows", "triforce.checkpoint.hf_config:with_windows", ("windowed if slides else {}", "windowed"),
    ),
    "experts are summed unweighted": (
        "mixtral", CHOOSE, ("weights_NK * experts.scale", "torch.ones_like(weights_NK)"),
    ),
    "weights of experts do not add up": (
        "qwen3-moe", CHOOSE, ("(logits[:, :chosen] if experts.renormalised else logits)", "logits"),
    ),
    "the second best experts": (
        "qwen3-moe", CHOOSE, ("torch.cat([ids[:, :chosen]", "torch.cat([ids[:, 1 : chosen + 1]"),
    ),
    "scores of sigmoids are a softmax": ("glm-4.5", CHOOSE, ('experts.function == "softmax"', "True")),
    "sigmoids are not divided by their sum": (
        "glm-4.5", CHOOSE, (" / (weights_NK.sum(1, keepdim=True) + LEAST_SUM)", ""),
    ),
    "sigmoids are divided by their sum": ("glm-4.5-air", CHOOSE, ("if experts.renormalised:", "if True:")),
    "corrections of scores enter the weights": (
        "glm-4.5", CHOOSE, ("[:, :chosen].sigmoid()", "[:, :chosen].sigmoid() + correction_E[ids[:, :chosen]]"),
    ),
    "corrections of scores are left out": (
        "glm-4.5-air", RANKING, ("scores_NE if correction_E is None else scores_NE + correction_E", "scores_NE"),
    ),
    "corrections are added to logits": (
        "glm-4.5-air", RANKING, (
            'logits_NE.softmax(1) if experts.function == "softmax" else logits_NE.sigmoid()', "logits_NE",
        ),
    ),
    "experts of all groups are chosen": ("glm-4.5", RANKING, ("experts.groups == experts.chosen_groups", "True")),
    "the best expert of a group counts": (
        "glm-4.5", RANKING, ("ranking_NGE.topk(2, dim=2)", "ranking_NGE.topk(1, dim=2)"),
    ),
    "weights of experts are not scaled": ("glm-4.5", CHOOSE, ("weights_NK * experts.scale", "weights_NK")),
    "shared experts are scaled": ("glm-4.5", CHOOSE, ("value=1.0", "value=experts.scale")),
    "shared experts are left out": ("glm-4.5-air", CHOOSE, ("value=1.0", "value=0.0")),
    "only rows with the first expert have shared ones": (
        "glm-4.5-air", CHOOSE, (
            "value=1.0)", "value=1.0)\n    weights_NK[:, chosen:] *= (ids[:, :chosen] == 0).any(1, keepdim=True)",
        ),
    ),
    "shared experts are all the first one": (
        "glm-4.5", f"{SOURCES}:_shared_expert_places", ("n * shape[axis]", "0 * shape[axis]"),
    ),
    "pairs of a rotation half a head apart": (
        "glm-4-whole", f"{SOURCES}:rotation_order", (
            "channels.reshape(-1, 2).T if architecture.interleaved else channels.reshape(2, -1)",
            "channels.reshape(2, -1)",
        ),
    ),
    "channels that stay are in the middle": (
        "phi-4-mini", f"{SOURCES}:rotation_order", (
            "np.concatenate([pairs, np.arange(rotated, head_dim).reshape(2, -1)], 1)", "np.arange(head_dim)",
        ),
    ),
    "keys of a fused matrix are queries": (
        "phi-3", f"{SOURCES}:_shift_slice", ("slice(offset + start, offset + stop)", "slice(start, stop)"),
    ),
    "every layer is rotated": (
        "smollm3", "triforce.model.config:ModelConfig.rotations", ("kind.rope for", "0 for"),
    ),
    "queries are not scaled": (
        "granite-3", f"{LAYER}.qkv", ("q_NHD if scale == 1 else q_NHD * scale", "q_NHD"),
    ),
    "the residual stream is not scaled": (
        "granite-3", f"{LAYER}._add", (", alpha=self.config.architecture.residual_scale", ""),
    ),
    "logits are not scaled": (
        "granite-3", "triforce.backends.torch.model:TorchModel.head", (
            "logits_NV if architecture.logit_scale == 1 else logits_NV.mul_(architecture.logit_scale)", "logits_NV",
        ),
    ),
    "scores are not capped": (
        "gemma-2", f"{KV}._attend", UNCAPPED,
    ),
    "logits are not capped": (
        "gemma-2", "triforce.backends.torch.model:TorchModel.head",
        ("capped(logits_NV, architecture.logit_cap)", "logits_NV"),
    ),
    "weights of norms count from 0": (
        "gemma-3", "triforce.checkpoint.weights:_add_norm_offset", (
            "float32(norm) + np.float32(offset)", "float32(norm)",
        ),
    ),
    "the embedding is not scaled": (
        "gemma-3", "triforce.backends.torch.model:TorchModel.embed", ("if scale == 1 else", "if True else"),
    ),
    "layers with a window turn as the others": (
        "gemma-3", "triforce.checkpoint.hf_config:with_windows", ('{"rope": 1}', '{"rope": 0}'),
    ),
    "rotations of layers with a window are scaled": (
        "olmo-3", "triforce.checkpoint.hf_config:_rotations", (
            "Unscaled().frequencies(hf.local_theta", "hf.scaling.frequencies(hf.local_theta",
        ),
    ),
    "the gate is not GELU": (
        "gemma-2", f"{LAYER}._activated", ('"gelu": geglu', '"gelu": self.swiglu'),
    ),
    "the sink logit is left out": (
        "gpt-oss", f"{ATTENTION}:_mix", ("sum_GR1 += (attention_sink_logits_GR[..., None] - top_GR1).exp()", "pass"),
    ),
    "sink logits of other heads": (
        "gpt-oss", f"{KV}._attend", ("sink_logits_LH[layer]", "sink_logits_LH[layer].flip(0)"),
    ),
    "an expert's bias is left out": (
        "gpt-oss", f"{LAYER}._gate", ("mlp.up_bias_I", "None"),
    ),
    "the bias of an expert's gate is left out": (
        "gpt-oss", f"{LAYER}._gate", ("mlp.gate_bias_I", "None"),
    ),
    "the bias of an expert's outputs is left out": (
        "gpt-oss", f"{LAYER}._down", ("mlp.down_bias_C", "None"),
    ),
    "the bias of an MLP's gate is left out": ("llama-biases", f"{LAYER}._gate", ("mlp.gate_bias_I", "None")),
    "the bias of an MLP's up projection is left out": ("llama-biases", f"{LAYER}._gate", ("mlp.up_bias_I", "None")),
    "the bias of an MLP's outputs is left out": ("granite-biases", f"{LAYER}._down", ("mlp.down_bias_C", "None")),
    "the router's bias is left out": (
        "gpt-oss", "triforce.checkpoint.weights:layer_of", (
            "float32(numbers(part)) if", 'float32(numbers(part)) * (field != "router_bias_E") if',
        ),
    ),
    "the bias behind attention is left out": (
        "gpt-oss", f"{LAYER}.out", (", self.layer.o_bias_C", ""),
    ),
    "the up projection is not bounded": (
        "gpt-oss", "triforce.backends.torch.model:clamped_swiglu", ("up_NI.clamp(-CLAMP, CLAMP)", "up_NI"),
    ),
    "the gate is not bounded": (
        "gpt-oss", "triforce.backends.torch.model:clamped_swiglu", ("gate_NI.clamp(max=CLAMP)", "gate_NI"),
    ),
    "gate and up projections in another order": (
        "gpt-oss", "triforce.checkpoint.stacked_experts:StackedExperts._places_in", (
            "enumerate(projections)", "enumerate(reversed(projections))",
        ),
    ),
    "outputs are added without their norms": (
        "olmo-2", f"{LAYER}._add", ("self._normed(part_NC, norm_C)", "part_NC"),
    ),
}  # fmt: skip
TIES = "tests/checkpoint/test_family_logits.py::test_expert_tie_mutant_is_noticed"
TIE_FAULTS: dict[str, tuple[str, str, tuple[str, str]]] = {
    "ties go to the highest ids": (
        "qwen3-moe", CHOOSE, (
            "ranking_scores(logits_NE, experts, correction_E).sort(",
            "logits_NE.shape[1] - 1 - ranking_scores(logits_NE, experts, correction_E).flip(1).sort(",
        ),
    ),
    "ties of groups go to the highest": (
        "glm-4.5", RANKING, ("group_scores_NG.sort(", "experts.groups - 1 - group_scores_NG.flip(1).sort("),
    ),
}  # fmt: skip
UNIONS = "tests/planner/test_expert_unions.py::test_union_mutant_is_noticed"
UNION_FAULTS: dict[str, tuple[str, tuple[str, str]]] = {
    "experts are counted with repeats": (
        "triforce.backends.torch.model:distinct_experts", ("len({*ids_NK.flatten().tolist()})", "ids_NK.numel()"),
    ),
    "experts of one token are counted": (
        "triforce.backends.torch.model:distinct_experts", ("ids_NK.flatten", "ids_NK[0].flatten"),
    ),
    "shared experts are not counted": (
        "triforce.backends.torch.model:choose", ("torch.cat([ids[:, :chosen], shared], 1)", "ids[:, :chosen]"),
    ),
    "layers without experts count in the mean": (
        "triforce.backends.layerwise:_layers",
        ("sum(count > 0 for count in experts_by_layer)", "len(experts_by_layer)"),
    ),
    "shared experts are not priced": ("triforce.model.expert_unions:experts_touched", ("experts.shared + ", "")),
    "unions are not learnt": ("triforce.model.expert_unions:ExpertUnions.observe", ("if width > 1", "if width < 1")),
    "neighbours are taken to choose independently": (
        "triforce.model.expert_unions:ExpertUnions.multiple", ("rows * width**self.spread", "rows * width"),
    ),
    "prices keep to the uniform router": (
        "triforce.engine.model_loader:ModelPair.cost_model", ("decoder.unions", "None"),
    ),
}  # fmt: skip
SHARD = "triforce.backends.cpu.model"
RANK_FAULTS: dict[str, tuple[str, str, str, tuple[str, str]]] = {
    "each rank adds the biases of sums": (
        "gpt-oss", "summed", "triforce.checkpoint.weights:_zeroed_biases", ("if ranks.rank and", "if False and"),
    ),
    "a rank adds no bias to what its MLP gives": (
        "llama-biases", "exact", f"{SHARD}:MlpShard.__init__", ("layer.down_bias_C", "None"),
    ),
    "a rank norms rows of its own heads": (
        "olmo-2", "exact", f"{SHARD}:_norm_over_heads", (
            "ranks.gather(rank_NQ, rank_NQ.shape[1] * ranks.count)", "np.tile(rank_NQ, ranks.count)",
        ),
    ),
    "what ranks give is added without its norm": (
        "gemma-2", "exact", f"{SHARD}:NativeLayerShard._add", ("if norm:", "if not norm and norm:"),
    ),
    "what ranks give is added unscaled": (
        "granite-3", "exact", f"{SHARD}:NativeLayerShard._add", (
            " * np.float32(self.config.architecture.residual_scale)", "",
        ),
    ),
    "queries of ranks are not scaled": (
        "granite-3", "exact", f"{SHARD}:NativeLayerShard.__init__", (
            "query_scale=architecture.query_scale / self._query_scale", "query_scale=1.0",
        ),
    ),
    "each rank has the sink logits of the first": (
        "gpt-oss", "exact", f"{SOURCES}:_cut", (
            "return (span(shape[0], ranks),)",
            'return (slice(shape[0] // ranks.count) if "sink" in field else span(shape[0], ranks),)',
        ),
    ),
    "a rank reads its own part of what experts give": (
        "mixtral", "torch", f"{LAYER}._mlp", (
            "partial(ranks.inputs, width=inner)", "lambda some: torch.cat([some] * ranks.count, 1)",
        ),
    ),
}  # fmt: skip
MUTANTS = [
    *(
        Mutant(
            name,
            "tests/distributed/test_tensor_parallel_families.py::test_family_rank_mutant_is_noticed",
            (Edit(target, change),),
            (model, how),
        )
        for name, (model, how, target, change) in RANK_FAULTS.items()
    ),
    *(Mutant(name, UNIONS, (Edit(target, change),)) for name, (target, change) in UNION_FAULTS.items()),
    Mutant(
        "scores are capped behind the mask",
        TEST,
        (
            Edit(f"{KV}._attend", UNCAPPED),
            Edit(
                f"{ATTENTION}:_mix",
                ("top_GR1 = scores_GRS.amax", "scores_GRS = capped(scores_GRS, 2.0)\n    top_GR1 = scores_GRS.amax"),
            ),
        ),
        ("gemma-2",),
    ),
    *(Mutant(name, TEST, (Edit(target, change),), (model,)) for name, (model, target, change) in FAULTS.items()),
    *(Mutant(name, TIES, (Edit(target, change),), (model,)) for name, (model, target, change) in TIE_FAULTS.items()),
]
