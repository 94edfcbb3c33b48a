"""The text part of a model that reads images, too: its tensors under the names of a model of text."""

from __future__ import annotations

from collections.abc import Mapping

from triforce.checkpoint.weight_files import Archive
from triforce.model.weights import Matrix

PREFIX = "language_model."


class TextTensors:
    """An archive by the names that tensors have without the prefix."""

    packed = False

    def __init__(self, archive: Archive) -> None:
        self._archive = archive

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor."""
        return self._archive.shape(f"{PREFIX}{name}")

    def view(self, name: str) -> Matrix:
        """Return the tensor as it lies in the file, in its shape."""
        return self._archive.view(f"{PREFIX}{name}")

    def glance(self, name: str) -> Matrix:
        """Return the same for a moment, in its shape."""
        return self._archive.glance(f"{PREFIX}{name}")


def text_part(archives: Mapping[str, Archive]) -> dict[str, Archive]:
    """Return archives by the names of the text's tensors; those of other parts are left out."""
    return {name.removeprefix(PREFIX): TextTensors(archives[name]) for name in archives if name.startswith(PREFIX)}
