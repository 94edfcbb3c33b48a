"""Prints the peak resident memory of a generation above that after import, and bytes of weights and KV.

A short text runs first and is freed: it loads the libraries' pages, which are read on first use.
Run in a process of its own: python tests/helpers/processes/measure_memory.py PROMPT_TOKENS
"""

from __future__ import annotations

import ctypes
import gc
import sys
from pathlib import Path

import numpy as np

from triforce.arrays import itemsize
from triforce.checkpoint.hub import SHIPPED
from triforce.interface.sampling_params import SamplingParams
from triforce.llm import LLM


def resident(kind: str) -> int:
    """Return VmRSS or VmHWM of this process in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(kind)) * 1024


def generate(tokens: int) -> LLM:
    llm = LLM()
    prompt = np.random.default_rng(0).integers(2, llm.target.config.vocab_size, tokens).tolist()
    llm.generate(prompt, SamplingParams(temperature=0.8, seed=1, max_tokens=16, ignore_eos=True))
    return llm


def main(tokens: int) -> None:
    generate(64)
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    resident_before = resident("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak
    llm = generate(tokens)
    weights = sum(file.stat().st_size for folder in SHIPPED for file in Path(folder).glob("*.safetensors"))
    config = llm.target.config
    kv = 2 * config.layers * config.kv_heads * config.head_dim * (tokens + 16) * itemsize(llm.models.target.dtype)
    print(resident("VmHWM") - resident_before, weights + kv)


if __name__ == "__main__":
    main(int(sys.argv[1]))
