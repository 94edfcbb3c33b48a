"""Random plans. Without torch, which their target takes, the tests that ask for them are skipped."""

from importlib.util import find_spec

import pytest

if find_spec("torch"):
    from tests.helpers import controlled_batch

    random_plans = controlled_batch.random_plans  # a fixture
else:

    @pytest.fixture
    def random_plans() -> None:
        pytest.skip("torch is not installed")
