"""Outputs of many prompts in one call: a bar that counts them, and what is done when the call is interrupted."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence

from triforce.engine.engine import Event, Request
from triforce.errors import require_bool
from triforce.interface.outputs import Interruption, RequestOutput


def collected(
    requests: Sequence[Request], events: Iterable[tuple[Request, Event]], use_tqdm: bool | None
) -> list[RequestOutput]:
    """Return the output of each request, in their order. Raises Interruption, which has those that are done."""
    from tqdm import tqdm

    if use_tqdm is not None:
        require_bool("use_tqdm", use_tqdm)
    outputs: dict[Request, RequestOutput] = {}
    shown = len(requests) > 1 and _is_watched() if use_tqdm is None else use_tqdm
    with tqdm(desc="generate", total=len(requests), unit=" prompts", disable=not shown, file=sys.stderr) as bar:
        try:
            for request, event in events:
                if isinstance(event, RequestOutput):
                    outputs[request] = event
                    bar.update()
        except KeyboardInterrupt as error:
            raise Interruption([outputs.get(request) for request in requests]) from error
    return [outputs[request] for request in requests]


def _is_watched() -> bool:
    """Whether stderr is a terminal, or the output of a cell of a notebook."""
    return sys.stderr.isatty() or type(sys.stderr).__module__.startswith("ipykernel.")
