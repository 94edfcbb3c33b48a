"""A conversation in Chromium: history, branches, cut answers, thoughts, calls, and how answers are rendered."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import pytest

from tests.helpers.page_browser import (
    CHATS,
    answer_with,
    ask,
    change_card,
    check,
    close_dialog,
    composer,
    drop,
    expect,
    finish,
    hold_streams,
    model_card,
    piece,
    send,
    set_settings,
    usage,
)

if TYPE_CHECKING:
    from playwright.sync_api import Page


def asked(page: Page, question: str) -> dict[str, Any]:
    """Return the body of the request that a question becomes, after its answer."""
    with page.expect_request(CHATS) as sent:
        ask(page, question)
    body: dict[str, Any] = sent.value.post_data_json
    return body


def test_browser_later_questions_carry_the_history(page: Page) -> None:
    question = "the cat sat on the mat " * 20
    first_body = asked(page, question)
    assert first_body["messages"] == [{"role": "user", "content": question.strip()}]
    text = page.locator(".answer .markdown").inner_text()
    second_body = asked(page, "and the dog")
    assert [message["role"] for message in second_body["messages"]] == ["user", "assistant", "user"]
    assert second_body["messages"][1]["content"].split() == text.split()
    expect(page.locator(".answer .figures").nth(1)).to_contain_text("of the conversation were read before")


def test_browser_run_is_frozen_at_the_click(page: Page) -> None:
    """Neither a later question nor later settings change what a check repeats."""
    set_settings(page, seed="11")
    body = asked(page, "the cat sat on the mat")
    set_settings(page, seed="12", temperature="1.5", max_tokens="7", system="be brief", stop="cat")
    composer(page).fill("another question")
    with page.expect_request(CHATS) as sent:
        check(page.locator(".answer"))
    repeated = sent.value.post_data_json
    assert repeated.pop("mode") == "ar" != body.pop("mode")
    assert repeated.pop("max_tokens") == 24 == body.pop("max_tokens")
    assert repeated == body
    expect(page.locator(".headline")).to_contain_text("Identical to plain decoding")
    expect(composer(page)).to_have_value("another question")


def test_browser_edit_and_regenerate_make_branches(page: Page) -> None:
    set_settings(page, temperature="1")
    ask(page, "the cat sat")
    page.get_by_role("button", name="Regenerate").click()
    expect(page.locator(".answer .branches")).to_contain_text("2 of 2")
    expect(page.locator(".answer .ending")).to_have_count(1)
    later_text = page.locator(".answer .markdown").inner_text()
    page.locator(".answer").get_by_label("Earlier branch").click()
    expect(page.locator(".answer .branches")).to_contain_text("1 of 2")
    assert page.locator(".answer .markdown").inner_text() != later_text
    page.locator(".question").get_by_role("button", name="Edit").click()
    page.get_by_label("Question, edited").fill("the dog ran")
    with page.expect_request(CHATS) as sent:
        page.keyboard.press("Control+Enter")
    assert sent.value.post_data_json["messages"] == [{"role": "user", "content": "the dog ran"}]
    expect(page.locator(".question .branches")).to_contain_text("2 of 2")
    expect(page.locator(".answer .ending")).to_have_count(1)
    page.locator(".question").get_by_label("Earlier branch").click()
    expect(page.locator(".question .plain")).to_have_text("the cat sat")
    page.reload()
    expect(page.locator(".question .plain")).to_have_text("the cat sat")


def test_browser_limit_is_told_and_the_answer_goes_on(page: Page) -> None:
    """An answer of several pieces is checked piece by piece."""
    set_settings(page, max_tokens="8", temperature="1", seed="3")
    answer = ask(page, "the cat sat on the mat")
    expect(answer.locator(".ending")).to_have_text("The answer reached its limit of 8 tokens.")
    first_text = answer.locator(".markdown").inner_text()
    with page.expect_request(CHATS) as sent:
        answer.get_by_role("button", name="Go on").click()
    assert sent.value.post_data_json["messages"][-1]["role"] == "assistant"
    expect(answer.locator(".ending")).to_have_count(1)
    whole = answer.locator(".markdown").inner_text()
    assert whole.startswith(first_text.rstrip("�")) and len(whole) > len(first_text)
    check(answer)
    expect(answer.locator(".headline")).to_have_count(2)
    for part, headline in enumerate(answer.locator(".headline").all_inner_texts(), 1):
        assert headline == f"Part {part}: Identical to plain decoding"


def test_browser_stop_keeps_the_text_and_goes_on(page: Page) -> None:
    hold_streams(page, 8)
    send(page, "the cat sat on the mat")
    expect(page.locator(".answer .markdown, .answer > .plain")).not_to_be_empty()
    page.keyboard.press("Escape")
    answer = page.locator(".answer")
    expect(answer.locator(".ending")).to_have_text("You stopped this answer.")
    page.reload()
    set_settings(page, max_tokens="8")
    answer.get_by_role("button", name="Go on").click()
    expect(answer.locator(".ending")).to_have_text("The answer reached its limit of 8 tokens.")
    check(answer)
    assert all("Identical" in headline for headline in answer.locator(".headline").all_inner_texts())


def test_browser_reload_marks_the_running_answer(page: Page) -> None:
    hold_streams(page, 8)
    send(page, "the cat sat on the mat")
    expect(page.locator(".answer .figures")).to_be_visible()
    page.wait_for_timeout(700)  # the answer is kept every half second
    page.once("dialog", lambda dialog: dialog.accept())
    page.reload()
    answer = page.locator(".answer")
    expect(answer.locator(".ending")).to_have_text("The answer was interrupted: the page was closed or loaded again.")
    kept_text = answer.locator(".markdown").inner_text()
    assert kept_text
    set_settings(page, max_tokens="8")
    answer.get_by_role("button", name="Go on").click()
    expect(answer.locator(".ending")).to_have_text("The answer reached its limit of 8 tokens.")
    assert len(answer.locator(".markdown").inner_text()) > len(kept_text)
    check(answer)
    assert all("Identical" in headline for headline in answer.locator(".headline").all_inner_texts())


def test_browser_ends_of_answers_are_told(page: Page) -> None:
    answer_with(page, [piece("all of it"), finish(), usage(20)])
    expect(ask(page, "one").locator(".ending")).to_have_text("The model ended its answer.")
    page.unroute(CHATS)
    page.route(CHATS, lambda route: route.abort())
    answer = ask(page, "two")
    expect(answer.locator(".fault")).to_have_text("The server does not answer. Is it still running?")
    answer_with(page, [piece("at last"), finish(), usage(20)])
    answer.get_by_role("button", name="Try again").click()
    expect(answer.locator(".ending")).to_have_text("The model ended its answer.")
    expect(answer.locator(".fault")).to_have_count(0)  # the old error went with the new text
    broken = [piece("cut "), {"error": {"message": "the engine has stopped"}}]
    answer_with(page, broken)
    expect(ask(page, "three").locator(".ending")).to_have_text("The answer was interrupted: the engine has stopped")


def test_browser_system_prompt_leads(page: Page) -> None:
    set_settings(page, system="You are a cat.")
    assert asked(page, "hello")["messages"][0] == {"role": "system", "content": "You are a cat."}
    expect(page.locator(".system")).to_contain_text("You are a cat.")


@pytest.mark.parametrize("seed", ["9007199254740993", "0", "9223372036854775807"])
def test_browser_seed_keeps_its_digits(page: Page, seed: str) -> None:
    set_settings(page, seed=seed)
    with page.expect_request(CHATS) as sent:
        ask(page, "the cat")
    assert f'"seed":{seed},' in (sent.value.post_data or "")


def test_browser_bad_settings_are_told_at_once(page: Page) -> None:
    set_settings(page, temperature="hot")
    expect(page.locator("#room")).to_contain_text("Temperature: give a number from 0 to 5.")
    composer(page).fill("the cat")
    expect(page.get_by_role("button", name="Ask", exact=True)).to_be_disabled()
    page.get_by_role("button", name="Settings").click()
    for name, value in (("temperature", "1"), ("seed", "1.5"), ("top_k", "-1"), ("max_tokens", "")):
        page.locator(f"dialog #{name}").fill(value)
    for name in ("seed", "top_k", "max_tokens"):
        assert page.locator(f"dialog #{name}").get_attribute("aria-invalid") == "true"
    page.get_by_role("button", name="Reset").click()
    assert page.locator("dialog [aria-invalid=true]").count() == 0


def test_browser_settings_show_what_the_server_has(page: Page) -> None:
    page.get_by_role("button", name="Settings").click()
    card = model_card(page)["triforce"]
    modes = page.locator("dialog #mode option").all_inner_texts()
    assert modes[0] == f"the server's: {card['mode']}"
    assert [re.findall(r"\((.+)\)", mode)[0] for mode in modes[1:]] == card["modes"]
    assert page.locator("dialog #top_k").get_attribute("placeholder") == f"the model's {card['defaults']['top_k']}"
    for mode in card["modes"]:
        page.locator("dialog #mode").select_option(mode)
        assert len(page.locator("#mode-note").inner_text()) > 20
    assert not page.locator("dialog #thinking").count()


def test_browser_singular_is_used(page: Page) -> None:
    set_settings(page, max_tokens="1")
    answer = ask(page, "the cat")
    expect(answer.locator(".ending")).to_have_text("The answer reached its limit of 1 token.")
    expect(answer.locator(".figures")).to_contain_text("1 token")
    assert not re.search(r"\b1 tokens", page.locator("body").inner_text())


MARKDOWN = """# Title

