"""The tokenizer files of a Hugging Face folder: the tokenizer itself, its special tokens and its chat templates."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import AddedToken
from tokenizers import Tokenizer as Core

from triforce.checkpoint.hub import read_json
from triforce.errors import ModelError, unreadable

CORE = "tokenizer.json"
CONFIG = "tokenizer_config.json"
FILES = (CORE, "tokenizer.model", "vocab.json")
NAMES = tuple(f"{name}_token" for name in ("bos", "eos", "unk", "sep", "pad", "cls", "mask"))
EXTRA = ("extra_special_tokens", "additional_special_tokens")
"""Fields with unnamed special tokens."""

LONGEST_TEMPLATE = 1 << 22
"""Bytes of the longest chat template file."""
_END = "<|endoftext|>"
DEFAULT_SPECIAL_TOKENS = {
    "LlamaTokenizer": {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"},
    "Qwen2Tokenizer": {"eos_token": _END, "unk_token": _END, "pad_token": _END},
    "GPT2Tokenizer": {"bos_token": _END, "eos_token": _END, "unk_token": _END},
}
"""Special tokens of tokenizer classes whose configs may omit them."""


@dataclass(frozen=True, slots=True)
class TokenizerFiles:
    """Contents of a tokenizer's files."""

    core: Core
    special: Mapping[str, str]
    """Special tokens by field name, such as eos_token. They are variables of chat templates."""
    templates: Mapping[str, str]
    """Chat templates by name: `default` and, in some models, `tool_use`."""


def has_tokenizer(folder: Path) -> bool:
    return any((folder / name).exists() for name in FILES)


def read_tokenizer(folder: Path) -> TokenizerFiles:
    """Read tokenizer.json and the files beside it; without it, transformers reads the folder. Raises ModelError.

    tokenizer.json alone, and not the class in tokenizer_config.json, decides how a text is split and which first token
    it gets. Tokens that only tokenizer_config.json has are added.
    """
    if not (folder / CORE).exists():
        return _read_with_transformers(folder)
    try:
        core = Core.from_file(str(folder / CORE))
    except Exception as error:  # the library raises plain Exception
        raise ModelError(f"the tokenizer in {folder} cannot be loaded ({error}); download it again") from error
    config = _config(folder)
    try:
        special_tokens = _special_tokens(config, core)
        core.add_tokens(list(_tokens_to_add(config, special_tokens, core)))
    except (TypeError, ValueError, AttributeError) as error:
        raise ModelError(f"{folder / CONFIG} has an entry that is not a token ({error}); download it again") from error
    core.encode_special_tokens = config.get("split_special_tokens") is True
    return TokenizerFiles(
        core, {name: str(token) for name, token in special_tokens.items()}, _templates(folder, config)
    )


def from_transformers(hf: Any) -> TokenizerFiles:
    """Return the files' contents from a transformers tokenizer. Raises ModelError unless it is a fast one."""
    if not getattr(hf, "is_fast", False):
        raise ModelError("this model has no tokenizer.json, and other kinds of tokenizer are not supported")
    chat_template = hf.chat_template or {}
    templates = {"default": chat_template} if isinstance(chat_template, str) else chat_template
    return TokenizerFiles(hf.backend_tokenizer, hf.special_tokens_map, templates)


def _read_with_transformers(folder: Path) -> TokenizerFiles:
    """Read a folder with transformers' converters. The import takes seconds, so it is made here only."""
    try:
        from transformers import AutoTokenizer

        hf = AutoTokenizer.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
    except Exception as error:  # tokenizer classes raise unrelated types
        reason = str(error).strip().partition("\n")[0]
        raise ModelError(
            f"the tokenizer in {folder} cannot be loaded: there is no {CORE}, and transformers cannot make one "
            f"({reason}); add the {CORE} of this model"
        ) from error
    return from_transformers(hf)


def _config(folder: Path) -> dict[str, Any]:
    """Return tokenizer_config.json; in old folders with the special and added tokens of two other files."""
    config = read_json(folder / CONFIG) if (folder / CONFIG).exists() else {}
    if "added_tokens_decoder" in config:
        return config
    if (folder / "special_tokens_map.json").exists():
        config |= read_json(folder / "special_tokens_map.json")
    if (folder / "added_tokens.json").exists():
        config["added_tokens"] = read_json(folder / "added_tokens.json")
    return config


