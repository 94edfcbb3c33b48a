"""/v1/completions: the texts are those of `LLM.generate`, however they are asked for and sent."""

from __future__ import annotations

from typing import Any

import pytest
from starlette.types import ASGIApp

from tests.helpers.asgi_client import SAMPLED, ask, events, good, refused
from triforce.interface.sampling_params import SamplingParams
from triforce.llm import LLM

PATH = "/v1/completions"
PROMPT = "the cat sat on the mat"


def expected_output(llm: LLM, prompt: Any = PROMPT, **changes: Any) -> Any:
    return llm.generate(prompt, SamplingParams(**(SAMPLED | changes)))[0]


def test_completions_text_equals_generate(app: ASGIApp, llm: LLM) -> None:
    answer = good(ask(app, PATH, {"model": "tiny", "prompt": PROMPT, **SAMPLED}))
    output = expected_output(llm)
    assert answer["object"] == "text_completion" and answer["model"] == "tiny"
    assert answer["choices"] == [
        {"index": 0, "text": output.outputs[0].text, "logprobs": None, "finish_reason": "length", "seed": 5}
    ]
    counts = {"prompt_tokens": output.prompt_tokens, "completion_tokens": 24}
    counts["total_tokens"] = sum(counts.values())
    assert answer["usage"] == {**counts, "prompt_tokens_details": {"cached_tokens": 0}}


@pytest.mark.parametrize("mode", ["ar", "draft", "retrieval", "streaming", "triforce", "ngram", "draft-ngram"])
def test_completions_mode_texts_are_equal(app: ASGIApp, llm: LLM, mode: str) -> None:
    answer = good(ask(app, PATH, {"prompt": PROMPT, **SAMPLED, "mode": mode}))
    assert answer["choices"][0]["text"] == expected_output(llm).outputs[0].text


def test_completions_prompts_as_texts_or_ids(app: ASGIApp, llm: LLM) -> None:
    ids = llm.encode(PROMPT)
    other_ids = llm.encode("the hat")
    texts = [expected_output(llm, prompt).outputs[0].text for prompt in (ids, other_ids)]
    for prompt in (PROMPT, ids, [PROMPT], [ids]):
        (choice,) = good(ask(app, PATH, {"prompt": prompt, **SAMPLED}))["choices"]
        assert choice["text"] == texts[0]
    for several in ([PROMPT, "the hat"], [ids, other_ids]):
        choices = good(ask(app, PATH, {"prompt": several, **SAMPLED}))["choices"]
        assert [choice["text"] for choice in choices] == texts


@pytest.mark.parametrize("several", [False, True])
def test_completions_stream_adds_up_to_whole(app: ASGIApp, several: bool) -> None:
    body = {"prompt": [PROMPT, "the hat"] if several else PROMPT, **SAMPLED, "n": 2, "logprobs": 2}
    body |= {"tier_stats": True, "mode": "triforce"}  # in mode auto what a tier did depends on the clock
    full_answer = good(ask(app, PATH, body))
    response = ask(app, PATH, body | {"stream": True, "stream_options": {"include_usage": True}})
    assert response.text.endswith("data: [DONE]\n\n")
    *chunks, last_chunk = events(response)
    assert last_chunk["choices"] == [] and last_chunk["usage"] == full_answer["usage"]
    assert all(chunk["usage"] is None and chunk["object"] == "text_completion" for chunk in chunks)
    for choice in full_answer["choices"]:
        mine = [c for chunk in chunks for c in chunk["choices"] if c["index"] == choice["index"]]
        assert "".join(c["text"] for c in mine) == choice["text"]
        assert [tier for c in mine for tier in c["token_tiers"]] == choice["token_tiers"]
        for key, values in choice["logprobs"].items():
            assert [value for c in mine for value in c["logprobs"][key]] == values
        assert [c["finish_reason"] for c in mine][-1] == "length" and not any(c["finish_reason"] for c in mine[:-1])


def test_completions_stop_strings_end_texts(app: ASGIApp, llm: LLM) -> None:
    text = expected_output(llm).outputs[0].text
    (choice,) = good(ask(app, PATH, {"prompt": PROMPT, **SAMPLED, "stop": [text[6:9]]}))["choices"]
    assert choice["text"] == text[: text.index(text[6:9])] and choice["finish_reason"] == "stop"


