"""Process that renders chat templates for its parent until the parent ends. A template can harm this process only.

Requests and answers are lines of JSON. A request is a template and its variables; an answer is whether it was
rendered, and its text or the reason.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path

SECONDS = 0.5
"""CPU time of a template, on top of the time for its messages."""
BYTES_PER_SECOND = 8 << 20
WALL_SECONDS = 60.0
"""Limit of elapsed time. It is longer than the limit of CPU time, because a busy machine gives CPU time late."""
MEMORY_BYTES = 512 << 20
GROWTH, ROOM = 4, 1 << 20
"""The longest text of a template has `GROWTH` times its request's bytes plus `ROOM` characters."""
LONGEST_REASON = 1000


def main() -> None:
    """Answer requests from stdin. A timer's signal ends this process if a template takes too long."""
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    sys.path.append(str(Path(__file__).parents[2]))
    from triforce.checkpoint.chat_template import render
    from triforce.sandbox import TrialLimits, limit

    limit(TrialLimits(cpu_seconds=1 << 30, memory_bytes=MEMORY_BYTES, stack_bytes=8 << 20))
    for line in sys.stdin.buffer:
        signal.setitimer(signal.ITIMER_PROF, SECONDS + len(line) / BYTES_PER_SECOND)
        signal.setitimer(signal.ITIMER_REAL, WALL_SECONDS)
        try:
            template, variables = json.loads(line)
            text = render(template, variables)
            if len(text) > (longest := GROWTH * len(line) + ROOM):
                raise ValueError(f"its text is longer than {longest:,} characters")
            answer = json.dumps([True, text]).encode()
        except MemoryError:  # the remaining memory may not suffice for another template
            os._exit(1)
        except Exception as error:  # a template is a program and may raise anything
            answer = json.dumps([False, str(error)[:LONGEST_REASON]]).encode()
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.setitimer(signal.ITIMER_REAL, 0)
        answers.write(answer + b"\n")
        answers.flush()


if __name__ == "__main__":
    main()
