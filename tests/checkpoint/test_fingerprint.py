"""Fingerprints: the fields of a config that they include."""

from __future__ import annotations

from dataclasses import fields, replace

from tests.helpers.small_decoder import small_decoder
from triforce.checkpoint.weights import told
from triforce.model.config import Architecture, Experts


def test_fingerprint_tells_arithmetic_only_where_it_is_not_usual() -> None:
    """Otherwise each version with another kind of model would refuse the drafts and prompts of the version before."""
    config = replace(small_decoder().config, architecture=Architecture())
    changed_config = replace(config, architecture=Architecture(qk_norm="head"))
    assert {field.name for field in fields(Architecture)}.isdisjoint(name for name, _ in told(config))
    assert [*told(config), ("qk_norm", "head")] == told(changed_config)


def test_fingerprint_of_a_mixture_stays_what_it_was() -> None:
    """The first four fields of a mixture are always included, and others only where they are not usual."""
    mixture = Experts(8, 2, renormalised=True)
    config = replace(small_decoder().config, architecture=Architecture(experts=mixture))
    plain = told(replace(config, architecture=Architecture()))
    assert told(config) == [*plain, ("experts", mixture)]
    assert repr(mixture) == "Experts(count=8, chosen=2, renormalised=True, biases=False)"
    shared = replace(mixture, function="sigmoid", shared=1)
    shared_config = replace(config, architecture=Architecture(experts=shared, dense_layers=1, dense_size=9))
    facts = [("experts", shared), ("dense_layers", 1), ("dense_size", 9), ("function", "sigmoid"), ("shared", 1)]
    assert told(shared_config) == [*plain, *facts]
