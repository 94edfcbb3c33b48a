"""A decoder's weights for the Triton kernels: products are torch's, what lies between them is one kernel each."""

from __future__ import annotations

from triforce.backends.cuda.triton.pointwise import norm, swiglu
from triforce.backends.torch.model import TorchLayer, TorchModel


class TritonLayer(TorchLayer):
    norm, swiglu = staticmethod(norm), staticmethod(swiglu)


class TritonModel(TorchModel):
    block = TritonLayer
