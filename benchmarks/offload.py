"""Speed with a KV cache three times as large as what stays of it in memory.

    python -m benchmarks.offload --json benchmarks/results/offload_cpu.json
    python -m benchmarks.offload --kv-dtypes bfloat16,int8 --memories 64MiB --skip-streaming

`streaming` compares the bytes a second that plain decoding reads from its file with those of a sequential read of a
file as large, in the way that is fastest, both past the system's cache. `bus` decodes the same text plainly and with
TriForce from the same store, with reads limited to a rate that stands for a bus. `computed` is not measured: what its
passes would take at another rate, with KV of another size. Of int8 KV as much less memory is given as there is less KV.
"""

from __future__ import annotations

import json
import mmap
import os
import sys
import tempfile
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import mean, median
from time import perf_counter
from typing import Any

from benchmarks import study
from triforce.arrays import itemsize
from triforce.backends.cpu.offload import NativeOffloadedKV
from triforce.bench.speed import acceptance
from triforce.cli.bench.setup import own_texts
from triforce.cli.options import described, json_file, several
from triforce.cli.text_files import BOOK
from triforce.eval.context import tokenizer_of
from triforce.interface.outputs import RequestOutput
from triforce.interface.quantities import size_of
from triforce.interface.sampling_params import SamplingParams
from triforce.llm import LLM

Row = dict[str, Any]
BLOCK = 4 << 20
ROUNDS = 3


def generate(
    llm: LLM, ids: list[int], tokens: int, mode: str, saved: Path, seed: int, limit: float = 0.0
) -> tuple[RequestOutput, int]:
    """Return the answer, and the bytes that decoding read; `limit`: bytes a second that the store gives (0: all)."""
    params = SamplingParams(temperature=0.6, top_p=0.9, seed=seed, max_tokens=tokens, ignore_eos=True)
    request = llm.request(ids, params, mode)
    texts = llm.open(1, len(ids) + tokens)
    stores = []
    memory = texts.core.store.pool.kv
    assert isinstance(memory, NativeOffloadedKV)
    earlier = llm.engines.parts.open_prompt(saved, texts.core.store.pool)
    texts.submit([request], saved=earlier, on_read=lambda _: stores.append(memory.bytes_read))
    memory.limit(limit)
    return texts.finish(request), memory.bytes_read - stores[0]


def sequential(size: int) -> float:
    """Return bytes a second of a file of `size` bytes, read from start to end past the system's cache."""
    with tempfile.NamedTemporaryFile() as file:
        data = os.urandom(BLOCK)
        for _ in range(size // BLOCK):
            file.write(data)
        file.flush()
        os.fsync(file.fileno())
        ways = [(block << 20, threads) for block in (2, 8) for threads in (1, 2) for _ in range(3)]
        return max(_read_through(file.name, size, *way) for way in ways)


def _read_through(name: str, size: int, block: int, threads: int) -> float:
    fd = os.open(name, os.O_RDONLY | os.O_DIRECT)
    buffers = [mmap.mmap(-1, block) for _ in range(threads)]

    def read(thread: int) -> None:
        for at in range(thread * block, size, threads * block):
            os.preadv(fd, [buffers[thread]], at)

    started = perf_counter()
    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(read, range(threads)))
    os.close(fd)
    return size / (perf_counter() - started)


def streaming(ids: list[int], saved: Path, memory: str, tokens: int) -> Row:
    llm = LLM(kv_offload="file", kv_memory=memory)
    files = []
    streamed = []
    seconds = []
    for turn in range(ROUNDS):  # in turns: a disk has its moods
        files.append(sequential(_kv(llm, len(ids))))
        output, read = generate(llm, ids, tokens, "ar", saved, turn)
        streamed.append(read / output.decode_seconds)
        seconds.append(output.decode_seconds / tokens)
    return {
        "what": "streaming", "context": len(ids), "kv_bytes": _kv(llm, len(ids)), "kv_memory": memory, "tokens": tokens,
        "file_gb_per_second": [rate / 1e9 for rate in files],
        "streamed_gb_per_second": [rate / 1e9 for rate in streamed],
        "share": median(a / b for a, b in zip(streamed, files, strict=True)), "seconds_per_token": median(seconds),
    }  # fmt: skip


def _kv(llm: LLM, tokens: int) -> int:
    """Return the KV bytes of `tokens` tokens."""
    return tokens * llm.target.config.kv_bytes(itemsize(llm.target.decoder.dtype))


