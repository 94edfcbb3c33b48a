"""The native attention with the rules of some families: a sink logit of each head, and a cap of scores.

Shape suffixes as in paged.py.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.helpers.paged_kv import PAGE, Paged, attend, by_the_book, native, visible
from triforce.backends.torch import attention
from triforce.backends.torch.int8_rows import rounded_queries

if native is None:
    pytest.skip("the native kernels were not built", allow_module_level=True)
from triforce.backends.cpu.kv import random_rotation

torch.set_num_threads(1)
pytestmark = pytest.mark.usefixtures("dtype")

G, H, D = 2, 6, 48
SINK_LOGITS = torch.tensor([0.0, 4.0, -2.0, 9.0, 40.0, -60.0])
RULES: dict[str, tuple[Tensor | None, float]] = {
    "sink logits": (SINK_LOGITS, 0.0), "cap": (None, 0.7), "both": (SINK_LOGITS, 2.0),
}  # fmt: skip
BOUND = {torch.bfloat16: 2**-8 + 2**-9, torch.float32: 3e-6}
CODES = {torch.bfloat16: 2**-7, torch.float32: 2**-11}
CASES = [(0, 1, 0), (200, 3, 0), (1100, 5, 0), (900, 40, 70), (130, 120, 0)]
"""Keys before the queries, number of queries, and their window. The last entries are prefill."""


@pytest.mark.parametrize("rules", RULES)
@pytest.mark.parametrize(("start", "T", "window"), CASES)
@pytest.mark.parametrize("codes", [False, True], ids=["numbers", "codes"])
def test_rules_of_attention_equal_float64(
    rules: str, start: int, T: int, window: int, codes: bool, dtype: torch.dtype
) -> None:
    """Values agree, and so does the mass of pages beside the sink logits."""
    attention_sink_logits, cap = RULES[rules]
    S = start + T
    kv = Paged(G, D, -(-S // PAGE) + 2, dtype, codes=codes, attention_sink_logits=attention_sink_logits, cap=cap)
    row = kv.row(S)
    q_BTHD = kv.normal(1, T, H, D, gain=2.0)
    attn_out, mass = attend(kv, q_BTHD, [start], [T], row.list_P[None], weigh=T < 100, window=window)
    visible_TS = visible(start, T, S, 0, window)
    queries = rounded_queries(q_BTHD[0]) if codes else q_BTHD[0]
    reference = by_the_book(queries, row.k_SGD, row.v_SGD, visible_TS, None, 0, attention_sink_logits, cap)
    bound = (CODES if codes else BOUND)[dtype] * float(row.v_SGD.abs().max())
    torch.testing.assert_close(attn_out[0].double(), reference[0], atol=bound, rtol=0)
    if T < 100:
        torch.testing.assert_close(mass[0].double(), reference[1], atol=1e-3 if codes else 5e-5, rtol=5e-5)


@pytest.mark.parametrize("rules", RULES)
def test_rules_leave_a_query_its_bits_in_any_pass(rules: str, dtype: torch.dtype) -> None:
    attention_sink_logits, cap = RULES[rules]
    kv = Paged(G, D, 90, dtype, attention_sink_logits=attention_sink_logits, cap=cap)
    row = kv.row(1300)
    q_BTHD = kv.normal(1, 130, H, D)
    single_pass, _ = attend(kv, q_BTHD, [1170], [130], row.list_P[None], weigh=False)
    for begin, count in ((0, 1), (7, 20), (129, 1)):
        part = q_BTHD[:, begin : begin + count].contiguous()
        short_pass, _ = attend(kv, part, [1170 + begin], [count], row.list_P[None])
        assert torch.equal(short_pass[0], single_pass[0, begin : begin + count])


@pytest.mark.parametrize("rules", RULES)
@pytest.mark.parametrize("window", [0, 50])
def test_torch_path_has_the_same_rules(rules: str, window: int, dtype: torch.dtype) -> None:
    attention_sink_logits, cap = RULES[rules]
    T = 9
    S = 150
    q, k, v = (torch.randn(n, heads, D) for n, heads in ((T, H), (S, G), (S, G)))
    attn_out, mass = attention.attend(
        q, k.transpose(0, 1), v.transpose(0, 1), True, None, 0, window, attention_sink_logits, cap
    )
    reference = by_the_book(q, k, v, visible(S - T, T, S, 0, window), None, 0, attention_sink_logits, cap)
    torch.testing.assert_close(attn_out.double(), reference[0], atol=1e-5, rtol=1e-5)
    pages = torch.nn.functional.pad(mass, (0, -S % PAGE)).unflatten(1, (-1, PAGE)).sum(2)
    torch.testing.assert_close(pages.double(), reference[1], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("rules", RULES)
def test_searched_pages_follow_the_rules(rules: str, dtype: torch.dtype) -> None:
    """A search that selects all pages has the bits of attention without a search."""
    attention_sink_logits, cap = RULES[rules]
    kv = Paged(G, D, 50, dtype, turn=random_rotation(D), attention_sink_logits=attention_sink_logits, cap=cap)
    row = kv.row(600)
    q_BTHD = kv.normal(1, 2, H, D)
    full_attention, _ = attend(kv, q_BTHD, [598], [2], row.list_P[None], weigh=False)
    searched, _ = attend(kv, q_BTHD, [598], [2], row.list_P[None], weigh=False, search=([1], [31], [30]))
    assert torch.equal(searched, full_attention)


@pytest.mark.parametrize("rules", RULES)
def test_int8_copies_follow_the_rules(rules: str, dtype: torch.dtype) -> None:
    attention_sink_logits, cap = RULES[rules]
    kv = Paged(G, D, 50, dtype, int8=True, attention_sink_logits=attention_sink_logits, cap=cap)
    row = kv.row(600)
    q_BTHD = kv.normal(1, 2, H, D)
    attn_out, mass = attend(kv, q_BTHD, [598], [2], row.list_P[None], coarse=[576])
    reference = by_the_book(q_BTHD[0], row.k_SGD, row.v_SGD, visible(598, 2, 600), None, 0, attention_sink_logits, cap)
    torch.testing.assert_close(attn_out[0].double(), reference[0], atol=0.03, rtol=0)
    torch.testing.assert_close(mass[0].double(), reference[1], atol=0.03, rtol=0)


def test_sink_logits_of_other_heads_raise(dtype: torch.dtype) -> None:
    kv = Paged(G, D, 5, dtype, attention_sink_logits=SINK_LOGITS[:4])
    row = kv.row(20)
    with pytest.raises(ValueError, match="each query head has a sink logit"):
        attend(kv, kv.normal(1, 1, H, D), [19], [1], row.list_P[None])
