"""Plain decoding against the other modes, on this machine: the same prompts, the same seed, one process.

    .venv/bin/python benchmarks/speed.py [MODEL] --contexts 4096,16384 --temperatures 0,0.8 --modes ar,triforce

The prompt is the start of a text file (by default the sample book). Prefill is reported beside decoding, never in it.
Each mode decodes `--tokens` tokens `--repeats` times, in turns with plain decoding: medians, and their spread.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import tempfile
from collections.abc import Iterator
from importlib import resources
from pathlib import Path
from statistics import median
from typing import Any

import torch

from triforce import LLM, RequestOutput, SamplingParams

Row = dict[str, Any]


def main(arguments: list[str] | None = None) -> None:
    options = parse(arguments)
    llm = LLM(options.model, options.draft, device=options.device, dtype=options.dtype)
    if llm.tokenizer is None:
        sys.exit("this model has no tokenizer; the prompt is a text")
    ids = llm.tokenizer.encode(options.text.read_text(encoding="utf-8"))
    rows: list[Row] = []
    print("mode        context    T  prefill/s  tokens/s  speedup  spread  full/token  acceptance")
    for context in options.contexts:
        for row in cells(llm, ids[:context], options):
            rows.append(row)
            print(line(row), flush=True)
    if options.json:
        machine = f"{platform.machine()}, {torch.get_num_threads()} threads, torch {torch.__version__}"
        report = {"machine": machine, "command": " ".join(sys.argv), "rows": rows}
        options.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("model", nargs="?", help="folder or hub name; the shipped pair if left out")
    parser.add_argument("--draft", default="auto")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--text", type=Path, default=Path(str(resources.files("triforce") / "data" / "dracula.txt")))
    parser.add_argument("--contexts", type=numbers(int), default=[4096, 16384])
    parser.add_argument("--temperatures", type=numbers(float), default=[0.0, 0.8])
    parser.add_argument("--modes", type=numbers(str), default=["ar", "triforce", "retrieval"])
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", type=Path)
    return parser.parse_args(arguments)


def numbers(kind: type) -> Any:
    return lambda text: [kind(part) for part in text.split(",")]


def cells(llm: LLM, prompt: list[int], options: argparse.Namespace) -> Iterator[Row]:
    """Rows of one context. The prompt is read once; the modes take turns, so that a drift of the machine meets all."""
    with tempfile.TemporaryDirectory() as folder:
        saved, prefill = Path(folder) / "prompt.kv", 0.0
        for temperature in options.temperatures:
            params = SamplingParams(temperature=temperature, seed=1, max_tokens=options.tokens, ignore_eos=True)
            if not saved.exists():
                (first,) = llm.generate(prompt, params, mode="ar", save_cache=saved)
                prefill = (len(prompt) - 1) / first.prefill_seconds
            runs: dict[str, list[RequestOutput]] = {mode: [] for mode in dict.fromkeys(["ar", *options.modes])}
            for _ in range(options.repeats):
                for mode, outputs in runs.items():
                    outputs += llm.generate(prompt, params, mode=mode, load_cache=saved)
            plain = [output.decode_seconds for output in runs["ar"]]
            for mode in options.modes:
                yield {"context": len(prompt), "temperature": temperature, **summary(mode, runs[mode], plain, prefill)}


def summary(mode: str, outputs: list[RequestOutput], plain: list[float], prefill: float) -> Row:
    """Medians of the repeats; the spread is that of the speedups, turn by turn."""
    seconds = [output.decode_seconds for output in outputs]
    speedups = [a / b for a, b in zip(plain, seconds, strict=True)]
    one, tiers = outputs[0], outputs[0].outputs[0].tiers
    return {
        "mode": mode,
        "tokens": one.completion_tokens,
        "seconds": median(seconds),
        "tokens_per_second": one.completion_tokens / median(seconds),
        "prefill_tokens_per_second": prefill,
        "speedup": median(speedups),
        "spread": max(speedups) - min(speedups),
        "acceptance": {tier.name: tier.acceptance for tier in tiers[:-1]},
        "full_passes": tiers[-1].passes,
    }


def line(row: Row) -> str:
    accepted = " ".join(f"{name} {share:.2f}" for name, share in row["acceptance"].items() if share is not None)
    return (
        f"{row['mode']:<10} {row['context']:>8,} {row['temperature']:>4} {row['prefill_tokens_per_second']:>10,.0f} "
        f"{row['tokens_per_second']:>9.1f} {row['speedup']:>8.2f} {row['spread']:>7.2f} "
        f"{row['full_passes'] / row['tokens']:>11.2f}  {accepted}"
    )


if __name__ == "__main__":
    main()
