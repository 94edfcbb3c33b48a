"""Checks of a machine, in an order in which each builds on the ones before: device, memory, kernels, equal texts.

The checks run the pair that ships with triforce. They check the Triton kernels on a GPU, the native ones on a CPU.
"""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from triforce.arrays import Array, DType, is_gpu, to_host
from triforce.backends import dispatch
from triforce.backends.decoder import Decoder
from triforce.backends.kernel_api import pages_for
from triforce.backends.token_sampler import make_noise, sampler_array, sampling
from triforce.bench.roofline import DeviceClock
from triforce.checkpoint.hub import SHIPPED
from triforce.engine.model_loader import load
from triforce.installed import version_of
from triforce.interface.outputs import RequestOutput
from triforce.interface.sampling_params import SamplingParams
from triforce.kvcache import FullView, PagePool
from triforce.kvcache.host_memory import free_memory
from triforce.kvcache.offload_sizing import format_bytes
from triforce.llm import LLM
from triforce.ragged import ints
from triforce.speculation import Draft, Seeded, SequenceState

Figures = dict[str, Any]
PROMPT_TOKENS, NEW_TOKENS = 2000, 48
"""Tokens of the prompt, which is longer than one split of the attention kernels, and new tokens of each text."""
VOCABULARY = 128_256
RESIDENT_KV_BYTES = 64 << 20
"""Bytes of resident KV in the check of offload. No whole layer is kept resident: otherwise all KV might be."""
MODES = ("ar", "triforce", "retrieval")
WIDTHS = (8, 1)
"""Widths of the passes after a prompt whose logits are compared."""
LOGIT_TOLERANCE: dict[DType, float] = {"float32": 1e-3, "bfloat16": 0.06, "float16": 0.02}
"""Greatest difference from the reference's logits, relative to the largest: orders of sums and rounding differ."""


class CheckFailed(Exception):
    """The machine computes wrong results."""


@contextmanager
def reference_kernels() -> Iterator[str]:
    """Compute with the reference kernels in this context: the torch path, or the portable native kernels without torch.

    Yields the name of the reference.
    """
    native = dispatch.native
    if native is None or dispatch.has_torch():
        with dispatch.torch_alone():
            yield "torch"
        return
    level = native.level()
    slowest, *_ = native.levels()
    native.use(slowest)
    try:
        yield f"{slowest} kernels"
    finally:
        native.use(level)


@dataclass(frozen=True)
class Check:
    """One check. run: returns a line of text and figures, and raises any exception if the check fails.

    advice: a command that shows more about a failure.
    """

    name: str
    run: Callable[[], tuple[str, Figures]]
    advice: str


