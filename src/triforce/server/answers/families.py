"""The formats of calls that are known, and the one of a chat template."""

from __future__ import annotations

from triforce.server.answers.call_format import CallFormat
from triforce.server.answers.gemma import FunctionGemmaFormat, GemmaFormat
from triforce.server.answers.glm import GlmFormat
from triforce.server.answers.granite import GraniteFormat
from triforce.server.answers.harmony import HarmonyFormat
from triforce.server.answers.llama import LlamaFormat
from triforce.server.answers.mistral import MistralFormat, NamedMistralFormat
from triforce.server.answers.phi import PhiFormat
from triforce.server.answers.qwen import QwenFormat
from triforce.server.answers.qwen_xml import QwenXmlFormat

FORMATS: tuple[CallFormat, ...] = (
    HarmonyFormat(),
    GlmFormat(),
    QwenXmlFormat(),
    GemmaFormat(),
    FunctionGemmaFormat(),
    GraniteFormat(),
    PhiFormat(),
    NamedMistralFormat(),
    MistralFormat(),
    QwenFormat(),
    LlamaFormat(),
)
"""The formats; of two that fit a template the first one holds."""


def call_format(template: str) -> CallFormat | None:
    """Return the format of calls of a chat template, or None if it is unknown."""
    return next((form for form in FORMATS if form.fits(template)), None)
