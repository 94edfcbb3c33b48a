"""Logits to the probabilities that are sampled, for each tier at each position: the reference of other kernels.

Order: repetition penalty (Keskar et al. 2019, as in transformers) > presence and frequency penalties (as OpenAI's) >
logit bias > temperature > min-p (Nguyen et al. 2024) > top-k > top-p (Holtzman et al. 2020). Steps that no row uses are
not computed, and on a CPU a row's probabilities have the same bits in any batch.

Equal scores at the edge of top-k or top-p: the lowest ids stay, so that nothing depends on how a sort breaks ties.

Shapes: B rows, R rows that use a step, J columns, V vocabulary, S text capacity, W largest values that are sorted.
"""

import math
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import torch
from torch import Tensor

from triforce.interface.sampling_params import SamplingParams
from triforce.sampling.logits import check_bias, non_finite_logits

_HEAD = 1024  # a nucleus of at most this many tokens is found without sorting the vocabulary
_LOWEST = -math.inf
_Params = Sequence[SamplingParams]
_Device = torch.device | str


class _ProcessingStep:
    """Step of processing: the rows that use it, and their parameters, float64 (R, 1, 1). It is false without rows."""

    def __init__(self, params: _Params, uses: Callable[[SamplingParams], bool], *names: str, device: _Device) -> None:
        rows = [b for b, p in enumerate(params) if uses(p)]
        self.count = len(rows)
        # All rows: a slice makes a view, without a copy.
        self.rows = slice(None) if len(rows) == len(params) else torch.tensor(rows, dtype=torch.int64, device=device)
        columns = [[float(getattr(params[b], name)) for b in rows] for name in names]
        self.values = [torch.tensor(c, dtype=torch.float64, device=device)[:, None, None] for c in columns]

    def __bool__(self) -> bool:
        return self.count > 0

    def apply(self, scores_BJV: Tensor, process: Callable[..., Tensor]) -> None:
        """Set scores = process(scores, *parameters) in these rows, in place."""
        if self:
            scores_BJV[self.rows] = process(scores_BJV[self.rows], *self.values)


