"""Parts of `triforce bench compare` of a GGUF file: turns, choices, texts, builds, folders and one worker."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open

from benchmarks.compare import on_file_tables, worker_pool
from benchmarks.compare.build import lacking
from benchmarks.compare.engines import Load, loads
from benchmarks.compare.hf_folder import LLAMA3, bits_per_weight, config_of, unpacked
from benchmarks.compare.processes import EngineTrouble, turn_of
from benchmarks.compare.texts import PLACES, choose, prompt
from benchmarks.compare.worker_pool import Contender, Models
from benchmarks.compare.workers import ikllamacpp_worker, llamacpp_worker
from tests.helpers import fake_ik_llama_cpp, fake_llama_cpp
from tests.helpers.gguf_models import write_model
from tests.helpers.mutants.mutation import Mutant
from tests.helpers.mutants.registry import caught_in
from triforce.bench.prompts import Sources
from triforce.checkpoint.gguf.config import Divided
from triforce.checkpoint.hf_config import read_config
from triforce.checkpoint.model_files import open_model
from triforce.checkpoint.rope_scaling import wavelengths
from triforce.errors import ModelError

LOAD = Load("", {}, {"": {}})


def contenders(*names: str) -> list[Contender]:
    return [Contender(name, "plain", LOAD, "") for name in names]


def taken_by_three() -> list[str]:
    """The order in which three take turns, of whom b fails in the second one."""
    order: list[str] = []

    def ask(contender: Contender, turn: int) -> dict[str, Any]:
        order.append(f"{contender.engine}{turn}")
        if (contender.engine, turn) == ("b", 1):
            raise EngineTrouble(failed="no more")
        return {"turn": turn}

    takes = worker_pool.in_turns(contenders("a", "b", "c"), 3, ask)
    lines = [f"{engine.engine}: {len(mine.turns)} {mine.trouble.get('failed')}" for engine, mine in takes.items()]
    return order + lines


IN_TURNS = ["a0", "b0", "c0", "c1", "b1", "a1", "a2", "c2"]


def test_turns_go_there_and_back_without_who_failed() -> None:
    assert taken_by_three() == [*IN_TURNS, "a: 3 None", "b: 1 no more", "c: 3 None"]


def test_turns_end_when_they_take_long() -> None:
    takes = worker_pool.in_turns(contenders("a"), 3, lambda *_: {}, lambda: False)
    assert [len(mine.turns) for mine in takes.values()] == [1]


def fastest() -> dict[str, str]:
    rates = [("prefill", "a", 9.0), ("prefill", "b", 10.0), ("plain", "a", 5.0), ("plain", "b", 4.0)]
    rows = [
        {"engine": "e", "kind": kind, "load": LOAD._replace(name=name), "way": "", f"{part}tokens_per_second": rate}
        for kind, name, rate in rates
        for part in (["prefill_"] if kind == "prefill" else [""])
    ]
    failed = {"engine": "e", "kind": "lookup", "load": LOAD, "way": "", "failed": "no lookup"}
    return {best_row.kind: best_row.variant for best_row in worker_pool.best([*rows, failed])}


def test_best_setting_is_fastest_of_each_kind() -> None:
    assert fastest() == {"prefill": "b", "plain": "a"}


def ratio() -> float | None:
    """Return the ratio on a machine that becomes four times as fast after the first turn."""
    return on_file_tables.over({"turns": [10.0, 40.0, 40.0]}, {"turns": [5.0, 20.0, 10.0]})


def test_ratio_is_median_of_turns_side_by_side() -> None:
    assert ratio() == 2.0
    for mine, theirs in (({"turns": [10.0]}, {"failed": "gone"}), (None, {"turns": [1.0]})):
        assert on_file_tables.over(mine, theirs) is None


@pytest.mark.parametrize("mutant", caught_in("test_compare_mutant_is_noticed"), ids=str)
def test_compare_mutant_is_noticed(mutant: Mutant, monkeypatch: pytest.MonkeyPatch, sources: Sources) -> None:
    mutant.apply(monkeypatch, None)
    assert (taken_by_three()[: len(IN_TURNS)], fastest(), ratio(), places(sources)) != (
        IN_TURNS, {"prefill": "b", "plain": "a"}, 2.0, (2, 1),
    )  # fmt: skip


def test_tables_have_no_figures_of_who_failed() -> None:
    row = {"what": "decoding", "engine": "llamacpp", "kind": "plain", "variant": "x", "context": 9}
    texts, absent = on_file_tables.tables([row | {"workload": "books", "temperature": 0.0, "failed": "it died"}])[1:]
    assert not texts.rows and absent.rows == [["llama.cpp, x", "it died"]]


INFO = "CPU : SSE3 = 1 | AVX2 = 1 | AVX512 = 1 | AVX512_VNNI = 0 | REPACK = 1 | "


@pytest.mark.parametrize(
    ("built", "level", "lacking_parts"),
    [
        (INFO, "avx2", ()),
        (INFO, "avx512", ()),
        (INFO, "avxvnni", ("without AVX_VNNI,", "TRIFORCE_KERNELS=avx512")),
        (INFO, "avx512bf16", ("without AVX512_VNNI, AVX512_BF16,", "TRIFORCE_KERNELS=avx512")),
        ("CPU : SSE3 = 1 | ", "avx2", ("without AVX2,", "TRIFORCE_KERNELS=portable")),
        (INFO, "portable", ()),
        ("", "avx512bf16", ()),
    ],
)
def test_build_lacks_what_our_level_uses(built: str, level: str, lacking_parts: tuple[str, ...]) -> None:
    missing_flags = lacking(built, level, "llama-cpp-python")
    assert all(part in missing_flags for part in lacking_parts) and bool(missing_flags) == bool(lacking_parts)


def places(sources: Sources) -> tuple[int, int]:
    """Return the places of two texts: where one engine repeats its prompt at the first two; where ours always loops."""
    by_place = {tuple(prompt(sources, "books", 200, place)): place for place in range(PLACES)}

    def ours(ids: list[int]) -> list[int]:
        return list(range(1000, 1040))

    def copies(ids: list[int]) -> list[int]:
        return ids[:40] if by_place[tuple(ids)] < 2 else ours(ids)

    def gone(ids: list[int]) -> list[int]:
        raise EngineTrouble(failed="gone")

    def loops(ids: list[int]) -> list[int]:
        again = [30, 20, 40, 40, 40, 40][by_place[tuple(ids)]]
        return [*range(1000, 1100 - again), *[7] * again]

    chosen = (
        choose(sources, ["books"], 200, writers)["books"].place
        for writers in ({"triforce": ours, "llamacpp": copies, "onnx": gone}, {"triforce": loops})
    )
    first_text, second = chosen
    return first_text, second


def test_text_chosen_repeats_little_with_any_engine(sources: Sources) -> None:
    assert places(sources) == (2, 1)


def test_question_stands_behind_its_place(sources: Sources) -> None:
    book, asked = (prompt(sources, workload, 200, 1) for workload in ("books", "questions"))
    assert len(book) == len(asked) == 200 and book[:100] == asked[:100]
    assert sources.tokenizer.decode(asked).endswith("\nAnswer:")
    assert book != prompt(sources, "books", 200, 2)


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_unpacked_folder_is_model_in_float16(tmp_path: Path, family: str) -> None:
    written = write_model(tmp_path, "Q4_1", family=family, num_hidden_layers=2)
    folder = unpacked(written.gguf, tmp_path / "made")
    with (
        safe_open(folder / "model-0.safetensors", "pt") as ours,
        safe_open(written.folder / "model.safetensors", "pt") as theirs,
    ):
        assert {*theirs.keys()} == {*ours.keys()}
        for name in theirs.keys():  # noqa: SIM118  it is no dictionary
            assert torch.equal(ours.get_tensor(name), theirs.get_tensor(name).half()), name
    assert read_config(folder) == read_config(written.folder)
    text = "the cat sat on the naïve mat"
    assert open_model(folder).tokenizer().encode(text) == open_model(written.gguf).tokenizer().encode(text)
    assert 5.0 < bits_per_weight(written.gguf) < 5.1
    (folder / "model-0.safetensors").unlink()
    assert unpacked(written.gguf, folder) == folder and not (folder / "model-0.safetensors").exists()


def test_unpacked_config_knows_scaling_of_llama_3(tmp_path: Path) -> None:
    hf = open_model(write_model(tmp_path, "Q8_0", num_hidden_layers=1).gguf).config
    scaled = LLAMA3.__class__(32.0, LLAMA3.original_positions, LLAMA3.low_turns, LLAMA3.high_turns)
    frequencies, _ = scaled.frequencies(500_000.0, 64, 0)
    divisors = (1.0 / wavelengths(500_000.0, 64) / frequencies).tolist()
    vars_ = {name: getattr(hf, name) for name in hf.__dataclass_fields__}
    llama3 = hf.__class__(**vars_ | {"scaling": Divided(tuple(divisors)), "rope_theta": 500_000.0, "head_dim": 64})
    assert config_of(llama3)["rope_scaling"] == {
        "rope_type": "llama3", "factor": pytest.approx(32), "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }  # fmt: skip
    with pytest.raises(ModelError, match="scales positions"):
        config_of(hf.__class__(**vars_ | {"scaling": Divided(tuple([1.0, 3.0] * 4))}))


def test_llamacpp_worker_makes_one_text_in_all_ways(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The cache holds a text with draft tokens, another prompt, or nothing before."""
    state = fake_llama_cpp.install(monkeypatch)
    (tmp_path / "it.gguf").touch()
    settings = {"flash": True, "ubatch": 512}
    task = {"model": str(tmp_path / "it.gguf"), "positions": 99, "threads": 1, "settings": settings}
    generate = llamacpp_worker.load(task)
    prompts = [[n % 4 for n in range(30)], [n % 4 for n in range(20)] + [3, 3, 1] * 4]
    texts: dict[int, list[list[int]]] = {0: [], 1: []}
    for way in ({}, {"lookup": 3}, {"lookup": 10}, {"python": True}, {}):
        for number, ids in enumerate(prompts):
            for fresh_prompt in (True, False):
                state.decoded.clear()
                answer = generate(turn_of(ids, 24, way, fresh=fresh_prompt))
                texts[number].append(answer["ids"][:24])
                parts = 2 if fresh_prompt and "python" in way else 1
                assert sum(state.decoded[:parts]) == (len(ids) if fresh_prompt else 1)
                if "lookup" in way:
                    assert len(state.decoded) < 24 <= len(answer["ids"])
    assert all(text == way_texts[0] for way_texts in texts.values() for text in way_texts)
    assert state.freed == 16
    assert answer["built"] == "CPU : AVX2 = 1 | "


