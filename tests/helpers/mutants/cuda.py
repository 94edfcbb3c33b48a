"""Faults of the CUDA backend: offloaded pages, the copy stream, waits for the device, and the fused sampler."""

from __future__ import annotations

from tests.helpers.mutants.mutation import Edit, ModuleEdit, Mutant, Swap

OFFLOAD = "triforce.backends.cuda.offload"
MANAGER = f"{OFFLOAD}.residency:OffloadManager"
LAYOUT = f"{OFFLOAD}.frames:DeviceLayout"
BUFFERS = f"{OFFLOAD}.frames:Buffers"
KV = f"{OFFLOAD}.kv:TritonOffloadedKV"
PAGES: dict[str, tuple[str, tuple[str, str]]] = {
    "pages of a text that ended are still found": (f"{MANAGER}.drop", ("self._publish_write_slots(pages)", "pass")),
    "a text that is cut goes on in an empty page": (
        f"{MANAGER}.begin_write",
        ("self.layout.store_to_frames(self.layout.cached_index, *self.places_of(rewritten_pages))", "pass"),
    ),
    "new tokens are not laid over the stored page": (
        f"{KV}._open", ("layout.frames_to_buffer(layer, buffer, *streams.write_slot_places)", "pass"),
    ),
    "a pass leaves what it writes in the buffer": (
        f"{KV}._close", ("manager.layout.buffer_to_frames(layer, buffer, *streams.written_places)", "pass"),
    ),
    "written pages are thought to be stored": (
        f"{OFFLOAD}.frames:WriteSlots.write", ("self._dirty.update(pages)", "pass"),
    ),
    "pages are evicted without being stored": (
        f"{MANAGER}.store", ("self.layout.frames_to_store(self.layout.cached_index, *self.places_of(pages))", "pass"),
    ),
    "an evicted page is still found": (
        f"{OFFLOAD}.frames:WorkingSet.take", ("frames_LGP.scatter_(2, evicted_LGN, 0)", "pass"),
    ),
    "a layer that becomes resident is empty": (f"{LAYOUT}.exchange", ("memory_GSD.copy_(buffer_GSD)", "pass")),
    "a layer that was resident is not stored": (
        f"{LAYOUT}.exchange", ("stored.copy_(on_device, non_blocking=True)", "pass"),
    ),
    "a resident layer keeps its working set": (f"{MANAGER}.prefer", ("self.working.clear(admitted_layer)", "pass")),
    "keys of another KV head are read": (
        f"{LAYOUT}.at_frames", ("self._heads_G1 * self._frames", "(1 - self._heads_G1) * self._frames"),
    ),
}  # fmt: skip
COPIES: dict[str, tuple[str, tuple[str, str]]] = {
    "a buffer is filled while it is in use": (
        f"{BUFFERS}.fill", ("self._stream.copy_after(self._free.pop(buffer))", "self._free.pop(buffer)"),
    ),
    "use of a buffer is not recorded": (f"{BUFFERS}.release", ("self._free[buffer] = event", "pass")),
    "a buffer is used before it is filled": (
        f"{BUFFERS}.use", ("self._stream.compute_after(self._ready[buffer])", "pass"),
    ),
    "one buffer for all copies": (f"{BUFFERS}.fill", ("next(iter(self._free))", "min(self._free)")),
    "a buffer is copied out before it is computed": (f"{BUFFERS}.release", ("self._stream.copy_after(event)", "pass")),
    "stored pages are not waited for": (
        f"{KV}._prepare", ("manager.stream.copy_after(manager.stream.record_compute())", "pass"),
    ),
}  # fmt: skip
TRITON = "triforce.backends.cuda.triton"
SAMPLER, TRUNCATION, RNG = f"{TRITON}.sampler", f"{TRITON}.truncation", f"{TRITON}.rng"
PARTS = f"{TRITON}.column_parts"
USERS = (SAMPLER, PARTS, "triforce.backends.cuda.sampler")
DRAWS: dict[str, tuple[str, str, str, str]] = {
    "one too many among equals": (TRUNCATION, "rank_N <= room", "rank_N <= room + 1", "lowest ids"),
    "equals counted in each block alone": (TRUNCATION, "rank_N = level + ", "rank_N = ", "many equals"),
    "nucleus one token too large": (
        TRUNCATION, "(nucleus_mass < mass) & (room", "(nucleus_mass <= mass) & (room", "exact masses",
    ),
    "nucleus by the sum of all at once": (
        TRUNCATION, "nucleus_mass = nucleus_mass + edge", "nucleus_mass = tl.sum(heavy_N, 0) + (room + 1) * edge",
        "exact masses",
    ),
    "nucleus edge between two values": (TRUNCATION, "return low\n", "return 0.5 * (low + high) * 0.999\n", "nuclei"),
    "no more than the largest": (TRUNCATION, "tl.where(k == 1, peak, low)", "peak", "many equals"),
    "fused: no residual": (SAMPLER, "rejected, other=0.0), 0.0)", "rejected & False, other=0.0), 0.0)", "residuals"),
    "fused: accepted a little too easily": (SAMPLER, "uniform * q < p", "uniform * q < 1.01 * p", "exact law"),
    "fused: one uniform to accept and to draw": (SAMPLER, "uniforms + 1 + j", "uniforms + j", "residuals"),
    "fused: last column left out": (SAMPLER, "j <= last_column", "j < last_column", "picks"),
    "fused: noise of the neighbour": (RNG, "tl.where(token_N % 2 == 0, w0, w2)", "w0", "far noise"),
    "fused: noise of another position": (SAMPLER, "tl.load(places + b) + j", "tl.load(places + b)", "picks"),
    "parts: scores below a part's own peak": (
        PARTS, "(x_N.to(tl.float64) - peak)", "(x_N.to(tl.float64) - part_peak)", "in parts: many equals",
    ),
    "parts: one less than the k largest of a part": (
        PARTS, "0) >= k, higher", "0) >= k - 1, higher", "in parts: largest in one part",
    ),
    "parts: equals of the k-th left out": (
        PARTS, "return order_N >= threshold", "return order_N > threshold", "in parts: largest in one part",
    ),
    "parts: a part is left out by its smallest score": (
        PARTS, "/ temperature >= min_score:", "/ temperature > min_score:", "in parts: lowest ids",
    ),
    "parts: light tokens weigh nothing": (
        PARTS, "total = tl.sum(value_N, 0)", "total = tl.sum(tl.where(value_N >= light, value_N, 0.0), 0)",
        "in parts: nuclei",
    ),
    "parts: the last of the list is left out": (
        PARTS, "joined_counts + cell, tl.sum(kept_C, 0)", "joined_counts + cell, tl.sum(kept_C, 0) - 1",
        "in parts: many equals",
    ),
    "parts: a nucleus ends at the first power of two": (
        PARTS, "tl.where(enough_P, p_P, P)", "tl.where(enough_P, 0, P)", "in parts: nuclei",
    ),
    "parts: cuts do not shorten the list": (
        PARTS, "tl.store(counts + cell, count)", "tl.store(counts + cell, count, mask=count < 0)",
        "in parts: many equals",
    ),
    "parts: the first part's winner": (
        PARTS, "best = tl.max(best_C, 0)", "best = tl.sum(tl.where(c_C == 0, best_C, 0.0), 0)",
        "in parts: far noise",
    ),
    "parts: no residual": (
        PARTS, "rejected, other=0.0), 0.0)", "rejected & False, other=0.0), 0.0)", "in parts: residuals",
    ),
    "parts: parts before are forgotten": (
        PARTS, "(earlier_mass + tl.cumsum", "(0 * earlier_mass + tl.cumsum", "in parts: residuals",
    ),
    "parts: accepted a little too easily": (
        PARTS, "uniform * q < p", "uniform * q < 1.01 * p", "in parts: exact law",
    ),
    "parts: noise of another position": (
        PARTS, "position = tl.load(places + b) + j", "position = tl.load(places + b)", "in parts: picks",
    ),
}  # fmt: skip
ATTENTION = f"{TRITON}.attention"
MERGES: dict[str, tuple[str, str]] = {
    "merge: only splits that are read at once": (
        "tl.range(0, used, SPLITS, num",
        "tl.range(0, min(used, SPLITS), SPLITS, num",
    ),
    "merge: the first dimensions everywhere": ("dims * DIMS + tl.arange(0, DIMS)", "0 * dims + tl.arange(0, DIMS)"),
    "merge: splits hang from no peak": ("- base_R[None, :])", "- 0 * base_R[None, :])"),
}
TILES, POINTWISE = f"{TRITON}.kv_tiles", f"{TRITON}.pointwise"
SCENE = "tests.helpers.cuda.scene"
CODES: dict[str, tuple[str, tuple[str, str], str]] = {
    "codes: the scale of the next slot": (
        TILES, ("D // 2 + slot % LANES", "D // 2 + (slot + 1) % LANES"), "odd units",
    ),
    "codes: two slots have one scale": (
        TILES, ("tl.join(first_P, tl.where(", "tl.join(second_P, tl.where("), "attention",
    ),
    "codes: what is behind the end has scales": (
        TILES, ("tl.where(key_P + 1 < end, second_P, 0.0)", "second_P"), "one unit",
    ),
    "codes: a page of codes begins without scales before it": (
        TILES, ("(LANES * (D + 2)) + slot", "(LANES * D) + slot"), "rows",
    ),
    "codes: scales are rounded down": (TILES, ("+ 0xFFFF) & -65536", "+ 0) & -65536"), "rows"),
    "codes: a query's scale is left out": (
        ATTENTION, (".to(tl.float32) * q_scale_R[:, None]", ".to(tl.float32)"), "attention",
    ),
    "codes: a query that is no number is one": (TILES, (", 127.0) + tl.sum(x_MD * 0.0, 1)", ", 127.0)"), "no number"),
    "rotated heads: keys only": (POINTWISE, ("rotated_heads(v_MD, d_1D, HADAMARD_SIZE)", "v_MD"), "rows"),
    "rotated heads: mixed values are not rotated back": (
        ATTENTION, ("d[None, :], HADAMARD_SIZE)", "d[None, :], 1)"), "rotated back",
    ),
    "rotated heads: halves are not subtracted": (TILES, ("partner_MD - x_MD", "partner_MD + x_MD"), "rows"),
}  # fmt: skip
WEIGHTS = f"{TRITON}.weight_tiles"
PRODUCTS: dict[str, tuple[str, str]] = {
    "weights: both halves of a group have one scale": ("half_MG1 if BY_HALF else scale_MG1", "scale_MG1"),
    "weights: the offset of codes is left out": ("(both_MGX & 15) - OFFSET", "(both_MGX & 15)"),
    "weights: the least of a group is left out": ("second_MGX += minimum_MG1", "pass"),
    "weights: scales are those of the turn before": ("min(eight + 1, stop - 1)", "max(eight, start)"),
    "weights: all parts begin with the first input": ("tl.program_id(2) * eights_per_part", "0 * eights_per_part"),
    "weights: the last part is left out": ("for p in range(P):", "for p in range(P - 1):"),
    "weights: the last inputs are those of the first half": ("x_NX = tl.load(at_NX + HALF,", "x_NX = tl.load(at_NX,"),
}
DRAFT, STEP = "triforce.backends.cuda.model", f"{TRITON}.draft_step"
DRAFTS: dict[str, tuple[Edit | ModuleEdit, str]] = {
    "draft: all tokens are drawn with the noise of the first": (
        ModuleEdit(STEP, ("tl.load(places + b, mask=real, other=0) + 1", "tl.load(places + b, mask=real, other=0)"),
                   users=(DRAFT,)), "Seeded",
    ),
    "draft: the next token is written over the last": (
        ModuleEdit(STEP, ("tl.load(starts + b, mask=real, other=0) + count", "tl.load(starts + b, mask=real, other=0)"),
                   users=(DRAFT,)), "Seeded",
    ),
    "draft: uniforms of the first draft come again": (
        Edit(f"{DRAFT}:DraftInputs.fill", ("self.draws_B[batch_rows] = draws.offsets_B", "pass")), "Rejection",
    ),
    "draft: settings of the first batch stay": (
        Edit(
            f"{DRAFT}:DraftInputs.fill",
            ("draws.settings_5B is not self._loaded_settings_5B", "self._loaded_settings_5B is None"),
        ), "Seeded",
    ),
}  # fmt: skip
HERE = "tests/backends/cuda/test_"
MUTANTS = [
    *(
        Mutant(name, f"{HERE}cuda_offload_law.py::test_cuda_offload_mutant_is_caught", (Edit(target, change),))
        for name, (target, change) in PAGES.items()
    ),
    *(
        Mutant(name, f"{HERE}copy_stream.py::test_copy_stream_mutant_races", (Edit(target, change),))
        for name, (target, change) in COPIES.items()
    ),
    *(
        Mutant(
            name,
            f"{HERE}cuda_sampler_mutants.py::test_cuda_sampler_mutant_fails_its_check",
            (ModuleEdit(module, (old, new), users=USERS),),
            (check,),
        )
        for name, (module, old, new, check) in DRAWS.items()
    ),
    *(
        Mutant(
            name,
            f"{HERE}triton_attention.py::test_attention_mutant_fails_its_check",
            (ModuleEdit(ATTENTION, change, users=(ATTENTION,)),),
        )
        for name, change in MERGES.items()
    ),
    *(
        Mutant(
            name,
            f"{HERE}triton_codes.py::test_codes_mutant_fails_its_check",
            (ModuleEdit(module, change, users=(ATTENTION, POINTWISE, SCENE)),),
            (check,),
        )
        for name, (module, change, check) in CODES.items()
    ),
    *(
        Mutant(
            name,
            f"{HERE}packed_weights.py::test_packed_weight_mutant_fails_its_check",
            (ModuleEdit(WEIGHTS, change, users=("tests.helpers.cuda.packed_checks",)),),
        )
        for name, change in PRODUCTS.items()
    ),
    *(
        Mutant(name, f"{HERE}cuda_fused_draft.py::test_cuda_draft_mutant_changes_a_draft", (edit,), (coupling,))
        for name, (edit, coupling) in DRAFTS.items()
    ),
    Mutant(
        "a selection asks the device",
        f"{HERE}host_syncs.py::test_host_sync_mutant_is_noticed",
        (
            Edit(
                "triforce.kvcache.selection:Observed.pick",
                ("if observation.grain == chunk:", "if observation.mass_LGU.sum() > 0:"),
            ),
        ),
    ),
    Mutant(
        "an offloaded layer is neither fetched nor stored",
        f"{HERE}cuda_ranks_offload.py::test_offload_mutant_of_ranks_changes_the_text",
        (
            Edit(f"{KV}._prepare", ("streams.runs = runs_of(pages_N.tolist())", "pass")),
            Swap(f"{KV}._close", lambda _: lambda *_: None),
        ),
    ),
]
