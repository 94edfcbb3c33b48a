"""Interrupts at any place of a call with many prompts."""

from __future__ import annotations

import pytest

from triforce import LLM, Interruption, SamplingParams
from triforce.engine.sequence_batch import SequenceBatch


def test_interrupt_while_rows_leave_keeps_outputs(monkeypatch: pytest.MonkeyPatch) -> None:
    """After the interrupt the batch is broken: all its calls fail."""
    llm = LLM(None, None, device="cpu", mode="ar")
    params = [SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True) for tokens in (2, 6, 12)]
    prompts = ["the sea", "the ship", "the wind"]
    uninterrupted = llm.generate(prompts, params)
    keep = SequenceBatch.keep
    calls: list[int] = []

    def broken(batch: SequenceBatch, rows: list[int]) -> None:
        calls.append(len(rows))
        if len(calls) == 1:
            return keep(batch, rows)
        raise KeyboardInterrupt if len(calls) == 2 else IndexError

    llm.reset_prefix_cache()
    with monkeypatch.context() as patch:
        patch.setattr(SequenceBatch, "keep", broken)
        with pytest.raises(Interruption) as interruption:
            llm.generate(prompts, params)
    assert len(calls) > 2, "the engine was given up without a word to the batch"
    outputs = interruption.value.outputs
    assert [output is not None for output in outputs] == [True, False, False]
    assert outputs[0] and outputs[0].outputs[0].text == uninterrupted[0].outputs[0].text
    assert [output.outputs[0].text for output in llm.generate(prompts, params)] == [
        o.outputs[0].text for o in uninterrupted
    ]
