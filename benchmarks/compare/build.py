"""Instructions that our kernels use and a build of llama.cpp or of its fork leaves out: such a comparison is none."""

from __future__ import annotations

import re

USED = {
    "avx2": ("AVX2",),
    "avxvnni": ("AVX2", "AVX_VNNI"),
    "avx512": ("AVX2", "AVX512"),
    "avx512vnni": ("AVX2", "AVX512", "AVX512_VNNI"),
    "avx512bf16": ("AVX2", "AVX512", "AVX512_VNNI", "AVX512_BF16"),
}
"""Instructions that each level of our kernels uses, as llama.cpp names them."""


def lacking(built: str, level: str, package: str) -> str:
    """Return what to do about a build that lacks what our kernels use at their level; "" if it lacks nothing.

    built: what `llama_print_system_info` says; "" is of an engine that chooses its instructions as it runs. package: of
    the engine, in the registry.
    """
    has = dict(re.findall(r"(\w+) = (\d)", built))
    missing = [name for name in USED.get(level, ()) if has.get(name) != "1"] if has else []
    if not missing:
        return ""
    lower = [name for name, used in USED.items() if all(has.get(flag) == "1" for flag in used)]
    names = ", ".join(missing)
    return (
        f"it was built without {names}, which triforce uses here: build it on this machine "
        f"(CMAKE_ARGS=-DGGML_NATIVE=ON pip install --force-reinstall --no-cache-dir --no-binary {package} {package}), "
        f"or set TRIFORCE_KERNELS={lower[-1] if lower else 'portable'}"
    )
