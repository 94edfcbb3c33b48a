"""Faults of EAGLE heads: states of another token, draft tokens that see too much or too little."""

from __future__ import annotations

from tests.helpers.mutants.mutation import Edit, Mutant

LAYER = "triforce.eagle.torch_passes:EagleHeadLayer"
DRAFT_OUTPUTS = "triforce.training.distillation:draft_outputs"
STREAM = "triforce.training.episodes:TargetStream"
FAULTS: dict[str, tuple[str, str, tuple[str, str]]] = {
    "draft tokens see entries behind their anchor": (
        "later", f"{LAYER}._visible", ("in_reach_BNK & (key_B1K <= last_BN[..., None])", "in_reach_BNK"),
    ),
    "draft tokens go on from the target's states": (
        "later", DRAFT_OUTPUTS, ("out_BNC, fused_BNC, step_entries = layer.step(\n            fused_BNC,",
                           "out_BNC, _, step_entries = layer.step(fused_BTC[:, positions_N],"),
    ),
    "draft tokens forget the draft tokens before them": (
        "row", DRAFT_OUTPUTS, ("chain += [step_entries] if step else []", "pass"),
    ),
    "draft tokens of a row stand at one slot": (
        "row", DRAFT_OUTPUTS, ("chunk.slots_BT[:, positions_N]", "chunk.slots_BT[:, anchors_N]"),
    ),
    "a window one entry longer": (
        "window", f"{LAYER}._visible", ("> slots_BN[..., None] - self.config.window",
                                       ">= slots_BN[..., None] - self.config.window"),
    ),
    "sinks are met from afar": (
        "engine", f"{LAYER}._attend", ("slots_BN.clamp_max(config.sinks + config.window - 1)", "slots_BN"),
    ),
    "what a chunk leaves lacks the sinks": (
        "chunks", "triforce.training.distillation:PastEntries.keep_visible", ("(slots_K < sinks) | ", ""),
    ),
}  # fmt: skip
STATES: dict[str, tuple[str, tuple[str, str]]] = {
    "the state of the token itself": (
        f"{STREAM}.read", ("torch.cat((self.last_B1X, states_BTX[:, :-1]), 1)", "states_BTX"),
    ),
    "a chunk begins without the state before it": (f"{STREAM}.read", ("self.last_B1X = states_BTX[:, -1:]", "pass")),
    "states of another row": (
        f"{STREAM}.read", ("observe(ids_BT.numpy(),", "observe(ids_BT[:1].expand(B, T).numpy(),"),
    ),
}  # fmt: skip
INDUCTION: dict[str, tuple[str, tuple[str, str]]] = {
    "states tell the token behind their own": (
        "triforce.training.trainer:Trainer._sample", ("chunk.embeddings_BTC[:, :-1]", "chunk.embeddings_BTC[:, 1:]"),
    ),
    "a query asks for the token before": (
        "triforce.training.initial_weights:add_induction",
        ("(sharpness * names_KC, torch.zeros_like(names_KC))", "(torch.zeros_like(names_KC), sharpness * unused_CK.T)"),
    ),
    "values in another order than outputs": (
        "triforce.training.initial_weights:_copy_maps",
        ("outputs_CP.T @ fitted_CC", "outputs_CP.T.flip(0) @ fitted_CC"),
    ),
}  # fmt: skip
AGAIN: dict[str, tuple[str, tuple[str, str]]] = {
    "episodes are trained on once": (
        "triforce.training.training_config:TrainingConfig.due",
        ("for distance in (0, *self.again)", "for distance in (0,)"),
    ),
    "the first episode is not trained on again": (
        "triforce.training.training_config:TrainingConfig.due",
        ("if distance <= number", "if distance < max(number, 1)"),
    ),
    "half an episode is kept as a whole one": (
        "triforce.training.episodes:EpisodeReader.__call__",
        ("read_texts.append(text)", "read_texts.append(text); self._cached_texts[number] = read_texts"),
    ),
}  # fmt: skip
DRAFT = "triforce.eagle.eagle_draft:EagleHead"
PASSES = "triforce.eagle.torch_passes:TorchEagleHeadPasses"
VIEW = "triforce.eagle.view:EagleHeadView"
TIER: dict[str, tuple[str, str, tuple[str, str]]] = {
    "a draft token goes by the state of its own slot, of a token that was refused": (
        "reference", f"{PASSES}.forward", ("_on_device(previous_slots_BT)]", "_on_device(slots_BT)]"),
    ),
    "an entry is made of the state one slot on": (
        "torch", f"{DRAFT}.record_entries",
        ("(positions_N, token_slots_N, previous_slots_N)", "(positions_N, token_slots_N, token_slots_N)"),
    ),
    "states of a draft token stay where the target has passed": (
        "reference", f"{PASSES}.record_entries",
        ("memory_states_NC[token_slots_N] =", "memory_states_NC[token_slots_N * 0] ="),
    ),
    "states are of another row": (
        "company", f"{DRAFT}.record_entries",
        ("columns_N, states_SBTC", "columns_N, states_SBTC[:, [*range(len(ids_BT))][::-1]]"),
    ),
    "entries of the retrieval tier stay after a full verification": (
        "prompt", "triforce.eagle.eagle_draft:EntryRecordingDecoder.__call__",
        ("self.draft.record_entries(", "(batch.past_committed and ids_BT.shape[1] < 12) or self.draft.record_entries("),
    ),
    "what was refused is not fed anew": (
        "torch", f"{VIEW}.rewind", ("np.minimum(self._fed_B, lengths_B)", "self._fed_B"),
    ),
    "the window slides over the sinks": (
        "torch", f"{VIEW}._lists", ("np.where(index_U < sinks, 0, ints(dropped)[:, None])",
                                    "ints(dropped)[:, None]"),
    ),
    "the window stays where it was": ("torch", f"{VIEW}._lists", ("self._cached_lists[0] != dropped or ", "")),
    "a row that is swapped in has no entries": (
        "swapped", "triforce.kvcache.views.full:FullView.swap_in",
        ("pool.eagle_memory.write(pool.slots(row, 0, swapped.length), swapped.eagle_slots)", "pass"),
    ),
    "a row that is swapped in has no states": (
        "swapped", "triforce.kvcache.eagle_memory:EagleHeadMemory.write",
        ("self.states_NC[slots_N] = self.kv.array(contents.states_NC)", "pass"),
    ),
    "a saved prompt has no entries": (
        "saved", "triforce.disk_cache.prompt_file:SavedCache.restore",
        ("if pool.eagle_memory:", "if not pool.eagle_memory:"),
    ),
    "the disk cache has no entries": (
        "disk", "triforce.disk_cache.prefixes:_copy",
        ("pool.eagle_memory.write(slots_N, eagle_slots.part(entry_tokens))", "pass"),
    ),
}  # fmt: skip

