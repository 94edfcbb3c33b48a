"""A tiny pair, and one thread."""

import torch

from tests.helpers import disk_llm, tiny_llm

torch.set_num_threads(1)
pair = tiny_llm.pair  # a fixture
disk_pair, cache = disk_llm.disk_pair, disk_llm.cache
