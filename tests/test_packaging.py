"""The frame: what is imported when, what the wheel holds, and how the command takes its arguments."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.extras import needs, needs_torch, needs_transformers
from triforce.cli import main, options
from triforce.cli.engine_arguments import sampling
from triforce.cli.parser import parse
from triforce.engine import tier_builder
from triforce.engine.tier_builder import COUPLINGS
from triforce.interface.sampling_params import SamplingParams
from triforce.kvcache.selection import POLICIES

ROOT = Path(__file__).parents[1]

ENVIRONMENT = os.environ | {"PYTHONPATH": str(ROOT / "src")}


def test_parser_choices_equal_engine() -> None:
    """The parser names them itself, so that --help does not wait for torch."""
    assert tuple(tier_builder.MODES) == options.MODES and tuple(tier_builder.LOWER_TIERS) == options.LOWER_TIERS
    assert tuple(POLICIES) == options.POLICIES and tuple(COUPLINGS) == options.COUPLINGS


def python(code: str, *arguments: str, **options: Any) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", code, *arguments]
    return subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, check=False, **options)


HELP = """
import sys
from triforce.cli import main
try:
    main(sys.argv[1:])
except SystemExit as end:
    heavy = {"torch", "transformers", "tokenizers", "safetensors", "huggingface_hub", "numpy", "tqdm", "jinja2"}
    heavy |= {"prompt_toolkit", "argcomplete"}
    print(*heavy & set(sys.modules), file=sys.stderr)
    sys.exit(end.code)
"""


@pytest.mark.parametrize(
    "command", [[], ["generate"], ["chat"], ["info"], ["demo"], ["eval"], ["serve"], ["bench", "compare"]]
)
def test_help_imports_nothing_heavy(command: list[str]) -> None:
    done = python(HELP, *command, "--help")
    assert done.returncode == 0
    assert done.stdout.startswith("usage: triforce")
    assert not done.stderr.strip()


LOADED = """
import sys
import torch
before = set(sys.modules)
{}
print(*set(sys.modules) - before - {{"triforce"}}, file=sys.stderr)
"""
GENERATE = (
    'from triforce.cli import main; main(["generate", "It was", "--max-tokens", "1", "--json", "--device", "cpu"])'
)
SERVE = """
import asyncio
from triforce.llm import LLM
from triforce.server import http_server
from triforce.server.app import create_app
from triforce.server.limits import Limits
from triforce.server.engine_thread import Worker
llm = LLM(device="cpu")
engine = Worker(llm, Limits())
create_app(llm, engine, "pair")
asyncio.run(engine.close())
"""
NEEDED = {"numpy", "tokenizers", "triforce", "__mp_main__"}
HEAVY = {"transformers", "huggingface_hub", "jinja2", "sympy", "triton", "matplotlib", "rich", "ray", "scipy", "pandas"}


def loaded(code: str) -> set[str]:
    """Modules that `code` loads, beside those of torch."""
    done = python(LOADED.format(code))
    assert done.returncode == 0, done.stderr
    return set(done.stderr.splitlines()[-1].split())


@needs_torch
def test_first_token_imports_few_packages() -> None:
    """Not transformers, nor the hub's client before a download, Jinja before a chat, or more parts of torch."""
    modules = loaded(GENERATE)
    packages = {name.partition(".")[0] for name in modules if "cython" not in name}  # the runtime of numpy.random
    assert packages - set(sys.stdlib_module_names) <= NEEDED
    assert "triforce.llm" in modules and not any(name.startswith("triforce.server") for name in modules)


@needs_torch
def test_server_start_defers_imports() -> None:
    modules = loaded(SERVE)
    packages = {name.partition(".")[0] for name in modules}
    assert packages >= {"fastapi", "triforce"} and not packages & HEAVY
    assert not any(name.startswith("torch.") for name in modules)


@needs_transformers
def test_import_guard_detects_imports() -> None:
    assert "transformers" in loaded("import transformers")


@needs_torch
def test_garbage_collector_leaves_torch_alone() -> None:
    code = "from triforce.backends.torch.torch_import import import_torch; import gc; import_torch(); import_torch()\n"
    done = python(code + "print(gc.isenabled(), gc.get_freeze_count() > 10_000, gc.get_count()[2])")
    assert done.stdout.split() == ["True", "True", "0"], done.stderr


