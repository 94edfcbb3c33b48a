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
"""New tokens, more than a test waits for."""


def settings(pair: Path, *extra_options: str, tokens: int = 6) -> list[str]:
    models = [str(pair / "target"), "--draft", str(pair / "draft"), "--dtype", "float32", "--retrieval-budget", "64"]
    return [*models, "--temperature", "0", "--ignore-eos", "--max-tokens", str(tokens), *extra_options]


def new_model_answer(pair: Path, file: Path, tokens: int) -> str:
    """Return the answer of a newly loaded model to the last question of a saved conversation."""
    llm = LLM(pair / "target", None, dtype="float32")
    conversation = load(file)
    assert llm.tokenizer
    ids = llm.tokenizer.chat(conversation.messages(conversation.turns.pop().question))
    params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
    return llm.generate(ids, params, mode="ar")[0].outputs[0].text


def test_chat_commands_all_answer(pair: Path, tmp_path: Path) -> None:
    saved_file, foreign, later_file = (tmp_path / name for name in ("kept", "foreign", "after"))
    foreign.write_text('{"what": "mine"}')
    with attended("chat", *settings(pair, "--system", "be brief")) as chat:
        prompt = chat.prompt()
        assert prompt.index("loading ") < prompt.index("triforce chat with target: a context of 32,768 tokens")
        assert "answers of 6 tokens at most (--max-tokens)" in prompt
        assert "/help" in prompt and "Ctrl-D or /exit leaves" in prompt
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
        chat.save(saved_file)
        saved = load(saved_file)
        assert saved.system == "be long" and [turn.question for turn in saved.turns] == ["the cat", "/etc"]
        assert "would be lost: name another file" in chat.ask(f"/save {foreign}")
        assert foreign.read_text() == '{"what": "mine"}'
        assert "all turns are forgotten" in chat.ask("/reset")
        chat.save(later_file)
        assert (load(later_file).system, load(later_file).turns) == ("be long", [])
        assert "holds no conversation" in chat.ask(f"/load {foreign}")
        assert "cannot be read" in chat.ask(f"/load {tmp_path / 'nowhere'}")
        assert "in the place of what was here: 2 turns" in chat.ask(f"/load {saved_file}")
        chat.ask("the hat")
        chat.save(later_file)
        assert load(later_file).turns[:2] == saved.turns and load(later_file).turns[2].answer == new_model_answer(
            pair, later_file, 6
        )
        chat.ask("/reset")
        assert "kept: 0 turns, a system message]" in chat.ask(f"/save {saved_file}")
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
    conversation_file = tmp_path / "said"
    with attended("chat", *settings(pair, "--quiet", "--tp", ranks, tokens=ALL)) as chat:
        chat.prompt()
        for question, keys in (("the cat sat", CTRL_C), ("on the mat", CTRL_C + CTRL_C)):
            chat.begin(question)
            chat.type(keys)
            assert "[stopped; what was said is kept]" in chat.prompt()
        chat.save(conversation_file)
        first_turn, second = load(conversation_file).turns
        assert (first_turn.question, second.question) == ("the cat sat", "on the mat") and first_turn.answer
        cut_answer = new_model_answer(pair, conversation_file, 16).rstrip("\ufffd")
        assert cut_answer and second.answer.startswith(cut_answer)
        chat.type(CTRL_D)
        assert chat.end() == 0


def test_chat_full_context_is_reported(pair: Path, tmp_path: Path) -> None:
    document = tmp_path / "document.txt"
    conversation_file = tmp_path / "said"
    document.write_text("the cat sat on the mat")
    with attended("chat", *settings(pair, "--context", "320", "--file", str(document))) as chat:
        assert "a document of 22 characters" in chat.prompt()
        for letter in "ab":
            chat.ask(letter * 100)
        for agreed, message in (("n", "nothing was asked: /reset"), ("y", '[dropped 1 turn, from "aaa')):
            chat.ask("c" * 100)
            shown = chat.ask(agreed)
            assert "tokens and 6 for the answer, and the context is 320. Drop the oldest 1 turn of 2? [y/n]" in shown
            assert message in shown
        chat.save(conversation_file)
        assert [turn.question[:1] for turn in load(conversation_file).turns] == ["b", "c"]
        assert load(conversation_file).document == document.read_text()
        assert load(conversation_file).turns[-1].answer == new_model_answer(pair, conversation_file, 6)
        assert "nothing was asked: " in chat.ask("d" * 400)
        chat.type(CTRL_D)
        assert chat.end() == 0
