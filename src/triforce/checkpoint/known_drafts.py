"""Which draft goes with which target, where that is known. A draft must share the target's vocabulary."""

from __future__ import annotations

from pathlib import Path

_PAIR = Path(__file__).parents[1] / "assets" / "pair"
SHIPPED = _PAIR / "target", _PAIR / "draft"
"""The target and the draft that come with the package."""

_DRAFTS = {
    "NousResearch/Yarn-Llama-2-7b-128k": "JackFram/llama-68m",
    "NousResearch/Yarn-Llama-2-13b-128k": "JackFram/llama-68m",
    "LargeWorldModel/LWM-Text-128K": "JackFram/llama-68m",
    "LargeWorldModel/LWM-Text-Chat-128K": "JackFram/llama-68m",
    "meta-llama/Llama-3.1-8B": "meta-llama/Llama-3.2-1B",
    "meta-llama/Llama-3.1-8B-Instruct": "meta-llama/Llama-3.2-1B-Instruct",
    "meta-llama/Llama-3.1-70B-Instruct": "meta-llama/Llama-3.2-1B-Instruct",
    "Qwen/Qwen2.5-7B-Instruct": "Qwen/Qwen2.5-0.5B-Instruct",
    "Qwen/Qwen2.5-14B-Instruct": "Qwen/Qwen2.5-0.5B-Instruct",
    "Qwen/Qwen3-8B": "Qwen/Qwen3-0.6B",
    "Qwen/Qwen3-14B": "Qwen/Qwen3-0.6B",
}


def draft_for(target: str | Path) -> str | Path | None:
    """The draft of a known target: by hub name, or, for a folder of that name, the draft's folder beside it."""
    folder = Path(target)
    if not folder.is_dir():
        return _DRAFTS.get(str(target))
    if folder.resolve() == SHIPPED[0].resolve():
        return SHIPPED[1]
    drafts = {name.split("/")[1]: draft.split("/")[1] for name, draft in _DRAFTS.items()}
    beside = folder.resolve().parent / drafts.get(folder.resolve().name, "")
    return beside if folder.resolve().name in drafts and beside.is_dir() else None
