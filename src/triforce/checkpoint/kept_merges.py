"""Orders of merges that took long to find are kept in the user's cache folder, by the vocabulary that they are of.

What cannot be read, or is damaged, is found anew.

Shape suffixes: M merges.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from triforce.user_cache import user_cache
from triforce.whole_file import whole_file

Merges = NDArray[np.int32]
FEWEST_TOKENS = 1 << 16
"""Of a vocabulary whose merges are kept; those of others are found in a fifth of a second."""
MAKERS = ("gguf_scores.py", "token_cuts.py")
"""Files of the code that finds merges. Others may find other ones."""
_HASH_BYTES = 32


def kept_merges(texts: list[str], scores: NDArray[np.float64], kinds: list[int], find: Callable[[], Merges]) -> Merges:
    """Return the ids of the left and right token of each merge, (M, 2): kept ones, or those that `find` returns."""
    cache = user_cache() if len(texts) >= FEWEST_TOKENS else None
    if cache is None:
        return find()
    lengths = np.fromiter(map(len, texts), np.int64, len(texts))
    code = b"".join((Path(__file__).parent / name).read_bytes() for name in MAKERS)
    about = ("".join(texts).encode(), lengths.tobytes(), scores.tobytes(), np.asarray(kinds).tobytes(), code)
    file = cache / "merges" / _digest(hashlib.sha256(part).digest() for part in about).hex()
    merges_M2 = _read(file)
    if merges_M2 is None:
        merges_M2 = find()
        _write(file, merges_M2)
    return merges_M2


def _read(file: Path) -> Merges | None:
    """Return what is in a file of merges, of which the sha256 stands in front."""
    try:
        content = file.read_bytes()
    except OSError:
        return None
    if len(content) <= _HASH_BYTES or _digest([content[_HASH_BYTES:]]) != content[:_HASH_BYTES]:
        return None
    return np.frombuffer(content, np.int32, offset=_HASH_BYTES).reshape(-1, 2)


def _write(file: Path, merges_M2: Merges) -> None:
    content = merges_M2.tobytes()
    with suppress(OSError):  # a full or read-only disk: the next start finds them again
        file.parent.mkdir(parents=True, exist_ok=True)
        with whole_file(file) as partial:
            partial.write_bytes(_digest([content]) + content)


def _digest(parts: Iterable[bytes]) -> bytes:
    return hashlib.sha256(b"".join(parts)).digest()