class Checkup:
    """The checks of a device. Their prompt is the beginning of a text."""

    def __init__(self, device: str, text: str) -> None:
        self.device = device
        self._text = text
        self.clock = DeviceClock(device)

    def checks(self) -> Iterator[Check]:
        """Yield the checks in order."""
        on_gpu = is_gpu(self.device)
        tests = f"python -m pytest tests/backends/{'cuda' if on_gpu else 'cpu'} -x -q"
        if on_gpu:
            yield Check("device", self.device_properties, "pip install 'triforce[gpu]', and see nvidia-smi")
        yield Check("memory", self.rates, "see what else uses the device")
        yield Check("kernels", self.kernels, f"{tests} -k 'attention or pointwise or model'")
        yield Check("sampler", self.sampler, f"{tests} -k sampler")
        for name, temperature in (("greedy text", 0.0), ("sampled text", 0.8)):
            yield Check(name, partial(self.same_text, temperature), f"{tests} -k 'engine or model'")
        yield Check("offload", self.offloaded, f"{tests} -k offload")
        yield Check("speed", self.speed, "triforce bench kernels")

    def device_properties(self) -> tuple[str, Figures]:
        """Return the device's name, capability and driver, and the versions of CUDA, torch and Triton."""
        import torch

        name = torch.cuda.get_device_name(self.device)
        capability = torch.cuda.get_device_capability(self.device)
        properties = {
            "gpu": name, "capability": ".".join(map(str, capability)), "driver": _driver(),
            "cuda": torch.version.cuda or torch.version.hip or "unknown", "torch": torch.__version__,
            "triton": version_of("triton") or "not installed",
        }  # fmt: skip
        dispatch.suits_triton("triton", self.device)  # raises if Triton is not installed
        details = ", ".join(
            f"{property_name} {value}" for property_name, value in properties.items() if property_name != "gpu"
        )
        return f"{name}, {details}", properties

    def rates(self) -> tuple[str, Figures]:
        """Measure free memory, and on a GPU the rates of copies and of matrix products."""
        if not is_gpu(self.device):
            free = free_memory()
            return f"{format_bytes(free)} free", {"free": free}
        import torch

        free, total = torch.cuda.mem_get_info(self.device)
        clock = self.clock
        figures = {"free": free, "total": total, "bandwidth": clock.bandwidth, "bus": clock.bus}
        figures["matrix_rate"] = clock.matrix_rate
        line = f"{format_bytes(free)} of {format_bytes(total)} free, copies {clock.bandwidth / 1e9:,.0f} GB/s, "
        return f"{line}from the host {clock.bus / 1e9:.0f}, multiplies {clock.matrix_rate / 1e12:.0f} TFLOP/s", figures

    def kernels(self) -> tuple[str, Figures]:
        """Compare logits of a prompt and of narrow passes after it with those of the reference kernels."""
        errors: Figures = {}
        for dtype in dict.fromkeys(("float32", self._llm.target.decoder.dtype)):
            load_target = partial(load, SHIPPED[0], device=self.device, dtype=dtype)
            kernel_logits = self._logits(load_target().decoder)
            with reference_kernels() as reference:
                expected_logits = self._logits(load_target().decoder)
            errors[dtype] = float(np.abs(kernel_logits - expected_logits).max() / np.abs(expected_logits).max())
            if not errors[dtype] <= LOGIT_TOLERANCE[dtype]:  # NaN fails, too
                raise CheckFailed(
                    f"logits in {dtype} are {errors[dtype]:.2g} from those of {reference}, more than "
                    f"{LOGIT_TOLERANCE[dtype]:g}"
                )
        line = ", ".join(f"{error:.1e} in {name}" for name, error in errors.items())
        return f"logits as those of {reference}: {line}", errors

    def _logits(self, decoder: Decoder) -> NDArray[np.float32]:
        """Return logits at the end of a prompt and of the tokens in narrow passes after it, on the host."""
        ids = self._prompt
        pool = PagePool(decoder.config, 1, pages_for(PROMPT_TOKENS), decoder.dtype, decoder.device)
        pool.reserve(0, len(ids))
        view = FullView(pool, grain=0)
        start = 0
        chunk_logits = []
        for width in (len(ids) - sum(WIDTHS), *WIDTHS):
            ids_1T = ints(ids[start : start + width])[None]
            scored_11 = ints([width - 1])[None] if start == 0 else None
            chunk_logits.append(to_host(decoder(ids_1T, ints([width]), view, scored_11)[0]))
            start += width
        return np.concatenate(chunk_logits)

    def sampler(self) -> tuple[str, Figures]:
        """Compare sampled tokens of a large vocabulary with those of the reference kernels on a CPU."""
        rows = [(0.0, 1.0, 0), (0.6, 0.9, 0), (0.8, 1.0, 50), (1.0, 1.0, 0)]
        params = [SamplingParams(temperature=t, top_p=p, top_k=k) for t, p, k in rows]
        logits_BJV = 3 * np.random.default_rng(0).standard_normal((len(rows), 1, VOCABULARY), np.float32)
        picks = self._picks(params, logits_BJV, self.device)
        with reference_kernels() as reference:
            expected_picks = self._picks(params, logits_BJV, "cpu")
        if picks != expected_picks:
            raise CheckFailed(f"picks are {picks}, and those of {reference} {expected_picks}")
        return f"{len(rows)} picks of {VOCABULARY:,} tokens as those of {reference}", {"picks": picks}

    @staticmethod
    def _picks(params: list[SamplingParams], logits_BJV: Array, device: str) -> list[int]:
        B = len(params)
        zeros = [0] * len(params)
        sampler = sampling(params, zeros, VOCABULARY, Seeded(make_noise(range(B), zeros, device)), device)
        prefix = SequenceState(np.zeros((B, 1), np.int64), ints([1] * B))
        draft = sampler.verify(Draft.empty(B, 0), sampler_array(logits_BJV, device), prefix, np.ones(B, np.bool_), 0)
        return [int(token) for token in draft.tokens_BK[:, 0]]

    def same_text(self, temperature: float) -> tuple[str, Figures]:
        """Compare the texts of a seed in all modes, with passes of one shape."""
        outputs = {mode: self._text_of(self._llm, mode, temperature) for mode in MODES}
        texts = {mode: output.outputs[0].token_ids for mode, output in outputs.items()}
        _require_equal_texts(texts)
        return f"{NEW_TOKENS} tokens, the same in {', '.join(MODES)}", {"token_ids": texts["ar"]}

    def offloaded(self) -> tuple[str, Figures]:
        """Compare a text whose KV is offloaded to host memory with one whose KV is not."""
        if not is_gpu(self.device) and dispatch.native is None:
            return "left out: on a CPU only the native kernels offload KV", {}
        offloading_llm = LLM(
            device=self.device, strict=True, kv_offload="host", kv_memory=RESIDENT_KV_BYTES, kv_resident_layers=0
        )  # fmt: skip
        texts = {"ar": self._text_of(self._llm, "ar", 0.0).outputs[0].token_ids}
        texts["triforce, KV on the host"] = self._text_of(offloading_llm, "triforce", 0.0).outputs[0].token_ids
        _require_equal_texts(texts)
        return f"{NEW_TOKENS} tokens, the same with KV on the host", {}

    def speed(self) -> tuple[str, Figures]:
        """Time two modes after their kernels are compiled and their passes captured."""
        llm = LLM(device=self.device)
        figures = {}
        for mode in MODES[:2]:
            for _ in range(2):
                output = self._text_of(llm, mode, 0.0)
            figures[f"{mode}_seconds_per_token"] = output.decode_seconds / output.completion_tokens
        line = ", ".join(f"{name.split('_')[0]} {1e3 * seconds:.2f} ms a token" for name, seconds in figures.items())
        return f"{line} (a pair this small says little)", figures

    @cached_property
    def _llm(self) -> LLM:
        return LLM(device=self.device, strict=True)

    @cached_property
    def _prompt(self) -> list[int]:
        assert self._llm.tokenizer, "the pair has one"
        return self._llm.tokenizer.encode(self._text)[:PROMPT_TOKENS]

    def _text_of(self, llm: LLM, mode: str, temperature: float) -> RequestOutput:
        params = SamplingParams(temperature=temperature, seed=1, max_tokens=NEW_TOKENS, ignore_eos=True)
        return llm.generate(self._prompt, params, mode=mode)[0]


def _require_equal_texts(texts: dict[str, list[int]]) -> None:
    reference_name, *compared_names = texts
    for name in compared_names:
        if texts[name] != texts[reference_name]:
            pairs = zip(texts[reference_name], texts[name], strict=True)
            position = next(i for i, (a, b) in enumerate(pairs) if a != b)
            raise CheckFailed(f"the texts of {reference_name} and {name} differ from token {position} on")


def _driver() -> str:
    """Return the version of the driver from nvidia-smi; `unknown` without it."""
    if not (smi := shutil.which("nvidia-smi")):
        return "unknown"
    command = [smi, "--query-gpu=driver_version", "--format=csv,noheader"]
    versions = subprocess.run(command, capture_output=True, text=True, check=False, timeout=30).stdout.split()
    return versions[0] if versions else "unknown"
