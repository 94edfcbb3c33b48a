"""A decoder's weights for the Triton kernels: products are torch's, what lies between them is one kernel each."""

from __future__ import annotations

from torch import Tensor

from triforce.backends.cuda.executor import GraphExecutor
from triforce.backends.cuda.triton.pointwise import norm, swiglu
from triforce.backends.kernel_api import ForwardBatch, ForwardOutput, KVBackend
from triforce.backends.torch.model import TorchLayer, TorchModel
from triforce.model.config import ModelConfig
from triforce.model.weights import Weights


class TritonLayer(TorchLayer):
    norm, swiglu = staticmethod(norm), staticmethod(swiglu)


class TritonModel(TorchModel):
    block = TritonLayer

    def __init__(self, config: ModelConfig, weights: Weights) -> None:
        super().__init__(config, weights)
        self.executor = GraphExecutor()

    def forward(self, ids_BT: Tensor, kv: KVBackend, batch: ForwardBatch, at_BJ: Tensor | None) -> ForwardOutput:
        return self.executor.forward(self, ids_BT, kv, batch, at_BJ)
