"""The code broken on purpose: edits of the source of one function, put in its place for the length of a test."""

from __future__ import annotations

import inspect
import textwrap
from dataclasses import dataclass
from types import ModuleType

import pytest

from triforce.backends.torch import attention
from triforce.backends.torch.kv import TorchKV
from triforce.kvcache import RetrievalView
from triforce.speculation import BlockRejection, NgramProposer, Rejection, Tier, verification


class Edit:
    """In the source of `owner.name`, each `old` occurs exactly once and becomes its `new`."""

    def __init__(self, owner: type | ModuleType, name: str, *changes: tuple[str, str]) -> None:
        self.owner, self.name, self.changes = owner, name, changes

    def function(self) -> object:
        found = inspect.getattr_static(self.owner, self.name)
        source = textwrap.dedent(inspect.getsource(found.fget if isinstance(found, property) else found))
        for old, new in self.changes:
            assert source.count(old) == 1, f"{old!r} is not once in {self.name}"
            source = source.replace(old, new)
        module, names = inspect.getmodule(self.owner), {}
        exec(compile(source, f"<broken {self.name}>", "exec"), vars(module), names)
        return names[self.name]


@dataclass(frozen=True)
class Mutant:
    """One fault. `caught_by`: checks that must fail on it; the others may."""

    name: str
    edits: list[Edit]
    caught_by: tuple[str, ...]

    def apply(self, patch: pytest.MonkeyPatch) -> None:
        for edit in self.edits:
            patch.setattr(edit.owner, edit.name, edit.function())


