"""POST /tokenize and /detokenize: their answers are written apart, as they are as long as what was sent."""

from __future__ import annotations

from typing import Any

from fastapi.responses import JSONResponse, Response

from triforce.server.errors import wrong
from triforce.server.limits import MOST_VALUES
from triforce.server.request_parser import RequestParser
from triforce.server.schemas import DetokenizeBody, TokenizeBody


async def tokenize(parser: RequestParser, body: TokenizeBody, key: str) -> Response:
    """Return the answer to a text or a conversation. Raises ApiError."""
    if (body.prompt is None) == (body.messages is None):
        raise wrong("prompt", "send prompt or messages, one of them")
    field = "prompt" if body.messages is None else "messages"
    if body.messages is not None:
        ids = await parser.conversation(body.messages, key, thinking=body.thinks)
    else:
        ids = await parser.tokens(body.prompt or "", body.add_special_tokens is not False, key)
    if len(ids) > MOST_VALUES:
        raise wrong(field, f"the text has {len(ids):,} tokens; at most {MOST_VALUES:,} are told, so send it in parts")

    def written() -> Response:
        answer: dict[str, Any] = {"count": len(ids), "max_model_len": parser.context, "tokens": ids}
        if body.return_token_strs:
            answer["token_strs"] = [parser.tokenizer.text_of(i) for i in ids]
        return JSONResponse(answer)

    return await parser.apart(len(ids), key, written)


async def detokenize(parser: RequestParser, body: DetokenizeBody, key: str) -> Response:
    """Return the answer to token ids. Raises ApiError."""
    ids = await parser.ids(body.tokens, key, "tokens") if body.tokens else []
    return await parser.apart(len(ids), key, lambda: JSONResponse({"prompt": parser.tokenizer.decode(ids)}))
