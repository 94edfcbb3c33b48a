"""A decoder's weights for the Triton kernels: products are torch's, what lies between them is one kernel each."""

from __future__ import annotations

from triforce.kernels.plain_model import PlainBlock, PlainModel
from triforce.kernels.triton.pointwise import norm, swiglu


class TritonBlock(PlainBlock):
    norm, swiglu = staticmethod(norm), staticmethod(swiglu)


class TritonModel(PlainModel):
    block = TritonBlock
