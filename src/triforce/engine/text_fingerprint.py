"""A digest of what changes the text of a seed. It says nothing of where files lie, and tells no setting."""

from __future__ import annotations

from hashlib import blake2b

from triforce.backends import native_loader
from triforce.engine.model_loader import ModelPair
from triforce.engine.speculative_config import SpeculativeConfig


def text_fingerprint(pair: ModelPair, speculation: SpeculativeConfig, coupling: str, mode: str) -> str:
    """Return a hex digest: two engines with the same one make the same text of a seed, in every mode under `seeded`.

    Under the other couplings texts depend on the mode and the drafts, too.
    """
    target, tokenizer = pair.target, pair.target.tokenizer
    # The fingerprint of the weights, as caches have it, tells their type and that of the KV.
    weights = target.fingerprint, native_loader.build(), target.decoder.device.type, speculation.strict
    chats = sorted(tokenizer.templates.items()) if tokenizer else ()
    advised = sorted(target.files.sampling_defaults().items())
    facts: list[object] = [weights, target.config.context, coupling, chats, advised]
    if coupling != "seeded":
        facts += [mode, speculation, pair.fingerprints]
    return blake2b(repr(facts).encode(), digest_size=16).hexdigest()
