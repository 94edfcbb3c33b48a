"""Digests of all facts that change the text for a seed. A digest depends on no path, and reveals no setting."""

from __future__ import annotations

from hashlib import blake2b
from pathlib import Path
from typing import Any

from triforce.backends import dispatch
from triforce.checkpoint.hub import SHIPPED
from triforce.checkpoint.weights import fingerprint
from triforce.engine.model_loader import Checkpoint, ModelPair, ModelSource, locate_model
from triforce.engine.tier_builder import SpeculativeConfig


def text_fingerprint(pair: ModelPair, speculation: SpeculativeConfig, coupling: str, mode: str) -> str:
    """Return a hex digest: engines with equal digests generate the same text for a seed.

    Under `seeded` with `width_independent` kernels a text is the same in every mode, so the digest covers neither the
    mode nor the drafts. With other kernels texts may differ in spite of equal digests. Under the other couplings the
    digest covers the mode and the drafts, because texts depend on them.
    """
    target = pair.target
    device_kind = target.decoder.device.partition(":")[0]
    facts = [*_facts(target, target.fingerprint, coupling), dispatch.build_identity(), device_kind]
    facts.append(speculation.strict)
    if coupling != "seeded":
        facts += [mode, speculation, pair.fingerprints]
    return _digest(facts)


def model_fingerprint(model: str | Path | None, *, coupling: str, **placement: Any) -> str:
    """Return a hex digest of the facts of a model that change texts.

    The digest does not depend on the mode. It depends on the machine only through the device and dtype that `auto`
    selects, and through `dispatch.keeps_packed`. The function reads the weights, and builds no model. placement:
    `device`, `dtype`, `kv_dtype` and `context` of `LLM`. Raises ModelError or RequestError.
    """
    source = locate_model(SHIPPED[0] if model is None else model, **placement)
    weights = fingerprint(source.config, source.weights())
    return _digest(_facts(source, weights, coupling))


def loaded_fingerprint(target: Checkpoint, coupling: str) -> str:
    """Return the `model_fingerprint` of a target that is loaded in one process."""
    return _digest(_facts(target, target.fingerprint, coupling))


def _facts(target: Checkpoint | ModelSource, weights: str, coupling: str) -> list[object]:
    """Return the facts of a target. weights: fingerprint of its weights, which covers the types of weights and KV."""
    chats = sorted(target.tokenizer.templates.items()) if target.tokenizer else ()
    advised = sorted(target.files.sampling_defaults().items())
    return [weights, target.config.context, coupling, chats, advised]


def _digest(facts: list[object]) -> str:
    return blake2b(repr(facts).encode(), digest_size=16).hexdigest()