BURST = Mutant(
    "a burst goes on where the window must move",
    "tests/engine/test_eagle_head_bursts.py::test_burst_mutant_is_noticed",
    (Edit(f"{VIEW}.steps", ("return steps_in_place(", "return limit or (")),),
)

RANKS = {
    "a rank notes no states": ("triforce.eagle.eagle_draft:EagleHead.record_entries", (
        "if len(token_slots_N):", "if len(token_slots_N) and not self.target.ranks.rank:",
    )),
    "head rows of the first rank alone": ("triforce.backends.tensor_parallel:ShardedModel.head_rows", (
        "return self._rows(self._part.head_rows, ids_N)",
        "return self._part.head_rows(ids_N % (self.config.vocab_size // self._ranks.count))",
    )),
    "a rank reads another embedding": ("triforce.engine.model_loader:_whole_embedding", (
        "dtype=decoder.dtype)", "dtype=decoder.dtype)[:: 1 - 2 * decoder.ranks.rank].copy()",
    )),
}  # fmt: skip
MUTANTS = (
    [BURST]
    + [
        Mutant(
            name,
            "tests/distributed/test_tensor_parallel_eagle.py::test_rank_eagle_mutant_is_noticed",
            (Edit(target, change),),
        )
        for name, (target, change) in RANKS.items()
    ]
    + [
        Mutant(
            name,
            "tests/training/test_distillation.py::test_draft_token_mutant_is_noticed",
            (Edit(target, change),),
            (check,),
        )
        for name, (check, target, change) in FAULTS.items()
    ]
    + [
        Mutant(name, "tests/training/test_trainer.py::test_stream_mutant_is_noticed", (Edit(target, change),))
        for name, (target, change) in STATES.items()
    ]
    + [
        Mutant(name, "tests/training/test_trainer.py::test_mutant_of_episodes_is_noticed", (Edit(target, change),))
        for name, (target, change) in AGAIN.items()
    ]
    + [
        Mutant(name, "tests/training/test_induction.py::test_induction_mutant_is_noticed", (Edit(target, change),))
        for name, (target, change) in INDUCTION.items()
    ]
    + [
        Mutant(name, "tests/engine/test_eagle_head.py::test_tier_mutant_is_noticed", (Edit(target, change),), (check,))
        for name, (check, target, change) in TIER.items()
    ]
)
