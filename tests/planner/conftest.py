"""Random plans."""

from tests.helpers import controlled_batch

random_plans = controlled_batch.random_plans  # a fixture
