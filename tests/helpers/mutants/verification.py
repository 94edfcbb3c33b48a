"""Faults of verification: of single draft tokens, of blocks, and of what tiers pass on."""

from __future__ import annotations

from tests.helpers.mutants.mutation import Edit, Mutant

TEST = "tests/laws/test_law_mutants.py::test_law_mutant_fails_its_checks"
RESIDUAL = "_residual(p_BV - _at(draft_probs_BJV, accepted_B), p_BV)"
ACCEPTED = "uniforms_BJ[:, 1:] * q_BK < p_BK"
SINGLE_TOKENS = [
    Mutant(
        "no residual anywhere",
        TEST,
        (Edit("triforce.speculation.verification:rejection", (RESIDUAL, "p_BV")),),
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
                ("uniforms_BJ: Array)", "uniforms_BJ: Array, middle: bool = False)"),
                (RESIDUAL, f"p_BV if middle else {RESIDUAL}"),
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
                    "_at(draft_probs_BJV, accepted_B)",
                    "_at(draft_probs_BJV, "
                    "on_device_of(np.minimum(to_host(accepted_B), draft.counts_B - 1), probs_BJV))",
                ),
            ),
        ),
        ("one verification", "two tiers", "three tiers"),
    ),
    Mutant(
        "padding accepted",
        TEST,
        (Edit("triforce.speculation.verification:_leading", ("fits_BK & _real(draft, fits_BK)", "fits_BK")),),
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
                    "np.put_along_axis(probs_BKV, tokens_BK[..., None], 1.0, axis=2)",
                    "probs_BKV[:] = 1 / sampling.vocab_size",
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
                    "    draws_B = (lengths_B - 2) * probs_BJV.shape[1]\n"
                    "    self.noise.draws[tier] = on_device_of(draws_B, self.noise.draws)\n"
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
RESIDUAL_THERE = "_at(residual_BJV, accepted_B)"
BLOCKS = [
    Mutant(
        "block: reach not clamped",
        TEST,
        (Edit("triforce.speculation.verification:block", ("xp.minimum(a * b, one_B)", "a * b")),),
        ("one block", "blocks of two tiers"),
    ),
    Mutant(
        "block: residual of single draft tokens",
        TEST,
        (
            Edit(
                "triforce.speculation.verification:block",
                (RESIDUAL_THERE, "_at(_positive(probs_BJV - draft_probs_BJV), accepted_B)"),
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
                (
                    "xp.max(xp.where(passes_BJ, ends_BJ, 0), axis=1)",
                    "xp.sum(xp.cumulative_prod(xp.astype(passes_BJ[:, 1:], xp.int64), axis=1), axis=1)",
                ),
            ),
        ),
        ("one block", "blocks of two tiers", "blocks of three tiers"),
    ),
    Mutant(
        "block: padding accepted",
        TEST,
        (Edit("triforce.speculation.verification:block", ("<= draft.counts_B[:, None]", "<= K")),),
        ("one block",),
    ),
    Mutant(
        "block: last draft token judged by padding",
        TEST,
        (Edit("triforce.speculation.verification:_drafted", (" * _real(draft, probs_BJV)[..., None]", "")),),
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
                ("uniforms_BJ: Array)", "uniforms_BJ: Array, middle: bool = False)"),
                (RESIDUAL_THERE, "_at(probs_BJV if middle else residual_BJV, accepted_B)"),
            ),
        ),
        ("blocks of three tiers",),
    ),
]
MUTANTS = SINGLE_TOKENS + BLOCKS
