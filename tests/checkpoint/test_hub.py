"""Names of models: which GGUF file on the hub or in a folder is taken."""

from __future__ import annotations

import logging
import re
from pathlib import Path

import pytest

from tests.helpers.fake_hub import UNREACHABLE, ended, fake_hub, started
from triforce.checkpoint.gguf.file import LOG, choose_gguf
from triforce.checkpoint.hub import FINETUNE, draft_for, model_path
from triforce.checkpoint.model_sources import KNOWN
from triforce.errors import ModelError

NAMES = ["m-IQ4_XS.gguf", "m-Q4_K_M.gguf", "m-Q4_K_S.gguf", "m.Q8_0.gguf", "mmproj-m-F16.gguf", "README.md"]
SET = [f"big/m-bf16-0000{number}-of-00003.gguf" for number in (1, 2, 3)]
RESOLVE = """
import logging, sys
from triforce.checkpoint.hub import model_path
from triforce.errors import ModelError
logging.basicConfig(format="%(message)s", level=logging.WARNING)
logging.getLogger("triforce.models").setLevel(logging.INFO)
try:
    print(model_path({name!r}, weights={weights}))
except ModelError as error:
    sys.exit(str(error))
"""


def resolve(
    name: str, home: Path, endpoint: str = "", weights: bool = True, **environment: str
) -> tuple[int, str, str]:
    code = RESOLVE.format(name=name, weights=weights)
    return ended(started(code, home, **({"endpoint": endpoint} if endpoint else {}), **environment))


@pytest.mark.parametrize(
    ("names", "quantisation", "chosen"),
    [
        (NAMES, "", ["m-Q4_K_M.gguf"]),
        (NAMES, "q8_0", ["m.Q8_0.gguf"]),
        (NAMES, "IQ4_XS", ["m-IQ4_XS.gguf"]),
        ([*SET, *NAMES], "BF16", SET),
        ([*SET, "z-Q8_0.gguf", "y-Q5_0.gguf"], "", ["y-Q5_0.gguf"]),
        (SET, "", SET),
        (["a-UD-Q4_K_M.gguf", "a-Q8_0.gguf"], "ud-q4_k_m", ["a-UD-Q4_K_M.gguf"]),
    ],
)
def test_gguf_choice_takes_quantisation_or_usual(names: list[str], quantisation: str, chosen: list[str]) -> None:
    assert choose_gguf(names[::-1], quantisation, "here") == chosen


@pytest.mark.parametrize("quantisation", ["K_M", "4_K_M", "Q4_K", "M", "F16"])
def test_gguf_choice_unknown_quantisation_names_those_there(quantisation: str) -> None:
    with pytest.raises(ModelError, match=rf"here has no .*{quantisation}; it has IQ4_XS, Q4_K_M, Q4_K_S, Q8_0$"):
        choose_gguf(NAMES, quantisation, "here")


def test_gguf_folder_of_several_files_takes_one(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(LOG, "propagate", True)  # earlier commands have set it
    monkeypatch.setattr(LOG, "handlers", [])
    for name in NAMES:
        (tmp_path / name).write_bytes(b"GGUF")
    with caplog.at_level(logging.INFO, "triforce.models"):
        assert model_path(tmp_path).name == "m-Q4_K_M.gguf"
    assert caplog.messages == [f"taking m-Q4_K_M.gguf of 4 models in {tmp_path}"]
    assert model_path(f"{tmp_path}:Q8_0").name == "m.Q8_0.gguf"
    with pytest.raises(ModelError, match="no GGUF file of Q2_K; it has"):
        model_path(f"{tmp_path}:Q2_K")
    (tmp_path / "config.json").write_text("{}")
    assert model_path(tmp_path) == tmp_path and model_path(f"{tmp_path}:Q8_0").name == "m.Q8_0.gguf"


def test_hub_gguf_file_alone_is_fetched_and_said(tmp_path: Path) -> None:
    with fake_hub({name: name.encode() for name in NAMES}) as hub:
        code, path, output = resolve("user/repo:q8_0", tmp_path, hub.url)
        assert (code, Path(path).read_bytes(), hub.fetched()) == (0, b"m.Q8_0.gguf", ["m.Q8_0.gguf"])
        assert output == "taking m.Q8_0.gguf of 4 models in user/repo"
        hub.asked.clear()
        assert Path(resolve("user/repo", tmp_path, hub.url)[1]).name == hub.fetched()[0] == "m-Q4_K_M.gguf"


def test_hub_gguf_set_is_fetched_whole(tmp_path: Path) -> None:
    with fake_hub({name: name.encode() for name in [*NAMES, *SET]}) as hub:
        code, path, output = resolve("user/repo:BF16", tmp_path, hub.url)
    assert code == 0 and path.endswith(SET[0]) and output.startswith(f"taking {SET[0]} and 2 more of 5 models")
    assert sorted(hub.fetched()) == [name.removeprefix("big/") for name in SET]
    assert {file.name for file in Path(path).parent.iterdir()} == set(hub.fetched())


def test_hub_gguf_unknown_quantisation_fetches_nothing(tmp_path: Path) -> None:
    with fake_hub({name: name.encode() for name in NAMES}) as hub:
        assert "has no GGUF file of Q2_K; it has IQ4_XS," in resolve("user/repo:Q2_K", tmp_path, hub.url)[2]
        code, _, output = resolve("user/other:Q4_0", tmp_path, hub.url)
    assert code == 1 and "'user/other:Q4_0' is not a folder here" in output and not hub.fetched()


def test_hub_safetensors_come_before_gguf(tmp_path: Path) -> None:
    files = {"config.json": b"{}", "model.safetensors": b"S", "m-Q4_0.gguf": b"G", "evil.py": b"raise"}
    with fake_hub(files) as hub:
        code, folder, output = resolve("user/repo", tmp_path, hub.url, weights=False)
        assert (code, output, hub.fetched()) == (0, "", ["config.json"])
        assert resolve("user/repo", tmp_path, hub.url)[1] == folder
        assert hub.fetched() == ["config.json", "model.safetensors"]
        assert Path(resolve("user/repo:Q4_0", tmp_path, hub.url)[1]).read_bytes() == b"G"


def test_hub_offline_takes_kept_files_alone(tmp_path: Path) -> None:
    with fake_hub({name: name.encode() for name in NAMES}) as hub:
        cached_file = resolve("user/repo:Q8_0", tmp_path, hub.url)[1]
        hub.asked.clear()
        for name in ("user/repo:Q8_0", "user/repo"):
            assert resolve(name, tmp_path, hub.url, HF_HUB_OFFLINE="1")[1] == cached_file
        assert (
            "no GGUF file of Q4_K_M; it has Q8_0"
            in resolve("user/repo:Q4_K_M", tmp_path, hub.url, HF_HUB_OFFLINE="1")[2]
        )
        assert resolve("user/else:Q8_0", tmp_path, hub.url, HF_HUB_OFFLINE="1")[0] == 1
        assert not hub.asked
    assert resolve("user/repo:Q8_0", tmp_path)[1] == cached_file  # a hub that cannot be reached


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("smolm2", "there is no model 'smolm2' (did you mean smollm2?); a name on the hub is org/model"),
        ("smollm2:135m", "(did you mean smollm2?)"),
        ("qwen2.5-coder:0.5b", "there is no model 'qwen2.5-coder:0.5b'; a name on the hub is org/model, with :Q4_K_M"),
    ],
)
def test_name_of_no_repository_is_told_before_hub_is_asked(name: str, message: str, tmp_path: Path) -> None:
    with fake_hub({}) as hub:
        code, _, output = resolve(name, tmp_path, hub.url)
        assert code == 1 and message in output and not hub.asked


