"""`triforce train-draft`: a draft for any target, which reads the target's hidden states."""

from __future__ import annotations

import os
import sys
import time
from argparse import Namespace
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from errno import EACCES, ENOENT
from pathlib import Path
from typing import TYPE_CHECKING, Any

from triforce.backends.torch_import import import_torch
from triforce.cli import INTERRUPTED
from triforce.cli.interrupts import heard
from triforce.cli.progress import loading
from triforce.cli.text_files import book_file, read_texts
from triforce.errors import RequestError
from triforce.whole_file import PARTIAL

if TYPE_CHECKING:
    from triforce.training.trainer import Trainer, TrainingState

DRAFT_FILES = ("config.json", "model.safetensors")
NOTHING_LOST = "stopped before the first update; the same command begins anew"


def run(options: Namespace) -> int:
    """Train, write the draft, and print its figures; the next run goes on where one was interrupted.

    Raises RequestError for folders and texts that will not do.
    """
    if options.device != "cpu":
        raise RequestError(f"--device {options.device}: drafts are trained on the CPU only; leave it out")
    folder = Path(options.output)
    texts = read_texts([options.texts or str(book_file())])
    _require_folder(folder)
    try:
        with heard(_leave):
            trainer = _trainer(options, texts, folder)
    except KeyboardInterrupt:
        return _stopped(NOTHING_LOST)
    try:
        with heard(_tell_of_end), _made(folder), Bar(options.minutes * 60) as bar:
            trainer.run(options.minutes * 60, bar)
            figures = _finish(trainer, folder)
        print(figures)
    except KeyboardInterrupt:
        done = f"after {trainer.state.seconds / 60:.1f} of {options.minutes:g} minutes"
        return _stopped(f"stopped {done}; the same command goes on from there")
    return 0


def _stopped(told: str) -> int:
    """Say what an interrupted training has come to, and return the exit code."""
    print(f"triforce: error: {told}", file=sys.stderr, flush=True)
    return INTERRUPTED


def _leave() -> None:
    """End the process in the middle of a pass, as there is nothing to keep."""
    os._exit(_stopped(NOTHING_LOST))


def _tell_of_end() -> None:
    """Tell why the process goes on for a while."""
    told = "stopping behind this pass; Ctrl-C again stops at once, and loses what was learned since the last episode"
    print(told, file=sys.stderr, flush=True)


def _require_folder(folder: Path) -> None:
    """Raise RequestError where a finished draft or files of others are, or where none can be written."""
    from triforce.training.trainer import FILE

    try:
        held = {file.name for file in folder.iterdir()} if folder.exists() else set()
        place = folder if folder.exists() else folder.absolute().parent
        if not place.exists():
            raise FileNotFoundError(ENOENT, os.strerror(ENOENT))
        if not (place.is_dir() and os.access(place, os.W_OK | os.X_OK)):
            raise PermissionError(EACCES, os.strerror(EACCES))
    except OSError as error:
        raise _unwritable(folder, error) from error
    if "config.json" in held and FILE not in held:
        raise RequestError(f"{folder} holds a model or a finished draft; name another folder with --output")
    others = {name for name in held - {FILE, *DRAFT_FILES} if not name.endswith(PARTIAL)}
    if others if FILE in held else held:
        raise RequestError(f"{folder} holds other files; name a new folder with --output, or an empty one")


@contextmanager
def _made(folder: Path) -> Iterator[None]:
    """Make a folder. It goes again if nothing was written to it. Raises RequestError where it cannot be made."""
    new = not folder.exists()
    try:
        folder.mkdir(exist_ok=True)
    except OSError as error:
        raise _unwritable(folder, error) from error
    try:
        yield
    finally:
        with suppress(OSError):  # it is not empty
            if new:
                folder.rmdir()


def _unwritable(folder: Path, error: OSError) -> RequestError:
    return RequestError(
        f"{folder} cannot be written ({error.strerror}); name another folder with --output, in one of yours that exists"
    )


def _trainer(options: Namespace, texts: dict[str, str], folder: Path) -> Trainer:
    # Threads that spin for others take the cores from them, where these are shared.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    import_torch()
    import torch

    threads = torch.get_num_threads()  # before native kernels claim all but one
    from triforce.backends import dispatch
    from triforce.llm import LLM
    from triforce.training.trainer import Trainer
    from triforce.training.training_config import TrainingConfig

    with loading(options):
        llm = LLM(options.model, None, device="cpu", mode="ar")
    threads = min(threads, dispatch.usable_cpus())
    if dispatch.native is not None:
        dispatch.native.set_threads(threads)
    narrow = dispatch.native is not None and dispatch.native.level() == "avx512bf16"
    return Trainer(llm, texts, folder, TrainingConfig(), clock=time.monotonic, threads=threads, narrow=narrow)


def _finish(trainer: Trainer, folder: Path) -> str:
    """Write the draft and remove the training's state; return the figures as text."""
    from triforce.eagle.head_files import EagleHeadFile, write_eagle_head
    from triforce.training.trainer import FILE
    from triforce.training.training_card import measure, table

    card = measure(trainer)
    target = trainer.llm.target.fingerprint
    write_eagle_head(folder, EagleHeadFile(trainer.draft, trainer.detached(), target, card))
    (folder / FILE).unlink()
    return table(card).plain()


class Bar:
    """Progress on stderr, on terminals only: time, and the share of guesses that held-out texts keep."""

    def __init__(self, seconds: float) -> None:
        from tqdm import tqdm

        how: dict[str, Any] = {"disable": None, "file": sys.stderr, "leave": False}
        self._seconds = seconds
        self._bar = tqdm(total=round(seconds), desc="training", unit=" s", **how)

    def __enter__(self) -> Bar:
        return self

    def __call__(self, state: TrainingState) -> None:
        self._bar.update(round(min(state.seconds, self._seconds)) - self._bar.n)
        if state.history:
            kept = state.history[-1]["kept"]
            shown = ", ".join(f"{kind} {' '.join(f'{share:.2f}' for share in of)}" for kind, of in kept.items())
            self._bar.set_postfix_str(f"kept: {shown}")

    def __exit__(self, *error: object) -> None:
        self._bar.close()
