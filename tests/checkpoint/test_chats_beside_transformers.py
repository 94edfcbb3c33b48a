"""Conversations drawn from a seed have the ids that transformers' `apply_chat_template` gives them.

Differences that are meant are in `ordinary_chats.plain_turns`, each with its reason. Differences that are faults stand
at the end of this file, each with a small input.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from itertools import islice
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import pytest
import transformers
from tokenizers import Tokenizer as Core

from tests.helpers.gguf_files import SMOLLM2 as SMOLLM2_FILE
from tests.helpers.gguf_files import byte_level_values, score_values
from tests.helpers.ordinary_chats import Chat, ordinary_chats, plain_turns, texts_in
from tests.helpers.tokenizer_folders import MADE, both
from tests.helpers.written_templates import WRITTEN, WrittenTemplate
from triforce import llm
from triforce.checkpoint import tokenizer as tokenizer_module
from triforce.checkpoint.gguf.file import GGUFFile
from triforce.checkpoint.gguf.tokenizer import read_gguf_tokenizer
from triforce.checkpoint.tokenizer import Tokenizer
from triforce.checkpoint.tokenizer_files import TokenizerFiles
from triforce.errors import RequestError

SHIPPED = Path(llm.__file__).parent / "assets" / "pair" / "target" / "tokenizer.json"
SMOLLM2 = SMOLLM2_FILE.with_name("tokenizer.json")
QWEN = os.environ.get("TRIFORCE_QWEN2_5_CODER_0_5B")
ENDS = {"bos_token": "<|endoftext|>", "eos_token": "<|endoftext|>"}
REPLACING = "replace"
"""A template with `replace`, which takes another way through `Tokenizer.chat`."""
SOUND = [name for name in WRITTEN if name != REPLACING]
COUNT = 1000 // len(SOUND)
"""Number of chats of each template."""


class Counterparts(NamedTuple):
    """A tokenizer of ours, the same one of transformers, and the chat template of both."""

    own: Tokenizer
    reference: Any
    template: WrittenTemplate


def from_core(core: Core, special: Mapping[str, str], template: WrittenTemplate) -> Counterparts:
    """Return the tokenizers with the control tokens of a template."""
    core.add_special_tokens(list(template.control_tokens))
    own = Tokenizer(TokenizerFiles(core, special, {"default": template.text}), frozenset())
    fast_tokenizer: Any = transformers.PreTrainedTokenizerFast  # its constructor has no types
    reference = fast_tokenizer(tokenizer_object=Core.from_str(core.to_str()), **special)
    reference.chat_template = template.text
    return Counterparts(own, reference, template)


def from_file(file: Path) -> Callable[[Path, WrittenTemplate], Counterparts]:
    """Return a reader of one tokenizer.json."""
    return lambda folder, template: from_core(Core.from_file(str(file)), ENDS, template)


def from_gguf(values: Mapping[str, Any]) -> Callable[[Path, WrittenTemplate], Counterparts]:
    """Return a reader of a GGUF file's metadata."""

    def read(folder: Path, template: WrittenTemplate) -> Counterparts:
        files = read_gguf_tokenizer(values, "chat.gguf").files
        return from_core(files.core, {**ENDS, **files.special}, template)

    return read


def from_folder(kind: str) -> Callable[[Path, WrittenTemplate], Counterparts]:
    """Return a writer of a folder, which both read by themselves."""

    def write(folder: Path, template: WrittenTemplate) -> Counterparts:
        MADE[kind](folder)
        file = folder / "tokenizer.json"
        core = Core.from_file(str(file))
        core.add_special_tokens(list(template.control_tokens))
        core.save(str(file))
        (folder / "chat_template.jinja").write_text(template.text, encoding="utf-8")
        return Counterparts(*both(folder), template)

    return write


KINDS: dict[str, Callable[[Path, WrittenTemplate], Counterparts]] = {
    **{kind: from_folder(kind) for kind in MADE},
    "GGUF, byte level": from_gguf(byte_level_values()),
    "GGUF, scores": from_gguf(score_values(["▁", "a", "e", "▁a", "th", "▁the", "東", "<", "|", "im"])),
    "the shipped pair": from_file(SHIPPED),
    "SmolLM2": from_file(SMOLLM2),
    "SmolLM2, GGUF": lambda folder, template: from_gguf(GGUFFile(SMOLLM2_FILE).metadata)(folder, template),
}
"""Makers of tokenizers by name."""


def skip_without_file(kind: str) -> None:
    if kind.startswith("SmolLM2") and not (SMOLLM2.exists() and SMOLLM2_FILE.exists()):
        pytest.skip("build/smollm2 is not there; make smollm2")


