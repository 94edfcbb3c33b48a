"""The engines, their settings, and the extras that they need."""

from __future__ import annotations

from typing import NamedTuple


class EngineSpec(NamedTuple):
    """A worker, in the order of settings that it is run in; the fastest is its best. `needs`: the extra to install."""

    title: str
    variants: tuple[str, ...]
    needs: str | None = None
    assisted: tuple[str, ...] = ()
    """Settings that need a draft model."""

    @property
    def all(self) -> tuple[str, ...]:
        return self.variants + self.assisted


OURS = "triforce"
PLAIN = (OURS, "ar")
"""The engine and its setting that the texts of all others are compared with."""

ENGINES = {
    OURS: EngineSpec("triforce", ("ar", "retrieval", "auto"), assisted=("triforce",)),
    "transformers": EngineSpec(
        "transformers", ("bf16", "f32", "bf16 lookup", "f32 lookup"), assisted=("bf16 assisted",)
    ),
    "openvino": EngineSpec("OpenVINO GenAI", ("default", "u8", "f16", "lookup"), "compare-openvino"),
    "llamacpp": EngineSpec("llama.cpp", ("no flash attention", "flash attention", "lookup"), "compare-llamacpp"),
    "onnx": EngineSpec("ONNX Runtime GenAI", ("fp32",), "compare-onnx"),
    "vllm": EngineSpec("vLLM, CPU", ("compiled", "eager"), "compare-vllm"),
}
