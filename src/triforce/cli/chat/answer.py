"""An answer that can be ended half-way, in all ranks at the same place."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator, Sequence
from types import FrameType
from typing import TYPE_CHECKING, Any

from triforce.errors import RankError, TriforceError

if TYPE_CHECKING:
    from triforce.engine.output_stream import OutputChunk
    from triforce.engine.sequence_group import OnPrefill
    from triforce.interface.outputs import RequestOutput
    from triforce.interface.sampling_params import SamplingParams
    from triforce.session import Session


class Interrupts:
    """Ctrl-C while it is entered: noted, however often, and looked at where an answer can end."""

    def __init__(self) -> None:
        self.noted = False
        self._before: Any = None

    def __enter__(self) -> Interrupts:
        self._before = signal.signal(signal.SIGINT, self._note)
        return self

    def __exit__(self, *error: object) -> None:
        signal.signal(signal.SIGINT, self._before)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.noted = True


class _Enough(Exception):
    """The answer is not wanted any more, and its first token is not there yet."""


def answer(
    session: Session,
    ids: Sequence[int],
    params: SamplingParams,
    ended: Callable[[], bool],
    on_prefill: OnPrefill | None = None,
) -> Iterator[OutputChunk | RequestOutput]:
    """Answer as `Session.ask` does, until rank 0 finds it `ended`: between two chunks, or two prefill passes."""
    ranks = session.llm.ranks

    def read(done: int, total: int) -> None:
        if on_prefill:
            on_prefill(done, total)
        if ranks.broadcast(ended()):
            raise _Enough

    pieces = session.ask(ids, params, read)
    try:
        for piece in pieces:
            yield piece
            if ranks.broadcast(ended()):
                return
    except _Enough:
        return
    finally:
        pieces.close()


def follow(session: Session, params: SamplingParams) -> None:
    """Run a rank other than the first: the same answers, until there are no more questions."""
    unheard: list[int] | None = None
    while ids := session.llm.ranks.broadcast(unheard):
        try:
            for _ in answer(session, ids, params, lambda: False):
                pass
        except RankError:
            raise
        except TriforceError:  # rank 0 has it, too, and tells of it
            continue