@pytest.mark.parametrize("fresh_prompt", [True, False])
def test_ikllamacpp_worker_makes_one_text_in_all_ways(
    fresh_prompt: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Drafts of the same fake model are always kept, and a pass of several tokens leaves no token in the cache."""
    states = fake_ik_llama_cpp.install(monkeypatch)
    model = tmp_path / "it.gguf"
    model.touch()
    settings = {"flash": True, "ubatch": 512, "repack": True}
    task = {"model": str(model), "draft": str(model), "positions": 99, "threads": 1, "settings": settings}
    generate = ikllamacpp_worker.load(task)
    ids = [n % 4 for n in range(30)]
    texts = []
    for way in ({}, {"lookup": 3}, {"draft": 3}, {}):
        states[1].decoded.clear()
        answer = generate(turn_of(ids, 24, way, fresh=fresh_prompt))
        texts.append(answer["ids"][:24])
        if "draft" in way:
            assert states[1].decoded[1:] == [4] * 6 and states[2].memory[: len(ids)] == ids
    assert all(text == texts[0] for text in texts) and answer["built"] == "AVX2 = 1 | AVX512 = 0 | "
    states[1].decoded.clear()
    timed = generate(turn_of(ids, 5, {"width": 3}, fresh=False))
    assert states[1].decoded[1:] == [3] * 4 and len(states[1].memory) == len(ids) + 3 and timed["pass_seconds"] > 0
    assert len(set(generate(turn_of(ids, 24, {}, temperature=5.0))["ids"])) > 1


def test_ikllamacpp_worker_says_what_it_cannot_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_ik_llama_cpp.install(monkeypatch)
    broken = tmp_path / "broken.gguf"
    broken.touch()
    settings = {"flash": True, "ubatch": 512, "repack": True}
    with pytest.raises(ValueError, match=r"cannot read .*broken\.gguf"):
        ikllamacpp_worker.load({"model": str(broken), "positions": 9, "threads": 1, "settings": settings})


@pytest.mark.parametrize(
    ("text", "draft_tokens"),
    [([1, 2, 3, 9, 1, 2, 3], [9, 1]), ([7, 3, 8, 5, 3], [8, 5]), ([1, 2, 3], []), ([3, 3], [3]), ([3], [])],
)
def test_lookup_takes_what_followed_longest_match(text: list[int], draft_tokens: list[int]) -> None:
    assert ikllamacpp_worker.looked_up(np.array(text, np.intc), 2) == draft_tokens


def test_only_engines_with_drafts_get_a_draft_file(tmp_path: Path) -> None:
    draft = tmp_path / "draft.gguf"
    draft.touch()
    models = Models(tmp_path / "it.gguf", tmp_path, draft)
    assert [models.draft_of(engine) for engine in ("triforce", "ikllamacpp", "llamacpp")] == [draft, draft, None]
    assert Models(tmp_path / "it.gguf", tmp_path, tmp_path).draft_of("ikllamacpp") is None
    ways = {way for load in loads("ikllamacpp", 4.5, drafted=True) for way in load.ways}
    assert {"", "lookup 5", "draft 4"} <= ways
    assert "draft 4" not in {way for load in loads("ikllamacpp", 4.5) for way in load.ways}
