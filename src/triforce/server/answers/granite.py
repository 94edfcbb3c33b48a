"""Calls of Granite 3: a list in JSON behind `<|tool_call|>`."""

from __future__ import annotations

from triforce.server.answers.call_format import JsonCallFormat


class GraniteFormat(JsonCallFormat):
    marks = ("<|tool_call|>",)
    opening = "<|tool_call|>"
    list_texts = ("<|tool_call|>[", "]", ", ")

    def fits(self, template: str) -> bool:
        return "<|tool_call|>" in template and "<|end_of_role|>" in template
