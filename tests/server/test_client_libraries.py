"""Client libraries with their defaults, against real models: the libraries that scripts/clients.py can install."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from scripts import clients
from tests.helpers.gguf_files import SMOLLM2
from tests.helpers.server_process import KEY, serving

FILES = {"smollm2": str(SMOLLM2), "qwen": os.environ.get("TRIFORCE_QWEN2_5_CODER_0_5B", "")}

pytestmark = [pytest.mark.slow, pytest.mark.timeout(2400)]  # the first test installs the libraries


@pytest.fixture(scope="module")
def missing() -> dict[str, str]:
    return clients.install_libraries()


@pytest.fixture(scope="module", params=FILES)
def model(request: pytest.FixtureRequest) -> Iterator[tuple[str, str]]:
    """The name of a model, and the address of its server."""
    file = FILES[request.param]
    if not Path(file).is_file():
        pytest.skip(f"there is no file of {request.param}; see docs/contributing/tests.md")
    with serving(file, "--name", request.param) as (_, url):
        yield request.param, url


@pytest.mark.parametrize(("client", "call"), clients.CASES)
def test_client_library_gets_what_it_asks_for(
    model: tuple[str, str], missing: dict[str, str], client: str, call: str
) -> None:
    name, url = model
    if client in missing:
        pytest.skip(missing[client])
    if not clients.is_asked(name, call):
        pytest.skip(f"{name} is not asked to choose whether to call a function")
    assert not clients.attempt(client, call, url, name, KEY)
