"""Files of a batch: input lines, the command, and the answers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def line(name: str, url: str, body: dict[str, Any], method: str = "POST") -> str:
    return json.dumps({"custom_id": name, "method": method, "url": url, "body": body}) + "\n"


def arguments(pair: Path, source: Path, output: Path, *options: str) -> list[str]:
    models = [str(pair / "target"), "--draft", str(pair / "draft"), "--retrieval-budget", "64"]
    return ["batch", str(source), *models, "-o", str(output), *options]


def answers(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(answer) for answer in (folder / "out.jsonl").read_text().splitlines()]
