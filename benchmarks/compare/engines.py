"""The engines that are compared, and the settings of each: `ENGINES` on a folder, `ON_FILE` on a GGUF file.

The fastest of an engine's settings is its best.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

Settings = Mapping[str, Any]


class Variant(NamedTuple):
    """A way to run an engine: its name, settings of its process, and those of each text."""

    name: str
    load: Settings
    text: Settings


class EngineSpec(NamedTuple):
    """An engine on a folder, in the order of variants that it is run in. `needs`: the extra to install."""

    title: str
    variants: tuple[Variant, ...]
    needs: str | None = None
    assisted: tuple[Variant, ...] = ()
    """Variants that need a draft model."""

    @property
    def all(self) -> tuple[Variant, ...]:
        return self.variants + self.assisted


OURS = "triforce"
PLAIN = (OURS, "ar")
"""The engine and its variant that the texts of all others are compared with."""


INT8_KV = "int8 KV"
"""Another model, as it is for the others that round keys and values."""
PLAIN_INT8_KV = (OURS, f"ar, {INT8_KV}")


def _modes(names: Sequence[str], kv: str = "") -> tuple[Variant, ...]:
    if kv:
        return tuple(Variant(f"{name}, {INT8_KV}", {"kv_dtype": kv}, {"mode": name}) for name in names)
    return tuple(Variant(name, {}, {"mode": name}) for name in names)


LOOKUP = {"lookup": 10}
BF16 = {"dtype": "bf16"}
F32 = {"dtype": "f32"}
USUAL = {"ubatch": 512}
Q8_0 = 8
"""A type of ggml."""

ENGINES = {
    OURS: EngineSpec(
        "triforce",
        _modes(["ar", "retrieval", "auto"]) + _modes(["ar", "auto"], "int8"),
        assisted=_modes(["triforce"]) + _modes(["triforce"], "int8"),
    ),
    "transformers": EngineSpec(
        "transformers",
        (
            Variant("bf16", BF16, {}),
            Variant("f32", F32, {}),
            Variant("bf16 lookup", BF16, LOOKUP),
            Variant("f32 lookup", F32, LOOKUP),
        ),
        assisted=(Variant("bf16 assisted", BF16, {"draft": True}),),
    ),
    "openvino": EngineSpec(
        "OpenVINO GenAI",
        (
            Variant("default", {}, {}),
            Variant("u8", {"KV_CACHE_PRECISION": "u8"}, {}),
            Variant("f16", {"KV_CACHE_PRECISION": "f16"}, {}),
            Variant("lookup", {"prompt_lookup": True}, LOOKUP),
        ),
        "compare-openvino",
    ),
    "llamacpp": EngineSpec(
        "llama.cpp",
        (
            Variant("no flash attention", USUAL | {"flash": False}, {}),
            Variant("flash attention", USUAL | {"flash": True}, {}),
            Variant("flash attention, q8_0 KV", USUAL | {"flash": True, "kv": Q8_0}, {}),
            Variant("lookup", USUAL | {"flash": False}, LOOKUP),
        ),
        "compare-llamacpp",
    ),
    "ikllamacpp": EngineSpec(
        "ik_llama.cpp",
        (
            Variant("repacked", USUAL | {"flash": True, "repack": True}, {}),
            Variant("repacked, lookup", USUAL | {"flash": True, "repack": True}, LOOKUP),
        ),
        "compare-ikllamacpp",
    ),
    "onnx": EngineSpec("ONNX Runtime GenAI", (Variant("fp32", {"precision": "fp32"}, {}),), "compare-onnx"),
    "vllm": EngineSpec(
        "vLLM, CPU",
        (Variant("compiled", {"eager": False}, {}), Variant("eager", {"eager": True}, {})),
        "compare-vllm",
    ),
}


class Load(NamedTuple):
    """A process of an engine: its name, its settings, and the ways to make texts in it, each with settings."""

    name: str
    settings: Settings
    ways: Mapping[str, Settings]


TEXTS: Mapping[str, Settings] = {"": {}}
LOOKUPS: Mapping[str, Settings] = {f"lookup {count}": {"lookup": count} for count in (2, 5, 10)}
DRAFTS: Mapping[str, Settings] = {f"draft {count}": {"draft": count} for count in (2, 4)}


def _llamacpp() -> Sequence[Load]:
    """Return it with flash attention and without, in sizes that a prompt is cut into, and with KV of 8 bits."""
    ways = {**TEXTS, "Llama.generate": {"python": True}, **LOOKUPS}
    loads = [
        Load(f"{'' if flash else 'no '}flash attention, ubatch {size}", {"flash": flash, "ubatch": size}, ways)
        for flash in (False, True)
        for size in (128, 512, 2048)
    ]
    return [*loads, Load("flash attention, q8_0 KV", {"flash": True, "ubatch": 512, "kv": Q8_0}, ways)]


def _ikllamacpp(drafted: bool) -> Sequence[Load]:
    """Return it with its own order of weights and without, with flash attention and without, and with KV of 8 bits."""
    ways = {**TEXTS, **LOOKUPS, **(DRAFTS if drafted else {})}
    kinds: dict[str, Settings] = {
        "repacked, flash attention": {"flash": True, "repack": True},
        "repacked, no flash attention": {"flash": False, "repack": True},
        "mapped, flash attention": {"flash": True, "repack": False},
        "repacked, flash attention, q8_0 KV": {"flash": True, "repack": True, "kv": Q8_0},
    }
    return [Load(name, {**USUAL, **settings}, ways) for name, settings in kinds.items()]


def _openvino() -> Sequence[Load]:
    """Return it with KV of 8 and of 16 bits, and with its other attention; a pipeline has lookup or has it not."""
    kinds: dict[str, Settings] = {
        "u8 KV": {"KV_CACHE_PRECISION": "u8"},
        "f16 KV": {"KV_CACHE_PRECISION": "f16"},
        "SDPA": {"ATTENTION_BACKEND": "SDPA"},
    }
    plain = [Load(name, settings, TEXTS) for name, settings in kinds.items()]
    return [*plain, *(Load(name, {**kinds[name], "prompt_lookup": True}, LOOKUPS) for name in ("u8 KV", "f16 KV"))]


def _onnx(bits: float) -> Sequence[Load]:
    """Return it on weights that its builder rounds, to as many bits as the file's have, or fewer; without lookup."""
    if bits >= 12:
        return [Load("fp32", {"precision": "fp32"}, TEXTS)]
    precision = "int8" if bits >= 6.5 else "int4"
    minima = {"precision": precision, "options": ["is_symmetric=false", "shared_embeddings=false"]}
    return [Load(precision, {"precision": precision}, TEXTS), Load(f"{precision}, minima", minima, TEXTS)]


