"""The served model as Codex describes models: it reads `models` beside OpenAI's list, or a file of the same form."""

from __future__ import annotations

from typing import Any

COMPACTION_SHARE = 0.8
"""Share of the context at which Codex sums its conversation up. The rest is for the answer and its summary."""

INSTRUCTIONS = """\
You are a coding agent in a terminal. You work in the user's folder, with the tools that you are given.
Look at a file before you change it, by commands such as ls, cat and grep.
Change files by apply_patch, or by a command. Keep changes small, and in the style of the file.
Run the tests of what you have changed, if there are any.
Go on until the task is done. Then say in a few sentences what you have changed.
"""
"""System message of Codex for a model that brings none of its own. Codex sends none where this is empty."""


def codex_card(name: str, context: int, effort: bool) -> dict[str, Any]:
    """Return the entry of a model. context: in tokens. effort: whether its chat template has a thinking effort.

    Codex refuses a whole list for one missing field, and ignores fields that it does not know. So the entry has the
    fields of its older and newer versions.
    """
    efforts = ("low", "medium", "high") if effort else ()
    return {
        "slug": name,
        "display_name": name,
        "description": "served by triforce",
        "default_reasoning_level": "medium" if effort else None,
        "supported_reasoning_levels": [{"effort": level, "description": level} for level in efforts],
        "shell_type": "shell_command",
        "visibility": "list",
        "supported_in_api": True,
        "priority": 0,
        "base_instructions": INSTRUCTIONS,
        "supports_reasoning_summaries": effort,
        "support_verbosity": False,
        "default_verbosity": None,
        "apply_patch_tool_type": "freeform",
        "truncation_policy": {"mode": "tokens", "limit": max(1, context // 8)},
        "supports_parallel_tool_calls": False,
        "supports_search_tool": False,
        "use_responses_lite": False,
        "context_window": context,
        "max_context_window": context,
        "auto_compact_token_limit": int(context * COMPACTION_SHARE),
        "effective_context_window_percent": 95,
        "experimental_supported_tools": [],
        "input_modalities": ["text"],
        "upgrade": None,
        "availability_nux": None,
    }
