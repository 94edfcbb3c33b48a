"""The bundle of the page, made again from its sources: the same bytes. Needs node, and npm's registry or its cache."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
BUNDLE = ROOT / "src" / "triforce" / "server" / "web"
UNREACHABLE = ("ENOTFOUND", "EAI_AGAIN", "ECONNREFUSED", "ETIMEDOUT", "ENOTCACHED", "ENETUNREACH")


def test_page_bundle_is_made_again_byte_for_byte(tmp_path: Path) -> None:
    npm, node = shutil.which("npm"), shutil.which("node")
    if not npm or not node:
        pytest.skip("no node here")
    for name in ("package.json", "package-lock.json", "build.mjs", ".npmrc"):
        shutil.copy(ROOT / "web" / name, tmp_path)
    shutil.copytree(ROOT / "web" / "src", tmp_path / "src")
    command = [npm, "ci", "--no-audit", "--no-fund", "--prefer-offline"]
    installed = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, env=os.environ)
    if any(code in installed.stderr for code in UNREACHABLE):
        pytest.skip("npm reaches no registry")
    assert installed.returncode == 0, installed.stderr
    subprocess.run([node, "build.mjs", str(tmp_path / "out")], cwd=tmp_path, check=True)
    files = {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()}
    assert sorted(files) == sorted(path.name for path in BUNDLE.iterdir())
    assert [name for name, data in files.items() if data != (BUNDLE / name).read_bytes()] == []
