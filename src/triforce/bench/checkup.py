"""Checks of a machine, in an order in which each builds on the ones before: device, memory, kernels, equal texts.

The checks run the pair that ships with triforce. They check the Triton kernels on a GPU, the native ones on a CPU.
"""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from triforce.backends import dispatch
from triforce.backends.decoder import Decoder
from triforce.backends.kernel_api import pages_for
from triforce.backends.token_sampler import make_noise, sampling
from triforce.bench.roofline import DeviceClock
from triforce.checkpoint.hub import SHIPPED
from triforce.engine.model_loader import load
from triforce.installed import version_of
from triforce.interface.outputs import RequestOutput
from triforce.interface.sampling_params import SamplingParams
from triforce.kvcache import FullView, PagePool
from triforce.kvcache.offload_sizing import describe, free_memory
from triforce.llm import LLM
from triforce.ragged import ints
from triforce.speculation import Draft, Seeded, SequenceState

Figures = dict[str, Any]
PROMPT, NEW = 2000, 48
"""Tokens of a prompt, more than one split of the kernels, and new tokens of each text."""
VOCABULARY = 128_256
OFFLOADED = 64 << 20
"""Bytes of KV that stay resident when it is offloaded: no whole layer, because else all of it might stay."""
MODES = ("ar", "triforce", "retrieval")
WIDTHS = (8, 1)
"""Widths of the passes after a prompt whose logits are compared."""
LOGIT_TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.06, torch.float16: 0.02}
"""Greatest difference from torch's logits, relative to the largest: the order of sums and rounding differ."""


class CheckFailed(Exception):
    """The machine computes wrong results."""


@dataclass(frozen=True)
class Check:
    """One check. run: returns a line of text and figures, and raises any exception if the check fails.

    advice: what tells more about a failure.
    """

    name: str
    run: Callable[[], tuple[str, Figures]]
    advice: str


