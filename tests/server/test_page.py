"""The page: it that brings all it needs, runs nothing else, and says nothing of the model."""

from __future__ import annotations

import asyncio
import json
import re
from base64 import b64encode
from hashlib import sha256
from pathlib import Path
from typing import Any

import httpx
import pytest
from starlette.types import ASGIApp

from tests.helpers.asgi_client import SAMPLED, ask, events, good, refused
from triforce.cli.demo import BEGIN, QUESTION
from triforce.interface.repeated_grams import repeated_share
from triforce.interface.sampling_params import chat_defaults
from triforce.llm import LLM
from triforce.server.app import create_app
from triforce.server.engine_thread import Worker
from triforce.server.limits import Limits
from triforce.server.page import FILES

WEB = Path(__file__).parents[2] / "web"
USAGE = {"include_usage": True}
PROMPT = "the cat sat on the mat " * 12


def test_page_is_self_contained(app: ASGIApp) -> None:
    page = ask(app, "/")
    assert page.status_code == 200 and page.headers["content-type"] == "text/html; charset=utf-8"
    shell = re.sub(r"<(script|style)>.*?</\1>", "", page.text, flags=re.DOTALL)
    assert not re.findall(r"""(?:src|href)=["'](?!data:,)|https?://|\son\w+=|\sstyle=""", shell)
    assert not re.findall(r"@import|url\(", re.findall(r"<style>.*?</style>", page.text, re.DOTALL)[0])
    policy = policy_of(page)
    assert policy["default-src"] == policy["frame-ancestors"] == policy["form-action"] == "'none'"
    assert policy["connect-src"] == policy["worker-src"] == "'self'" and "unsafe" not in str(policy)
    for tag, others in (("script", [ask(app, "/page/renderer.js").text.rstrip()]), ("style", [])):
        texts = re.findall(rf"<{tag}>(.*?)</{tag}>", page.text, re.DOTALL)
        assert len(texts) == 1
        hashes = [f"'sha256-{b64encode(sha256(text.encode()).digest()).decode()}'" for text in [*texts, *others]]
        assert policy[f"{tag}-src"].split() == hashes


def policy_of(answer: httpx.Response) -> dict[str, str]:
    rules = answer.headers["content-security-policy"].split(";")
    return dict(rule.strip().split(" ", 1) for rule in rules)


def test_page_is_small() -> None:
    """Bytes gzipped: of the first view, which is one request, and of what renders answers."""
    assert len(FILES["/"].compressed) <= 60_000
    assert len(FILES["/page/renderer.js"].compressed) <= 400_000


@pytest.mark.parametrize("path", sorted(FILES))
def test_page_files_have_a_tag_and_are_compressed(app: ASGIApp, path: str) -> None:
    plain_answer = ask(app, path, headers={"accept-encoding": "identity"})
    small_answer = ask(app, path, headers={"accept-encoding": "gzip"})
    assert small_answer.headers["content-encoding"] == "gzip" and "content-encoding" not in plain_answer.headers
    assert plain_answer.content == small_answer.content  # the client has unpacked it
    assert int(small_answer.headers["content-length"]) < len(plain_answer.content) / 2
    assert plain_answer.headers["vary"] == small_answer.headers["vary"] == "Accept-Encoding"
    for answer, encoding in ((plain_answer, "identity"), (small_answer, "gzip")):
        assert answer.headers["cache-control"] == "no-cache" and answer.headers["x-content-type-options"] == "nosniff"
        headers = {"accept-encoding": encoding, "if-none-match": f'"other", W/{answer.headers["etag"]}'}
        second_answer = ask(app, path, headers=headers)
        assert (
            second_answer.status_code == 304
            and not second_answer.content
            and second_answer.headers["etag"] == answer.headers["etag"]
        )
        assert ask(app, path, headers=headers | {"if-none-match": '"other"'}).status_code == 200
    assert plain_answer.headers["etag"] != small_answer.headers["etag"]


