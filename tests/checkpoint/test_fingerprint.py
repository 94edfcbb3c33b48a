"""Fingerprints: what of a config they tell."""

from __future__ import annotations

from dataclasses import fields, replace

from tests.helpers.small_decoder import small_decoder
from triforce.checkpoint.hub import SHIPPED
from triforce.checkpoint.weights import fingerprint_facts
from triforce.engine.model_loader import load
from triforce.model.config import Architecture, Experts


def test_fingerprints_of_shipped_models_stay_what_they_were() -> None:
    """Saved KV and trained heads name them. They depend on neither the machine nor the kernels."""
    assert [load(folder, device="cpu", dtype="float32").fingerprint for folder in SHIPPED] == [
        "6ffec7b9c865314916bfaf687851ac33b6af621bbf196938c7cd7ab3e6a740a1",
        "e5fe3f0174748650834a9e5ba3334f7fbfc9c4b33bdb200ad64df0ffe0cbbe6e",
    ]


def test_fingerprint_tells_arithmetic_only_where_it_is_not_usual() -> None:
    """Else each version that knows another kind of model would refuse the drafts and prompts of the one before."""
    config = replace(small_decoder().config, architecture=Architecture())
    other = replace(config, architecture=Architecture(qk_norm="head"))
    assert {field.name for field in fields(Architecture)}.isdisjoint(name for name, _ in fingerprint_facts(config))
    assert [*fingerprint_facts(config), ("qk_norm", "head")] == fingerprint_facts(other)


def test_fingerprint_of_a_mixture_stays_what_it_was() -> None:
    """The text of its first four fields is told; others are where they are not usual."""
    mixture = Experts(8, 2, renormalised=True)
    config = replace(small_decoder().config, architecture=Architecture(experts=mixture))
    plain = fingerprint_facts(replace(config, architecture=Architecture()))
    assert fingerprint_facts(config) == [*plain, ("experts", mixture)]
    assert repr(mixture) == "Experts(count=8, chosen=2, renormalised=True, biases=False)"
    shared = replace(mixture, function="sigmoid", shared=1)
    other = replace(config, architecture=Architecture(experts=shared, dense_layers=1, dense_size=9))
    facts = [("experts", shared), ("dense_layers", 1), ("dense_size", 9), ("function", "sigmoid"), ("shared", 1)]
    assert fingerprint_facts(other) == [*plain, *facts]