| name | value |
|---|---|
| a | 1 |

```python
def f(x):  # code
    return x
```

Euler: $e^{i\\pi} + 1 = 0$, and it costs $5 or $6.

$$\\int_0^1 x\\,dx = \\frac12$$

- [x] done
"""


def test_browser_markdown_is_rendered(page: Page) -> None:
    answer_with(page, [piece(MARKDOWN), finish(), usage(20)])
    answer = ask(page, "show")
    expect(answer.locator("h1")).to_have_text("Title")
    assert answer.locator("table td").all_inner_texts() == ["a", "1"]
    assert answer.locator("pre .hljs-keyword").all_inner_texts() == ["def", "return"]
    assert answer.locator("math").count() == 2
    assert "it costs $5 or $6." in answer.inner_text()
    page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    answer.get_by_role("button", name="Copy the code").click()
    expect(answer.get_by_role("button", name="Copied")).to_be_visible()
    assert page.evaluate("navigator.clipboard.readText()") == "def f(x):  # code\n    return x"
    answer.get_by_role("button", name="Copy the answer").click()
    assert page.evaluate("navigator.clipboard.readText()") == MARKDOWN


def test_browser_thoughts_are_folded(page: Page) -> None:
    thinking = piece("", delta={"reasoning_content": "let me see"}, ids=[1, 2])
    answer_with(page, [thinking, piece("It is so."), finish(), usage(20)])
    answer = ask(page, "why")
    assert answer.locator(".thoughts").get_attribute("open") is None
    answer.get_by_text("Thoughts").click()
    expect(answer.locator(".thoughts p")).to_have_text("let me see")
    expect(answer.locator(".markdown")).to_have_text("It is so.")


def test_browser_calls_are_shown_and_answered(page: Page) -> None:
    page.get_by_role("button", name="Settings").click()
    page.locator("dialog #tools").fill("[{")
    expect(page.locator("#tools-note")).to_contain_text("The functions are no JSON")
    page.locator("dialog #tools").fill('[{"name": "weather", "parameters": {"type": "object"}}]')
    close_dialog(page)
    call = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Bern"}'}}
    answer_with(page, [piece("", delta={"tool_calls": [call]}, ids=[1]), finish("tool_calls"), usage(20)])
    with page.expect_request(CHATS) as sent:
        answer = ask(page, "the weather")
    assert sent.value.post_data_json["tools"][0]["function"]["name"] == "weather"
    expect(answer.locator(".call summary")).to_have_text("The model calls weather")
    answer_with(page, [piece("It rains."), finish(), usage(30)])
    answer.get_by_label("Result of weather").fill("rain")
    with page.expect_request(CHATS) as sent:
        answer.get_by_role("button", name="Send the results").click()
    *_, called, result = sent.value.post_data_json["messages"]
    assert called["tool_calls"][0]["function"] == call["function"]
    assert result == {"role": "tool", "tool_call_id": "c1", "content": "rain"}
    expect(page.locator(".answer").nth(1).locator(".markdown")).to_have_text("It rains.")


def test_browser_model_without_template_continues(page: Page) -> None:
    change_card(page, chats=False)
    expect(page.get_by_role("heading", name="Continue a long document")).to_be_visible()
    composer(page).fill("the cat sat")
    with page.expect_request("**/v1/completions") as sent:
        page.get_by_role("button", name="Continue").click()
    assert sent.value.post_data_json["prompt"] == "the cat sat" and sent.value.post_data_json["parse_special"] is False
    expect(page.locator(".answer .ending")).to_have_count(1)
    check(page.locator(".answer"))
    expect(page.locator(".headline")).to_contain_text("Identical to plain decoding")


def test_browser_edited_question_is_never_lost(page: Page) -> None:
    """While nothing can be asked, the editor stays open with its text; Escape in it stops no answer."""
    ask(page, "one")
    page.locator(".question").get_by_role("button", name="Edit").click()
    page.get_by_label("Question, edited").fill("one, better")
    set_settings(page, temperature="hot")
    expect(page.get_by_role("button", name="Ask as a new branch")).to_be_disabled()
    page.get_by_label("Question, edited").press("Control+Enter")
    expect(page.get_by_label("Question, edited")).to_have_value("one, better")
    set_settings(page, temperature="0")
    hold_streams(page, 3)
    send(page, "two")
    expect(page.get_by_role("button", name="Stop")).to_be_visible()
    page.get_by_label("Question, edited").press("Escape")
    expect(page.get_by_label("Question, edited")).to_have_count(0)
    expect(page.get_by_role("button", name="Stop")).to_be_visible()


def test_browser_regenerate_refuses_bad_settings(page: Page) -> None:
    ask(page, "one")
    set_settings(page, seed="x1")
    expect(page.get_by_role("button", name="Regenerate")).to_be_disabled()
    set_settings(page, seed="007")
    with page.expect_request(CHATS) as sent:
        page.get_by_role("button", name="Regenerate").click()
    assert '"seed":7,' in (sent.value.post_data or "")


def test_browser_thoughts_that_were_cut_are_asked_again(page: Page) -> None:
    thinking = piece("", delta={"reasoning_content": "hm"}, ids=[1])
    answer_with(page, [thinking, finish("length"), usage(20)])
    answer = ask(page, "why?")
    answer_with(page, [piece("because"), finish(), usage(20)])
    answer.get_by_role("button", name="Try again").click()
    expect(answer.locator(".markdown")).to_have_text("because")
    expect(answer.locator(".thoughts")).to_have_count(0)


def test_browser_text_is_continued_where_it_ends(page: Page) -> None:
    change_card(page, chats=False)
    composer(page).fill("Once upon a time \n\n")
    with page.expect_request("**/v1/completions") as sent:
        page.get_by_role("button", name="Continue").click()
    assert sent.value.post_data_json["prompt"] == "Once upon a time \n\n"


def test_browser_clock_that_was_set_back_shows_the_latest(page: Page) -> None:
    ask(page, "one")
    page.evaluate("() => { const now = Date.now; Date.now = () => now() - 1e9; }")
    page.get_by_role("button", name="Regenerate").click()
    expect(page.locator(".answer .branches")).to_contain_text("2 of 2")


def test_browser_question_waits_for_a_document(page: Page) -> None:
    """A question is not sent without the document that is being read."""
    page.route("**/tokenize", lambda route: None)
    drop(page, {"a.txt": "text"})
    expect(page.locator(".composer")).to_contain_text("Reading a.txt")
    send(page, "what?")
    expect(page.locator("#room")).to_have_text("A document is being read.")
    assert page.locator(".question").count() == 0