def test_page_worker_may_connect_to_nothing(app: ASGIApp) -> None:
    worker = ask(app, "/page/pdf.js")
    assert worker.headers["content-type"] == "text/javascript; charset=utf-8"
    assert policy_of(worker) == {"default-src": "'none'", "frame-ancestors": "'none'"}


def test_page_names_the_licences_of_its_parts(app: ASGIApp) -> None:
    text = ask(app, "/page/licences.txt").text
    lock = json.loads((WEB / "package-lock.json").read_text())["packages"]
    bundled = {name.removeprefix("node_modules/") for name in lock if name} - {"esbuild"}
    named = re.findall(r"^((?:@[\w-]+/)?[\w.-]+) \d+\.\d+\.\d+, ", text, re.MULTILINE)
    direct = json.loads((WEB / "package.json").read_text())["devDependencies"].keys() - {"esbuild"}
    assert direct <= set(named) <= bundled
    assert {"MIT License", "Apache License", "Redistribution and use"} <= set(
        re.findall("MIT License|Apache License|Redistribution and use", text)
    )


def test_page_bundle_belongs_to_its_sources(app: ASGIApp) -> None:
    """Holds without node; `make page` writes the bundle second_answer."""
    digest = sha256()
    sources = sorted(path.name for path in (WEB / "src").iterdir())
    for file in ["build.mjs", "package-lock.json", *(f"src/{name}" for name in sources)]:
        digest.update(f"{file}\0".encode() + (WEB / file).read_bytes() + b"\0")
    assert re.findall(r"<!-- sources (\w+) -->", ask(app, "/").text) == [digest.hexdigest()]


def test_page_is_same_without_key(app: ASGIApp, llm: LLM) -> None:
    engine = Worker(llm, Limits())
    guarded = create_app(llm, engine, "secret-name", keys=["a-key-of-many-letters"])
    for path in FILES:
        answer = ask(guarded, path)
        assert answer.text == ask(app, path).text and "secret-name" not in answer.text + str(answer.headers)
    refused(ask(guarded, "/", {}), 405)
    refused(ask(guarded, "/v1/models"), 401)
    refused(ask(guarded, "/sample.txt"), 401)
    refused(ask(guarded, "/page/other.js"), 401)
    assert not [path for path in ask(app, "/openapi.json").json()["paths"] if path == "/" or path.startswith("/page")]
    asyncio.run(engine.close())


def test_page_has_long_sample(app: ASGIApp) -> None:
    sample = ask(app, "/sample.txt")
    assert sample.headers["content-type"] == "text/plain; charset=utf-8"
    assert "JONATHAN HARKER" in sample.text[:2000] and len(sample.text) > 32_000 * 5


def test_page_asks_what_demo_asks(app: ASGIApp) -> None:
    """The page asks the demo's question, in one sentence; its sample begins at the chapter in question."""
    source = (WEB / "src" / "welcome.jsx").read_text()
    assert f'"Answer in one sentence: {QUESTION[0].lower()}{QUESTION[1:]}"' in source
    assert f"'{BEGIN}'" in source and BEGIN in ask(app, "/sample.txt").text


