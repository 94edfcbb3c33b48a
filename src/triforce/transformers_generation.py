"""custom_generate: an LLM that decodes in place of transformers' own loop, behind `model.generate`."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from triforce.errors import RequestError
from triforce.interface.outputs import RequestOutput
from triforce.interface.sampling_params import SamplingParams
from triforce.llm import LLM

if TYPE_CHECKING:
    import torch

PROCESSOR_FIELDS = {
    "MinPLogitsWarper": ("min_p", "min_p"),
    "RepetitionPenaltyLogitsProcessor": ("penalty", "repetition_penalty"),
    "TemperatureLogitsWarper": ("temperature", "temperature"),
    "TopKLogitsWarper": ("top_k", "top_k"),
    "TopPLogitsWarper": ("top_p", "top_p"),
}
"""Attribute of transformers' logits processors, and field of the generation config, by class."""
CRITERION_FIELDS = {"EosTokenCriteria": ("eos_token_id", "_eos_token_tensor"), "MaxLengthCriteria": ("max_length",) * 2}
FOLLOWED_MODES = ("greedy_search", "sample")
REFUSED_OUTPUTS = ("output_attentions", "output_hidden_states", "output_logits", "output_scores")


def custom_generate(llm: LLM) -> Callable[..., Any]:
    """Return a function for `model.generate(**inputs, custom_generate=...)` of transformers 5, which `llm` answers.

    llm: an LLM of the same model. The weights of `model` itself are not read. The function takes transformers'
    generation settings and returns its outputs: token ids of shape (batch, tokens), padded on the right, or with
    `return_dict_in_generate` an output with these `sequences`. The seed of the noise comes from torch's generator, so
    `transformers.set_seed` sets it. A repetition penalty counts no padding. `triforce_mode`, an argument of
    `model.generate`, selects the mode.

    The function raises RequestError for settings that it cannot follow exactly. These are beams and other modes of
    generation, logits processors and stopping criteria of one's own, and `top_p` together with `min_p`, which
    transformers applies in the other order. Inputs must be token ids without a cache, padded on the left. Scores,
    attentions and hidden states are not returned.
    """
    if not isinstance(llm, LLM):
        raise TypeError(
            f"llm is of type {type(llm).__name__}; pass the LLM that is to answer: custom_generate(LLM(...))"
        )

    def generate(
        model: Any,
        input_ids: torch.Tensor,
        logits_processor: Sequence[Any],
        stopping_criteria: Sequence[Any],
        generation_config: Any,
        synced_gpus: bool = False,
        streamer: Any = None,
        triforce_mode: str | None = None,
        **model_inputs: Any,
    ) -> Any:
        streamer = streamer or _streamer_of_caller()
        _require_same_model(llm, model)
        _require_followed(logits_processor, stopping_criteria, generation_config)
        prompts = _prompts(input_ids, model_inputs)
        params = [_params(generation_config, logits_processor, input_ids.shape[1]) for _ in prompts]
        if streamer is None:
            outputs = llm.generate(prompts, params, mode=triforce_mode, use_tqdm=False)
        else:
            outputs = [_streamed(llm, prompts[0], params[0], triforce_mode, streamer)]
        return _result(model, input_ids, [output.outputs[0].token_ids for output in outputs], generation_config)

    return generate


def _require_same_model(llm: LLM, model: Any) -> None:
    config = model.config.get_text_config()
    config_of_llm = llm.target.config
    theirs = (config.num_hidden_layers, config.hidden_size)
    if theirs != (config_of_llm.layers, config_of_llm.hidden_size):
        raise RequestError(
            f"the LLM has {config_of_llm.layers} layers of width {config_of_llm.hidden_size}, and the model of "
            f"transformers has {theirs[0]} of width {theirs[1]}; open the LLM from the same folder or hub name"
        )


