"""Instructions that our kernels use and a build of llama.cpp leaves out: such a comparison is none."""

from __future__ import annotations

import re

USED = ("AVX2", "AVX512", "AVX512_VNNI", "AVX512_BF16")
"""Instructions, as llama.cpp names them, in the order in which our levels come to use them."""

LEVELS = {"avx2": 1, "avx512": 2, "avx512vnni": 3, "avx512bf16": 4}
"""How many of these each level of our kernels uses."""


def lacking(built: str, level: str) -> str:
    """Return what to do about a build that lacks what our kernels use at their level; "" if it lacks nothing.

    built: what `llama_print_system_info` says; "" is of an engine that chooses its instructions as it runs.
    """
    has = dict(re.findall(r"(\w+) = (\d)", built))
    missing = [name for name in USED[: LEVELS.get(level, 0)] if has.get(name) != "1"] if has else []
    if not missing:
        return ""
    lower = [name for name, count in LEVELS.items() if all(has.get(used) == "1" for used in USED[:count])]
    names = ", ".join(missing)
    return (
        f"it was built without {names}, which triforce uses here: build it on this machine "
        "(CMAKE_ARGS=-DGGML_NATIVE=ON pip install --force-reinstall --no-cache-dir --no-binary llama-cpp-python "
        "llama-cpp-python), "
        f"or set TRIFORCE_KERNELS={lower[-1] if lower else 'portable'}"
    )
