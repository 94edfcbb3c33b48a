"""Rewrite recorded results by the field's names: python scripts/migrate_results.py. Once; then it goes."""

from __future__ import annotations

import re
from pathlib import Path

RESULTS = Path(__file__).resolve().parents[1] / "benchmarks" / "results"
RULES = [
    (r'"lookup"', '"ngram"'),
    (r'"hybrid"', '"draft-ngram"'),
    (r'"gamma_1"', '"draft_tokens"'),
    (r'"gamma_2"', '"speculative_tokens"'),
    (r'( *)"gammas": \[\s*(\d+),\s*(\d+)\s*\]', r'\1"draft_tokens": \2,\n\1"speculative_tokens": \3'),
]
SPEED = [(r'^ "budget":', ' "retrieval_budget":'), (r'^ "full_layers":', ' "searched_layers":')]

for path in sorted(RESULTS.glob("*.json")):
    if path.name.startswith(("compare", "digests")):
        continue  # other engines' variants; digests name the texts of both
    text = path.read_text(encoding="utf-8")
    for old, new in RULES + (SPEED if path.name == "speed.json" else []):
        text = re.sub(old, new, text, flags=re.MULTILINE)
    path.write_text(text, encoding="utf-8")
