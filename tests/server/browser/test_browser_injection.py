"""Hostile texts in Chromium: in questions, names, answers and imported files. Nothing runs, nothing is loaded."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.helpers.page_browser import answer_with, ask, change_card, close_dialog, drop, expect, finish, piece, usage

if TYPE_CHECKING:
    from playwright.sync_api import Page

PAYLOADS = (
    "<script>window.pwned = 1</script>",
    "<img src=https://evil.example/x onerror='window.pwned = 1'>",
    "<svg onload='window.pwned = 1'><script>window.pwned = 1</script></svg>",
    "![x](https://evil.example/pixel.png)",
    "[x](javascript:window.pwned=1)",
    "<a href='javascript:window.pwned=1'>x</a>",
    "$\\href{javascript:window.pwned=1}{x}$ $$\\includegraphics{https://evil.example/x}$$",
    "<math><mtext><style><img src=x onerror='window.pwned=1'></style></mtext></math>",
    "<iframe srcdoc='<script>parent.pwned=1</script>'></iframe><object data='https://evil.example'></object>",
    "<style>body { background: url(https://evil.example/x) } @import 'https://evil.example/y';</style>",
    "<link rel=stylesheet href=https://evil.example/x><meta http-equiv=refresh content='0;url=https://evil.example'>",
    "<form action=https://evil.example><button autofocus onfocus='window.pwned=1'>x</button></form>",
    "```html\n<script>window.pwned = 1</script>\n```",
    "[x]: https://evil.example 'onmouseover=window.pwned=1'\n[x]",
    "</script><script>window.pwned = 1</script>",
    "<details open ontoggle='window.pwned=1'>x</details><video autoplay src=https://evil.example/v></video>",
)
FRAGMENTS = (
    *PAYLOADS,
    *("<", ">", "</", "/>", "<!--", "-->", "<![CDATA[", "]]>", "&lt;script&gt;", "&#x3C;", "\0", "\u202e", "\ufeff"),
    *(
        "[",
        "](",
        ")",
        "![",
        "`",
        "```",
        "~~~",
        "\n",
        "\n\n",
        "    ",
        "\t",
        "> ",
        "* ",
        "1. ",
        "# ",
        "|",
        "|---|",
        "- [x] ",
    ),
    *(
        "$",
        "$$",
        "\\(",
        "\\)",
        "\\[",
        "\\]",
        "{",
        "}",
        "^",
        "_",
        "\\frac",
        "\\text{",
        "\\style{",
        "\\unicode{",
        "\\def\\a{\\a}\\a",
    ),
    *(
        "javascript:",
        "data:text/html,<script>pwned=1</script>",
        "vbscript:",
        "JaVaScRiPt\n:",
        "https://evil.example/",
        "//evil.example",
    ),
    *("onerror=", "onload=", "style=", "src=", "href=", "xlink:href=", "srcset=", "formaction=", "'", '"', "=", " "),
    *(
        "<math>",
        "<mglyph>",
        "<annotation-xml encoding='text/html'>",
        "<svg>",
        "<foreignObject>",
        "<use href=",
        "<template>",
        "<noscript>",
    ),
    *("<p id=page>", "<a name=body>", "<form id=x><input name=attributes>", "word", "été", "中文", "\U0001d4b3"),
)
TEXTS = 10_000
INSPECT = """texts => {
    const stage = document.body.appendChild(document.createElement("div"));
    const known = new Set(["http:", "https:", "mailto:"]), faults = [];
    const forbidden = "script, style, iframe, object, embed, link, meta, base, img, svg, video, audio, form, input, " +
        "button, textarea, template, portal, frame";
    for (const text of texts) {
        const html = triforceRenderer.blocks(text).map(block => block.html).join("");
        stage.innerHTML = html;
        if (stage.querySelector(forbidden)) faults.push([text, html]);
        for (const element of stage.querySelectorAll("*")) {
            for (const {name, value} of element.attributes) {
                const runs = name.startsWith("on") || ["style", "id", "name", "src", "srcset"].includes(name);
                const leads = name.endsWith("href");
                if (runs || (leads && !known.has(new URL(value, location.href).protocol))) faults.push([text, html]);
                if (leads && !/^(https?:|mailto:)/i.test(value)) faults.push([text, html]);
            }
            const opens = element.href && (element.target !== "_blank" || !element.rel.includes("noopener"));
            if (opens) faults.push([text, html]);
        }
    }
    stage.remove();
    return faults.slice(0, 3);
}"""


def is_unharmed(page: Page) -> bool:
    return bool(page.evaluate("window.pwned === undefined"))


@pytest.mark.parametrize("payload", PAYLOADS)
def test_browser_hostile_answer_is_text(page: Page, payload: str) -> None:
    """The fixture of the page fails for any request to another host, and for any violation of the policy."""
    page.evaluate("window.same = true")
    thinking = piece("", delta={"reasoning_content": payload}, ids=[1])
    answer_with(page, [thinking, piece(payload), finish(), usage(20)])
    answer = ask(page, payload)
    for summary in answer.locator("summary").all():
        summary.click()
    page.wait_for_timeout(100)
    assert is_unharmed(page) and page.evaluate("window.same") and page.url.startswith("http://127.0.0.1")
    assert page.locator("img, iframe, object, embed, video, .turn form, .turn style, .turn script").count() == 0


def test_browser_hostile_names_are_text(page: Page) -> None:
    name = "<img src=https://evil.example/x onerror='window.pwned=1'>"
    change_card(page, {"id": name}, pays=name, modes=[name, "ar"])
    expect(page.locator("#about")).to_contain_text(name)
    drop(page, {f"{name}.txt": "the cat"})
    expect(page.locator(".composer .documents")).to_contain_text(name)
    call = {"id": name, "type": "function", "function": {"name": name, "arguments": name}}
    events = [piece(name, tier=name, delta={"tool_calls": [call]}), finish(name), usage(20)]
    answer_with(page, [event | {"model": name} for event in events])
    ask(page, "what?")
    for view in ("Runs", "Settings"):
        page.get_by_role("button", name=view).click()
        expect(page.get_by_role("dialog")).to_contain_text(name)
        close_dialog(page)
    assert is_unharmed(page) and page.locator("img").count() == 0


def test_browser_hostile_import_is_text(page: Page, tmp_path: Path) -> None:
    bad = PAYLOADS[1]
    figures = {
        "tokens": 5,
        "seconds": 1,
        "promptTokens": 9,
        "tiers": [{"name": bad, "passes": bad}],
        "inText": {bad: bad},
    }
    answered: dict[str, Any] = {
        "state": bad, "text": bad, "thoughts": bad, "calls": [{"id": bad, "name": bad, "arguments": bad}],
        "error": bad, "figures": figures, "fingerprint": bad, "model": bad, "proof": {"state": "identical"},
        "frozen": {"seed": bad, "mode": bad, "fields": {"temperature": {"__proto__": 1}}, "tools": bad},
    }  # fmt: skip
    turns = [
        {"id": "__proto__", "parent": None, "role": "user", "created": 1, "text": bad, "documents": [{"id": "d"}]},
        {"id": "b", "parent": "__proto__", "role": "assistant", "created": 2, "pieces": [answered]},
    ]
    head = {"id": "c", "title": bad, "choices": {"__proto__": "b"}, "system": bad, "tools": "", "draft": {"text": bad}}
    documents = [{"id": "d", "name": bad, "text": bad}]
    data = {
        "format": "triforce-conversation",
        "version": 1,
        "conversation": head,
        "turns": turns,
        "details": [],
        "documents": documents,
    }
    (tmp_path / "hostile.json").write_text(json.dumps(data))
    page.locator("#import").set_input_files(tmp_path / "hostile.json")
    expect(page.locator(".answer")).to_have_count(1)
    for summary in page.locator("summary").all():
        summary.click()
    page.wait_for_timeout(100)
    assert is_unharmed(page) and page.locator("img").count() == 0
    assert page.locator(".same").count() == 0  # a verdict of a file is no verdict


def test_browser_hostile_markdown_is_harmless(page: Page) -> None:
    """10,000 texts of hostile fragments: no element, attribute or address that could run or load anything."""
    answer_with(page, [piece("text"), finish(), usage(20)])
    expect(ask(page, "one").locator(".markdown")).to_be_visible()
    random_source = random.Random(72)
    texts = ["".join(random_source.choices(FRAGMENTS, k=random_source.randint(2, 14))) for _ in range(TEXTS)]
    for start in range(0, TEXTS, 500):
        assert page.evaluate(INSPECT, texts[start : start + 500]) == []
    assert is_unharmed(page)


@pytest.mark.parametrize("text", [">" * 2500, "- " * 2500, "1. " * 2500, "[" * 20_000, "\\[ " * 20_000, "$$ " * 20_000])
def test_browser_deep_and_long_texts_are_shown(page: Page, text: str) -> None:
    """Texts on which a Markdown parser could overflow its stack, or take forever."""
    answer_with(page, [piece(text, ids=[1]), finish(), usage(20)])
    answer = ask(page, "what?")
    shown = answer.locator(".markdown").inner_text()
    assert len(shown) > len(text) / 4
    page.reload()
    expect(page.locator(".answer .markdown")).to_be_visible()