def _special_tokens(config: Mapping[str, Any], core: Core) -> dict[str, AddedToken]:
    """Return special tokens by name."""
    tokenizer_class = str(config.get("tokenizer_class")).removesuffix("Fast")
    tokens = {
        name: token
        for name, token in DEFAULT_SPECIAL_TOKENS.get(tokenizer_class, {}).items()
        if core.token_to_id(token) is not None
    }
    for name, value in config.items():
        if name in NAMES or (name.endswith("_token") and isinstance(value, str)):
            tokens[name] = value
        elif name in EXTRA and isinstance(value, dict):
            tokens |= value
    return {name: _token(name, value, special=True) for name, value in tokens.items() if value is not None}


def _token(name: str, value: Any, **attributes: bool) -> AddedToken:
    """Return the token of a config's value: a text, or an object with its content and matching options."""
    token_fields = {"content": value} if isinstance(value, str) else value
    if not isinstance(token_fields, dict) or not isinstance(token_fields.get("content"), str):
        raise ModelError(f"{CONFIG}: {name} = {value!r} is no token; write a text, or an object with its content")
    return AddedToken(**{key: entry for key, entry in token_fields.items() if key != "__type"} | attributes)


def _tokens_to_add(
    config: Mapping[str, Any], special_tokens: Mapping[str, AddedToken], core: Core
) -> Iterator[AddedToken]:
    """Yield tokens, by id, that tokenizer.json lacks or has with other matching options than the config."""
    core_tokens = core.get_added_tokens_decoder()
    core_reprs = {repr(token) for token in core_tokens.values()}
    texts = {str(token) for token in core_tokens.values()}
    names = {str(token) for token in special_tokens.values()}
    lists = [config[field] for field in EXTRA if isinstance(config.get(field), list)]
    extra = [_token(EXTRA[0], value, special=True) for values in lists for value in values]
    special_texts = names | {str(token) for token in extra}
    decoder = config.get("added_tokens_decoder", {})
    legacy_tokens = config.get("added_tokens", {})
    config_tokens = {int(i): _token(f"added_tokens_decoder.{i}", token) for i, token in decoder.items()}
    for text, i in legacy_tokens.items():
        if i not in core_tokens:
            config_tokens[i] = AddedToken(text, normalized=text not in special_texts, special=text in special_texts)
    for _, token in sorted(config_tokens.items()):
        if repr(token) not in core_reprs:
            token.special = token.special or str(token) in names
            texts.add(str(token))
            yield token
    for token in (*special_tokens.values(), *extra):
        if str(token) not in texts:
            texts.add(str(token))
            yield token


def _templates(folder: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """Return chat templates by name. Template files take precedence over the config's. Raises ModelError."""
    default_file = folder / "chat_template.jinja"
    additional_files = sorted(folder.glob("additional_chat_templates/*.jinja"))
    if default_file.exists() or additional_files:
        files = {
            **({"default": default_file} if default_file.exists() else {}),
            **{file.stem: file for file in additional_files},
        }
        return {name: _text(file) for name, file in files.items()}
    chat_template = config.get("chat_template") or {}
    if isinstance(chat_template, list):
        chat_template = {entry.get("name"): entry.get("template") for entry in chat_template if isinstance(entry, dict)}
    templates = {"default": chat_template} if isinstance(chat_template, str) else chat_template
    if not isinstance(templates, dict) or not all(isinstance(text, str) for pair in templates.items() for text in pair):
        raise ModelError(f"{folder / CONFIG}: chat_template is neither a text nor a list of named ones; correct it")
    return templates


def _text(file: Path) -> str:
    try:
        if (size := file.stat().st_size) > LONGEST_TEMPLATE:
            raise ModelError(f"{file} has {size:,} bytes, more than {LONGEST_TEMPLATE:,}; correct it")
        return file.read_text(encoding="utf-8")
    except OSError as error:
        raise unreadable(file, error) from error
    except ValueError as error:
        raise ModelError(f"{file} cannot be read as text ({error}); download it again") from error
