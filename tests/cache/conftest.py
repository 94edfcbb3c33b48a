"""The helpers beside the folder `cache` are importable from inside it, whichever tests are asked for."""

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent.parent))
torch.set_num_threads(1)
