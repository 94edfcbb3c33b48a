"""A tiny pair, and the mirrors that are made of a worker's steps."""

from tests.helpers import mirrored_worker

pair, crews = mirrored_worker.pair, mirrored_worker.crews  # fixtures