@pytest.fixture(scope="module", params=SOUND)
def real(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Counterparts:
    """The tokenizer with the most merges that is here, with each of the written templates."""
    return KINDS[real_kind()](tmp_path_factory.mktemp("real"), WRITTEN[request.param])


def real_kind() -> str:
    return "SmolLM2" if SMOLLM2.exists() else "the shipped pair"


def spells_control_token(own: Tokenizer, chat: Chat) -> bool:
    texts = texts_in([plain_turns(chat.messages), chat.tools, chat.variables])
    return any(own.control_tokens.written_in(text) for text in texts)


def drawn_chats(counterparts: Counterparts, count: int, seed: int = 0) -> Iterator[Chat]:
    """Yield chats whose texts spell no control token."""
    chats = ordinary_chats(counterparts.template, seed)
    return islice((chat for chat in chats if not spells_control_token(counterparts.own, chat)), count)


def expected(counterparts: Counterparts, chat: Chat, **options: Any) -> Any:
    """Return transformers' ids or text, or the reason of a refusal.

    No tools and an empty list of them are one: the second is what clients send that have no tools at hand.
    """
    options = {"add_generation_prompt": True, "return_dict": False} | options | chat.variables
    try:
        turns = plain_turns(chat.messages)
        return counterparts.reference.apply_chat_template(turns, tools=chat.tools or None, **options)
    except Exception as error:  # a template is a program and may raise anything
        return str(error)


def own_ids(counterparts: Counterparts, chat: Chat, continue_final: bool = False) -> list[int] | str:
    """Return our ids, or the reason of a refusal."""
    try:
        return counterparts.own.chat(chat.messages, chat.tools, chat.variables, continue_final)
    except RequestError as error:
        return str(error).partition("messages: ")[2]


def equal_count(counterparts: Counterparts, chats: Iterator[Chat], **variables: Any) -> int:
    """Assert that both give the same ids or refuse for the same reason; return the number of chats with ids.

    variables: of our call only.
    """
    count = 0
    for chat in chats:
        reference_ids = expected(counterparts, chat)
        assert own_ids(counterparts, chat._replace(variables=chat.variables | variables)) == reference_ids, chat
        count += isinstance(reference_ids, list)
    return count


def spelling(template: WrittenTemplate) -> dict[str, str]:
    """Return a variable that no template reads, and that spells a control token."""
    return {"unread": template.control_tokens[0]}


def test_ids_of_ordinary_chats_equal_transformers(real: Counterparts) -> None:
    """A thousand chats, over all templates together."""
    assert equal_count(real, drawn_chats(real, COUNT)) == COUNT


def test_ids_stay_beside_text_that_spells_control_token(real: Counterparts) -> None:
    """Such a chat is encoded in another way: control tokens have secret names meanwhile."""
    assert equal_count(real, drawn_chats(real, 25, seed=1), **spelling(real.template)) == 25


def test_ids_of_continued_answers_equal_transformers(real: Counterparts) -> None:
    """The last turn has no white space around it: where a template trims, transformers trims the end, too."""
    if real.template is WRITTEN["filters"]:
        pytest.skip("it shows the last turn twice, and transformers leaves its mark in the text")
    continued_chats = (
        chat._replace(messages=[*chat.messages, {"role": "assistant", "content": f"So: {chat.messages[0]['role']}"}])
        for chat in drawn_chats(real, 200, seed=2)
        if chat.messages[-1]["role"] == "user"
    )
    for chat in islice(continued_chats, 25):
        ids = expected(real, chat, add_generation_prompt=False, continue_final_message=True)
        assert own_ids(real, chat, continue_final=True) == ids, chat


def with_control_tokens(random: Random, value: Any, control_tokens: tuple[str, ...]) -> Any:
    """Return turns or tools with control tokens in some of their texts. Names of members and choices stay."""
    if isinstance(value, list):
        return [with_control_tokens(random, entry, control_tokens) for entry in value]
    if isinstance(value, dict):
        return {
            name: _spoiled_member(random, name, member, control_tokens) if member else member
            for name, member in value.items()
        }
    return value


def _spoiled_member(random: Random, name: str, member: Any, control_tokens: tuple[str, ...]) -> Any:
    if not isinstance(member, str):
        return with_control_tokens(random, member, control_tokens)
    if name not in ("content", "description", "text", "reasoning_content") or random.random() < 0.5:
        return member
    place = random.randrange(len(member) + 1)
    return member[:place] + random.choice(control_tokens) + member[place:]


def test_text_that_spells_control_tokens_is_laid_out_as_by_transformers(real: Counterparts) -> None:
    """The ids differ, as ours are text there; the text that they stand for does not."""
    random = Random(3)
    control_tokens = real.template.control_tokens
    spelled_count = 0
    for chat in drawn_chats(real, 25, seed=3):
        messages, tools = (with_control_tokens(random, value, control_tokens) for value in (chat.messages, chat.tools))
        spoiled_chat = Chat(messages, tools, chat.variables)
        reference_ids = expected(real, spoiled_chat)
        ids = own_ids(real, spoiled_chat)
        assert isinstance(ids, list)
        assert real.reference.decode(ids) == real.reference.decode(reference_ids), spoiled_chat
        spelled_count += ids != reference_ids
    assert spelled_count > 10


def test_border_inside_a_text_is_detected(real: Counterparts, monkeypatch: pytest.MonkeyPatch) -> None:
    plain_encode = tokenizer_module._encode

    def encode(core: Core, text: str, add_special: bool) -> list[int]:
        half = len(text) // 2
        return plain_encode(core, text[:half], add_special) + plain_encode(core, text[half:], add_special)

    monkeypatch.setattr(tokenizer_module, "_encode", encode)
    with pytest.raises(AssertionError, match="Chat"):
        equal_count(real, drawn_chats(real, 25))


def served_counterparts(files: TokenizerFiles, control_tokens: tuple[str, ...], calls: int) -> Counterparts:
    """Return the tokenizers of a model with its own chat template."""
    template = WrittenTemplate(files.templates["default"], control_tokens, alternates=not calls, calls=calls)
    return from_core(files.core, files.special, template)


@pytest.mark.parametrize("kind", ["folder", "GGUF"])
def test_ids_of_chats_with_smollm2_equal_transformers(kind: str) -> None:
    """Two turns of the user in a row are not drawn, as they become one, see below."""
    skip_without_file("SmolLM2")
    control_tokens = ("<|im_start|>", "<|im_end|>")
    metadata = GGUFFile(SMOLLM2_FILE).metadata
    files = read_gguf_tokenizer(metadata, "smollm2").files
    counterparts = served_counterparts(files, control_tokens, calls=0)
    if kind == "folder":
        reference = transformers.AutoTokenizer.from_pretrained(SMOLLM2.parent, local_files_only=True)
        own = Tokenizer.load(SMOLLM2.parent)
        counterparts = counterparts._replace(own=own, reference=reference)
    assert equal_count(counterparts, drawn_chats(counterparts, 100)) == 100


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.skipif(QWEN is None, reason="TRIFORCE_QWEN2_5_CODER_0_5B names no GGUF file of Qwen2.5-Coder 0.5B")
def test_ids_of_chats_with_qwen_equal_transformers() -> None:
    assert QWEN
    files = read_gguf_tokenizer(GGUFFile(Path(QWEN)).metadata, QWEN).files
    counterparts = served_counterparts(files, ("<|im_start|>", "<|im_end|>"), calls=3)
    assert equal_count(counterparts, drawn_chats(counterparts, 1000)) == 1000
    chats = drawn_chats(counterparts, 100, seed=1)
    assert equal_count(counterparts, chats, **spelling(counterparts.template)) == 100


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("kind", KINDS)
def test_ids_of_ordinary_chats_equal_transformers_with_each_tokenizer(tmp_path: Path, kind: str) -> None:
    """Templates that need a first token refuse every chat without one, in both."""
    skip_without_file(kind)
    count = 0
    for i, name in enumerate(SOUND):
        folder = tmp_path / str(i)
        folder.mkdir()
        counterparts = KINDS[kind](folder, WRITTEN[name])
        count += equal_count(counterparts, drawn_chats(counterparts, COUNT))
        if kind != "special tokens as text":  # see below
            chats = drawn_chats(counterparts, 20, seed=1)
            equal_count(counterparts, chats, **spelling(WRITTEN[name]))
    assert count == 1000 or (kind == "no config" and count >= 600)


USER = {"role": "user", "content": "the cat"}
CALL = {"id": "abc012345", "type": "function", "function": {"name": "f", "arguments": {"a": 1}}}
TURN = "{% for m in messages %}<|im_start|>{{ CONTENT }}<|im_end|>{% endfor %}"
MARKS = ("<|im_start|>", "<|im_end|>", "<|call|>")


def known_fault(reason: str) -> pytest.MarkDecorator:
    """Mark a test that fails for a reason that is known."""
    return pytest.mark.xfail(raises=AssertionError, strict=True, reason=reason)


def small_template(content: str) -> WrittenTemplate:
    """Return a template of turns of this content. It is one with tools, unless it lacks the word."""
    return WrittenTemplate(TURN.replace("{{ CONTENT }}", content), MARKS)


def small(content: str) -> Counterparts:
    """Return the shipped tokenizer with such a template."""
    return KINDS["the shipped pair"](Path(), small_template(content))


def test_small_template_is_laid_out_as_by_transformers() -> None:
    counterparts = small("{{ m.content }}{# tool #}")
    assert equal_count(counterparts, iter([Chat([USER, USER], None, {})])) == 1


def test_calls_stay_where_template_replaces_text() -> None:
    """`tool_calls` is spelled with a character of `<|im_end|>`, which a template with `replace` must find."""
    content = "{{ m.content | replace('x', 'y') }}{% for c in m.tool_calls or [] %}<|call|>{{ c.function.name }}"
    counterparts = small(content + "{% endfor %}")
    equal_count(counterparts, iter([Chat([USER, {"role": "assistant", "tool_calls": [CALL]}], None, {})]))


def test_ids_of_ordinary_chats_equal_transformers_where_template_replaces_text(tmp_path: Path) -> None:
    counterparts = KINDS[real_kind()](tmp_path, WRITTEN[REPLACING])
    assert equal_count(counterparts, drawn_chats(counterparts, 25)) == 25


def test_turns_of_user_in_a_row_stay_apart_without_tools() -> None:
    """The chat has no tools, calls or results that would have to be told in text."""
    equal_count(small("{{ m.content }}"), iter([Chat([USER, USER], None, {})]))


@known_fault("private characters are unprintable, and `repr` writes their codes")
def test_text_that_spells_control_token_is_shown_where_template_writes_python() -> None:
    """`{{ tools }}` writes a list as Python does; the description becomes `\\U000f0000...` in the prompt."""
    counterparts = small("{{ m.content }}{{ tools }}")
    tools = [{"type": "function", "function": {"name": "f", "description": "ends with <|im_end|>"}}]
    chat = Chat([USER], tools, {})
    decode = counterparts.reference.decode
    assert decode(own_ids(counterparts, chat)) == decode(expected(counterparts, chat))


@known_fault("private characters are no `<`, which `escape` and `urlencode` look for")
@pytest.mark.parametrize("filter_name", ["escape", "urlencode"])
def test_text_that_spells_control_token_is_escaped_where_template_escapes(filter_name: str) -> None:
    counterparts = small(f"{{{{ m.content | {filter_name} }}}}{{# tool #}}")
    chat = Chat([{"role": "user", "content": "<b> <|im_end|>"}], None, {})
    decode = counterparts.reference.decode
    assert decode(own_ids(counterparts, chat)) == decode(expected(counterparts, chat))


@pytest.mark.parametrize(
    ("content", "text"),
    [
        ("{{ m.content.split('<think>')[0] + m.content.split('</think>')[-1] }}", "a<|im_<think>b</think>end|>"),
        ("{{ m.content.split('<x>') | join }}", "a<|im_<x>end|>"),
        ("{% set p = m.content.partition('<x>') %}{{ p[0] ~ p[2] }}", "a<|im_<x>end|>"),
        ("{{ m.content.splitlines() | join }}", "a<|im\n_end|>"),
        ("{{ m.content.split() | join }}", "a<|im _end|>"),
        ("{{ m.content | lower }}", "a<|IM_END|>"),
        ("{{ m.content | striptags }}", "a &lt;|im_end|&gt;"),
        ("{{ m.content | reverse }}", ">|dne_mi|<"),
    ],
)
def test_template_that_composes_text_composes_no_control_token(content: str, text: str) -> None:
    counterparts = small(content + "{# tool #}")
    ids = own_ids(counterparts, Chat([{"role": "user", "content": text}], None, {}))
    assert len([i for i in ids if i in counterparts.own.special_ids]) == 2


def test_continued_answer_that_template_shows_twice_leaves_no_mark() -> None:
    counterparts = small("{{ m.content }} {{ m.content }}{# tool #}")
    ids = own_ids(counterparts, Chat([USER, {"role": "assistant", "content": "So"}], None, {}), continue_final=True)
    assert "\U0010fffd" not in counterparts.reference.decode(ids)


@known_fault("beside such a text the template's own tokens are control tokens again")
def test_template_of_text_stays_text_beside_text_that_spells_control_token(tmp_path: Path) -> None:
    """With `split_special_tokens` all control tokens are text, those of the template too, as in transformers."""
    counterparts = KINDS["special tokens as text"](tmp_path, small_template("{{ m.content }}{# tool #}"))
    assert equal_count(counterparts, iter([Chat([USER], None, {})])) == 1
    assert equal_count(counterparts, iter([Chat([USER], None, {})]), unread="<|im_end|>") == 1


@known_fault("a chat through the library has only the field that was given")
@pytest.mark.parametrize("field", ["reasoning", "thinking"])
def test_thoughts_of_each_name_are_shown(field: str) -> None:
    """transformers fills `reasoning_content` from older names of thoughts; the server does so for one of them."""
    counterparts = small("{{ m.reasoning_content }}{{ m.content }}{# tool #}")
    equal_count(counterparts, iter([Chat([USER, {"role": "assistant", "content": "So", field: "hm"}, USER], None, {})]))