def test_completions_settings_reach_sampler(app: ASGIApp, llm: LLM) -> None:
    settings = {
        "presence_penalty": 1.5,
        "frequency_penalty": 0.5,
        "repetition_penalty": 1.2,
        "top_k": 40,
        "min_p": 0.01,
    }
    answer = good(ask(app, PATH, {"prompt": PROMPT, **SAMPLED, **settings, "top_p": 0.9, "logit_bias": {"70": 4}}))
    assert (
        answer["choices"][0]["text"]
        == expected_output(llm, **settings, top_p=0.9, logit_bias={70: 4.0}).outputs[0].text
    )


def test_completions_prompt_scores_for_lm_eval(app: ASGIApp, llm: LLM) -> None:
    """lm_eval's `local-completions` sums token_logprobs[context:-1], and calls a token greedy if none scores higher."""
    ids = [llm.encode(PROMPT), llm.encode("the hat and")]
    body = {"prompt": ids, "max_tokens": 1, "temperature": 0, "seed": 1234, "echo": True, "logprobs": 1}
    choices = good(ask(app, PATH, body))["choices"]
    for prompt, choice in zip(ids, choices, strict=True):
        scored = expected_output(llm, prompt, max_tokens=1, temperature=0, prompt_logprobs=1).prompt_logprobs
        logprobs = choice["logprobs"]["token_logprobs"]
        assert logprobs[0] is None and len(logprobs) == len(prompt) + 1
        assert logprobs[1:-1] == [entry.chosen.logprob for entry in scored[1:]]
        best = [max(top.values()) for top in choice["logprobs"]["top_logprobs"][1:-1]]
        assert best == [entry.top[0].logprob for entry in scored[1:]]
        text = choice["text"]
        offsets = choice["logprobs"]["text_offset"]
        assert offsets[0] == 0 and offsets == sorted(offsets) and offsets[-1] <= len(text)


def test_offsets_behind_incomplete_character_are_those_of_the_text(app: ASGIApp, llm: LLM) -> None:
    prompt = [*llm.encode("hat \u4e16")[:-1], *llm.encode("cat")]
    body = {"prompt": prompt, "max_tokens": 0, "echo": True, "logprobs": 0}
    (choice,) = good(ask(app, PATH, body))["choices"]
    tokens = choice["logprobs"]["tokens"]
    offsets = choice["logprobs"]["text_offset"]
    placed = [(token, offset) for token, offset in zip(tokens, offsets, strict=True) if not token.startswith("<0x")]
    assert "\ufffd" in choice["text"] and len(placed) < len(tokens)
    assert [choice["text"][offset:][: len(token)] for token, offset in placed] == [token for token, _ in placed]


def test_completions_prompt_can_be_scored_only(app: ASGIApp, llm: LLM) -> None:
    body = {"prompt": PROMPT, "max_tokens": 0, "echo": True, "logprobs": 2}
    answer = good(ask(app, PATH, body))
    (choice,) = answer["choices"]
    assert choice["text"] == PROMPT and choice["finish_reason"] == "length"
    assert len(choice["logprobs"]["tokens"]) == len(llm.encode(PROMPT)) == answer["usage"]["prompt_tokens"]
    assert "".join(choice["logprobs"]["tokens"]) == PROMPT and answer["usage"]["completion_tokens"] == 0
    streamed = events(ask(app, PATH, {"prompt": PROMPT, "max_tokens": 0, "echo": True, "stream": True}))
    assert "".join(chunk["choices"][0]["text"] for chunk in streamed) == PROMPT


def test_completions_report_tiers(app: ASGIApp, llm: LLM) -> None:
    answer = good(ask(app, PATH, {"prompt": PROMPT, **SAMPLED, "tier_stats": True, "mode": "triforce"}))
    (output,) = llm.generate(PROMPT, SamplingParams(**SAMPLED), mode="triforce")
    stats = [{"name": t.name, "proposed": t.proposed, "accepted": t.accepted, "passes": t.passes} for t in output.tiers]
    assert answer["usage"]["tiers"] == stats
    assert answer["choices"][0]["token_tiers"] == output.outputs[0].origins


def test_completions_scored_echo_is_not_streamed(app: ASGIApp) -> None:
    text = refused(ask(app, PATH, {"prompt": PROMPT, "echo": True, "logprobs": 1, "stream": True}))
    assert "leave out" in text
