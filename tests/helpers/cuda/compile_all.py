"""Compiles each Triton kernel for GPUs that are absent, as it is launched at the sizes of real models.

    python -m tests.helpers.cuda.compile_all sm_89 [--plant spill]

It runs in a process of its own, as the interpreter and the compiler exclude each other. It prints each kernel's needs
as JSON, one line per kind of launch: registers and spills as ptxas reports, shared memory, and the bytes of its
asynchronous copies. Results are cached in build/compiled, by a hash of the kernel with all that it calls, of its
arguments and of the compilers.
"""

from __future__ import annotations

import argparse
import hashlib
import io
import json
import os
import re
from collections.abc import Iterable, Iterator
from contextlib import redirect_stdout
from math import prod
from pathlib import Path
from typing import Any

os.environ["TRITON_INTERPRET"] = "0"

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler.compiler import ASTSource, make_backend
from triton.runtime.jit import create_function_from_signature

from tests.helpers.cuda.launches import PLANTED, Launch, everything, planted

Row = dict[str, Any]
TARGETS = {f"sm_{number}": GPUTarget("cuda", number, 32) for number in (80, 89, 90, 120)}
TARGETS["gfx942"] = GPUTarget("hip", "gfx942", 64)


FOLDER = Path(__file__).parents[3] / "build" / "compiled"
FORMAT = 3
"""Format of cached results. Another format makes all kernels compile again."""


class NeedsCache:
    """Cache of an architecture's compiler results: a file that is read once and written after each result."""

    def __init__(self, arch: str) -> None:
        self._file = FOLDER / f"kernels-{arch}.json"
        self._target = TARGETS[arch]
        self._rows: dict[str, Row] = json.loads(self._file.read_text()) if self._file.exists() else {}

    def needs(self, source: ASTSource, options: dict[str, Any]) -> Row:
        """Return a kernel's needs, from the cache if they are there."""
        text = f"{FORMAT} {triton.__version__} {source.hash()} {options}"
        key = hashlib.sha256(text.encode()).hexdigest()[:24]
        if key not in self._rows:
            self._rows[key] = needs(source, options, self._target)
            FOLDER.mkdir(parents=True, exist_ok=True)
            self._file.write_text(json.dumps(self._rows))
        return self._rows[key]


def compiled(launches: Iterable[Launch], arch: str) -> Iterator[Row]:
    """Yield each launch's needs. Launches of a case that are equal to the compiler and in their programs come once."""
    compiled_keys = set()
    compiler = NeedsCache(arch)
    for launch in launches:
        source, options = source_of(launch, TARGETS[arch])
        key = launch.case, launch.kernel.__name__, launch.grid, source.hash(), str(options)
        if key not in compiled_keys:
            compiled_keys.add(key)
            row = {
                "kernel": launch.kernel.__name__,
                "case": launch.case,
                "arch": arch,
                "bits": launch.dtype.itemsize * 8,
                "warps": options["num_warps"],
                "programs": prod(launch.grid),
            }
            yield row | compiler.needs(source, options)


def source_of(launch: Launch, target: GPUTarget) -> tuple[ASTSource, dict[str, Any]]:
    """Return source and options as `JITFunction.run` makes them: argument types, and facts on alignment and ones."""
    kernel = launch.kernel
    backend = make_backend(target)
    binder = create_function_from_signature(kernel.signature, kernel.params, backend)
    asked = launch.options | {"debug": False}
    bound, specialization, options = binder(*launch.arguments, **asked)
    parsed, signature, constants, attributes = kernel._pack_args(backend, asked, bound, specialization, options)
    return ASTSource(kernel, signature, constants, attributes), parsed.__dict__


def needs(source: ASTSource, options: dict[str, Any], target: GPUTarget) -> Row:
    """Return registers, bytes of spills and of shared memory, and kinds of loads.

    `copies`: bytes of the largest asynchronous copy; `narrow`: loads of two bytes. `sums`: layouts of products and
    sums, which decide the order of additions.
    """
    triton.knobs.nvidia.dump_ptxas_log, triton.knobs.compilation.always_compile = True, True
    with redirect_stdout(io.StringIO()) as log:
        done = triton.compile(source, target=target, options=options)
    sums = layouts(done.asm["ttgir"])
    if target.backend == "hip":
        assembly = done.asm["amdgcn"]
        registers, spills = (max(map(int, re.findall(rf"\.vgpr_{what}:\s+(\d+)", assembly))) for what in KINDS)
        return {
            "registers": registers,
            "spills": spills,
            "shared": done.metadata.shared,
            "copies": 0,
            "narrow": 0,
            "sums": sums,
        }
    ptxas_log = log.getvalue()
    spills = sum(map(int, re.findall(r"(\d+) bytes spill", ptxas_log)))
    ptx = done.asm["ptx"]
    copy = r"cp\.async\.c[ag]\.shared\.global \[.*?\], \[.*?\], (0x\w+)"
    copies = [int(size, 0) for size in re.findall(copy, ptx)]
    narrow = len(re.findall(r"ld\.global\.[bu]16\b", ptx))
    registers = max(map(int, re.findall(r"Used (\d+) registers", ptxas_log)))
    copying = {"copies": max(copies, default=0), "narrow": narrow, "sums": sums}
    return {"registers": registers, "spills": spills, "shared": done.metadata.shared, **copying}


def layouts(text: str) -> list[str]:
    """Return a digest of each kind of product and reduction in Triton's GPU representation, with all its layouts."""
    named = dict(re.findall(r"^(#\w+) = (.*)$", text, re.MULTILINE))
    products = re.findall(r"\b((?:tt|ttng)\.\w*dot\b).*? : (.*)$", text, re.MULTILINE)
    sums = re.findall(r'"(tt\.reduce)"\(.*?\}\) : (.*?)$', text, re.MULTILINE | re.DOTALL)
    digests = set[str]()
    for kind, types in products + sums:
        while nested_names := [name for name in re.findall(r"#\w+\b(?!\.)", types) if name in named]:
            for name in nested_names:
                types = re.sub(rf"{name}\b(?!\.)", lambda match: named[match[0]], types)
        digests.add(hashlib.sha256(re.sub(r" loc\(.*", "", f"{kind} {types}").encode()).hexdigest()[:8])
    return sorted(digests)


KINDS = "count", "spill_count"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("arch", choices=TARGETS)
    parser.add_argument("--plant", choices=PLANTED, help="a fault, which must be seen in what is printed")
    asked = parser.parse_args()
    if TARGETS[asked.arch].backend == "hip":
        torch.version.hip = "made up"  # launches are those of torch's build for AMD
    for row in compiled(planted(asked.plant) if asked.plant else everything(), asked.arch):
        print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
