"""Plans that dice decide."""

from tests.helpers import controlled_batch

whims = controlled_batch.whims  # a fixture
