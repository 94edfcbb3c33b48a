"""Fields that bodies of several endpoints share. Null is the default of every field."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, Literal

from pydantic import Field

from triforce.server.request_base import Body, CacheFields, StopIds


class ModelField(Body):
    """A request to a model: the one that is served, if named at all."""

    is_request: ClassVar[bool] = True
    model: str | None = None


class SamplingFields(CacheFields, ModelField):
    """Sampling parameters. Fields after `stream` are extensions of triforce's."""

    prompt_field: ClassVar[str] = "prompt"
    """The field that holds the prompt."""
    temperature: float | None = None
    top_p: float | None = None
    seed: int | None = None
    stream: bool | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    stop_token_ids: StopIds | None = None
    ignore_eos: bool | None = None
    mode: str | None = Field(None, description="Which tiers: a value of --mode")
    tier_stats: bool | None = Field(None, description="Report what each tier did, and which proposed each token")

    @property
    def sent_as(self) -> Mapping[str, str]:
        """Fields by the parameters of `SamplingParams` that they become, where names differ."""
        return {}

    @property
    def scored_only(self) -> bool:
        """Whether the prompt is to be scored, and no text made."""
        return False

    @property
    def output_format(self) -> str | None:
        """The field that holds the answer to a format, if one does."""
        return None


class StreamOptions(Body):
    include_usage: bool | None = None
    include_obfuscation: Literal[False] | None = None


class Thinking(Body):
    """Whether the model thinks before it answers, where its chat template can tell it (`enable_thinking`)."""

    type: Literal["enabled", "disabled"]


class TemplateKeywords(Body):
    """Keywords of a chat template, as other servers take them: `enable_thinking`, which is `thinking` here."""

    enable_thinking: bool | None = None


class ThinkingField(Body):
    """A request whose turns a chat template lays out."""

    thinking: Thinking | None = None
    chat_template_kwargs: TemplateKeywords | None = None

    @property
    def thinks(self) -> tuple[str, bool | None]:
        """Return the field that says whether the model thinks, and what it says."""
        if self.thinking is not None:
            return "thinking", self.thinking.type == "enabled"
        told = self.chat_template_kwargs
        return "chat_template_kwargs", told.enable_thinking if told else None
