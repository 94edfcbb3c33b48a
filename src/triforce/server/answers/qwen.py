"""Calls of Qwen 2.5 and 3, Hermes, SmolLM3, Granite 4: JSON between `<tool_call>` and `</tool_call>`.

Models whose chat template has no form of calls are told this one in text, see `interface.messages.told_in_text`.
"""

from __future__ import annotations

from triforce.interface.messages import CALL_CLOSE, CALL_OPEN
from triforce.server.answers.call_format import JsonCallFormat


class QwenFormat(JsonCallFormat):
    marks = (CALL_OPEN, CALL_CLOSE)
    opening = CALL_OPEN
    closing = CALL_CLOSE
    json_texts = (f'{CALL_OPEN}\n{{"name": ', f"}}\n{CALL_CLOSE}")

    def fits(self, template: str) -> bool:
        return "tool" not in template or (CALL_OPEN in template and '"arguments"' in template)
