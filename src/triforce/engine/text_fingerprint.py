"""Digests of all facts that change the text of a seed. A digest depends on no path, and reveals no setting."""

from __future__ import annotations

from hashlib import blake2b
from pathlib import Path
from typing import Any

import torch

from triforce.backends import dispatch
from triforce.checkpoint.hub import SHIPPED
from triforce.checkpoint.weights import fingerprint
from triforce.engine.model_loader import Checkpoint, ModelPair, ModelSource, located
from triforce.engine.tier_builder import SpeculativeConfig


def text_fingerprint(pair: ModelPair, speculation: SpeculativeConfig, coupling: str, mode: str) -> str:
    """Return a hex digest: engines with equal digests make the same text of a seed, under `seeded` in every mode.

    Under the other couplings the digest also covers the mode and the drafts, on which texts then depend.
    """
    target = pair.target
    facts = [*_facts(target, target.fingerprint, coupling), dispatch.build(), target.decoder.device.type]
    facts.append(speculation.strict)
    if coupling != "seeded":
        facts += [mode, speculation, pair.fingerprints]
    return _digest(facts)


def model_fingerprint(model: str | Path | None, *, coupling: str, **placement: Any) -> str:
    """Return a hex digest of the facts of a model that change texts, independent of machine and mode.

    It reads the weights, and builds no model. placement: `device`, `dtype`, `kv_dtype` and `context` of `LLM`. Raises
    ModelError or RequestError.
    """
    source = located(SHIPPED[0] if model is None else model, **placement)
    weights = fingerprint(source.config, source.weights(torch.device("cpu")))
    return _digest(_facts(source, weights, coupling))


def loaded_fingerprint(target: Checkpoint, coupling: str) -> str:
    """Return the `model_fingerprint` of a target that is loaded in one process."""
    return _digest(_facts(target, target.fingerprint, coupling))


def _facts(target: Checkpoint | ModelSource, weights: str, coupling: str) -> list[object]:
    """Return the facts of a target. weights: their fingerprint, as caches use it; it covers types of weights and KV."""
    chats = sorted(target.tokenizer.templates.items()) if target.tokenizer else ()
    advised = sorted(target.files.sampling_defaults().items())
    return [weights, target.config.context, coupling, chats, advised]


def _digest(facts: list[object]) -> str:
    return blake2b(repr(facts).encode(), digest_size=16).hexdigest()
