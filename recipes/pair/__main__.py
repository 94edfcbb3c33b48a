"""Makes a whole pair: `python -m recipes.pair small [--corpus DIR] [--work DIR] [--out DIR] [--pictures DIR] ...`."""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import torch

from recipes.pair import card, config, export, measure, pack, tokenizer
from recipes.pair.config import Config
from recipes.pair.train import Deadline, Trainer, weights_path

HERE = Path(__file__).parent


def main(arguments: list[str] | None = None) -> None:
    """Run every step that is not done yet."""
    parser = argparse.ArgumentParser(prog="python -m recipes.pair", description=__doc__)
    parser.add_argument("size", help="small, base, smoke, or the path of a .toml file")
    parser.add_argument("--corpus", type=Path, default=Path("../shared/corpus"), help="folder of the .tar.xz archives")
    parser.add_argument("--work", type=Path, default=Path("build/pair"), help="folder of tokens and checkpoints")
    parser.add_argument("--out", type=Path, default=Path("src/triforce/assets/pair"), help="folder of the shipped pair")
    parser.add_argument("--pictures", type=Path, default=Path("docs/pair"), help="folder of the card's pictures")
    parser.add_argument(
        "--max-seconds", type=float, default=float("inf"), help="seconds after which the run stops at a checkpoint"
    )
    options = parser.parse_args(arguments)
    path = Path(options.size) if options.size.endswith(".toml") else HERE / f"{options.size}.toml"
    settings = config.load(path)
    folders = options.corpus, options.work / settings.name, options.out, options.pictures
    done = run(settings, *folders, options.max_seconds)
    print("done" if done else "paused: run the same command again to continue")


def run(
    settings: Config, corpus: Path, work: Path, out: Path, pictures: Path, max_seconds: float = float("inf")
) -> bool:
    """Make the shipped folders from the archives. Returns False if `max_seconds` ran out before the end."""
    began = time.monotonic()
    torch.set_num_threads(settings.machine.threads)

    def out_of_time() -> bool:
        return time.monotonic() - began > max_seconds

    prepare(settings, corpus, work)
    if not train(settings, work, out_of_time):
        return False
    export.run(settings, work, out)
    measure.run(settings, corpus, work, out)
    card.run(settings, corpus, work, out, pictures)
    return True


def prepare(settings: Config, corpus: Path, work: Path) -> None:
    """Train the tokenizer and pack the corpus. Finished parts are not made again."""
    tokens = work / "tokens"
    vocabulary = work / "tokenizer"
    tokens.mkdir(parents=True, exist_ok=True)
    if not (vocabulary / "tokenizer_config.json").exists():
        learnt = tokenizer.train(pack.sample(settings.corpus, corpus), settings.corpus.vocab)
        tokenizer.save(learnt, vocabulary, settings.shapes["target"].max_positions)
    loaded = tokenizer.load(vocabulary)
    if not (tokens / "eval" / "bytes.json").exists():
        pack.pack_evaluation(loaded, settings.corpus, corpus, tokens)
    for source in settings.corpus.archives:
        if not (tokens / f"{source}.train.npy").exists():
            pack.pack_source(loaded, settings.corpus, source, corpus, tokens)


def train(settings: Config, work: Path, out_of_time: Deadline) -> bool:
    """Run the stages of training in order. Returns False if time ran out in a stage."""
    for stage in settings.stages:
        if not weights_path(work, stage.name).exists() and not Trainer(settings, stage, work).run(out_of_time):
            return False
    return True


if __name__ == "__main__":
    main()
