"""The CPU path never imports torch or transformers: each command and the library in processes of their own.

Only the rooms in `ROOMS_WITH_TORCH` import them, and the functions in `FUNCTIONS_WITH_TORCH`.
"""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from triforce.backends import dispatch

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "triforce"
FORBIDDEN = ("torch", "transformers")
ROOMS_WITH_TORCH = ("backends/torch", "backends/cuda", "training", "eval", "bench")
"""Rooms that compute with torch: its backends, training, and the commands that compare with it."""
FUNCTIONS_WITH_TORCH = {
    "backends/dispatch.py": {"claim_threads"},
    "checkpoint/pickle_file.py": {"<module>"},
    "checkpoint/tokenizer_files.py": {"_read_with_transformers"},
    "cli/doctor.py": {"_missing_gpu_reason"},
    "cli/eval.py": {"_provenance"},
    "cli/train_draft.py": {"_trainer"},
    "distributed/nccl_group.py": {"<module>"},
    "distributed/spawn.py": {"own_device"},
    "eagle/torch_passes.py": {"<module>"},
    "installed.py": {"has_cuda"},
    "planner/cost_model.py": {"_torch_threads"},
    "transformers_generation.py": {"_params", "_result", "_streamed"},
}
needs_kernels = pytest.mark.skipif(dispatch.native is None, reason="the native kernels were not built")


def importing_functions(code: ast.Module) -> set[str]:
    """Return the functions of a module, or `<module>`, that import torch or transformers at run time."""
    functions = set[str]()

    def visit(node: ast.AST, function: str) -> None:
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            return
        if isinstance(node, ast.FunctionDef):
            function = node.name
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        names += [node.module or ""] if isinstance(node, ast.ImportFrom) and not node.level else []
        if any(name.partition(".")[0] in FORBIDDEN for name in names):
            functions.add(function)
        for child in ast.iter_child_nodes(node):
            visit(child, function)

    visit(code, "<module>")
    return functions


def test_torch_is_imported_in_named_places_only() -> None:
    places = {}
    for file in SOURCE.rglob("*.py"):
        name = file.relative_to(SOURCE).as_posix()
        functions = importing_functions(ast.parse(file.read_text(encoding="utf-8")))
        if functions and not name.startswith(tuple(f"{room}/" for room in ROOMS_WITH_TORCH)):
            places[name] = functions
    assert places == FUNCTIONS_WITH_TORCH


def imported(code: str, *arguments: str, stdin: str = "") -> tuple[list[str], str]:
    """Run code in a process of its own. Returns the forbidden modules that it imported, and what it printed."""
    script = f"""
import atexit, json, os, sys
report = os.dup(2)
atexit.register(lambda: os.write(report, json.dumps([m for m in {FORBIDDEN!r} if m in sys.modules]).encode()))
{textwrap.dedent(code)}
"""
    path = os.pathsep.join([str(ROOT / "src"), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run([sys.executable, "-c", script, *arguments], input=stdin, capture_output=True, text=True,
                          env=os.environ | {"PYTHONPATH": path}, cwd=ROOT, timeout=200, check=False)  # fmt: skip
    assert done.returncode == 0, done.stderr
    modules: list[str] = json.loads(done.stderr.rpartition("[")[1] + done.stderr.rpartition("[")[2])
    return modules, done.stdout


COMMAND = "import sys\nfrom triforce.__main__ import main\nsys.argv[0] = 'triforce'\nsys.exit(main())"
TOKENS = ("-n", "4", "-q")
COMMANDS = {
    "help": (["--help"], ""),
    "generate": (["generate", "It was", *TOKENS], ""),
    "generate-auto": (["generate", "It was", *TOKENS, "--mode", "auto", "--temperature", "0.8"], ""),
    "generate-int8": (["generate", "It was", *TOKENS, "--kv-dtype", "int8", "--coupling", "block"], ""),
    "explain": (["explain", "It was", "-n", "4"], ""),
    "info": (["info"], ""),
    "demo": (["demo", "--offline"], ""),
}


@needs_kernels
@pytest.mark.parametrize("command", COMMANDS)
def test_command_imports_no_torch(command: str) -> None:
    arguments, stdin = COMMANDS[command]
    modules, printed = imported(COMMAND, *arguments, stdin=stdin)
    assert not modules and printed


@needs_kernels
def test_batch_imports_no_torch(tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.jsonl"
    body = {"model": "triforce", "prompt": "It was", "max_tokens": 4}
    line = {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": body}
    prompts.write_text(json.dumps(line) + "\n")
    modules, _ = imported(COMMAND, "batch", str(prompts), "-o", str(tmp_path / "answers.jsonl"))
    assert not modules and "choices" in (tmp_path / "answers.jsonl").read_text()


@needs_kernels
def test_disk_cache_commands_import_no_torch(tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    text = "It was a dark and stormy night. " * 60
    for arguments in (["generate", text, *TOKENS, "--disk-cache", str(cache)], ["cache", "list", str(cache)],
                      ["cache", "verify", str(cache)], ["cache", "clear", str(cache)]):  # fmt: skip
        assert imported(COMMAND, *arguments)[0] == [], arguments


@needs_kernels
def test_library_and_saved_cache_import_no_torch(tmp_path: Path) -> None:
    modules, printed = imported(
        """
        import sys
        import triforce
        assert not {"torch", "transformers", "numpy"} & sys.modules.keys()
        from triforce import LLM, SamplingParams
        with LLM() as llm:
            params = SamplingParams(max_tokens=4, logprobs=2, prompt_logprobs=1)
            for mode in ("ar", "triforce", "retrieval", "draft", "auto"):
                llm.generate("It was", params, mode=mode)
            llm.generate("It was a dark night " * 40, SamplingParams(max_tokens=2), save_cache=sys.argv[1])
            (output,) = llm.generate("It was a dark night " * 40, SamplingParams(max_tokens=2), load_cache=sys.argv[1])
            print(output.cached_tokens > 0)
        """,
        str(tmp_path / "saved.kv"),
    )
    assert not modules and printed.strip() == "True"


@needs_kernels
def test_server_imports_no_torch() -> None:
    modules, printed = imported(
        """
        import json, os, signal, sys, threading, time, urllib.request
        from triforce.__main__ import main

        def ask() -> None:
            address = "http://127.0.0.1:" + port
            body = json.dumps({"prompt": "It was", "max_tokens": 4}).encode()
            headers = {"content-type": "application/json"}
            while True:
                try:
                    urllib.request.urlopen(address + "/health").read()
                    break
                except OSError:
                    time.sleep(0.1)
            answer = urllib.request.urlopen(urllib.request.Request(address + "/v1/completions", body, headers)).read()
            print("choices" in json.loads(answer), flush=True)
            os.kill(os.getpid(), signal.SIGTERM)

        import socket
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = str(free.getsockname()[1])
        threading.Thread(target=ask, daemon=True).start()
        sys.argv = ["triforce", "serve", "--port", port]
        sys.exit(main())
        """
    )
    assert not modules and "True" in printed
