"""Choice of the model among several GGUF files: the one of a quantisation, or Q4_K_M, or the first."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable
from pathlib import PurePosixPath

from triforce.errors import ModelError

USUAL = "Q4_K_M"
NO_MODELS = ("mmproj", "imatrix")
"""How names of files begin that are no language models: projections of images, statistics of a calibration."""
LOG = logging.getLogger("triforce.models")
"""Says what is chosen and fetched. The command line shows it; a program that wants to hear it sets its level."""
_PART = re.compile(r"-\d{5}-of-\d{5}(?=\.gguf$)")


def choose_gguf(names: Iterable[str], quantisation: str, where: str) -> list[str]:
    """Return the files of one model, all parts of its set in order.

    names: files in `where`, others than GGUF among them. quantisation: as its name ends, in any case; empty for
    Q4_K_M, or the first file that is a model by itself, or the first set. Raises ModelError naming what is there.
    """
    models: dict[str, list[str]] = {}
    for name in sorted(names):
        if name.endswith(".gguf") and not PurePosixPath(name).name.lower().startswith(NO_MODELS):
            models.setdefault(_PART.sub("", name), []).append(name)
    named = [files for whole, files in models.items() if _is_of(whole, quantisation or USUAL)]
    if not quantisation and not named:
        named = sorted(models.values(), key=lambda files: len(files) > 1)
    if not named:
        there = ", ".join(dict.fromkeys(_pieces(whole)[-1] for whole in models))
        raise ModelError(
            f"{where} has no GGUF file of {quantisation}; it has {there}"
            if models
            else f"{where} has no GGUF file of a model; name it without :{quantisation}"
        )
    if len(models) > 1:
        more = f" and {len(named[0]) - 1} more" if len(named[0]) > 1 else ""
        LOG.info("taking %s%s of %d models in %s", named[0][0], more, len(models), where)
    return named[0]


def _is_of(whole: str, quantisation: str) -> bool:
    """Whether the last pieces of a name are a quantisation's."""
    wanted = _pieces(f"{quantisation}.gguf")
    return [piece.lower() for piece in _pieces(whole)[-len(wanted) :]] == [piece.lower() for piece in wanted]


def _pieces(whole: str) -> list[str]:
    return re.split(r"[-.]", PurePosixPath(whole).name.removesuffix(".gguf"))