def _require_followed(processors: Sequence[Any], criteria: Sequence[Any], config: Any) -> None:
    """Raise RequestError for a setting of transformers that `llm` cannot follow exactly."""
    if (mode := str(config.get_generation_mode().value)) not in FOLLOWED_MODES:
        raise RequestError(f"{mode} cannot be followed; set num_beams to 1, and leave out settings of other modes")
    for parts, fields, argument in (
        (processors, PROCESSOR_FIELDS, "logits_processor"),
        (criteria, CRITERION_FIELDS, "stopping_criteria"),
    ):
        for part in parts:
            attribute, field = fields.get(type(part).__name__, ("", ""))
            if not field or not _is_equal(getattr(part, attribute), getattr(config, field, None)):
                raise RequestError(f"{type(part).__name__} ({argument}) cannot be followed; leave it out")
    if outputs := [name for name in REFUSED_OUTPUTS if getattr(config, name, None)]:
        raise RequestError(f"{', '.join(outputs)}: only token ids are returned; leave it out")
    if config.do_sample and (config.top_p or 1) < 1 and config.min_p:
        raise RequestError("top_p and min_p together are applied in another order than transformers'; set one of them")


def _is_equal(value: Any, configured: Any) -> bool:
    """Whether a setting of a processor or criterion, a number or a tensor, is that of the generation config."""
    if hasattr(value, "tolist") and hasattr(configured, "tolist"):
        return bool(value.flatten().tolist() == configured.flatten().tolist())
    return bool(value == configured)


def _prompts(input_ids: torch.Tensor, model_inputs: dict[str, Any]) -> list[list[int]]:
    """Return the token ids of each row without padding on the left. Raises RequestError for other inputs."""
    cache = model_inputs.get("past_key_values")
    if cache is not None and cache.get_seq_length():
        raise RequestError("past_key_values holds tokens; pass the whole input_ids without it")
    if model_inputs.get("inputs_embeds") is not None:
        raise RequestError("inputs_embeds cannot be read; pass input_ids")
    rows: list[list[int]] = input_ids.tolist()
    mask = model_inputs.get("attention_mask")
    if mask is None:
        return rows
    masks: list[list[int]] = mask.tolist()
    if any(row != sorted(row) for row in masks):
        raise RequestError("attention_mask has zeros behind a one; pad on the left: tokenizer.padding_side = 'left'")
    return [ids[len(ids) - sum(row) :] for ids, row in zip(rows, masks, strict=True)]


def _params(config: Any, processors: Sequence[Any], prompt_columns: int) -> SamplingParams:
    import torch

    names = {type(processor).__name__ for processor in processors}
    ends = config.eos_token_id
    sampling: dict[str, Any] = {"temperature": 0.0}
    if config.do_sample:
        sampling = {
            "temperature": config.temperature,
            "top_k": config.top_k,
            "top_p": config.top_p,
            "min_p": config.min_p,
            "seed": int(torch.randint(1 << 32, ())),
        }
    return SamplingParams(
        **sampling,
        repetition_penalty=config.repetition_penalty if "RepetitionPenaltyLogitsProcessor" in names else None,
        max_tokens=config.max_length - prompt_columns,
        ignore_eos=True,  # the ids that end a text are those of transformers
        stop_token_ids=[] if ends is None else ends if isinstance(ends, list) else [ends],
    )


def _streamer_of_caller() -> Any:
    """Return the streamer that was passed to `model.generate`; None without one.

    transformers 5 does not hand it to a function with arguments of its own: it drops the arguments that it knows.
    """
    frame = sys._getframe(2)
    return frame.f_locals.get("streamer") if frame.f_code.co_name == "generate" else None


def _streamed(llm: LLM, prompt: list[int], params: SamplingParams, mode: str | None, streamer: Any) -> RequestOutput:
    """Generate one text, and pass its new tokens to a streamer as they come."""
    import torch

    outputs = []
    for event in llm.stream(prompt, params, mode=mode):
        if isinstance(event, RequestOutput):
            outputs.append(event)
        else:
            streamer.put(torch.tensor(event.token_ids))
    streamer.end()
    return outputs[-1]


def _result(model: Any, input_ids: torch.Tensor, new_ids: list[list[int]], config: Any) -> Any:
    """Return prompts and new tokens as transformers does: in one tensor, with shorter texts padded on the right."""
    import torch
    from transformers.generation.utils import GenerateDecoderOnlyOutput

    columns = max(map(len, new_ids))
    padding = 0 if config._pad_token_tensor is None else int(config._pad_token_tensor)
    rows = [ids + [padding] * (columns - len(ids)) for ids in new_ids]
    new_tokens = torch.tensor(rows, dtype=input_ids.dtype, device=input_ids.device)
    sequences: Any = torch.cat([input_ids, new_tokens], dim=1)
    return GenerateDecoderOnlyOutput(sequences=sequences) if config.return_dict_in_generate else sequences
