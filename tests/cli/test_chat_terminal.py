"""`triforce chat` on a terminal: every command, several lines, Ctrl-C, a context that is full."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.helpers.chat_terminal import ALT_ENTER, CTRL_C, CTRL_D, ENTER, UP, attended
from tests.helpers.slow_parameters import slow
from triforce.cli.chat.conversation import load
from triforce.interface.sampling_params import SamplingParams
from triforce.llm import LLM

# What a forked process may do is exec, and that is all that these do.
pytestmark = pytest.mark.filterwarnings("ignore:.*forkpty:DeprecationWarning")

ALL = 30_000
"""New tokens that nobody waits for."""


def settings(pair: Path, *more: str, tokens: int = 6) -> list[str]:
    models = [str(pair / "target"), "--draft", str(pair / "draft"), "--dtype", "float32", "--retrieval-budget", "64"]
    return [*models, "--temperature", "0", "--ignore-eos", "--max-tokens", str(tokens), *more]


def fresh(pair: Path, file: Path, tokens: int) -> str:
    """What a model that has seen nothing before answers to the last question of a saved conversation."""
    llm, said = LLM(pair / "target", None, dtype="float32"), load(file)
    assert llm.tokenizer
    ids = llm.tokenizer.chat(said.messages(said.turns.pop().question))
    params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
    return llm.generate(ids, params, mode="ar")[0].outputs[0].text


def test_chat_commands_all_answer(pair: Path, tmp_path: Path) -> None:
    kept, foreign, after = (tmp_path / name for name in ("kept", "foreign", "after"))
    foreign.write_text('{"what": "mine"}')
    with attended("chat", *settings(pair, "--system", "be brief")) as chat:
        first = chat.prompt()
        assert first.index("loading ") < first.index("triforce chat with target: a context of 32,768 tokens")
        assert "answers of 6 tokens at most (--max-tokens)" in first
        assert "/help" in first and "Ctrl-D or /exit leaves" in first
        shown = chat.ask("the cat")
        assert "tokens/s" in shown and "[cut at --max-tokens 6]" in shown
        shown = chat.ask("/help")
        assert all(name in shown for name in ("/exit", "/reset", "/system", "/save", "/load", "Alt-Enter", "Ctrl-C"))
        assert "[the system message: be brief]" in chat.ask("/system")
        assert "the system message is set" in chat.ask("/system be long")
        assert "/rest is not a command (did you mean /reset?)" in chat.ask("/rest")
        assert "/regen is not a command; see /help" in chat.ask("/regen")
        assert "triforce chat MODEL --temperature" in chat.ask("/set temperature 1")
        assert "Alt-Enter" in chat.ask("/?")
        assert "Ctrl-D or /exit leaves" in chat.ask("exit")
        chat.ask("/clear")
        chat.ask("the cat")
        assert "/reset takes nothing" in chat.ask("/reset all")
        assert "/save needs more: /save FILE" in chat.ask("/save")
        chat.ask("//etc")
        chat.save(kept)
        said = load(kept)
        assert said.system == "be long" and [turn.question for turn in said.turns] == ["the cat", "/etc"]
        assert "would be lost: name another file" in chat.ask(f"/save {foreign}")
        assert foreign.read_text() == '{"what": "mine"}'
        assert "all turns are forgotten" in chat.ask("/reset")
        chat.save(after)
        assert (load(after).system, load(after).turns) == ("be long", [])
        assert "holds no conversation" in chat.ask(f"/load {foreign}")
        assert "cannot be read" in chat.ask(f"/load {tmp_path / 'nowhere'}")
        assert "in the place of what was here: 2 turns" in chat.ask(f"/load {kept}")
        chat.ask("the hat")
        chat.save(after)
        assert load(after).turns[:2] == said.turns and load(after).turns[2].answer == fresh(pair, after, 6)
        chat.ask("/reset")
        assert "kept: 0 turns, a system message]" in chat.ask(f"/save {kept}")
        chat.type("/bye" + ENTER)
        assert chat.end() == 0


def test_chat_lines_are_edited_and_recalled(pair: Path, tmp_path: Path) -> None:
    lines = "\n".join(f"line {n} of a long paste" for n in range(200))
    with attended("chat", *settings(pair)) as chat:
        chat.prompt()
        chat.paste(lines)
        chat.ask("")
        chat.type("the cat" + ALT_ENTER)
        chat.ask("/exit is no command here")
        chat.type("/exit" + CTRL_C + CTRL_C)  # cleared, and with it what would have ended the chat
        chat.see("Ctrl-D or /exit leaves")
        chat.prompt()
        chat.ask(UP + " too")
        chat.save(tmp_path / "said")
        asked = [turn.question for turn in load(tmp_path / "said").turns]
        assert asked == [lines, "the cat\n/exit is no command here", "the cat\n/exit is no command here too"]
        chat.type(CTRL_D)
        assert chat.end() == 0


@pytest.mark.parametrize("ranks", ["1", *slow("2")])
def test_chat_ctrl_c_ends_answer_only(pair: Path, tmp_path: Path, ranks: str) -> None:
    """The answer after it is that of a process that was never interrupted."""
    said = tmp_path / "said"
    with attended("chat", *settings(pair, "--quiet", "--tp", ranks, tokens=ALL)) as chat:
        chat.prompt()
        for question, keys in (("the cat sat", CTRL_C), ("on the mat", CTRL_C + CTRL_C)):
            chat.begin(question)
            chat.type(keys)
            assert "[stopped; what was said is kept]" in chat.prompt()
        chat.save(said)
        first, second = load(said).turns
        assert (first.question, second.question) == ("the cat sat", "on the mat") and first.answer
        begun = fresh(pair, said, 16).rstrip("\ufffd")
        assert begun and second.answer.startswith(begun)
        chat.type(CTRL_D)
        assert chat.end() == 0


def test_chat_full_context_is_reported(pair: Path, tmp_path: Path) -> None:
    document, said = tmp_path / "document.txt", tmp_path / "said"
    document.write_text("the cat sat on the mat")
    with attended("chat", *settings(pair, "--context", "320", "--file", str(document))) as chat:
        assert "a document of 22 characters" in chat.prompt()
        for letter in "ab":
            chat.ask(letter * 100)
        for agreed, told in (("n", "nothing was asked: /reset"), ("y", '[dropped 1 turn, from "aaa')):
            chat.ask("c" * 100)
            shown = chat.ask(agreed)
            assert "tokens and 6 for the answer, and the context is 320. Drop the oldest 1 turn of 2? [y/n]" in shown
            assert told in shown
        chat.save(said)
        assert [turn.question[:1] for turn in load(said).turns] == ["b", "c"]
        assert load(said).document == document.read_text()
        assert load(said).turns[-1].answer == fresh(pair, said, 6)
        assert "nothing was asked: " in chat.ask("d" * 400)
        chat.type(CTRL_D)
        assert chat.end() == 0
