"""transformers' generate. Its setting is `dtype`; a turn's are `draft`, or `lookup`: a number of draft tokens."""

from __future__ import annotations

from typing import Any

from benchmarks.compare.workers.clock import Clock, Generate, Result, Task, Turn


def load(task: Task) -> Generate:
    import torch
    import transformers

    torch.set_num_threads(task["threads"])
    dtype = task["settings"]["dtype"]
    model = _model(task["model"], dtype)

    def generate(turn: Turn) -> Result:
        prompt, options = torch.tensor([turn["ids"]]), dict[str, Any]()
        if turn["settings"].get("draft"):
            options["assistant_model"] = _model(task["draft"], dtype)
        elif lookup := turn["settings"].get("lookup"):
            options["prompt_lookup_num_tokens"] = lookup
        clock = Clock()

        class Ticker(transformers.StoppingCriteria):
            """Never stops a text, but is asked after each pass."""

            def __call__(self, input_ids: Any, scores: Any, **_: Any) -> Any:
                clock.tick(input_ids.shape[1] - prompt.shape[1])
                return torch.zeros(len(input_ids), dtype=torch.bool)

        with torch.inference_mode():
            output_ids = model.generate(
                prompt,
                attention_mask=torch.ones_like(prompt),
                do_sample=False,
                max_new_tokens=turn["tokens"],
                stopping_criteria=transformers.StoppingCriteriaList([Ticker()]),
                **options,
            )
        return clock.result(output_ids[0, prompt.shape[1] :].tolist(), transformers.__version__)

    return generate


def _model(folder: str, name: str) -> Any:
    import torch
    from transformers import AutoModelForCausalLM

    dtype = {"bf16": torch.bfloat16, "f32": torch.float32}[name]
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation="sdpa")
    model.generation_config.eos_token_id = None  # texts do not end before their time
    model.generation_config.pad_token_id = 0
    return model
