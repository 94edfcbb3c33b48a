"""A tiny pair, and one thread."""

from tests.helpers import disk_llm, tiny_llm

pair = tiny_llm.pair  # a fixture
disk_pair, cache = disk_llm.disk_pair, disk_llm.cache
