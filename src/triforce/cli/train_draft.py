"""`triforce train-draft`: trains a draft that reads the hidden states of its target, for any target."""

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

from triforce.cli import INTERRUPTED
from triforce.cli.interrupts import sigint_callback
from triforce.cli.progress import loading
from triforce.cli.text_files import book_file, read_texts
from triforce.errors import RequestError
from triforce.whole_file import PARTIAL

if TYPE_CHECKING:
    from triforce.training.trainer import Trainer, TrainingState

DRAFT_FILES = ("config.json", "model.safetensors")
NOTHING_LOST = "stopped before the first update; the same command begins anew"


def run(options: Namespace) -> int:
    """Train, write the draft, and print its figures. A run continues one that was interrupted.

    Raises RequestError for unusable folders and texts.
    """
    if options.device != "cpu":
        raise RequestError(f"--device {options.device}: drafts are trained on the CPU only; leave it out")
    from triforce.backends.dispatch import require_torch

    require_torch("training runs")
    folder = Path(options.output)
    texts = read_texts([options.texts or str(book_file())])
    _require_folder(folder)
    try:
        with sigint_callback(_exit_now):
            trainer = _trainer(options, texts, folder)
    except KeyboardInterrupt:
        return _report_stopped(NOTHING_LOST)
    try:
        with sigint_callback(_report_stopping), _output_folder(folder), Bar(options.minutes * 60) as bar:
            trainer.run(options.minutes * 60, bar)
            figures = _finish(trainer, folder)
        print(figures)
    except KeyboardInterrupt:
        progress_note = f"after {trainer.state.seconds / 60:.1f} of {options.minutes:g} minutes"
        return _report_stopped(f"stopped {progress_note}; the same command goes on from there")
    return 0


def _report_stopped(message: str) -> int:
    """Print the state of an interrupted training, and return the exit code."""
    print(f"triforce: error: {message}", file=sys.stderr, flush=True)
    return INTERRUPTED


def _exit_now() -> None:
    """End the process in the middle of a pass: there is nothing to save yet."""
    os._exit(_report_stopped(NOTHING_LOST))


def _report_stopping() -> None:
    """Print why the process does not stop at once."""
    message = "stopping after this pass; Ctrl-C again stops at once, and loses what was learned since the last episode"
    print(message, file=sys.stderr, flush=True)


def _require_folder(folder: Path) -> None:
    """Raise RequestError if the folder holds a finished draft or foreign files, or cannot be written."""
    from triforce.training.trainer import FILE

    try:
        file_names = {file.name for file in folder.iterdir()} if folder.exists() else set()
        writable_folder = folder if folder.exists() else folder.absolute().parent
        if not writable_folder.exists():
            raise FileNotFoundError(ENOENT, os.strerror(ENOENT))
        if not (writable_folder.is_dir() and os.access(writable_folder, os.W_OK | os.X_OK)):
            raise PermissionError(EACCES, os.strerror(EACCES))
    except OSError as error:
        raise _unwritable(folder, error) from error
    if "config.json" in file_names and FILE not in file_names:
        raise RequestError(f"{folder} holds a model or a finished draft; name another folder with --output")
    foreign_names = {name for name in file_names - {FILE, *DRAFT_FILES} if not name.endswith(PARTIAL)}
    if foreign_names if FILE in file_names else file_names:
        raise RequestError(f"{folder} holds other files; name a new folder with --output, or an empty one")


@contextmanager
def _output_folder(folder: Path) -> Iterator[None]:
    """Make a folder; remove it at the end if it is new and empty. Raises RequestError if it cannot be made."""
    is_new = not folder.exists()
    try:
        folder.mkdir(exist_ok=True)
    except OSError as error:
        raise _unwritable(folder, error) from error
    try:
        yield
    finally:
        with suppress(OSError):  # raised if the folder is not empty
            if is_new:
                folder.rmdir()


def _unwritable(folder: Path, error: OSError) -> RequestError:
    return RequestError(
        f"{folder} cannot be written ({error.strerror}); name another folder with --output, within one of yours"
    )


def _trainer(options: Namespace, texts: dict[str, str], folder: Path) -> Trainer:
    # Threads that spin while they wait take the cores from others, where cores are shared.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
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
    use_bfloat16 = dispatch.native is not None and dispatch.native.level() == "avx512bf16"
    return Trainer(
        llm, texts, folder, TrainingConfig(), clock=time.monotonic, threads=threads, use_bfloat16=use_bfloat16
    )


def _finish(trainer: Trainer, folder: Path) -> str:
    """Write the draft and remove the training state; return the figures as text."""
    from triforce.eagle.head_files import EagleHeadFile, write_eagle_head
    from triforce.training.trainer import FILE
    from triforce.training.training_card import measure, table

    card = measure(trainer)
    target = trainer.llm.target.fingerprint
    write_eagle_head(folder, EagleHeadFile(trainer.draft, trainer.detached(), target, card))
    (folder / FILE).unlink()
    return table(card).plain()


class Bar:
    """Progress on stderr, on terminals only: time, and the acceptance of draft tokens on held-out texts."""

    def __init__(self, seconds: float) -> None:
        from tqdm import tqdm

        bar_options: dict[str, Any] = {"disable": None, "file": sys.stderr, "leave": False}
        self._seconds = seconds
        self._bar = tqdm(total=round(seconds), desc="training", unit=" s", **bar_options)

    def __enter__(self) -> Bar:
        return self

    def __call__(self, state: TrainingState) -> None:
        self._bar.update(round(min(state.seconds, self._seconds)) - self._bar.n)
        if state.history:
            history_shares = state.history[-1]["kept"]
            shares_text = ", ".join(
                f"{kind} {' '.join(f'{share:.2f}' for share in shares)}" for kind, shares in history_shares.items()
            )
            self._bar.set_postfix_str(f"accepted: {shares_text}")

    def __exit__(self, *error: object) -> None:
        self._bar.close()
