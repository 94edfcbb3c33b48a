"""A notebook: a stream, a call of several prompts with its progress bar, an interrupt, and the same text afterwards."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.helpers import chat_fixtures

pair = chat_fixtures.pair  # a fixture
ROOT = Path(__file__).parents[2]
CELLS = {
    "load": """
import os, signal, sys, threading, time
from tqdm import tqdm
from triforce import LLM, SamplingParams
llm = LLM("PAIR/target", "PAIR/draft", retrieval_budget=64)
short = SamplingParams(seed=5, max_tokens=12, ignore_eos=True)
""",
    "stream": """
streamed = "".join(map(str, llm.stream("the cat", short)))
print(streamed == llm.generate("the cat", short)[0].outputs[0].text)
""",
    "several": """
outputs = llm.generate(["the cat"] * 5, short)
print(len(outputs), {output.outputs[0].text for output in outputs} == {streamed})
""",
    "interrupted": """
def interrupt():
    while not any(bar.n for bar in list(tqdm._instances)):
        time.sleep(0.002)
    os.kill(os.getpid(), signal.SIGINT)

threading.Thread(target=interrupt, daemon=True).start()
long = SamplingParams(seed=5, max_tokens=1900, ignore_eos=True)
llm.generate(["the cat"] + ["the hat"] * 30, [short] + [long] * 30)
""",
    "kept": """
kept = sys.last_value.outputs
print(len(kept), kept[0].outputs[0].text == streamed, kept[-1])
""",
    "afterwards": """
print(llm.generate("the cat", short)[0].outputs[0].text == streamed)
""",
}


@pytest.mark.filterwarnings("default")  # those of a notebook's own machinery
def test_notebook_streams_counts_and_survives_interrupt(
    pair: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("ipykernel", reason="a notebook needs ipykernel")
    nbclient = pytest.importorskip("nbclient", reason="a notebook is run by nbclient")
    from nbformat.v4 import new_code_cell, new_notebook

    for folder in ("JUPYTER_RUNTIME_DIR", "JUPYTER_DATA_DIR", "JUPYTER_CONFIG_DIR", "IPYTHONDIR"):
        monkeypatch.setenv(folder, str(tmp_path / folder.lower()))
    monkeypatch.setenv("PYTHONPATH", str(ROOT / "src"))
    cells = [new_code_cell(source.strip().replace("PAIR", str(pair))) for source in CELLS.values()]
    cells[3].metadata["tags"] = ["raises-exception"]
    nbclient.NotebookClient(new_notebook(cells=cells), timeout=240, kernel_name="python3").execute()
    cell_outputs = {name: shown(cell) for name, cell in zip(CELLS, cells, strict=True)}
    assert cell_outputs["stream"]["stdout"] == "True\n"
    assert cell_outputs["several"]["stdout"] == "5 True\n" and "5/5" in cell_outputs["several"]["stderr"]
    assert cell_outputs["interrupted"]["error"].startswith("Interruption: ")
    assert cell_outputs["kept"]["stdout"] == "31 True None\n"
    assert cell_outputs["afterwards"]["stdout"] == "True\n"


def shown(cell: Any) -> dict[str, str]:
    """Return a cell's output by stream, and the error that ended it."""
    texts: dict[str, str] = {}
    for output in cell.outputs:
        name = output.get("name", "error")
        texts[name] = texts.get(name, "") + output.get("text", f"{output.get('ename')}: {output.get('evalue')}")
    return texts
