"""Fixtures: a tiny pair, and the mirrors that a worker's steps create."""

from tests.helpers import mirrored_worker

pair, mirrors = mirrored_worker.pair, mirrored_worker.mirrors  # fixtures