class Checkup:
    """The checks of a device. Their prompt is the beginning of a text."""

    def __init__(self, device: torch.device, text: str) -> None:
        self.device = device
        self._text = text
        self.clock = DeviceClock(device)

    def checks(self) -> Iterator[Check]:
        """Yield the checks in order."""
        on_gpu = self.device.type == "cuda"
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
        if self.device.type != "cuda":
            free = free_memory()
            return f"{describe(free)} free", {"free": free}
        free, total = torch.cuda.mem_get_info(self.device)
        clock = self.clock
        figures = {"free": free, "total": total, "bandwidth": clock.bandwidth, "bus": clock.bus}
        figures["matrix_rate"] = clock.matrix_rate
        line = f"{describe(free)} of {describe(total)} free, copies {clock.bandwidth / 1e9:,.0f} GB/s, from the host "
        return f"{line}{clock.bus / 1e9:.0f}, multiplies {clock.matrix_rate / 1e12:.0f} TFLOP/s", figures

    def kernels(self) -> tuple[str, Figures]:
        """Compare logits of a prompt and of narrow passes after it with those of the torch path."""
        errors: Figures = {}
        for dtype in dict.fromkeys((torch.float32, self._llm.target.decoder.dtype)):
            load_target = partial(load, SHIPPED[0], device=self.device, dtype=dtype)
            kernel_logits = self._logits(load_target().decoder)
            with dispatch.torch_alone():
                torch_logits = self._logits(load_target().decoder)
            name = str(dtype).removeprefix("torch.")
            errors[name] = float((kernel_logits - torch_logits).abs().max() / torch_logits.abs().max())
            if not errors[name] <= LOGIT_TOLERANCE[dtype]:  # NaN fails, too
                raise CheckFailed(
                    f"logits in {name} are {errors[name]:.2g} from torch's; {LOGIT_TOLERANCE[dtype]:g} is usual"
                )
        return "logits as torch's: " + ", ".join(f"{error:.1e} in {name}" for name, error in errors.items()), errors

    def _logits(self, decoder: Decoder) -> Tensor:
        """Return logits at the end of a prompt and of the tokens in narrow passes after it, on the host."""
        ids = self._prompt
        pool = PagePool(decoder.config, 1, pages_for(PROMPT), decoder.dtype, decoder.device)
        pool.reserve(0, len(ids))
        view = FullView(pool, grain=0)
        start = 0
        chunk_logits = []
        for width in (len(ids) - sum(WIDTHS), *WIDTHS):
            ids_1T = torch.tensor([ids[start : start + width]])
            scored_11 = torch.tensor([[width - 1]]) if start == 0 else None
            chunk_logits.append(decoder(ids_1T, ints([width]), view, scored_11)[0].cpu())
            start += width
        return torch.cat(chunk_logits)

    def sampler(self) -> tuple[str, Figures]:
        """Compare sampled tokens of a large vocabulary with those of the torch path on a CPU."""
        rows = [(0.0, 1.0, 0), (0.6, 0.9, 0), (0.8, 1.0, 50), (1.0, 1.0, 0)]
        params = [SamplingParams(temperature=t, top_p=p, top_k=k) for t, p, k in rows]
        logits_BJV = 3 * torch.randn(len(rows), 1, VOCABULARY, generator=torch.Generator().manual_seed(0))
        picks = self._picks(params, logits_BJV, self.device)
        with dispatch.torch_alone():
            torch_picks = self._picks(params, logits_BJV, torch.device("cpu"))
        if picks != torch_picks:
            raise CheckFailed(f"picks are {picks}, and torch's {torch_picks}")
        return f"{len(rows)} picks of {VOCABULARY:,} tokens as torch's", {"picks": picks}

    @staticmethod
    def _picks(params: list[SamplingParams], logits_BJV: Tensor, device: torch.device) -> list[int]:
        B = len(params)
        zeros = [0] * len(params)
        sampler = sampling(params, zeros, VOCABULARY, Seeded(make_noise(range(B), zeros, device)), device)
        prefix = SequenceState(np.zeros((B, 1), np.int64), ints([1] * B))
        draft = sampler.verify(Draft.empty(B, 0), logits_BJV.to(device), prefix, np.ones(B, np.bool_), 0)
        return [int(token) for token in draft.tokens_BK[:, 0]]

    def same_text(self, temperature: float) -> tuple[str, Figures]:
        """Compare the texts of a seed in all modes, with passes of one shape."""
        outputs = {mode: self._text_of(self._llm, mode, temperature) for mode in MODES}
        texts = {mode: output.outputs[0].token_ids for mode, output in outputs.items()}
        _require_equal_texts(texts)
        return f"{NEW} tokens, the same in {', '.join(MODES)}", {"token_ids": texts["ar"]}

    def offloaded(self) -> tuple[str, Figures]:
        """Compare a text whose KV is offloaded to host memory with one whose KV is not."""
        if self.device.type == "cpu" and dispatch.native is None:
            return "left out: on a CPU it is for the native kernels", {}
        offloading_llm = LLM(
            device=str(self.device), strict=True, kv_offload="host", kv_memory=OFFLOADED, kv_resident_layers=0
        )  # fmt: skip
        texts = {"ar": self._text_of(self._llm, "ar", 0.0).outputs[0].token_ids}
        texts["triforce, KV on the host"] = self._text_of(offloading_llm, "triforce", 0.0).outputs[0].token_ids
        _require_equal_texts(texts)
        return f"{NEW} tokens, the same with KV on the host", {}

    def speed(self) -> tuple[str, Figures]:
        """Time two modes after their kernels are compiled and their passes captured."""
        llm = LLM(device=str(self.device))
        figures = {}
        for mode in MODES[:2]:
            for _ in range(2):
                output = self._text_of(llm, mode, 0.0)
            figures[f"{mode}_seconds_per_token"] = output.decode_seconds / output.completion_tokens
        line = ", ".join(f"{name.split('_')[0]} {1e3 * seconds:.2f} ms a token" for name, seconds in figures.items())
        return f"{line} (a pair this small says little)", figures

    @cached_property
    def _llm(self) -> LLM:
        return LLM(device=str(self.device), strict=True)

    @cached_property
    def _prompt(self) -> list[int]:
        assert self._llm.tokenizer, "the pair has one"
        return self._llm.tokenizer.encode(self._text)[:PROMPT]

    def _text_of(self, llm: LLM, mode: str, temperature: float) -> RequestOutput:
        params = SamplingParams(temperature=temperature, seed=1, max_tokens=NEW, ignore_eos=True)
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
