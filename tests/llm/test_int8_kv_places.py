"""Texts of real models over int8 KV in any place: in memory, in a file, after a restart, shared by ranks.

Each prompt also runs alone; otherwise prompts run in batches.
"""

from __future__ import annotations

from importlib import resources
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.disk_llm import written
from tests.helpers.gguf_files import SMOLLM2
from tests.helpers.thread_ranks import together
from tests.helpers.tiny_llm import ask
from triforce.backends import dispatch
from triforce.checkpoint.hub import SHIPPED
from triforce.eval.context import tokenizer_of
from triforce.interface.outputs import RequestOutput
from triforce.llm import LLM

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(3600),
    pytest.mark.skipif(dispatch.native is None, reason="the native kernels were not built"),
]
needs_smollm2 = pytest.mark.skipif(not SMOLLM2.exists(), reason=f"there is no {SMOLLM2.name}")
LENGTHS = 530, 700, 850


@pytest.mark.parametrize(
    ("folder", "draft", "mode", "ranks", "prompts", "tokens"),
    [
        pytest.param(SMOLLM2, None, "retrieval", [3], 3, 48, marks=needs_smollm2),
        pytest.param(SMOLLM2, None, "retrieval", [3], 10, 128, marks=needs_smollm2),
        pytest.param(*SHIPPED, "triforce", [2, 4], 50, 256),
    ],
    ids=["4-bit-few", "4-bit", "bfloat16"],
)
def test_int8_kv_texts_are_one_wherever_it_lies(
    folder: Path, draft: Path | None, mode: str, ranks: list[int], prompts: int, tokens: int, cache: Path
) -> None:
    def model(**how: Any) -> LLM:
        return LLM(folder, draft, kv_dtype="int8", retrieval_budget=256, **how)

    plain = model()
    book = tokenizer_of(plain).encode((resources.files("triforce") / "assets/dracula.txt").read_text(encoding="utf-8"))
    starts = range(0, len(book) - 1000, len(book) // prompts - 20)
    texts_of = [book[start : start + LENGTHS[i % 3]] for i, start in enumerate(starts)][:prompts]

    def answers(model: LLM, mode: str = mode) -> list[RequestOutput]:
        return model.generate(texts_of, ask(max_tokens=tokens), mode=mode)

    def texts(outputs: list[RequestOutput]) -> list[list[int]]:
        return [output.outputs[0].token_ids for output in outputs]

    expected_texts = texts(answers(plain, "ar"))
    assert len(expected_texts) == prompts and {len(text) for text in expected_texts} == {tokens}
    assert [
        texts(plain.generate([prompt], ask(max_tokens=tokens), mode=mode))[0] for prompt in texts_of
    ] == expected_texts
    filed = answers(model(kv_offload="file", kv_memory="16MiB"))
    assert texts(filed) == expected_texts and filed[0].kv.file_bytes > filed[0].kv.device_bytes
    first_llm = model(disk_cache=cache)
    again = model(disk_cache=cache)
    for part_start in range(0, prompts, 5):  # the writes of more at once would wait too long and be dropped
        part = slice(part_start, part_start + 5)
        part_outputs = first_llm.generate(texts_of[part], ask(max_tokens=tokens), mode=mode)
        written(first_llm)
        assert texts(part_outputs) == expected_texts[part]
    restored_outputs = answers(again)
    assert texts(restored_outputs) == expected_texts and all(output.cached_tokens >= 512 for output in restored_outputs)
    for count in ranks:
        assert together(count, lambda group: texts(answers(model(ranks=group)))) == [expected_texts] * count