class FileEngine(NamedTuple):
    """An engine on a GGUF file: the module that it is, and the extra that has it.

    folder: it reads folders only. drafts: it takes a second file as a draft model. package: what is built anew where
    its build lacks instructions.
    """

    title: str
    module: str
    needs: str
    folder: bool = False
    drafts: bool = False
    package: str = ""


ON_FILE = {
    "llamacpp": FileEngine("llama.cpp", "llama_cpp", "compare-llamacpp", package="llama-cpp-python"),
    "ikllamacpp": FileEngine(
        "ik_llama.cpp", "ik_llama_cpp", "compare-ikllamacpp", drafts=True, package="ik-llama-cpp-python"
    ),
    "openvino": FileEngine("OpenVINO GenAI", "openvino_genai", "compare-openvino"),
    "onnx": FileEngine("ONNX Runtime GenAI", "onnxruntime_genai", "compare-onnx", folder=True),
}


def loads(engine: str, bits: float, drafted: bool = False) -> Sequence[Load]:
    """Return the loads to try of an engine, for a file whose weights have `bits` bits in the mean.

    drafted: it gets a draft model.
    """
    match engine:
        case "onnx":
            return _onnx(bits)
        case "ikllamacpp":
            return _ikllamacpp(drafted)
    return {"llamacpp": _llamacpp, "openvino": _openvino}[engine]()
