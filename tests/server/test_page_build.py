"""The bundle of the page, made again from its sources: the same bytes. Needs node, and npm's registry or its cache."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
BUNDLE = ROOT / "src" / "triforce" / "server" / "web"
WRONG_PACKAGES = ("EUSAGE", "EINTEGRITY")
"""Codes of npm for a lock file that does not fit. All others mean that a registry could not be reached."""
SECONDS = 120


def test_page_bundle_is_made_again_byte_for_byte(tmp_path: Path) -> None:
    npm, node = shutil.which("npm"), shutil.which("node")
    if not npm or not node:
        pytest.skip("no node here")
    for name in ("package.json", "package-lock.json", "build.mjs", ".npmrc"):
        shutil.copy(ROOT / "web" / name, tmp_path)
    shutil.copytree(ROOT / "web" / "src", tmp_path / "src")
    command = [npm, "ci", "--no-audit", "--no-fund", "--prefer-offline", "--fetch-retries=0", "--fetch-timeout=30000"]
    try:
        installed = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=SECONDS)
    except subprocess.TimeoutExpired:
        pytest.skip("npm reaches no registry in time")
    if installed.returncode:
        assert not any(code in installed.stderr for code in WRONG_PACKAGES), installed.stderr
        pytest.skip(f"npm reaches no registry: {installed.stderr[-300:]}")
    subprocess.run([node, "build.mjs", str(tmp_path / "out")], cwd=tmp_path, check=True)
    files = {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()}
    assert sorted(files) == sorted(path.name for path in BUNDLE.iterdir())
    assert [name for name, data in files.items() if data != (BUNDLE / name).read_bytes()] == []
