"""Sampling in torch, on any device: the reference of other samplers.

Shape suffixes: B rows, K drafted tokens, J = K + 1, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from triforce.arrays import on_device
from triforce.backends.torch.logits_processor import LogitsProcessor, check
from triforce.interface.sampling_params import SamplingParams
from triforce.ragged import Bools
from triforce.speculation import Draft, SequenceState, Verification


@dataclass(frozen=True, slots=True)
class TorchSampling:
    """Reference sampler: processes logits, then verifies, in separate torch operations."""

    processor: LogitsProcessor
    coupling: Verification
    vocab_size: int

    @property
    def probs_size(self) -> int:
        return self.coupling.probs_size(self.vocab_size)

    def verify(self, draft: Draft, logits_BJV: Tensor, prefix: SequenceState, live_B: Bools, tier: int) -> Draft:
        text = on_device(prefix.ids_BS, "cpu"), on_device(prefix.lengths_B, "cpu")
        probs_BJV, peaks_BJ = self.processor.unchecked(logits_BJV, *text)
        verified = self.coupling.verify(draft, probs_BJV, prefix.lengths_B, live_B, tier)
        check(peaks_BJ)  # after the verification, for which the host has waited: this check costs no second wait
        return verified


def torch_sampling(
    params: Sequence[SamplingParams],
    prompt_lengths: Sequence[int],
    vocab_size: int,
    coupling: Verification,
    device: str = "cpu",
) -> TorchSampling:
    """Return the sampler of rows; the arguments are those of `LogitsProcessor`."""
    return TorchSampling(LogitsProcessor(params, prompt_lengths, vocab_size, device), coupling, vocab_size)
