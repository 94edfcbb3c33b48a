"""PyTorch's own operations as a backend: right on any device, for any dtype. The first import here is that of torch."""

from triforce.backends.torch.torch_import import import_torch

import_torch()
