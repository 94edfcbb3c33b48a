"""Advice on unknown keyword arguments: keywords of other engines, and what triforce calls them."""

from __future__ import annotations

from collections.abc import Callable, Collection
from functools import wraps
from inspect import Parameter, isfunction, signature
from typing import Any, TypeVar

from triforce.errors import suggest

T = TypeVar("T")

_GRAMMAR = "grammar=Grammar.json(schema), Grammar.choices(texts) or Grammar.regex(pattern)"
_FOREIGN_KEYWORDS: tuple[tuple[str, str, str], ...] = (
    ("n_ctx num_ctx ctx_size max_model_len max_seq_len context_length", "context", ""),
    ("model_path model_name model_id repo_id pretrained_model_name_or_path", "model", ""),
    ("draft_model speculative_model assistant_model", "draft", ""),
    ("num_speculative_tokens num_draft_tokens", "draft_tokens", ""),
    ("speculative_config", "draft", "its values are the arguments draft, mode and draft_tokens here"),
    ("torch_dtype", "dtype", ""),
    ("kv_cache_dtype cache_type_k cache_type_v type_k type_v", "kv_dtype", ""),
    ("device_map n_gpu_layers gpu_layers", "device", 'device="cuda" puts all layers on the GPU'),
    ("tensor_parallel_size", "ranks", "ranks share a model among processes; on the command line it is --tp N"),
    ("swap_space cpu_offload_gb", "kv_offload", 'kv_offload="host" keeps KV in host memory, and "file" in a file'),
    ("gpu_memory_utilization", "kv_memory", 'KV takes memory as it grows; kv_offload="host" with kv_memory bounds it'),
    (
        "threads n_threads num_threads",
        "",
        "one thread runs on each processor that the process may use; taskset limits the processors",
    ),
    ("trust_remote_code", "", "code of a model is never run; leave it out"),
    ("enable_prefix_caching", "", "prefix caching is always on; leave it out"),
    ("temp", "temperature", ""),
    ("do_sample", "temperature", "temperature=0 is greedy, and any other value samples"),
    ("max_new_tokens max_completion_tokens n_predict num_predict", "max_tokens", ""),
    ("max_length", "max_tokens", "max_tokens counts new tokens only, without the prompt"),
    ("repeat_penalty", "repetition_penalty", ""),
    ("num_return_sequences", "n", ""),
    ("best_of", "n", "all n completions are returned"),
    ("stop_strings stop_sequences stop_words", "stop", ""),
    ("eos_token_id", "stop_token_ids", ""),
    ("random_seed", "seed", ""),
    ("bad_words allowed_token_ids", "logit_bias", "logit_bias={token_id: -100} excludes a token, and 100 forces one"),
    ("min_tokens", "ignore_eos", "leave it out; with ignore_eos=True a text goes on up to max_tokens"),
    ("structured_outputs guided_decoding response_format json_schema", "grammar", _GRAMMAR),
    ("guided_json guided_regex guided_choice guided_grammar regex", "grammar", _GRAMMAR),
    ("sampling_params generation_config", "params", ""),
    ("messages", "conversation", "pass conversation=llm.encode_chat(messages)"),
    ("messages", "prompt", "pass prompt=llm.encode_chat(messages)"),
    ("messages", "prompts", "LLM.chat takes it"),
    ("prompt prompts inputs input_ids text prompt_token_ids", "prompts", ""),
    ("prompt prompts inputs input_ids text prompt_token_ids", "prompt", ""),
    ("prompt prompts inputs input_ids text prompt_token_ids", "conversation", ""),
    ("conversations prompt prompts", "messages", ""),
    (
        "stream streamer",
        "",
        "llm.stream(prompt) yields the text as it grows; for a chat the prompt is llm.encode_chat(messages)",
    ),
    ("add_generation_prompt", "", "the template always ends where the answer begins; leave it out"),
    ("pad_token_id", "", "prompts are not padded; leave it out"),
)
"""Keywords of other engines, their name here, and advice where the name is not enough."""

_CLASS_BY_KEYWORD: dict[str, str] = {}
"""Names of advised classes by the keywords of their constructors."""


def advised(kind: type[T]) -> type[T]:
    """Make a class and its public methods raise a TypeError with advice for an unknown keyword argument.

    Methods that take any keyword stay unchanged.
    """
    methods = {
        name: member for base in reversed(kind.__mro__) for name, member in vars(base).items() if isfunction(member)
    }
    for name, function in methods.items():
        if name == "__init__" or not name.startswith("_"):
            callable_name = kind.__name__ if name == "__init__" else f"{kind.__name__}.{name}"
            function.__qualname__ = callable_name  # Python's own errors use this name, also for methods of base classes
            setattr(kind, name, _with_advice(function, callable_name))
    for keyword in signature(kind).parameters:
        _CLASS_BY_KEYWORD.setdefault(keyword, kind.__name__)
    return kind


def _with_advice(function: Callable[..., Any], callable_name: str) -> Callable[..., Any]:
    parameters = signature(function).parameters
    if any(parameter.kind is Parameter.VAR_KEYWORD for parameter in parameters.values()):
        return function

    @wraps(function)
    def call(*args: Any, **keywords: Any) -> Any:
        if unknown := next((name for name in keywords if name not in parameters), None):
            advice = _advice(unknown, parameters)
            raise TypeError(f"{callable_name}() got an unexpected keyword argument '{unknown}'{advice}")
        return function(*args, **keywords)

    return call


def _advice(keyword: str, parameters: Collection[str]) -> str:
    """Return advice on an unknown keyword, to append to an error text; empty without advice."""
    rows = [(name_here, advice) for names, name_here, advice in _FOREIGN_KEYWORDS if keyword in names.split()] or [
        (keyword, "")
    ]
    for name_here, advice in rows:
        if name_here in parameters:
            return f": {advice or f'it is called {name_here} here'}"
    name_here, advice = rows[0]
    match _CLASS_BY_KEYWORD.get(name_here):
        case "SamplingParams" if "params" in parameters:
            chat = "chat=True, " if "messages" in parameters else ""
            advice_suffix = f"; {advice}" if advice else ""
            return f": pass it in params: params=llm.sampling_params({chat}{name_here}=...){advice_suffix}"
        case str(owner):
            owner_text = f"{owner} takes it" if name_here == keyword else f"{owner} takes it, as {name_here}"
            return f": {advice or owner_text}"
    return f": {advice}" if advice else suggest(keyword, parameters)
