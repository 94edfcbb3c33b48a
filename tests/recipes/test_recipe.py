"""The training recipe, whole, on a corpus generated here: `recipes/pair/smoke.toml`."""

from __future__ import annotations

import dataclasses
import io
import random
import tarfile
from importlib import import_module
from pathlib import Path

import pytest
import torch
import transformers

from recipes.pair import batches, config, corpus, heldout, model, plants, tokenizer
from recipes.pair.__main__ import prepare, run
from recipes.pair.batches import IGNORED, Batches
from recipes.pair.config import Config
from recipes.pair.train import Trainer, load_model

WORDS = ["one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve"]


def text(seed: int, words: int = 6000) -> str:
    """Prose of a kind, with line ends and a few letters beyond ASCII."""
    rng = random.Random(seed)
    return "".join(rng.choice(WORDS) + rng.choice([" ", " ", ", ", ".\n", " “é” "]) for _ in range(words))


def archive(path: Path, members: dict[str, str]) -> None:
    with tarfile.open(path, "w:xz") as tar:
        for name, contents in members.items():
            member = tarfile.TarInfo(name)
            member.size = len(contents.encode())
            tar.addfile(member, io.BytesIO(contents.encode()))


@pytest.fixture(scope="module")
def settings() -> Config:
    return config.load(Path(__file__).parents[2] / "recipes" / "pair" / "smoke.toml")


