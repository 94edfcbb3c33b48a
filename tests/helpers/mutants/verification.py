"""Faults of verification: of single guesses, of blocks, and of what tiers pass on."""

from __future__ import annotations

from tests.helpers.mutants.mutation import Edit, Mutant

TEST = "tests/laws/test_law_mutants.py::test_law_mutant_fails_its_checks"
RESIDUAL = "residual_BV = (p_BV - q_BV).clamp_min(0)"
ACCEPTED = "uniforms_BJ[:, 1:] * q_BK < p_BK"
GUESSES = [
    Mutant(
        "no residual anywhere",
        TEST,
        (Edit("triforce.speculation.verification:rejection", (RESIDUAL, "residual_BV = p_BV")),),
        ("one verification", "two tiers", "three tiers", "ngram", "the engine"),
    ),
    Mutant(
        "no residual in the middle tier only",  # the fault of the published code
        TEST,
        (
            Edit(
                "triforce.speculation.verification:Rejection.verify",
                ("probs_BJV, uniforms_BJ)", "probs_BJV, uniforms_BJ, tier == 1)"),
            ),
            Edit(
                "triforce.speculation.verification:rejection",
                ("uniforms_BJ: Tensor)", "uniforms_BJ: Tensor, middle: bool = False)"),
                (RESIDUAL, "residual_BV = p_BV if middle else (p_BV - q_BV).clamp_min(0)"),
            ),
        ),
        ("three tiers", "the engine"),
    ),
    Mutant(
        "draft law reported without temperature",
        TEST,
        (
            Edit(
                "triforce.speculation.tier:Tier.verify",
                (
                    "if self.keeps_logits:",
                    "if not self.below:\n"
                    "        raw_BJV = logits_BJV.double().softmax(-1)\n"
                    "        step = Draft(step.tokens_BK, raw_BJV, step.origins_BK, step.counts_B)\n"
                    "    if self.keeps_logits:",
                ),
            ),
        ),
        ("temperature",),
    ),
    Mutant(
        "bonus token treated as a rejection",
        TEST,
        (
            Edit(
                "triforce.speculation.verification:rejection",
                (
                    "F.pad(draft_probs_BKV, (0, 0, 0, 1))",
                    "torch.cat([draft_probs_BKV, draft_probs_BKV[:, -1:] if K else 0 * probs_BJV], 1)",
                ),
                (" * rejected_B[:, None]", ""),
            ),
        ),
        ("one verification", "two tiers", "three tiers"),
    ),
    Mutant(
        "padding accepted",
        TEST,
        (Edit("triforce.speculation.verification:_leading", ("(fits_BK & real_BK)", "fits_BK")),),
        ("one verification", "three tiers", "ngram", "seeded"),
    ),
    Mutant(
        "one uniform to accept and to draw",
        TEST,
        (Edit("triforce.speculation.verification:rejection", ("uniforms_BJ[:, 1:]", "uniforms_BJ[:, :-1]")),),
        ("one verification", "three tiers", "ngram"),
    ),
    Mutant(
        "accepted a little too easily",
        TEST,
        (Edit("triforce.speculation.verification:rejection", (ACCEPTED, f"0.99 * {ACCEPTED}")),),
        ("one verification",),
    ),
    Mutant(
        "an n-gram proposal reported as a uniform draw",
        TEST,
        (
            Edit(
                "triforce.speculation.ngram:NgramProposer.propose",
                (
                    "probs_BKV.scatter_(2, torch.from_numpy(tokens_BK)[..., None], 1.0)",
                    "probs_BKV.fill_(1 / sampling.vocab_size)",
                ),
            ),
        ),
        ("ngram", "ngram above a draft"),
    ),
    Mutant(
        "rewind forgotten",
        TEST,
        (Edit("triforce.speculation.tier:Tier.commit", ("self.rewind(longer)", "pass")),),
        ("gamma 1",),
    ),
    Mutant(
        "rewind not passed down",
        TEST,
        (
            Edit(
                "triforce.speculation.tier:Tier.rewind", ("    if self.below:\n        self.below.rewind(prefix)\n", "")
            ),
        ),
        ("acceptance",),
    ),
    Mutant(
        "last token kept in the cache",
        TEST,
        (Edit("triforce.speculation.tier:Tier.rewind", ("prefix.lengths_B - 1", "prefix.lengths_B")),),
        ("gamma 1",),
    ),
    Mutant(
        "noise reused after a rollback",
        TEST,
        (
            Edit(
                "triforce.speculation.verification:Rejection.verify",
                (
                    "    uniforms_BJ =",
                    "    self.noise.draws[tier] = torch.from_numpy((lengths_B - 2) * probs_BJV.shape[1])\n"
                    "    uniforms_BJ =",
                ),
            ),
        ),
        ("noise",),
    ),
    Mutant(
        "seeded proposals accepted unseen",
        TEST,
        (Edit("triforce.speculation.verification:seeded", (" == picks_BJ[:, :-1]", " >= picks_BJ[:, :-1]")),),
        ("seeded", "same text: triforce"),
    ),
]
RESIDUAL_THERE = "residual_BV = residual_BJV[rows_B, accepted_B]"
BLOCKS = [
    Mutant(
        "block: reach not clamped",
        TEST,
        (Edit("triforce.speculation.verification:block", ("(a * b).clamp_max(1)", "a * b")),),
        ("one block", "blocks of two tiers"),
    ),
    Mutant(
        "block: residual of single guesses",
        TEST,
        (
            Edit(
                "triforce.speculation.verification:block",
                (RESIDUAL_THERE, "residual_BV = (probs_BJV - draft_probs_BJV).clamp_min(0)[rows_B, accepted_B]"),
            ),
        ),
        ("one block",),
    ),
    Mutant(
        "block: accepted wherever it reaches",
        TEST,
        (
            Edit(
                "triforce.speculation.verification:block",
                ("uniforms_BJ * (residual_BJ + (1 - reach_BJ)) < residual_BJ", "uniforms_BJ < reach_BJ"),
            ),
        ),
        ("one block", "blocks of two tiers"),
    ),
    Mutant(
        "block: ends at the first rejection",
        TEST,
        (
            Edit(
                "triforce.speculation.verification:block",
                ("(passes_BJ * columns_J).amax(1)", "passes_BJ[:, 1:].long().cumprod(1).sum(1)"),
            ),
        ),
        ("one block", "blocks of two tiers", "blocks of three tiers"),
    ),
    Mutant(
        "block: padding accepted",
        TEST,
        (Edit("triforce.speculation.verification:block", ("<= counts_B[:, None]", "<= K")),),
        ("one block",),
    ),
    Mutant(
        "block: last guess judged by padding",
        TEST,
        (Edit("triforce.speculation.verification:block", (" * (columns_J < counts_B[:, None])[..., None]", "")),),
        ("one block",),
    ),
    Mutant(
        "block: no residual in the middle tier",
        TEST,
        (
            Edit(
                "triforce.speculation.verification:BlockRejection.verify",
                ("probs_BJV, uniforms_BJ)", "probs_BJV, uniforms_BJ, tier == 1)"),
            ),
            Edit(
                "triforce.speculation.verification:block",
                ("uniforms_BJ: Tensor)", "uniforms_BJ: Tensor, middle: bool = False)"),
                (RESIDUAL_THERE, "residual_BV = (probs_BJV if middle else residual_BJV)[rows_B, accepted_B]"),
            ),
        ),
        ("blocks of three tiers",),
    ),
]
MUTANTS = GUESSES + BLOCKS
