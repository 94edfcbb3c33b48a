"""A tiny pair, and one thread."""

import torch

from tests.helpers import tiny_llm

torch.set_num_threads(1)
pair = tiny_llm.pair  # a fixture
