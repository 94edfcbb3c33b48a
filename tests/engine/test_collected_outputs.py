"""Many prompts in one call: the progress bar, and the outputs of an interrupted call."""

from __future__ import annotations

import io
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from tests.helpers.fake_llm import answer
from tests.helpers.tty import Tty
from triforce import Interruption
from triforce.engine.engine import collect_outputs

REQUESTS: list[Any] = ["first", "second", "third"]
OUTPUTS = {request: answer(request) for request in REQUESTS}


def events(*done: str, end: type[BaseException] | None = None) -> Iterator[Any]:
    for request in done:
        yield request, OUTPUTS[request]
    if end:
        raise end


@pytest.mark.parametrize(
    ("stream", "wish", "requests", "shown"),
    [
        (Tty(), None, REQUESTS, True),
        (Tty(), None, REQUESTS[:1], False),
        (Tty(), False, REQUESTS, False),
        (io.StringIO(), None, REQUESTS, False),
        (io.StringIO(), True, REQUESTS[:1], True),
    ],
)
def test_bar_is_shown_for_several_prompts_on_terminals(
    monkeypatch: pytest.MonkeyPatch, stream: io.StringIO, wish: bool | None, requests: list[Any], shown: bool
) -> None:
    monkeypatch.setattr(sys, "stderr", stream)
    assert collect_outputs(requests, events(*reversed(requests)), wish) == [OUTPUTS[request] for request in requests]
    assert (f"{len(requests)}/{len(requests)}" in stream.getvalue()) == shown == bool(stream.getvalue())


def test_interrupt_keeps_what_is_done() -> None:
    with pytest.raises(KeyboardInterrupt) as error:
        collect_outputs(REQUESTS, events("third", end=KeyboardInterrupt), None)
    assert isinstance(error.value, Interruption)
    assert error.value.outputs == [None, None, OUTPUTS["third"]]
    assert str(error.value).startswith("1 of 3 prompts are done")


def test_other_errors_pass_unchanged() -> None:
    with pytest.raises(ValueError):
        collect_outputs(REQUESTS, events("third", end=ValueError), None)
