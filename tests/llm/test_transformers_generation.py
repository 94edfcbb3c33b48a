"""`model.generate` of transformers with an LLM behind it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.helpers.tiny_checkpoint import tiny_pair
from triforce import custom_generate
from triforce.errors import RequestError
from triforce.llm import LLM

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

SMOLLM2 = Path(__file__).parents[2] / "build" / "smollm2"
TEXTS = ["the cat sat on the mat, the hat and the cat sat on", "the hat"]


class Words(transformers.generation.streamers.BaseStreamer):  # type: ignore[misc, name-defined]
    """A streamer that collects token ids."""

    def __init__(self) -> None:
        self.ids: list[int] = []
        self.ended = False

    def put(self, value: Any) -> None:
        self.ids += value.flatten().tolist()

    def end(self) -> None:
        self.ended = True


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_pair(tmp_path_factory.mktemp("pair"), 512)


@pytest.fixture(scope="module")
def model(folder: Path) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(folder / "target", dtype=torch.float32)


@pytest.fixture(scope="module")
def llm(folder: Path) -> LLM:
    return LLM(folder / "target", draft=folder / "draft", dtype="float32", device="cpu")


@pytest.fixture(scope="module")
def inputs(folder: Path) -> dict[str, Any]:
    """Two prompts, the shorter one padded on the left."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder / "target", padding_side="left")
    tokenizer.pad_token = tokenizer.eos_token
    return dict(tokenizer(TEXTS, return_tensors="pt", padding=True, return_token_type_ids=False))


def row(inputs: dict[str, Any], index: int) -> dict[str, Any]:
    return {name: tensor[index : index + 1] for name, tensor in inputs.items()}


@pytest.mark.parametrize("settings", [
    {"max_new_tokens": 24},
    {"max_length": 40},
    {"max_new_tokens": 24, "eos_token_id": [1, 40, 41, 42, 43, 44, 45]},
    {"max_new_tokens": 24, "eos_token_id": None},
    {"max_new_tokens": 8, "num_return_sequences": 1, "do_sample": False},
], ids=str)  # fmt: skip
def test_greedy_tokens_equal_those_of_transformers(
    model: Any, llm: LLM, inputs: dict[str, Any], settings: dict[str, Any]
) -> None:
    settings = {"pad_token_id": 1} | settings
    expected = model.generate(**inputs, **settings)
    assert torch.equal(model.generate(**inputs, **settings, custom_generate=custom_generate(llm)), expected)


def test_penalised_tokens_equal_those_of_transformers(model: Any, llm: LLM, inputs: dict[str, Any]) -> None:
    """Without padding, whose tokens transformers penalises, too."""
    settings = {"max_new_tokens": 24, "pad_token_id": 1, "repetition_penalty": 1.2}
    expected = model.generate(**row(inputs, 0), **settings)
    assert torch.equal(model.generate(**row(inputs, 0), **settings, custom_generate=custom_generate(llm)), expected)


@pytest.mark.parametrize("mode", ["ar", "triforce", "auto"])
def test_mode_is_selected(model: Any, llm: LLM, inputs: dict[str, Any], mode: str) -> None:
    settings = {"max_new_tokens": 16, "pad_token_id": 1}
    sequences = model.generate(**inputs, **settings, custom_generate=custom_generate(llm), triforce_mode=mode)
    assert torch.equal(sequences, model.generate(**inputs, **settings))


def test_seed_of_torch_repeats_sampled_texts(model: Any, llm: LLM, inputs: dict[str, Any]) -> None:
    settings = {"max_new_tokens": 16, "pad_token_id": 1, "do_sample": True, "top_k": 20, "num_return_sequences": 3}
    texts = []
    for seed in (1, 1, 2):
        transformers.set_seed(seed)
        texts.append(model.generate(**row(inputs, 0), **settings, custom_generate=custom_generate(llm)))
    assert torch.equal(texts[0], texts[1]) and not torch.equal(texts[0], texts[2])
    assert len({tuple(ids) for ids in texts[0].tolist()}) == 3  # each sequence has noise of its own


def test_top_k_of_one_is_greedy(model: Any, llm: LLM, inputs: dict[str, Any]) -> None:
    settings = {"max_new_tokens": 16, "pad_token_id": 1}
    sampled = model.generate(**inputs, **settings, do_sample=True, top_k=1, custom_generate=custom_generate(llm))
    assert torch.equal(sampled, model.generate(**inputs, **settings))


