"""transformers' generate: plain, with the draft as its assistant, or with prompt lookup; variants are `dtype way`."""

from __future__ import annotations

from typing import Any

from triforce.bench.compare.worker import Clock, Task, work


def run(task: Task) -> dict[str, Any]:
    import torch
    import transformers

    torch.set_num_threads(task["threads"])
    dtype, _, way = task["variant"].partition(" ")
    model = _load(task["model"], dtype)
    more: dict[str, Any] = {}
    if way == "assisted":
        more = {"assistant_model": _load(task["draft"], dtype)}
    elif way == "lookup":
        more = {"prompt_lookup_num_tokens": 10}
    prompt, clock = torch.tensor([task["ids"]]), Clock()
    with torch.inference_mode():
        made = model.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            do_sample=False,
            max_new_tokens=task["tokens"],
            stopping_criteria=_ticker(clock, prompt.shape[1]),
            **more,
        )
    return clock.result(made[0, prompt.shape[1] :].tolist()) | {"version": transformers.__version__}


def _ticker(clock: Clock, prompt: int) -> Any:
    """Never stops a text, but is asked after each pass."""
    import torch
    from transformers import StoppingCriteria, StoppingCriteriaList

    class Ticker(StoppingCriteria):
        def __call__(self, input_ids: Any, scores: Any, **_: Any) -> Any:
            clock.tick(input_ids.shape[1] - prompt)
            return torch.zeros(len(input_ids), dtype=torch.bool)

    return StoppingCriteriaList([Ticker()])


def _load(folder: str, name: str) -> Any:
    import torch
    from transformers import AutoModelForCausalLM

    dtype = {"bf16": torch.bfloat16, "f32": torch.float32}[name]
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation="sdpa")
    model.generation_config.eos_token_id = None  # texts do not end before their time
    model.generation_config.pad_token_id = 0
    return model


if __name__ == "__main__":
    work(run)
