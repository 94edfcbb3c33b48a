"""Faults of feature drafts: states of another token, guesses that see too much or too little."""

from __future__ import annotations

from tests.helpers.mutants.mutation import Edit, Mutant

LAYER = "triforce.backends.torch.feature_layer:FeatureLayer"
GUESSES = "triforce.training.distillation:guesses"
STREAM = "triforce.training.target_stream:TargetStream"
FAULTS: dict[str, tuple[str, str, tuple[str, str]]] = {
    "guesses see entries behind their anchor": (
        "later", f"{LAYER}._scores", ("in_reach_BNK & (key_B1K <= last_BN[..., None])", "in_reach_BNK"),
    ),
    "guesses go on from the target's states": (
        "later", GUESSES, ("out_BNC, fused_BNC, own = layer.step(fused_BNC,",
                           "out_BNC, _, own = layer.step(fused_BTC[:, at_N],"),
    ),
    "guesses forget those that led to them": ("row", GUESSES, ("chain += [own] if step else []", "pass")),
    "guesses of a row stand at one slot": ("row", GUESSES, ("chunk.slots_BT[:, at_N]", "chunk.slots_BT[:, anchors_N]")),
    "a window one entry longer": (
        "window", f"{LAYER}._scores", ("> slots_BN[..., None] - self.config.window",
                                       ">= slots_BN[..., None] - self.config.window"),
    ),
    "sinks are met from afar": (
        "engine", f"{LAYER}._attend", ("slots_BN.clamp_max(config.sinks + config.window - 1)", "slots_BN"),
    ),
    "what a chunk leaves lacks the sinks": (
        "chunks", "triforce.training.distillation:Past.keep", ("(slots_K < sinks) | ", ""),
    ),
}  # fmt: skip
STATES: dict[str, tuple[str, tuple[str, str]]] = {
    "the state of the token itself": (
        f"{STREAM}.read", ("torch.cat((self.last_B1X, states_BTX[:, :-1]), 1)", "states_BTX"),
    ),
    "a chunk begins without the state before it": (f"{STREAM}.read", ("self.last_B1X = states_BTX[:, -1:]", "pass")),
    "states of another row": (f"{STREAM}.read", ("ids_BT[b : b + 1]", "ids_BT[:1]")),
}  # fmt: skip

MUTANTS = [
    Mutant(name, "tests/training/test_distillation.py::test_guess_mutant_is_noticed", (Edit(target, change),), (check,))
    for name, (check, target, change) in FAULTS.items()
] + [
    Mutant(name, "tests/training/test_trainer.py::test_stream_mutant_is_noticed", (Edit(target, change),))
    for name, (target, change) in STATES.items()
]
