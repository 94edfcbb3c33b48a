"""Fingerprints: what of a config they tell."""

from __future__ import annotations

from dataclasses import fields, replace

from tests.helpers.small_decoder import small_decoder
from triforce.checkpoint.weights import told
from triforce.model.architecture import Architecture


def test_fingerprint_tells_arithmetic_only_where_it_is_not_usual() -> None:
    """Else each version that knows another kind of model would refuse the drafts and prompts of the one before."""
    config = replace(small_decoder().config, architecture=Architecture())
    other = replace(config, architecture=Architecture(qk_norm="head"))
    assert {field.name for field in fields(Architecture)}.isdisjoint(name for name, _ in told(config))
    assert [*told(config), ("qk_norm", "head")] == told(other)
