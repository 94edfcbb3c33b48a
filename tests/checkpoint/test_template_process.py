"""Chat templates have bounds: a template beyond them is refused, and one within them is rendered."""

from __future__ import annotations

import hashlib
import json
import os
import resource
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.hostile_templates import HOSTILE
from tests.helpers.tiny_checkpoint import tiny_tokenizer
from triforce.checkpoint import chat_template, template_process
from triforce.checkpoint.template_process import TemplateProcess, render_apart
from triforce.checkpoint.tokenizer import Tokenizer
from triforce.errors import RequestError

QUICK = ("loops", "width", "doubled texts", "nested lists")
MESSAGES = '{"messages": [{"role": "user", "content": "hat"}], "name": "\\ud83d\\ude42\\ud800"}'


def refused(template: str) -> str:
    with pytest.raises(RequestError) as refusal:
        render_apart(template, MESSAGES)
    return str(refusal.value)


def check(name: str) -> None:
    """Time is wall time, ten times the promised bound: other tests may hold the processor."""
    assert render_apart("{{ 1 }}", MESSAGES) == "1"
    peak_before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    began = time.monotonic()
    assert len(refused(HOSTILE[name])) < 1100
    assert time.monotonic() - began < 10
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - peak_before < 16 * 1024  # KiB
    assert render_apart("{{ messages[0].content }}", MESSAGES) == "hat"


@pytest.mark.parametrize("name", QUICK)
def test_hostile_template_is_refused_in_bounded_time_and_memory(name: str) -> None:
    check(name)


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(HOSTILE.keys() - set(QUICK)))
def test_other_hostile_template_is_refused_in_bounded_time_and_memory(name: str) -> None:
    check(name)


def test_hostile_template_of_a_model_raises_request_error(tmp_path: Path) -> None:
    tiny_tokenizer(chat_template=HOSTILE["loops"]).save_pretrained(tmp_path)
    with pytest.raises(RequestError, match=r"does not accept these messages: it takes more than 0\.5 s or 512 MiB"):
        Tokenizer.load(tmp_path).chat([{"role": "user", "content": "hat"}])


def test_long_messages_have_their_time_and_memory() -> None:
    long = "the 🙂 cat " * 500_000
    template = "{% for m in messages %}<{{ m.role }}>{{ m.content | trim }}</s>{% endfor %}"
    text = render_apart(template, f'{{"messages": [{{"role": "user", "content": "{long}"}}]}}')
    assert text == f"<user>{long.strip()}</s>"


def test_texts_come_back_as_they_are() -> None:
    text = "line\nnext\r\u2028 \U0001f642 \ud800 \"'\\ \x00"
    assert render_apart("{{ x }}{{ y }}", json.dumps({"x": text, "y": float("inf")})) == f"{text}inf"


def test_process_answers_many_threads_in_turn() -> None:
    process = TemplateProcess()
    with ThreadPoolExecutor(8) as threads:
        texts = list(threads.map(lambda i: process.render("{{ x }}", f'{{"x": {i}}}'), range(200)))
    assert texts == [str(i) for i in range(200)]
    process.end()


def test_process_that_has_ended_is_begun_anew() -> None:
    process = TemplateProcess()
    process.end()
    assert process.render("cat", "{}") == "cat"
    running: Any = process._process
    running.kill()
    running.wait()
    assert process.render("cat", "{}") == "cat"
    process.end()


class InterruptedAnswers:
    """Ctrl-C while an answer is awaited."""

    def __init__(self, answers: Any) -> None:
        self._answers = answers

    def __getattr__(self, name: str) -> Any:
        return getattr(self._answers, name)

    def readline(self) -> bytes:
        raise KeyboardInterrupt


def test_interrupted_wait_leaves_no_answer_behind() -> None:
    process = TemplateProcess()
    assert process.render("cat", "{}") == "cat"
    running: Any = process._process
    running.stdout = InterruptedAnswers(running.stdout)
    with pytest.raises(KeyboardInterrupt):
        process.render("late", "{}")
    assert running.returncode == -signal.SIGKILL and process.render("hat", "{}") == "hat"
    process.end()


def test_forked_process_has_one_of_its_own() -> None:
    assert render_apart("cat", "{}") == "cat"
    child = os.fork()
    if not child:
        os._exit(0 if render_apart("hat", "{}") == "hat" else 1)
    assert render_apart("mat", "{}") == "mat"
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_template_of_known_model_is_rendered_here(monkeypatch: pytest.MonkeyPatch) -> None:
    template = "{{ messages|length }}{{ raise_exception('no') if name is not string }}"
    known_digests = frozenset({hashlib.sha256(template.encode()).hexdigest()})
    monkeypatch.setattr(template_process, "KNOWN", known_digests)
    monkeypatch.setattr(template_process, "PROCESS", None)
    assert render_apart(template, MESSAGES) == chat_template.render(template, json.loads(MESSAGES)) == "1"
    with pytest.raises(RequestError, match=r"^no$"):
        render_apart(template, '{"messages": [], "name": 3}')
