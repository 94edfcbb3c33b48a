"""Advice on unknown keyword arguments: the names here of keywords of other engines."""

from __future__ import annotations

from collections.abc import Callable, Collection
from functools import wraps
from inspect import Parameter, isfunction, signature
from typing import Any, TypeVar

from triforce.errors import suggest

T = TypeVar("T")

_GRAMMAR = "grammar=Grammar.json(schema), Grammar.choices(texts) or Grammar.regex(pattern)"
_ROWS: tuple[tuple[str, str, str], ...] = (
    ("n_ctx num_ctx ctx_size max_model_len max_seq_len context_length", "context", ""),
    ("model_path model_name model_id repo_id pretrained_model_name_or_path", "model", ""),
    ("draft_model speculative_model assistant_model", "draft", ""),
    ("num_speculative_tokens num_draft_tokens", "draft_tokens", ""),
    ("torch_dtype", "dtype", ""),
    ("kv_cache_dtype cache_type_k cache_type_v type_k type_v", "kv_dtype", ""),
    ("device_map n_gpu_layers gpu_layers", "device", 'device="cuda" has all layers on the GPU'),
    ("tensor_parallel_size", "ranks", "ranks share a model among processes; on the command line it is --tp N"),
    ("swap_space cpu_offload_gb", "kv_offload", 'kv_offload="host" keeps KV in host memory, and "file" in a file'),
    ("gpu_memory_utilization", "kv_memory", 'KV takes memory as it grows; kv_offload="host" with kv_memory bounds it'),
    ("n_threads num_threads", "", "threads are as many as processors that the process may use, as taskset sets them"),
    ("trust_remote_code", "", "no code of a model is run; leave it out"),
    ("enable_prefix_caching", "", "beginnings that prompts share are always read once; leave it out"),
    ("temp", "temperature", ""),
    ("do_sample", "temperature", "temperature=0 is greedy, and any other value samples"),
    ("max_new_tokens max_completion_tokens n_predict num_predict", "max_tokens", ""),
    ("max_length", "max_tokens", "max_tokens counts new tokens alone, without the prompt"),
    ("repeat_penalty", "repetition_penalty", ""),
    ("num_return_sequences", "n", ""),
    ("best_of", "n", "n gives that many completions, and none is left out"),
    ("stop_strings stop_sequences stop_words", "stop", ""),
    ("eos_token_id", "stop_token_ids", ""),
    ("random_seed", "seed", ""),
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
    ("stream streamer", "", "llm.stream(prompt) yields the text as it grows, of a chat with llm.encode_chat(messages)"),
    ("add_generation_prompt", "", "the template always ends where the answer begins; leave it out"),
    ("pad_token_id", "", "prompts are not padded; leave it out"),
)
"""Keywords of other engines, their name here, and advice where the name is not enough."""

_OWNERS: dict[str, str] = {}
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
            called = kind.__name__ if name == "__init__" else f"{kind.__name__}.{name}"
            function.__qualname__ = called  # Python's own errors use this name, also for methods of base classes
            setattr(kind, name, _with_advice(function, called))
    for keyword in signature(kind).parameters:
        _OWNERS.setdefault(keyword, kind.__name__)
    return kind


def _with_advice(function: Callable[..., Any], called: str) -> Callable[..., Any]:
    parameters = signature(function).parameters
    if any(parameter.kind is Parameter.VAR_KEYWORD for parameter in parameters.values()):
        return function

    @wraps(function)
    def call(*args: Any, **keywords: Any) -> Any:
        if unknown := next((name for name in keywords if name not in parameters), None):
            raise TypeError(f"{called}() got an unexpected keyword argument '{unknown}'{_advice(unknown, parameters)}")
        return function(*args, **keywords)

    return call


def _advice(keyword: str, parameters: Collection[str]) -> str:
    """Return advice on an unknown keyword, as a suffix of its name; empty without advice."""
    rows = [(name_here, advice) for names, name_here, advice in _ROWS if keyword in names.split()] or [(keyword, "")]
    for name_here, advice in rows:
        if name_here in parameters:
            return f": {advice or f'it is called {name_here} here'}"
    name_here, advice = rows[0]
    match _OWNERS.get(name_here):
        case "SamplingParams" if "params" in parameters:
            chat = "chat=True, " if "messages" in parameters else ""
            advice_suffix = f"; {advice}" if advice else ""
            return f": it is one of params, such as params=llm.sampling_params({chat}{name_here}=...){advice_suffix}"
        case str(owner):
            owner_text = f"{owner} takes it" if name_here == keyword else f"{owner} takes it, as {name_here}"
            return f": {advice or owner_text}"
    return f": {advice}" if advice else suggest(keyword, parameters)