@pytest.mark.parametrize(
    ("name", "environment", "messages"),
    [
        ("llama3.2", {}, ("it cannot be reached: Connection refused", "; a name on the hub is org/model")),
        ("org/model", {}, ("it cannot be reached: Connection refused",)),
        ("org/model", {"HF_HUB_OFFLINE": "1"}, ("nothing is fetched offline (--offline, HF_HUB_OFFLINE)",)),
    ],
)
def test_hub_out_of_reach_is_told_in_words_of_ours(
    name: str, environment: dict[str, str], messages: tuple[str, ...], tmp_path: Path
) -> None:
    code, _, output = resolve(name, tmp_path, UNREACHABLE, **environment)
    assert (
        code == 1
        and all(text in output for text in messages)
        and "Errno" not in output
        and "local_files_only" not in output
    )


def test_missing_repository_is_told(tmp_path: Path) -> None:
    with fake_hub({}) as hub:
        output = resolve("org/model", tmp_path, hub.url)[2]
    assert "(the hub has no such repository, or a private one)" in output


@pytest.mark.parametrize("name", KNOWN)
def test_draft_of_known_model_comes_with_package(name: str, tmp_path: Path) -> None:
    file = tmp_path / KNOWN[name].file
    with file.open("wb") as stream:
        stream.truncate(KNOWN[name].size)
    draft = draft_for(name, tmp_path / "own.gguf")
    assert draft_for(file, file) == draft_for("org/model:Q4_1", file) == draft
    with file.open("wb") as stream:
        stream.truncate(9)
    assert draft_for(file, file) is None and draft_for(f"org/{name}", file) is None
    folder = Path(str(draft).removeprefix(FINETUNE))
    assert (folder / "config.json").is_file()
    assert (folder / "model.safetensors").stat().st_size <= 12 * 2**20


@pytest.mark.parametrize(
    ("names", "quantisation", "message"),
    [
        ("gemma-270m-Q4_K_M.gguf qwen-0.5b-Q4_K_M.gguf", "", "of several models: {}; name the file"),
        ("gemma-270m-Q4_K_M.gguf qwen-0.5b-Q4_K_M.gguf", ":Q4_K_M", "of several models: {}; name the file"),
        ("gemma270m.gguf qwen0.5b.gguf qwen1.5b.gguf", "", "of several models: {}; name the file"),
        ("gemma270m.gguf qwen0.5b.gguf qwen1.5b.gguf", ":Q4_K_M", "no GGUF file of Q4_K_M; it has {}"),
        ("gemma270m.gguf qwen0.5b.gguf qwen1.5b.gguf", ":5b", "no GGUF file of 5b; it has {}"),
        ("qwen-0.5b.gguf qwen-1.5b.gguf", "", "of several models: {}; name the file"),
        ("qwen-v2.5.gguf qwen-v3.5.gguf", ":5", "no GGUF file of 5; it has {}"),
        (
            "q-0.5b-Q8_0.gguf q-0.5b.f16.gguf q-0.5b.gguf",
            ":Q2_K",
            "no GGUF file of Q2_K; it has Q8_0, f16, q-0.5b.gguf",
        ),
        ("sub-IQ2_XXS.gguf sub-MXFP4_MOE.gguf sub-4bit.gguf", ":x", "it has sub-4bit.gguf, IQ2_XXS, MXFP4_MOE"),
    ],
)
def test_gguf_folder_of_several_models_is_refused(names: str, quantisation: str, message: str, tmp_path: Path) -> None:
    """Full names are listed where they do not end with a quantisation."""
    for name in names.split():
        (tmp_path / name).write_bytes(b"GGUF")
    with pytest.raises(ModelError, match=re.escape(message.format(names.replace(" ", ", ")))):
        model_path(f"{tmp_path}{quantisation}")
