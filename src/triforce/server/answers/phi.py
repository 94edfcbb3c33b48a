"""Calls of Phi-4-mini: a list in JSON between `<|tool_call|>` and `<|/tool_call|>`."""

from __future__ import annotations

from triforce.server.answers.call_format import JsonCallFormat


class PhiFormat(JsonCallFormat):
    marks = ("<|tool_call|>", "<|/tool_call|>")
    opening = "<|tool_call|>"
    closing = "<|/tool_call|>"
    list_texts = ("<|tool_call|>[", "]<|/tool_call|>", ", ")

    def fits(self, template: str) -> bool:
        return "<|tool|>" in template and "<|end_of_role|>" not in template