class LogitsProcessor:
    """Processor from logits to probabilities. Raises RequestError if a bias names a token beyond the vocabulary."""

    def __init__(
        self, params: _Params, prompt_lengths: Sequence[int], vocab_size: int, device: _Device = "cpu"
    ) -> None:
        step = partial(_ProcessingStep, params, device=device)
        self._vocab_size = vocab_size
        self._prompt_lengths_B = torch.tensor(list(prompt_lengths), dtype=torch.int64, device=device)
        self._repetition = step(lambda p: p.repetition_penalty != 1, "repetition_penalty")
        self._output = step(
            lambda p: p.presence_penalty != 0 or p.frequency_penalty != 0, "presence_penalty", "frequency_penalty"
        )
        self._bias = _bias(params, vocab_size, device)
        self._greedy = step(lambda p: p.temperature == 0)
        self._all_greedy = self._greedy.count == len(params)
        self._temperature = step(lambda p: p.temperature not in (0, 1), "temperature")
        self._min_p = step(lambda p: p.min_p > 0 and p.temperature > 0, "min_p")
        self._top_k = step(lambda p: 0 < p.top_k < vocab_size and p.temperature > 0, "top_k")
        self._widest = max((p.top_k for p in params if p.top_k < vocab_size), default=0)
        self._top_p = step(lambda p: p.top_p < 1 and p.temperature > 0, "top_p")

    def __call__(self, logits_BJV: Tensor, ids_BS: Tensor, lengths_B: Tensor) -> Tensor:
        """Return probabilities, float64 (B, J, V): each row sums to 1 and is never empty.

        Column j is for the token that follows ids_BS[b, : lengths_B[b] + j]; later ids are ignored. Logits of -inf are
        allowed. Raises ModelError for NaN, +inf or nothing but -inf in any column, padding included.
        """
        probs_BJV, peaks_BJ = self.unchecked(logits_BJV, ids_BS, lengths_B)
        check(peaks_BJ)
        return probs_BJV

    def unchecked(self, logits_BJV: Tensor, ids_BS: Tensor, lengths_B: Tensor) -> tuple[Tensor, Tensor]:
        """Return probabilities, and the peak (B, J) of each column. They are valid only if `check(peaks)` passes."""
        scores_BJV = self.adjusted(logits_BJV, ids_BS, lengths_B)
        peaks_BJ1 = scores_BJV.amax(-1, keepdim=True)
        peaks_BJ = peaks_BJ1.squeeze(-1)
        if self._all_greedy:
            return _one_hot(scores_BJV), peaks_BJ
        scores_BJV -= peaks_BJ1  # before the division: then a tiny temperature cannot overflow
        return self._probabilities(scores_BJV), peaks_BJ

    @property
    def adjusts(self) -> bool:
        """Whether a row has penalties or biases."""
        return bool(self._repetition or self._output or self._bias is not None)

    def adjusted(self, logits_BJV: Tensor, ids_BS: Tensor, lengths_B: Tensor) -> Tensor:
        """Return new logits (B, J, V), float64, with penalties and biases, before temperature and truncation."""
        scores_BJV = logits_BJV.to(torch.float64, copy=True)
        self._penalize(scores_BJV, ids_BS, lengths_B)
        if self._bias is not None:
            rows_N, ids_N, values_N1 = self._bias
            scores_BJV[rows_N, :, ids_N] += values_N1
        return scores_BJV

    def _penalize(self, scores_BJV: Tensor, ids_BS: Tensor, lengths_B: Tensor) -> None:
        """Apply penalties for the tokens before each column, in place."""
        columns = scores_BJV.shape[1]
        for step, firsts_B, penalty in (
            (self._repetition, torch.zeros_like(self._prompt_lengths_B), _repetition),
            (self._output, self._prompt_lengths_B, _presence_and_frequency),
        ):
            if step:
                ids_RS, firsts_R, lengths_R = (
                    x.to(scores_BJV.device)[step.rows] for x in (ids_BS, firsts_B, lengths_B)
                )
                counts_RJV = _counts(ids_RS, firsts_R, lengths_R, columns, self._vocab_size)
                step.apply(scores_BJV, partial(penalty, counts_RJV))

    def _probabilities(self, scores_BJV: Tensor) -> Tensor:
        """Return the probabilities of scores whose largest is 0; the scores are overwritten."""
        self._temperature.apply(scores_BJV, torch.div)
        self._min_p.apply(scores_BJV, _min_p)
        self._top_k.apply(scores_BJV, partial(_top_k, self._widest))
        self._top_p.apply(scores_BJV, _top_p)
        probs_BJV = scores_BJV.softmax(-1)
        # From the scores: different ones may have equal probabilities.
        self._greedy.apply(probs_BJV, lambda _: _one_hot(scores_BJV[self._greedy.rows]))
        return probs_BJV


def _counts(ids_RS: Tensor, firsts_R: Tensor, lengths_R: Tensor, columns: int, vocab_size: int) -> Tensor:
    """Count each token in ids[first : length + j]: float64 (R, J, V)."""
    place_S = torch.arange(ids_RS.shape[1], device=ids_RS.device)
    column_RS = (place_S - lengths_R[:, None] + 1).clamp_(min=0)  # the first column whose past includes this place
    counts_RS = (place_S >= firsts_R[:, None]) & (column_RS < columns)
    cell_RS = torch.where(counts_RS, column_RS * vocab_size + ids_RS.clamp(0, vocab_size - 1), 0)
    counts_RN = torch.zeros(len(ids_RS), columns * vocab_size, dtype=torch.float64, device=ids_RS.device)
    counts_RN.scatter_add_(1, cell_RS, counts_RS.double())
    return counts_RN.view(-1, columns, vocab_size).cumsum(1)


def _repetition(counts_RJV: Tensor, scores_RJV: Tensor, penalty_R11: Tensor) -> Tensor:
    punished_RJV = torch.where(scores_RJV > 0, scores_RJV / penalty_R11, scores_RJV * penalty_R11)
    return torch.where(counts_RJV > 0, punished_RJV, scores_RJV)


