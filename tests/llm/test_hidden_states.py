"""Hidden states of the requested layers in the engine's passes, against those of transformers."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.helpers.tiny_checkpoint import save, tiny_model
from triforce.backends.torch.tensors import as_tensor
from triforce.engine.model_loader import load
from triforce.engine.tier_builder import ModelSet, SpeculativeConfig, TierBuilder
from triforce.ragged import ints

torch.set_num_threads(1)


@pytest.mark.parametrize("head_dim", [16, 8], ids=["native", "torch"])
def test_states_of_a_verification_equal_those_of_transformers(head_dim: int, tmp_path: Path) -> None:
    """One of two rows is prefilled by parts. Heads of 8 are too small for native kernels."""
    model = tiny_model(num_hidden_layers=4, head_dim=head_dim)
    decoder = load(save(model, tmp_path), device="cpu", dtype="float32").decoder
    view = TierBuilder(ModelSet(decoder), SpeculativeConfig(), [40, 40]).full_view()
    ids_BT = torch.randint(97, (2, 24), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        expected_output = model(ids_BT, output_hidden_states=True)
    start = 0
    for width in (13, 6, 5):
        fed_BT = ids_BT[:, start : start + width]
        counts_B = ints([width, width])
        _, output = decoder.observe(fed_BT.numpy(), counts_B, view, None, (1, 3))
        logits_BTV = as_tensor(output.logits_BJV)
        assert output.states_SBTC is not None
        states_SBTC = as_tensor(output.states_SBTC)
        part = slice(start, start + width)
        torch.testing.assert_close(logits_BTV, expected_output.logits[:, part], atol=2e-4, rtol=2e-4)
        for state_BTC, layers in zip(states_SBTC, (1, 3), strict=True):
            torch.testing.assert_close(state_BTC, expected_output.hidden_states[layers][:, part], atol=2e-4, rtol=2e-4)
        start += width