OWED = "owed_BV = (p_BV - q_BV).clamp_min(0)"
JUDGED = "uniforms_BJ[:, 1:] * q_BK < p_BK"
DECISIONS = [
    Mutant(
        "no residual anywhere",
        [Edit(verification, "rejection", (OWED, "owed_BV = p_BV"))],
        ("one verification", "two tiers", "three tiers", "ngram", "the engine"),
    ),
    Mutant(
        "no residual in the middle tier only",  # the fault of the published code
        [
            Edit(Rejection, "verify", ("probs_BJV, uniforms_BJ)", "probs_BJV, uniforms_BJ, tier == 1)")),
            Edit(
                verification,
                "rejection",
                ("uniforms_BJ: Tensor)", "uniforms_BJ: Tensor, middle: bool = False)"),
                (OWED, "owed_BV = p_BV if middle else (p_BV - q_BV).clamp_min(0)"),
            ),
        ],
        ("three tiers", "the engine"),
    ),
    Mutant(
        "raw q reported",
        [
            Edit(
                Tier,
                "verify",
                (
                    "if self.keeps_logits:",
                    "if not self.below:\n"
                    "        raw_BJV = logits_BJV.double().softmax(-1)\n"
                    "        step = Draft(step.tokens_BK, raw_BJV, step.origins_BK, step.counts_B)\n"
                    "    if self.keeps_logits:",
                ),
            )
        ],
        ("temperature",),
    ),
    Mutant(
        "bonus treated as refusal",
        [
            Edit(
                verification,
                "rejection",
                (
                    "F.pad(laws_BKV, (0, 0, 0, 1))",
                    "torch.cat([laws_BKV, laws_BKV[:, -1:] if K else 0 * probs_BJV], 1)",
                ),
                (" * refused_B[:, None]", ""),
            )
        ],
        ("one verification", "two tiers", "three tiers"),
    ),
    Mutant(
        "padding accepted",
        [Edit(verification, "_leading", ("(fits_BK & real_BK)", "fits_BK"))],
        ("one verification", "three tiers", "ngram", "seeded"),
    ),
    Mutant(
        "one uniform to accept and to draw",
        [Edit(verification, "rejection", ("uniforms_BJ[:, 1:]", "uniforms_BJ[:, :-1]"))],
        ("one verification", "three tiers", "ngram"),
    ),
    Mutant(
        "accepted a little too easily",
        [Edit(verification, "rejection", (JUDGED, f"0.99 * {JUDGED}"))],
        ("one verification",),
    ),
    Mutant(
        "a guess from the text reported as one of many",
        [
            Edit(
                NgramProposer,
                "propose",
                (
                    "F.one_hot(torch.from_numpy(tokens_BK), sampling.vocab_size)[..., :law_size].double()",
                    "torch.full((*tokens_BK.shape, law_size), 1 / sampling.vocab_size, dtype=torch.float64)",
                ),
            )
        ],
        ("ngram", "ngram above a draft"),
    ),
    Mutant("rewind forgotten", [Edit(Tier, "settle", ("self.rewind(kept)", "pass"))], ("gamma 1",)),
    Mutant(
        "rewind not passed down",
        [Edit(Tier, "rewind", ("    if self.below:\n        self.below.rewind(prefix)\n", ""))],
        ("acceptance",),
    ),
    Mutant(
        "last token kept in the cache",
        [Edit(Tier, "rewind", ("prefix.lengths_B - 1", "prefix.lengths_B"))],
        ("gamma 1",),
    ),
    Mutant(
        "noise reused after a rollback",
        [
            Edit(
                Rejection,
                "verify",
                (
                    "    uniforms_BJ =",
                    "    self.noise.draws[tier] = torch.from_numpy((lengths_B - 2) * probs_BJV.shape[1])\n"
                    "    uniforms_BJ =",
                ),
            )
        ],
        ("noise",),
    ),
    Mutant(
        "seeded guesses kept unseen",
        [Edit(verification, "seeded", (" == picks_BJ[:, :-1]", " >= picks_BJ[:, :-1]"))],
        ("seeded", "same text: triforce"),
    ),
]
OWED_HERE = "owed_BV, p_BV = owed_BJV[rows_B, kept_B]"
BLOCKS = [
    Mutant(
        "a block's reach grows",
        [Edit(verification, "block", ("(a * b).clamp_max(1)", "a * b"))],
        ("one block", "blocks of two tiers"),
    ),
    Mutant(
        "a block owes as if each guess were alone",
        [
            Edit(
                verification,
                "block",
                (OWED_HERE, "owed_BV, p_BV = (probs_BJV - laws_BJV).clamp_min(0)[rows_B, kept_B]"),
            )
        ],
        ("one block",),
    ),
    Mutant(
        "a block ends wherever it reaches",
        [Edit(verification, "block", ("uniforms_BJ * (owed_BJ + (1 - reach_BJ)) < owed_BJ", "uniforms_BJ < reach_BJ"))],
        ("one block", "blocks of two tiers"),
    ),
    Mutant(
        "a block ends at its first refusal",
        [Edit(verification, "block", ("(passes_BJ * columns_J).amax(1)", "passes_BJ[:, 1:].long().cumprod(1).sum(1)"))],
        ("one block", "blocks of two tiers", "blocks of three tiers"),
    ),
    Mutant(
        "padding accepted in a block", [Edit(verification, "block", ("<= counts_B[:, None]", "<= K"))], ("one block",)
    ),
    Mutant(
        "a block's last guess judged by padding",
        [Edit(verification, "block", (" * (columns_J < counts_B[:, None])[..., None]", ""))],
        ("one block",),
    ),
    Mutant(
        "no residual in the blocks of the middle tier",
        [
            Edit(BlockRejection, "verify", ("probs_BJV, uniforms_BJ)", "probs_BJV, uniforms_BJ, tier == 1)")),
            Edit(
                verification,
                "block",
                ("uniforms_BJ: Tensor)", "uniforms_BJ: Tensor, middle: bool = False)"),
                (OWED_HERE, "owed_BV, p_BV = (probs_BJV if middle else owed_BJV)[rows_B, kept_B]"),
            ),
        ],
        ("blocks of three tiers",),
    ),
]
WRITE_ONCE = """\
if not hasattr(self, "written"):
        self.written_LS = torch.zeros(self.keys_LGSD.shape[0], self.keys_LGSD.shape[2], dtype=torch.bool)
        self.written = True
    old_N1 = self.written_LS[layer, slots_N, None]
    k_GND = torch.where(old_N1, self.keys_LGSD[layer][:, slots_N], k_GND)
    v_GND = torch.where(old_N1, self.values_LGSD[layer][:, slots_N], v_GND)
    self.written_LS[layer, slots_N] = True
    """
MEMORIES = [
    Mutant(
        "stale KV after a rollback",  # the slot of a refused guess keeps what the guess wrote
        [Edit(TorchKV, "put", (FIRST := "self.keys_LGSD[layer].index_copy_", WRITE_ONCE + FIRST))],
        ("same text: draft", "same KV: draft"),
    ),
    Mutant(
        "a lower tier rewrites a committed slot",
        [
            Edit(
                RetrievalView,
                "lengths_B",
                (
                    "np.maximum(self.ahead_B, self.full.lengths_B)",
                    "np.where(self.ahead_B > 0, self.ahead_B, self.full.lengths_B)",
                ),
            )
        ],
        ("same KV: retrieval", "same KV: triforce", "same text: triforce"),
    ),
    Mutant(
        "wrong KV group",  # query head h reads group h modulo G
        [
            Edit(
                attention,
                "fold",
                ("q_THD.transpose(0, 1)", "q_THD.transpose(0, 1).view(H // G, G, T, D).transpose(0, 1)"),
            ),
            Edit(
                attention,
                "unfold",
                (
                    "mixed_GRD.reshape(-1, T, mixed_GRD.shape[-1])",
                    "mixed_GRD.unflatten(1, (-1, T)).transpose(0, 1).reshape(-1, T, mixed_GRD.shape[-1])",
                ),
            ),
        ],
        ("same text: ar", "same KV: ar"),
    ),
]
