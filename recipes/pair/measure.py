"""Figures of a finished pair: results of `triforce eval` on evaluation texts, and of the training log."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from recipes.pair import apart, corpus, files
from recipes.pair.config import Config
from recipes.pair.model import count
from recipes.pair.train import load_model
from triforce import LLM, SamplingParams
from triforce.cli import main
from triforce.eval import MEASUREMENTS


def run(config: Config, folder: Path, work: Path, out: Path) -> None:
    """Write `figures.json`, and `far.json` with the longest readings, if they do not exist yet.

    folder: the folder of the archives. out: the folder of the shipped pair.
    """
    if not (work / "figures.json").exists():
        _figures(config, folder, work, out)
    if not (work / "far.json").exists():
        texts = unpack(config, folder, work)
        _evaluate(config, texts, out, work / "far.json", config.measure.far_context, ["far"])


def _figures(config: Config, folder: Path, work: Path, out: Path) -> None:
    near_names = [name for name in MEASUREMENTS if name != "far"]
    texts = unpack(config, folder, work)
    apart.run(work)
    files.write_json(
        work / "figures.json",
        {
            "parameters": {name: count(load_model(config, name, work)) for name in ("target", "draft")},
            "training": training(work),
            "apart": json.loads((work / "apart.json").read_text(encoding="utf-8")),
            "eval": _evaluate(config, texts, out, work / "eval.json", config.measure.max_context, near_names),
            "sample": _sample(config, out),
        },
    )


def unpack(config: Config, folder: Path, work: Path) -> Path:
    """Write the evaluation texts to a folder. Returns the folder."""
    texts = work / "texts"
    texts.mkdir(exist_ok=True)
    for name, text in corpus.texts(folder, config.corpus.evaluation):
        (texts / f"{name}.txt").write_bytes(text.encode())
    return texts


def training(work: Path) -> dict[str, Any]:
    """Return tokens, seconds and held-out nats per token by stage, from the log. A repeated step counts once."""
    stages: dict[str, Any] = {}
    for text in (work / "training.jsonl").read_text(encoding="utf-8").splitlines():
        line = json.loads(text)
        stage = stages.setdefault(line["stage"], {"heldout": {}})
        stage |= {"tokens": line["tokens"], "seconds": line["seconds"]}
        if "heldout" in line:
            stage["heldout"][line["tokens"]] = line["heldout"]
    return stages


def _evaluate(config: Config, texts: Path, out: Path, path: Path, max_context: int, names: list[str]) -> Any:
    """Return the report of `triforce eval` on the shipped pair, written to `path` completely or not at all."""
    partial = path.with_name(path.name + ".partial")
    models = [str(out / "target"), "--draft", str(out / "draft"), "--texts", str(texts), "--only", ",".join(names)]
    options = ["--max-context", str(max_context), "--device", config.machine.device, "--json", str(partial)]
    if main(["eval", *models, *options]) != 0:
        raise RuntimeError("triforce eval has failed; its message is printed above")
    return json.loads(partial.replace(path).read_text(encoding="utf-8"))


def _sample(config: Config, out: Path) -> str:
    """Return the prompt with its continuation at temperature 0.8."""
    llm = LLM(out / "target", out / "draft", device=config.machine.device)
    settings = config.measure
    params = SamplingParams(temperature=0.8, max_tokens=settings.sample_tokens, seed=config.seed, ignore_eos=True)
    (output,) = llm.generate(settings.prompt, params)
    return settings.prompt + output.outputs[0].text
