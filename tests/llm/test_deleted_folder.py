"""Calls in a deleted working directory: they work, or raise an error that says so."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.helpers.tiny_checkpoint import tiny_pair

PROGRAM = """
import os, sys
from triforce import LLM, CacheError, Grammar, SamplingParams
llm = LLM(sys.argv[1], None)
os.rmdir(sys.argv[2])
chosen = SamplingParams(max_tokens=4, grammar=Grammar.choices(["b"]))
print(llm.generate("a", chosen)[0].outputs[0].text)
try:
    llm.generate("a", save_cache="prompt.kv")
except CacheError as error:
    print(error)
"""


def test_grammars_work_and_saved_prompts_are_refused_in_a_deleted_folder(tmp_path: Path) -> None:
    model = tiny_pair(tmp_path / "pair", positions=640) / "target"
    folder = tmp_path / "deleted"
    folder.mkdir()
    command = [sys.executable, "-c", PROGRAM, model, folder]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == [
        "b",
        "cannot write the KV cache to prompt.kv: the current folder was deleted; go to another",
    ]
