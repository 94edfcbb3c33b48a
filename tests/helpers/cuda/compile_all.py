"""Compiles each Triton kernel for a GPU that is not here, as its function launches it.

    python -m tests.helpers.cuda.compile_all

In a process of its own, as the interpreter and the compiler exclude each other. Prints what each kernel needs.
"""

from __future__ import annotations

import os
from typing import Any

os.environ["TRITON_INTERPRET"] = "0"

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

from triforce.backends.cuda.triton import pointwise, rng, sampler, topk
from triforce.backends.cuda.triton.attention import DevicePageTable, attend
from triforce.backends.cuda.triton.page_copy import carry

POINTERS = {
    torch.float32: "*fp32", torch.bfloat16: "*bf16", torch.float16: "*fp16", torch.float64: "*fp64",
    torch.int32: "*i32", torch.int64: "*i64",
}  # fmt: skip
SHARED = 99 * 1024
"""Bytes of shared memory that a program has on the smaller of today's devices."""


def compile_instead(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
    """In the place of a launch."""
    signature, constants = {}, {}
    for param, value in zip(self.params, args, strict=True):
        if param.is_constexpr or (isinstance(value, int) and value == 1 and not param.do_not_specialize):
            signature[param.name], constants[param.name] = "constexpr", value
        elif isinstance(value, torch.Tensor):
            signature[param.name] = POINTERS[value.dtype]
        else:
            signature[param.name] = "fp32" if isinstance(value, float) else "i32" if abs(value) < 2**31 else "i64"
    source = triton.compiler.ASTSource(fn=self, signature=signature, constexprs=constants)
    done = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    print(self.__name__, done.metadata.shared, flush=True)
    assert done.metadata.shared <= SHARED, f"{self.__name__} asks for {done.metadata.shared} bytes of shared memory"


def main() -> None:
    JITFunction.run = compile_instead
    for dtype, D, T, group, window in (
        (torch.bfloat16, 128, 1, 1, 0), (torch.bfloat16, 128, 8, 4, 0), (torch.float16, 64, 16, 4, 480),
        (torch.float32, 128, 64, 1, 0), (torch.bfloat16, 80, 3, 1, 0),
    ):  # fmt: skip
        attention(dtype, D, T, group, window)
    x = torch.zeros(4, 4096, dtype=torch.bfloat16)
    pointwise.norm(x, x[0], 1e-5)
    pointwise.swiglu(x, x)
    topk.best(torch.zeros(4, 8000), range(1, 7900), 200)
    some, pages = torch.zeros(3, dtype=torch.int64), (x, x)
    carry(pages, some, pages, some, 16 * 128)
    carry(pages, some, pages, some, 16 * 80)
    rng.exponentials(some, some, some, 32_000)
    rng.uniforms(some, some, some, 0, 9)
    sampling(torch.float32)
    sampling(torch.float64)


def attention(dtype: torch.dtype, D: int, T: int, group: int, window: int) -> None:
    """The rotation and the kernels of attention, over lists of each head's own and over shared ones."""
    B, G = 2, 2
    k_GSD = torch.zeros(G, 64, D, dtype=dtype)
    q_BTHD, new_BTGD = (torch.zeros(B, T, heads, D, dtype=dtype) for heads in (G * group, G))
    qkv = q_BTHD, new_BTGD, new_BTGD
    starts_B, tables_PF = torch.zeros(B, dtype=torch.int64), (torch.zeros(9, D // 2),) * 2
    for units, unit in ((torch.zeros(B, G, 4).int(), 16), (torch.zeros(B, 16).int(), 4)):
        seen = DevicePageTable(units, starts_B, starts_B, unit, 4 if window else 0, window)
        q_BTHD, q_sinks_BTHD = pointwise.rotate_and_write(qkv, starts_B, tables_PF, seen, (k_GSD, k_GSD))
        attend(q_BTHD, k_GSD, k_GSD, seen, return_mass=not window, q_sinks_BTHD=q_sinks_BTHD)


def sampling(dtype: torch.dtype) -> None:
    """Both couplings, over logits as models give them and as penalties leave them."""
    B, J, V = 3, 5, 32_000
    settings_5B, some, uniforms_BJ = torch.zeros(5, B).double(), torch.zeros(B, dtype=torch.int64), torch.zeros(B, J)
    asked = sampler.SamplerInputs(torch.zeros(B, J, V, dtype=dtype), settings_5B, torch.zeros(2, B, dtype=torch.int64))
    sampler.by_race(asked, some, some)
    tokens_BK, guessed_BKV = torch.zeros(B, J - 1, dtype=torch.int64), torch.zeros(B, J - 1, V).double()
    sampler.by_rejection(asked, tokens_BK, guessed_BKV, uniforms_BJ.double())


if __name__ == "__main__":
    main()