def test_public_names_are_lazy() -> None:
    done = python(
        "import sys, triforce; assert 'torch' not in sys.modules\n"
        "print(triforce.SamplingParams.__module__, dir(triforce))"
    )
    assert "triforce.interface.sampling_params" in done.stdout, done.stderr
    assert "'LLM'" in done.stdout


def test_python_m_triforce_runs() -> None:
    command = [sys.executable, "-m", "triforce", "--version"]
    done = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, check=True)
    assert done.stdout.startswith("triforce ")


def test_bench_compare_of_wheel_asks_for_checkout(tmp_path: Path) -> None:
    """Without any other package, as nothing heavy is imported first, and in whatever folder it is started."""
    site = tmp_path / "python" / "site-packages"
    site.mkdir(parents=True)
    (site / "triforce").symlink_to(ROOT / "src" / "triforce", target_is_directory=True)
    command = [sys.executable, "-S", "-m", "triforce", "bench", "compare"]
    environment = os.environ | {"PYTHONPATH": str(site)}
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    (line,) = done.stderr.splitlines()
    assert line.startswith("triforce: error: bench compare") and "checkout" in line


@needs_torch
def test_bench_compare_of_checkout_starts_in_any_folder(tmp_path: Path) -> None:
    """Its own `benchmarks` is taken, not one of the folder where it is started."""
    (tmp_path / "benchmarks").mkdir()
    (tmp_path / "benchmarks" / "__init__.py").write_text("raise ImportError('of others')")
    command = [sys.executable, "-m", "triforce", "bench", "compare", "--engines", "magic"]
    done = subprocess.run(command, env=ENVIRONMENT, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 2 and "magic" in done.stderr and "openvino" in done.stderr


@needs("scikit_build_core")
def test_wheel_without_compiler_holds_all_but_kernels(tmp_path: Path) -> None:
    """It is pure Python, with the pair and the sample."""
    pip = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--no-index"]
    environment = os.environ | {"CXX": "/no/compiler"}
    command = [*pip, "--wheel-dir", str(tmp_path), str(ROOT)]
    subprocess.run(command, check=True, capture_output=True, env=environment)
    (wheel,) = tmp_path.glob("triforce-*-none-any.whl")
    inside = set(zipfile.ZipFile(wheel).namelist())
    package = ROOT / "src" / "triforce"
    packaged = {str(file.relative_to(package.parent)) for file in package.rglob("*") if file.is_file()}
    built = ("__pycache__", ".so")
    assert {name for name in packaged if not any(part in name for part in built)} <= inside
    assert not any(name.endswith((".so", ".cpp", ".hpp")) for name in inside)
    assert "triforce/assets/dracula.txt" in inside
    models = {
        f"triforce/assets/{model}/{file}"
        for model in ("pair/target", "pair/draft", "smollm2")
        for file in ("config.json", "model.safetensors")
    }
    assert models <= inside


def test_documented_defaults_equal_code() -> None:
    parsed = parse(["generate"])
    options = vars(parsed)
    defaults = {
        "draft_tokens": 2,
        "speculative_tokens": 6,
        "retrieval_budget": "auto",
        "retrieval_chunk": 16,
        "retrieval_policy": "observed",
        "coupling": "seeded",
    }
    assert {name: options[name] for name in defaults} == defaults
    assert SamplingParams(**sampling(parsed)) == SamplingParams()


@pytest.mark.parametrize(
    "arguments",
    [
        ["generate", "a", "b", "c"],
        ["generate", "--mode", "magic"],
        ["generate", "--logit-bias", "5"],
        ["generate", "--draft-tokens", "two"],
        ["info", "--json"],
    ],
)
def test_wrong_usage_exits_2(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(arguments)
    assert end.value.code == 2
    assert "error" in capsys.readouterr().err


@pytest.mark.parametrize("line", ["MODEL PROMPT -n", "-n MODEL PROMPT", "MODEL -n PROMPT"])
def test_arguments_may_stand_anywhere(line: str) -> None:
    options = parse(["generate", *line.replace("-n", "--n 3").split()])
    assert (options.model, options.prompt, options.n) == ("MODEL", "PROMPT", 3)
    assert parse(["chat", "--file", "DOC", "MODEL"]).model == "MODEL"