def test_streamer_gets_prompt_and_new_tokens(model: Any, llm: LLM, inputs: dict[str, Any]) -> None:
    words = Words()
    settings = {"max_new_tokens": 16, "pad_token_id": 1, "custom_generate": custom_generate(llm)}
    sequences = model.generate(**row(inputs, 0), **settings, streamer=words)
    assert words.ids == sequences[0].tolist() and words.ended


def test_output_object_holds_sequences(model: Any, llm: LLM, inputs: dict[str, Any]) -> None:
    settings = {"max_new_tokens": 4, "pad_token_id": 1, "return_dict_in_generate": True}
    output = model.generate(**inputs, **settings, custom_generate=custom_generate(llm))
    assert torch.equal(output.sequences, model.generate(**inputs, **settings).sequences)


class Favourite(transformers.LogitsProcessor):  # type: ignore[misc, name-defined]
    def __call__(self, input_ids: Any, scores: Any) -> Any:
        return scores


@pytest.mark.parametrize(("settings", "message"), [
    ({"num_beams": 2}, "beam_search cannot be followed"),
    ({"logits_processor": transformers.LogitsProcessorList([
        transformers.RepetitionPenaltyLogitsProcessor(1.3)
    ])}, "RepetitionPenaltyLogitsProcessor"),
    ({"stopping_criteria": transformers.StoppingCriteriaList([transformers.MaxLengthCriteria(10)])}, "MaxLength"),
    ({"logits_processor": transformers.LogitsProcessorList([Favourite()])}, "Favourite"),
    ({"no_repeat_ngram_size": 2}, "NoRepeatNGramLogitsProcessor"),
    ({"max_time": 5.0}, "MaxTimeCriteria"),
    ({"do_sample": True, "top_p": 0.9, "min_p": 0.1}, "top_p and min_p"),
    ({"do_sample": True, "typical_p": 0.9}, "TypicalLogitsWarper"),
    ({"return_dict_in_generate": True, "output_scores": True}, "output_scores"),
], ids=range(9))  # fmt: skip
def test_setting_that_cannot_be_followed_is_refused(
    model: Any, llm: LLM, inputs: dict[str, Any], settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(RequestError, match=message):
        model.generate(**inputs, max_new_tokens=4, pad_token_id=1, **settings, custom_generate=custom_generate(llm))


def test_padding_on_the_right_is_refused(model: Any, llm: LLM, inputs: dict[str, Any]) -> None:
    flipped = {name: tensor.flip(1) for name, tensor in inputs.items()}
    with pytest.raises(RequestError, match="pad on the left"):
        model.generate(**flipped, max_new_tokens=4, pad_token_id=1, custom_generate=custom_generate(llm))


def test_other_model_is_refused(folder: Path, llm: LLM, inputs: dict[str, Any]) -> None:
    other = transformers.AutoModelForCausalLM.from_pretrained(folder / "draft", dtype=torch.float32)
    with pytest.raises(RequestError, match="the LLM has 2 layers"):
        other.generate(**inputs, max_new_tokens=4, pad_token_id=1, custom_generate=custom_generate(llm))
    with pytest.raises(TypeError, match="pass the LLM"):
        custom_generate(other)


@pytest.mark.slow
@pytest.mark.skipif(not SMOLLM2.is_dir(), reason="SmolLM2 has not been fetched: make smollm2")
@pytest.mark.parametrize("mode", ["ar", "auto"])
def test_smollm2_writes_the_tokens_of_transformers(mode: str) -> None:
    """Greedy tokens are those of transformers' own loop, in float32, with the chat template and in a batch."""
    folder = SMOLLM2
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder, padding_side="left")
    questions = ["What is the capital of France?", "Count from one to ten.", "Write a line of Python."]
    chats = [[{"role": "user", "content": question}] for question in questions]
    inputs = tokenizer.apply_chat_template(
        chats, add_generation_prompt=True, padding=True, return_dict=True, return_tensors="pt"
    )
    settings = {"max_new_tokens": 48, "do_sample": False, "pad_token_id": tokenizer.pad_token_id}
    expected = model.generate(**inputs, **settings)
    llm = LLM(folder, dtype="float32")
    assert torch.equal(
        model.generate(**inputs, **settings, custom_generate=custom_generate(llm), triforce_mode=mode), expected
    )
