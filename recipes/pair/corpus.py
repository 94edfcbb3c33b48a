"""Texts of the corpus archives, in a fixed order."""

from __future__ import annotations

import tarfile
from collections.abc import Iterator
from pathlib import Path, PurePosixPath


def texts(folder: Path, archives: list[str], prefix: str = "") -> Iterator[tuple[str, str]]:
    """Yield name and text of each .txt file below a folder `prefix`, archive by archive, sorted by name."""
    for archive in archives:
        yield from _archive_texts(folder / archive, prefix)


def _archive_texts(archive: Path, prefix: str) -> Iterator[tuple[str, str]]:
    contents: dict[str, bytes] = {}
    with tarfile.open(archive) as tar:
        for member in tar:
            path = PurePosixPath(member.name)
            if member.isfile() and path.suffix == ".txt" and (not prefix or prefix in path.parts[:-1]):
                stream = tar.extractfile(member)
                assert stream is not None, "a regular file has contents"
                contents[path.stem] = stream.read()
    for name in sorted(contents):
        yield name, contents[name].decode("utf-8")


def check_apart(train: list[str], evaluation: list[str]) -> None:
    """Raise ValueError if a training text has the name of an evaluation text.

    Names are `author_title` for books and `owner-project` (with `code_` before it in the evaluation set) for code.
    """
    titles = {name.split("_")[-1] if not name.startswith("code_") else name[5:] for name in evaluation}
    titles_in_train = sorted(name for name in train for title in titles if title in name)
    if titles_in_train:
        raise ValueError(f"evaluation texts found in the training set: {', '.join(titles_in_train)}")