def bus(ids: list[int], saved: Path, options: Namespace, memory: int, kv_dtype: str, rate: float) -> Iterator[Row]:
    """Plain decoding and TriForce in turns, from one store's limits; the speedup is taken turn by turn.

    Each turn has a seed of its own, so that no single text decides; counts are those of the mean turn.
    """
    gammas = {name: getattr(options, name) for name in ("draft_tokens", "speculative_tokens")}
    llm = LLM(kv_offload="host", kv_memory=memory, kv_dtype=kv_dtype, **gammas)
    runs: dict[str, list[tuple[RequestOutput, int]]] = {mode: [] for mode in ("ar", *options.modes)}
    for turn in range(options.repeats):
        for mode, outputs in runs.items():
            outputs.append(generate(llm, ids, options.tokens, mode, saved, turn, rate))
    plain = runs["ar"]
    for mode, outputs in runs.items():
        texts = [output for output, _ in outputs]
        read = mean(read for _, read in outputs)
        seconds = median(output.decode_seconds for output in texts)
        yield {
            "what": "bus", "mode": mode, "context": len(ids), "temperature": 0.6, "gb_per_second": rate / 1e9,
            "kv_dtype": llm.target.kv_dtype, "kv_bytes": _kv(llm, len(ids)), "kv_memory": memory, **gammas,
            "tokens": options.tokens, "turns": len(texts),
            "seconds": seconds, "tokens_per_second": options.tokens / seconds,
            "speedup": median(p[0].decode_seconds / o[0].decode_seconds for p, o in zip(plain, outputs, strict=True)),
            **acceptance(texts), "bytes_read": read,
            "same_text_as_ar": all(
                p[0].outputs[0].token_ids == o.outputs[0].token_ids for p, o in zip(plain, texts, strict=True)
            ),
        }  # fmt: skip


def computed(rows: list[Row], kv_bytes: float, rate: float) -> Iterator[Row]:
    """By the measured run: what passes read grows with the KV and takes its time on the bus; the lower tiers' own
    time and their bytes stay, as their budget does."""
    for row in rows:
        scale = kv_bytes / row["kv_bytes"]
        on_bus = row["bytes_read"] / (row["gb_per_second"] * 1e9)
        seconds = max(row["seconds"] - on_bus, 0.0) + row["bytes_read"] * scale / rate
        yield {
            "what": "computed", "mode": row["mode"], "kv_bytes": kv_bytes, "gb_per_second": rate / 1e9,
            "seconds_per_token": seconds / row["tokens"],
        }  # fmt: skip


def add_arguments(parser: ArgumentParser) -> None:
    add = parser.add_argument
    add("--context", type=int, default=32_768, metavar="N", help=described("tokens of the prompt"))
    add("--memories", type=several(str), default=["64MiB", "96MiB"], metavar="SIZE,...", help="KV that stays in memory")
    add("--kv-dtypes", type=several(str), default=["auto"], metavar="TYPE,...", help="of keys and values")
    add("--tokens", type=int, default=128, metavar="N", help=described("new tokens of each text"))
    add("--repeats", type=int, default=1, metavar="N", help=described("turns"))
    add("--draft-tokens", type=int, default=2, metavar="N")
    add("--speculative-tokens", type=int, default=14, metavar="N")
    add("--modes", type=several(str), default=["triforce"], metavar="MODE,...", help="beside plain decoding")
    add("--skip-streaming", action="store_true", help="leave out the bytes a second of plain decoding")
    json_file(parser)


def measure(options: Namespace) -> None:
    """Print a line of JSON for each row as it is measured."""
    rows = list[Row]()
    memories = options.memories

    def note(row: Row) -> None:
        rows.append(row)
        print(json.dumps(row), flush=True)

    with tempfile.TemporaryDirectory() as folder:
        for kv_dtype in options.kv_dtypes:
            plain = LLM(kv_dtype=kv_dtype)
            saved = Path(folder) / f"{kv_dtype}.kv"
            ids = tokenizer_of(plain).encode(own_texts()[BOOK])[: options.context]
            started = perf_counter()
            plain.generate(ids, SamplingParams(temperature=0, max_tokens=1), mode="ar", save_cache=saved)
            print(f"prefill {perf_counter() - started:.1f} s", flush=True)
            if not options.skip_streaming and kv_dtype != "int8":
                note(streaming(ids, saved, memories[0], 12))
            kv_share = _kv(plain, 1) / (plain.target.config.kv_size * itemsize(plain.target.decoder.dtype))
            for memory in memories:
                for row in bus(ids, saved, options, int(size_of(memory) * kv_share), kv_dtype, 2e9):
                    note(row | {"memory": memory, "kv": kv_dtype})
    last_case = memories[-1], options.kv_dtypes[0]
    measured = [row for row in rows if row["what"] == "bus" and (row["memory"], row["kv"]) == last_case]
    rows += computed(measured, 64e9, 25e9)
    study.write(options, {"rows": rows})


main = study.command("offload", __doc__, add_arguments, measure)

if __name__ == "__main__":
    sys.exit(main())
