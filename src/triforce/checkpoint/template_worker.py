"""Process that renders chat templates for another one, until that one ends. Whatever a template does ends here.

Requests and answers are lines of JSON: a template and its variables, whether it could be rendered, and its text or why
not.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path

SECONDS = 0.5
"""CPU time of a template, besides that for its messages."""
BYTES_PER_SECOND = 8 << 20
WALL_SECONDS = 60.0
"""CPU time may come late."""
MEMORY_BYTES = 512 << 20
GROWTH, ROOM = 4, 1 << 20
"""The longest text of a template: so many times its messages, and so many characters."""
LONGEST_REASON = 1000


def main() -> None:
    """Answer requests from stdin. A timer ends the process of a template that takes too long, as do its signals."""
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
        except MemoryError:  # what is left may not do for another template
            os._exit(1)
        except Exception as error:  # a template is a program, and raises what it likes
            answer = json.dumps([False, str(error)[:LONGEST_REASON]]).encode()
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.setitimer(signal.ITIMER_REAL, 0)
        answers.write(answer + b"\n")
        answers.flush()


if __name__ == "__main__":
    main()
