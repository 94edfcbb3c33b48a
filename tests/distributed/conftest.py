"""A tiny pair, and the mirrors that are made of a worker's steps."""

from tests.helpers import mirrored_worker

pair, mirrors = mirrored_worker.pair, mirrored_worker.mirrors  # fixtures