def _presence_and_frequency(
    counts_RJV: Tensor, scores_RJV: Tensor, presence_R11: Tensor, frequency_R11: Tensor
) -> Tensor:
    return scores_RJV - (counts_RJV > 0) * presence_R11 - counts_RJV * frequency_R11


def _bias(params: _Params, vocab_size: int, device: _Device) -> tuple[Tensor, Tensor, Tensor] | None:
    """Return all biases as rows_N, ids_N and values (N, 1); None if there are none."""
    check_bias(params, vocab_size)
    entries = [(b, token, x) for b, p in enumerate(params) for token, x in (p.logit_bias or {}).items()]
    if not entries:
        return None
    rows, ids, values = zip(*entries, strict=True)
    return (
        torch.tensor(rows, device=device),
        torch.tensor(ids, device=device),
        torch.tensor(values, dtype=torch.float64, device=device)[:, None],
    )


def _min_p(scores_RJV: Tensor, share_R11: Tensor) -> Tensor:
    """Keep the tokens with at least this share of the highest probability, whose score is 0."""
    return scores_RJV.masked_fill(scores_RJV < share_R11.log(), _LOWEST)


def _top_k(widest: int, scores_RJV: Tensor, k_R11: Tensor) -> Tensor:
    """Keep exactly k tokens; k <= widest."""
    head_RJW = scores_RJV.topk(widest).values
    keep_RJV = _largest(scores_RJV, head_RJW, k_R11.long().expand(-1, scores_RJV.shape[1], 1))
    return scores_RJV.masked_fill(~keep_RJV, _LOWEST)


def _top_p(scores_RJV: Tensor, mass_R11: Tensor) -> Tensor:
    """Keep the fewest tokens, the most probable first, that hold this mass."""
    # softmax works row by row; a plain sum may be split among threads, and its last bit then depends on the batch.
    probs_RJV = scores_RJV.softmax(-1)
    head_RJW = _descending(probs_RJV, mass_R11)
    below_RJ1 = (head_RJW.cumsum(-1) < mass_R11).sum(-1, keepdim=True)
    keep_RJV = _largest(probs_RJV, head_RJW, (below_RJ1 + 1).clamp_(max=head_RJW.shape[-1]))
    return scores_RJV.masked_fill(~keep_RJV, _LOWEST)


def _descending(probs_RJV: Tensor, mass_R11: Tensor) -> Tensor:
    """Return the largest probabilities in order, (R, J, W): enough to hold the mass."""
    if (
        probs_RJV.device.type == "cpu" and probs_RJV.shape[-1] > _HEAD
    ):  # on a GPU the check would be a sync, and a sort is cheap
        head_RJW = probs_RJV.topk(_HEAD).values
        if bool((head_RJW.cumsum(-1)[..., -1:] >= mass_R11).all()):
            return head_RJW
    return probs_RJV.sort(descending=True).values


def _largest(values_RJV: Tensor, head_RJW: Tensor, count_RJ1: Tensor) -> Tensor:
    """Mark the `count` largest values, the lowest ids among equals: bool (R, J, V). head: the largest, in order."""
    edge_RJ1 = head_RJW.gather(-1, count_RJ1 - 1)
    above_RJV = values_RJV > edge_RJ1
    equal_RJV = values_RJV == edge_RJ1
    room_RJ1 = count_RJ1 - above_RJV.sum(-1, keepdim=True)
    return above_RJV | (equal_RJV & (equal_RJV.cumsum(-1) <= room_RJ1))


def _one_hot(scores_BJV: Tensor) -> Tensor:
    """Return probability 1 for the largest score, the lowest id among equals."""
    return torch.zeros_like(scores_BJV).scatter_(-1, scores_BJV.argmax(-1, keepdim=True), 1.0)


def check(peaks_BJ: Tensor) -> None:
    """Raise ModelError where the maximum of a column, to which a NaN spreads, is not finite."""
    on_host_BJ = peaks_BJ.double().cpu().numpy()  # the host waits
    if not np.isfinite(on_host_BJ).all():
        b, j = np.argwhere(~np.isfinite(on_host_BJ))[0].tolist()
        raise non_finite_logits(b, j, float(on_host_BJ[b, j]))
