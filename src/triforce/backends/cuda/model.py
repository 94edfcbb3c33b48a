"""A decoder's weights for the Triton kernels: products are torch's, what lies between them is one kernel each."""

from __future__ import annotations

from triforce.backends.cuda.triton.pointwise import norm, swiglu
from triforce.backends.torch.model import PlainBlock, PlainModel


class TritonBlock(PlainBlock):
    norm, swiglu = staticmethod(norm), staticmethod(swiglu)


class TritonModel(PlainModel):
    block = TritonBlock