@pytest.fixture(scope="module")
def archives(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("corpus")
    train = {f"books/author_book-{number}.txt": text(number) for number in range(3)}
    train |= {f"code/owner-project{number}.txt": text(10 + number) for number in range(2)}
    archive(folder / "train.tar.xz", train)
    archive(folder / "eval.tar.xz", {"some-author_the-held-book.txt": text(99)})
    return folder


@pytest.fixture(scope="module")
def prepared(settings: Config, archives: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A working folder with tokenizer and tokens."""
    work = tmp_path_factory.mktemp("work")
    prepare(settings, archives, work)
    return work


def test_recipe_tokenizer_round_trip(prepared: Path) -> None:
    learnt = tokenizer.load(prepared / "tokenizer")
    rng = random.Random(0)
    texts = [bytes(rng.randrange(256) for _ in range(200)).decode("latin-1") for _ in range(50)]
    texts += ["", " ", "  two  spaces\r\n\t", "e\u0301 \u00e9 \u212b", "\U0001f600\x00", "".join(map(chr, range(3000)))]
    for original in texts:
        assert learnt.decode(learnt.encode(original).ids, skip_special_tokens=False) == original


def test_recipe_tokenizer_covers_every_byte(prepared: Path) -> None:
    learnt = tokenizer.load(prepared / "tokenizer")
    singles = [token for token in learnt.get_vocab() if len(token) == 1]
    assert len(singles) == 256
    assert learnt.token_to_id(tokenizer.END) == 0
    assert learnt.get_vocab_size() == 288


def test_recipe_eval_texts_in_training_set_raise() -> None:
    corpus.check_apart(["owner-project", "author_book"], ["code_owner-other", "author_another-book"])
    with pytest.raises(ValueError, match="translator_the-book"):
        corpus.check_apart(["translator_the-book"], ["author_the-book"])
    with pytest.raises(ValueError, match="owner-project_part1"):
        corpus.check_apart(["owner-project_part1"], ["code_owner-project"])


def test_recipe_packed_tokens_equal_texts(settings: Config, archives: Path, prepared: Path) -> None:
    learnt = tokenizer.load(prepared / "tokenizer")
    parts = [batches.np.load(prepared / "tokens" / f"books.{split}.npy") for split in ("train", "heldout")]
    packed = learnt.decode(batches.np.concatenate(parts).tolist(), skip_special_tokens=False)
    originals = [contents for _, contents in corpus.texts(archives, ["train.tar.xz"], "books")]
    assert packed == "".join(tokenizer.END + contents for contents in originals)


def test_recipe_batches_depend_on_step_only(settings: Config, prepared: Path) -> None:
    words = tokenizer.load(prepared / "tokenizer")
    first_batches, again = (Batches(prepared / "tokens", words, settings.stages[1], settings.seed) for _ in range(2))
    again(0)
    assert all(torch.equal(a, b) for a, b in zip(first_batches(7), again(7), strict=True))
    assert not torch.equal(first_batches(7)[0], first_batches(8)[0])


def test_recipe_copies_are_predictable() -> None:
    rng = batches.np.random.default_rng(0)
    labelled = 0
    for _ in range(50):
        original = rng.integers(1, 10**9, 1024)  # so large a vocabulary that nothing repeats by itself
        window = original.copy()
        known_mask = batches.np.ones(1024, dtype=bool)
        plants.plant_copies(window, known_mask, rng)
        changed = [where for where in (window != original).nonzero()[0] if known_mask[where]]
        labelled += len(changed)
        assert all(window[where] in window[: where - 1] for where in changed)
        assert all(window[where - 1] in window[: where - 1] for where in changed)  # and so can where it comes from
    assert labelled > 50 * 200


def test_recipe_echo_is_masked_and_followed_by_text() -> None:
    rng = batches.np.random.default_rng(0)
    echoed = 0
    for _ in range(20):
        original = rng.integers(1, 10**9, 513)
        window = original.copy()
        known_mask = batches.np.ones(513, dtype=bool)
        plants.plant_echoes(window, known_mask, rng)
        assert (window[known_mask] == original[known_mask]).all()
        hidden = (~known_mask).nonzero()[0]
        assert all(window[where] in window[max(0, where - plants.ECHO_REACH) : where] for where in hidden)
        echoed += len(hidden)
    assert echoed > 20 * 20


def test_recipe_cycles_close_and_third_round_is_masked() -> None:
    rng = batches.np.random.default_rng(0)
    rounds = 0
    for _ in range(20):
        original = rng.integers(1, 10**9, 513)
        window = original.copy()
        known_mask = batches.np.ones(513, dtype=batches.np.int8)
        plants.plant_loops(window, known_mask, rng)
        assert (window[known_mask == 1] == original[known_mask == 1]).all()
        avoided = (known_mask == plants.AVOIDED).nonzero()[0]
        rounds += sum(
            window[max(0, at - 2 * plants.MAX_LOOP_PERIOD) : at].tolist().count(window[at]) > 1 for at in avoided
        )
        assert len(avoided) > 8
    assert rounds > 20 * 8


def test_recipe_sharpening_scales_all_heads(settings: Config) -> None:
    llama = model.build(settings.shapes["target"], settings.corpus.vocab, 1)
    weights_before = [layer.self_attn.q_proj.weight.clone() for layer in llama.model.layers]
    model.sharpen(llama, 1.5)
    weights_after = [layer.self_attn.q_proj.weight for layer in llama.model.layers]
    assert all(torch.equal(b * 1.5, a) for b, a in zip(weights_before, weights_after, strict=True))


def test_recipe_numbers_are_asked_after_being_given(prepared: Path) -> None:
    words = tokenizer.load(prepared / "tokenizer")
    filler = words.get_vocab_size()
    window = batches.np.full(4096, filler)
    known_mask = batches.np.ones(4096, dtype=bool)
    plants.Records.of(words)(window, known_mask, batches.np.random.default_rng(0))
    given_lines, asked = (
        words.decode([i for i in half if i != filler]).split("\n") for half in (window[:2048], window[2048:])
    )
    answered_lines = [line for line in asked if line and line in given_lines]
    assert len(answered_lines) >= 5
    answers = words.decode([i for i, sure in zip(window, known_mask, strict=True) if sure and i != filler])
    assert all(line[-6:-1] in answers or line[-5:] in answers for line in answered_lines)


def test_recipe_gapped_pieces_keep_positions(settings: Config, prepared: Path) -> None:
    stage = settings.stages[1]
    inputs_RT, positions_RT, labels_RT = Batches(
        prepared / "tokens", tokenizer.load(prepared / "tokenizer"), dataclasses.replace(stage, planted={}, rows=20), 1
    )(0)
    gaps_RT = positions_RT.diff() > 1
    assert stage.length < int(positions_RT.max()) <= stage.span
    assert gaps_RT.any(1).sum() > 10
    assert (labels_RT[:, :-1][gaps_RT] == IGNORED).all()
    assert (labels_RT[:, :-1][~gaps_RT] == inputs_RT[:, 1:][~gaps_RT]).all()


def test_recipe_gap_moves_tokens_and_masks_none(settings: Config) -> None:
    llama = model.build(settings.shapes["target"], settings.corpus.vocab, 1)
    torch.nn.init.normal_(llama.model.layers[0].self_attn.o_proj.weight)
    ids_RT = torch.randint(0, settings.corpus.vocab, (2, 32))
    near_positions = torch.arange(32).expand(2, -1)
    far_positions = near_positions + 500 * (torch.arange(32) >= 20)
    expected = llama.model(ids_RT, use_cache=False).last_hidden_state
    torch.testing.assert_close(model.hidden(llama, ids_RT, near_positions), expected)
    mask = torch.ones(32, 32, dtype=torch.bool).tril()[None, None].expand(2, -1, -1, -1)
    expected = llama.model(ids_RT, position_ids=far_positions, attention_mask=mask, use_cache=False).last_hidden_state
    torch.testing.assert_close(model.hidden(llama, ids_RT, far_positions), expected)


def test_recipe_killed_stage_resumes_to_same_weights(settings: Config, prepared: Path) -> None:
    stage = settings.stages[0]
    straight = Trainer(settings, stage, prepared)
    assert straight.run(lambda: False)
    prepared.joinpath("short.weights.pt").unlink()
    steps = iter(range(100))
    assert not Trainer(settings, stage, prepared).run(lambda: next(steps) == 5)
    resumed = Trainer(settings, stage, prepared)
    assert resumed.step == 5
    assert resumed.run(lambda: False)
    assert resumed.history == straight.history
    for name, weight in straight.model.state_dict().items():
        assert torch.equal(weight, resumed.model.state_dict()[name]), name
    prepared.joinpath("short.weights.pt").unlink()


def test_recipe_early_stop_waits_for_patience() -> None:
    history = [[100, 3.0], [200, 2.5], [300, 2.6], [400, 2.7]]
    assert not heldout.stalled(history, patience=0)
    assert not heldout.stalled(history, patience=3)
    assert heldout.stalled(history, patience=2)


def test_recipe_whole_run_ships_loadable_pair(
    settings: Config, archives: Path, prepared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pictures = tmp_path / "pictures"
    monkeypatch.setattr(import_module("triforce.eval.context"), "SPAN", 256)  # so that there is something beyond it
    assert not run(settings, archives, prepared, tmp_path, pictures, max_seconds=0)
    assert run(settings, archives, prepared, tmp_path, pictures)
    for name in ("target", "draft"):
        shipped = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / name, dtype=torch.bfloat16)
        trained = load_model(settings, name, prepared).bfloat16()
        assert all(torch.equal(a, b) for a, b in zip(shipped.parameters(), trained.parameters(), strict=True))
        words = transformers.AutoTokenizer.from_pretrained(tmp_path / name)
        ids = words("one  two\n“é”")["input_ids"]
        assert words.decode(ids) == "one  two\n“é”"
        assert words.bos_token_id == words.eos_token_id == shipped.config.eos_token_id == 0
    card = (tmp_path / "README.md").read_text(encoding="utf-8")
    assert "### Bits per byte" in card
    near_table, far_table = (part.split("###")[0] for part in card.split("### Loss by position")[1:])
    assert "0 to 256" in near_table and "256 to 512" not in near_table and "512 to 1K" in far_table
    assert "(pictures/positions.svg)" in card
    assert "longest readings" in (pictures / "positions.svg").read_text(encoding="utf-8")
    files = [tmp_path / "README.md", pictures / "positions.svg", prepared / "far.json", prepared / "figures.json"]
    written = [file.read_bytes() for file in files]
    assert run(settings, archives, prepared, tmp_path, pictures)
    assert [file.read_bytes() for file in files] == written


def test_recipe_base_config_parses() -> None:
    base = config.load(Path(__file__).parents[2] / "recipes" / "pair" / "base.toml")
    target, draft = (model.count(model.build(base.shapes[name], base.corpus.vocab, 0)) for name in ("target", "draft"))
    assert 15e6 < target < 18e6
    assert draft < 2e6
