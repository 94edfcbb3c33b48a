"""`--weight-inputs int8` is another model with laws of its own; draft models always round their inputs to int8."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from tests.helpers.gguf_models import MIXED, write_model
from tests.helpers.slow_parameters import slow
from tests.helpers.thread_ranks import together
from tests.helpers.tiny_llm import GREEDY, MODES, SEEDED, ask, ids
from triforce.arrays import to_host
from triforce.backends import dispatch
from triforce.backends.decoder import Decoder
from triforce.cli import main
from triforce.distributed.group import ALONE, TPGroup
from triforce.engine.model_loader import load
from triforce.errors import RequestError
from triforce.kvcache import FullView, PagePool
from triforce.llm import LLM
from triforce.ragged import ints

if dispatch.native is None:
    pytest.skip("the native kernels were not built", allow_module_level=True)
PROMPTS = [ids(length, seed=length) for length in (70, 250, 333)]
SETTINGS: dict[str, Any] = dict(retrieval_budget=160, speculative_tokens=4, searched_layers="none")


class Files:
    def __init__(self, folder: Path) -> None:
        self.target, self.folder = write_model(folder / "target", "Q4_K", MIXED)
        self.draft = write_model(folder / "draft", "Q4_0", num_hidden_layers=1).gguf

    def llm(self, weight_inputs: str, **how: Any) -> LLM:
        return LLM(self.target, self.draft, weight_inputs=weight_inputs, **(SETTINGS | how))


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Files:
    return Files(tmp_path_factory.mktemp("weight-inputs"))


def texts(model: LLM, mode: str, **how: Any) -> list[list[int]]:
    outputs = model.generate(PROMPTS, ask(**how), mode=mode)
    assert all(output.exactness == "bitwise" for output in outputs)
    assert {output.weight_inputs for output in outputs} == {model.target.config.weight_inputs}
    return [output.outputs[0].token_ids for output in outputs]


def logits(decoder: Decoder) -> NDArray[np.float32]:
    """Return the logits (T, V) of the first prompt, in one pass."""
    pool = PagePool(decoder.config, 1, 8, decoder.dtype)
    pool.reserve(0, len(PROMPTS[0]))
    return to_host(decoder(np.array(PROMPTS[:1]), ints([len(PROMPTS[0])]), FullView(pool)))[0]


@pytest.mark.parametrize("sampling", [*slow(GREEDY), SEEDED], ids=["greedy", "seeded"])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("weight_inputs", ["int16", "int8"])
def test_text_equals_plain_decoding_with_same_inputs(
    files: Files, weight_inputs: str, mode: str, sampling: dict[str, Any]
) -> None:
    model = files.llm(weight_inputs)
    assert texts(model, mode, **sampling) == texts(model, "ar", **sampling)


def test_drafts_read_same_weights_by_int8(files: Files) -> None:
    """The decoder of a draft shares the weights of one that rounds to int16. A target's tiers keep int16."""
    target = load(files.target, device="cpu")
    drafting = load(files.target, device="cpu", target=target)
    rounded = load(files.target, device="cpu", weight_inputs="int8")
    assert target.lower_decoder is target.decoder and rounded.lower_decoder is rounded.decoder
    assert drafting.lower_decoder.model.blocks[0].native is drafting.decoder.model.blocks[0].native
    full_TV, lower_TV, int8_TV = map(logits, (drafting.decoder, drafting.lower_decoder, rounded.decoder))
    assert np.array_equal(lower_TV, int8_TV)
    assert not np.array_equal(lower_TV, full_TV) and np.abs(lower_TV - full_TV).mean() < 0.1 * full_TV.std()


def test_fingerprints_name_int8_inputs(files: Files) -> None:
    """So memory's and the disk's caches keep the KV of both apart, and so do engines that compare fingerprints."""
    models = [files.llm(weight_inputs) for weight_inputs in ("int16", "int8")]
    fingerprints = {fingerprint for model in models for fingerprint in (model.target.fingerprint, model.fingerprint)}
    assert len(fingerprints) == 4


def test_ranks_have_bits_of_one_process(files: Files) -> None:
    def of_ranks(ranks: TPGroup) -> NDArray[np.float32]:
        return logits(load(files.target, device="cpu", weight_inputs="int8", ranks=ranks).decoder)

    alone_TV = of_ranks(ALONE)
    assert all(np.array_equal(alone_TV, rank_TV) for rank_TV in together(2, of_ranks))


def test_int8_without_packed_weights_is_refused(files: Files, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", str(files.folder), "Once", "--weight-inputs", "int8"]) == 2
    assert "is for packed weights of a GGUF file on a CPU" in capsys.readouterr().err
    with pytest.raises(RequestError, match="weight_inputs='int4' is not known; choose from int16, int8"):
        LLM(files.target, weight_inputs="int4")


def test_eval_measures_rounding_of_inputs(files: Files, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The model is random, so its divergences mean nothing; int8's is the greater one all the same."""
    text = tmp_path / "book.txt"
    model = files.llm("int16")
    if model.tokenizer is None:
        pytest.skip("the tiny model has no tokenizer")
    text.write_text(model.tokenizer.decode(ids(600)), encoding="utf-8")
    assert main(["eval", str(files.target), "--draft", "none", "--only", "inputs", "--texts", str(text)]) == 0
    shown = capsys.readouterr().out
    divergences = {line.split()[1]: float(line.split()[2]) for line in shown.splitlines() if line.startswith("prose,")}
    assert 0 < divergences["int16"] < divergences["int8"] < 1
