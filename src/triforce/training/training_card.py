"""Figures of a trained draft: the share of draft tokens that the target accepts, by text, temperature and context."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from operator import mul
from typing import Any

import torch

from triforce.tables import Table, percent, tokens
from triforce.training.distillation import SAMPLED_TEMPERATURE, Subject, shares_at_length
from triforce.training.trainer import Trainer, torch_threads

MEASURING_SHARE = 0.5
"""Share of the training time that figures of long texts may take. Slower ones are left out."""


def measure(trainer: Trainer) -> dict[str, Any]:
    """Return the figures of a draft on held-out texts, which it was not trained on."""
    config = trainer.config
    subject = trainer.subject
    rows = []
    start = trainer.clock()
    for kind, context in _kinds(trainer):
        predicted_seconds = (trainer.clock() - start) * context / config.width  # from the time of the shortest texts
        if context > config.width and predicted_seconds > trainer.state.seconds * MEASURING_SHARE:
            continue
        generator = torch.Generator().manual_seed(config.seed)
        for temperature, shares in _shares(trainer, subject, kind, context, generator).items():
            rows.append({"kind": kind, "context": context, "temperature": temperature, "kept": shares})
    heldout_N = trainer.texts.heldout_N
    state = trainer.state
    return {
        "acceptance": rows,
        "proposed": float(torch.isin(heldout_N, subject.tokens_M).float().mean()),
        "choices": len(subject.tokens_M),
        "trained_tokens": state.tokens,
        "updates": state.updates,
        "minutes": state.seconds / 60,
    }


def _kinds(trainer: Trainer) -> list[tuple[str, int]]:
    """Return pairs of a kind of text and its length in tokens: the width, and the longest length of held-out texts."""
    width = trainer.config.width
    heldout_tokens = len(trainer.texts.heldout_N)
    lengths = [length for length in trainer.episodes.lengths if length <= heldout_tokens]
    return [("texts", length) for length in sorted({width, lengths[-1]})] + [("answers", width)]


def _shares(
    trainer: Trainer, subject: Subject, kind: str, context: int, generator: torch.Generator
) -> dict[str, list[float]]:
    config = trainer.config
    ids_N = trainer.texts.heldout_N
    layers = trainer.draft.state_layers
    shares_by_temperature = {}
    for n, temperature in enumerate(("0", f"{SAMPLED_TEMPERATURE:g}")):
        if kind == "texts":
            ids_BL = trainer.texts.windows(ids_N, config.heldout_rows, context, generator)
        else:
            args = (ids_N, context, config.seed + n, (float(temperature),), config.heldout_rows, generator)
            ids_BL = trainer.episodes.answers(*args)
        with torch_threads(trainer.threads):
            shares = shares_at_length(trainer.decoder, layers, subject, ids_BL, config.width, config.steps)
        if kind == "texts":
            return shares
        shares_by_temperature[temperature] = shares[temperature]
    return shares_by_temperature


def table(card: dict[str, Any]) -> Table:
    """Return the figures of a draft as a table."""
    note = (
        f"Texts were held out; answers are the target's own. The draft chooses from {card['choices']:,} tokens, "
        f"which make up {percent(card['proposed'])} of the held-out texts. Trained on {card['trained_tokens']:,} "
        f"tokens in {card['minutes']:.0f} minutes."
    )
    return acceptance_table("Acceptance of the draft", note, card["acceptance"])


def acceptance_table(title: str, note: str, rows: Sequence[dict[str, Any]]) -> Table:
    """Return a table with a line for each kind of text, context and temperature. note: added after the explanation."""
    lines = [
        [
            f"{row['kind']}, T = {row['temperature']}",
            tokens(row["context"]),
            *(f"{share:.3f}" for share in row["kept"]),
            f"{1 + sum(accumulate(row['kept'], mul)):.2f}",
        ]
        for row in rows
    ]
    words = (
        "Share of first, second and later draft tokens that the target keeps, if it kept the draft tokens before: at "
        f"temperature 0, and under the seeded coupling at {SAMPLED_TEMPERATURE:g}. The last column is the tokens that "
        "one verification of all these draft tokens gives. "
    )
    draft_tokens = range(1, len(rows[0]["kept"]) + 1)
    return Table(title, words + note, ["", "context", *map(str, draft_tokens), "tokens"], lines)
