"""Options that users of llama.cpp, Ollama or vLLM are used to."""

from __future__ import annotations

import pytest

from triforce.cli import main
from triforce.cli.parser import parse


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("generate -hf user/repo x", "triforce chat user/repo"),
        ("-hf user/repo", "triforce chat user/repo"),
        ("chat smollm2 -t 4", "use --temperature X with generate, explain or chat; for threads: one thread"),
        ("serve -t4", "taskset -c 0-3"),
        ("generate --threads 4 x", "taskset -c 0-3"),
        ("chat smollm2 --temp=0.7", "--temperature X"),
        ("serve -c 4096", "--context N"),
        ("generate x --ctx-size=4096", "--context N"),
        ("serve --max-model-len 4096", "--context N"),
        ("serve --gpu-memory-utilization 0.9", "in serve up to --max-kv-tokens N"),
        ("serve --enable-prefix-caching", "it is always on"),
        ("generate x --trust-remote-code", "never run"),
        ("serve --ssl-keyfile key", "a proxy"),
        ("serve --speculative-config {}", "--draft MODEL"),
        ("serve --swap-space 4", "--kv-offload host"),
        ("run smollm2", "triforce chat MODEL"),
        ("pull smollm2", "triforce chat MODEL"),
        ("list", "triforce models list"),
        ("ps", "/health"),
    ],
)
def test_parser_habits_of_other_programs_name_the_right_thing(
    line: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as end:
        main(line.split())
    err = capsys.readouterr().err
    assert end.value.code == 2 and message in err and err.count("\n") == 1 and "did you mean" not in err


def test_parser_habits_leave_values_and_own_options_alone() -> None:
    options = parse(["generate", "-m", "M", "--stop=-c", "--context", "9", "--", "-t"])
    assert (options.stop, options.context, options.prompt) == (["-c"], 9, "-t")
    assert parse(["bench", "compare", "--threads", "2"]).threads == 2