@pytest.mark.parametrize("stop", [None, ["at", "he "]])
def test_page_tokens_have_lengths_and_pieces_offsets(app: ASGIApp, stop: Any) -> None:
    body = {
        "prompt": PROMPT,
        **SAMPLED,
        "stop": stop,
        "stream": True,
        "tier_stats": True,
        "trace": True,
        "mode": "triforce",
    }
    stream_events = events(ask(app, "/v1/completions", body))
    *choices, last_choice = [event["choices"][0] for event in stream_events if event["choices"]]
    choices.append(last_choice)
    lengths = [n for choice in choices for n in choice["token_characters"]]
    text = "".join(choice["text"] for choice in choices)
    assert len(lengths) == sum(len(choice["token_tiers"]) for choice in choices)
    assert len(text) == sum(lengths) or (stop and last_choice["finish_reason"] == "stop" and len(text) < sum(lengths))
    looks = [choice["trace"] for choice in choices]
    assert all(0 <= percent <= 100 for look in looks for percent in look["seen"])
    assert [tier["name"] for tier in looks[-1]["tiers"]] == ["draft", "retrieval", "full"]
    assert looks[0]["tiers"][0]["proposed"] < looks[-1]["tiers"][0]["proposed"] or len(looks) == 1
    assert looks[-1]["tokens"] >= len(lengths) and len(looks[-1]["seen"]) <= 256


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_page_prefill_progress_precedes_text(app: ASGIApp, path: str) -> None:
    text = f"{path} has not been read before. " + PROMPT * 4
    request_body = {"prompt": text} if path == "/v1/completions" else {"messages": [{"role": "user", "content": text}]}
    stream_events = events(
        ask(app, path, {**request_body, **SAMPLED, "stream": True, "return_progress": True, "stream_options": USAGE})
    )
    kinds = "".join("r" if "prompt_progress" in event else "t" if event["choices"] else "u" for event in stream_events)
    assert re.fullmatch("t?r+t+u", kinds)  # a chat begins with its role
    reports = [event["prompt_progress"] for event in stream_events if "prompt_progress" in event]
    assert all(list(report) == ["total", "cache", "processed", "time_ms"] for report in reports)
    counts, times = ([report[name] for report in reports] for name in ("processed", "time_ms"))
    assert counts == sorted(set(counts)) and counts[0] > 0 and times == sorted(times) and times[0] >= 0
    assert {report["total"] for report in reports} == {counts[-1]} == {stream_events[-1]["usage"]["prompt_tokens"]}
    cached = stream_events[-1]["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert {report["cache"] for report in reports} == {cached}


@pytest.mark.parametrize("n", [1, 2])
def test_progress_counts_what_was_read_before(app: ASGIApp, n: int) -> None:
    body = {"prompt": f"{n} of them ask this second_answer. " + PROMPT * 4, **SAMPLED, "n": n, "stream": True}
    progress = []
    usage = {}
    for _ in range(2):
        for event in events(ask(app, "/v1/completions", body | {"return_progress": True, "stream_options": USAGE})):
            progress += [event["prompt_progress"]] if "prompt_progress" in event else []
            usage = event.get("usage") or usage
    cached = usage["prompt_tokens_details"]["cached_tokens"]
    assert progress[-1]["cache"] == cached > 0 == progress[0]["cache"]
    assert all(report["cache"] < report["processed"] <= report["total"] for report in progress)


def test_page_events_are_ignored_by_openai_client(app: ASGIApp) -> None:
    """Progress events have an empty text, so the openai client yields the text alone."""
    openai = pytest.importorskip("openai", reason="openai is not installed")

    async def go() -> tuple[int, list[str]]:
        http = httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost")
        async with openai.AsyncOpenAI(base_url="http://localhost/v1", api_key="none", http_client=http) as client:
            asked = {"trace": True, "return_progress": True, "ignore_eos": True}
            stream = await client.completions.create(
                model="tiny", prompt="no client has read this " * 30, max_tokens=8, stream=True, extra_body=asked
            )
            chunks = [chunk async for chunk in stream]
        return sum("prompt_progress" in (c.model_extra or {}) for c in chunks), [c.choices[0].text for c in chunks]

    reports, texts = asyncio.run(go())
    assert reports and len(texts) > reports


def test_page_chat_sends_trace(app: ASGIApp) -> None:
    body = {"messages": [{"role": "user", "content": PROMPT}], **SAMPLED, "stream": True, "trace": True}
    choices = [event["choices"][0] for event in events(ask(app, "/v1/chat/completions", body)) if event["choices"]]
    assert sum(n for choice in choices for n in choice.get("token_characters", [])) == sum(
        len(choice["delta"].get("content") or "") for choice in choices
    )
    assert any(choice.get("trace") for choice in choices)


def test_page_trace_needs_request(app: ASGIApp) -> None:
    body = {"prompt": PROMPT, **SAMPLED, "stream": True, "tier_stats": True}
    trace_text = json.dumps(events(ask(app, "/v1/completions", body | {"prompt": "no one looks here " * 40})))
    assert "trace" not in trace_text.replace("no one looks", "") and "prompt_progress" not in trace_text
    assert "needs stream" in refused(ask(app, "/v1/completions", {"prompt": "a", "trace": True}))


def test_page_model_reports_abilities(app: ASGIApp, llm: LLM) -> None:
    (card,) = good(ask(app, "/v1/models"))["data"]
    assert card["triforce"]["chats"] is True and "triforce" in card["triforce"]["modes"]
    break_even = llm.break_even()
    assert (card["triforce"]["pays_from"], card["triforce"]["pays"]) == (break_even.tokens, break_even.sentence)
    assert good(ask(app, f"/v1/models/{card['id']}"))["triforce"] == card["triforce"]
    assert (card["triforce"]["mode"], card["triforce"]["coupling"]) == (llm.mode, llm.coupling)
    assert card["triforce"]["defaults"] == chat_defaults(llm.sampling_defaults)
    answer = good(ask(app, "/v1/completions", {"prompt": "the cat", "max_tokens": 1}))
    assert card["triforce"]["system_fingerprint"] == answer["system_fingerprint"]


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
@pytest.mark.parametrize("n", [1, 2])
def test_answers_return_token_ids(app: ASGIApp, llm: LLM, path: str, n: int) -> None:
    """As vLLM does: ids of the prompt once for each choice or chat, and ids of new tokens with each choice."""
    is_chat = path != "/v1/completions"
    turns = [{"role": "user", "content": PROMPT}]
    ids = llm.encode_chat(turns) if is_chat else llm.encode(PROMPT)
    body = {**({"messages": turns} if is_chat else {"prompt": PROMPT}), **SAMPLED, "n": n, "max_tokens": 20}
    body |= {"top_k": 0, "top_p": 1, "min_p": 0}
    (output,) = llm.generate(ids, llm.sampling_params(n=n, max_tokens=20, temperature=0.8, seed=5, ignore_eos=True))
    expected = [completion.token_ids for completion in output.outputs]
    answer = good(ask(app, path, body | {"return_token_ids": True}))
    assert [choice["token_ids"] for choice in answer["choices"]] == expected
    prompts = [answer["prompt_token_ids"]] if is_chat else [choice["prompt_token_ids"] for choice in answer["choices"]]
    assert prompts == [ids] * (1 if is_chat else n)
    streamed_ids: list[list[int]] = [[] for _ in range(n)]
    prompts = []
    for event in events(ask(app, path, body | {"return_token_ids": True, "stream": True})):
        prompts += [holder["prompt_token_ids"] for holder in (event, *event["choices"]) if "prompt_token_ids" in holder]
        for choice in event["choices"]:
            streamed_ids[choice["index"]] += choice.get("token_ids", [])
    assert streamed_ids == expected and prompts == [ids] * (1 if is_chat else n)
    assert "token_ids" not in str(good(ask(app, path, body)))


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_texts_with_tier_stats_tell_how_far_they_repeat(app: ASGIApp, llm: LLM, path: str) -> None:
    """The share counts 8-grams that a text repeats of itself, not of its prompt."""
    turns = [{"role": "user", "content": PROMPT}]
    request_body = {"prompt": PROMPT}
    ids = llm.encode(PROMPT)
    if path != "/v1/completions":
        request_body = {"messages": turns}
        ids = llm.encode_chat(turns)
    body = {**request_body, **SAMPLED, "n": 2, "max_tokens": 60, "top_k": 2, "tier_stats": True}
    (output,) = llm.generate(
        ids, llm.sampling_params(n=2, max_tokens=60, top_k=2, temperature=0.8, seed=5, ignore_eos=True)
    )
    shares = [round(repeated_share(completion.token_ids), 4) for completion in output.outputs]
    assert good(ask(app, path, body))["usage"]["repeated_8_grams"] == shares
    *_, last_event = events(ask(app, path, body | {"stream": True, "stream_options": USAGE}))
    assert last_event["usage"]["repeated_8_grams"] == shares
    assert "repeated_8_grams" not in good(ask(app, path, body | {"tier_stats": False}))["usage"]
