"""Counter-based noise: the same numbers for the same (seed, choice, position), whatever else is in the batch.

Philox4x32-10 (Salmon, Moraes, Dror, Shaw 2011, "Parallel random numbers: as easy as 1, 2, 3"), in torch's int64
arithmetic: a product of two 32-bit words wraps into the sign bit, and shifting and masking give back both halves.

The 64-bit seed is the key. The counter's four words are

    exponentials  (token // 2, position,         choice, 0)          two tokens share the four words of a block
    uniforms      (draw low,   draw high,        choice, 1 + tier)

so no two kinds and no two tiers share a counter. Batch rows, steps and request names are not part of it.

Shapes: B rows, J columns, V vocabulary, n draws, N blocks side by side, R the ten rounds.
"""

from collections.abc import Sequence
from itertools import product

import torch
from torch import Tensor

from triforce.arrays import Array, on_device
from triforce.ragged import Ints

_MASK = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
_ROUNDS = 10
_TIERS = 8
_CACHED_POSITIONS = 32  # mean number of positions of a row in the cache: several rounds of all tiers; 2 MiB at V = 8192
_POSITIONS_AT_ONCE = 4  # the next positions will be needed too, and a call costs as much as two positions
_TILE = 1 << 14  # Philox blocks of a call on a CPU: larger temporaries leave the cache, and each costs an mmap


def key_schedule(keys: Sequence[int]) -> Tensor:
    """Return the ten round keys of each 64-bit key: int64 (R, 2, B), low word first."""
    halves = [k & _MASK for k in keys], [k >> 32 for k in keys]
    rounds = [
        [[(k + r * w) & _MASK for k in words] for words, w in zip(halves, _WEYL, strict=True)] for r in range(_ROUNDS)
    ]
    return torch.tensor(rounds, dtype=torch.int64).view(_ROUNDS, 2, len(keys))


def philox(counter: tuple[Tensor, Tensor, Tensor, Tensor], keys_R2: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return four random 32-bit words for four counter words, by Philox4x32-10.

    Each word is an int64 tensor in [0, 2**32); words broadcast against each other. keys_R2 is `key_schedule`, with any
    trailing shape that broadcasts with words 1 and 3.
    """
    c0, c1, c2, c3 = counter
    for k0, k1 in zip(*keys_R2.unbind(1), strict=True):
        p0 = c0 * _MULTIPLIERS[0]
        p1 = c2 * _MULTIPLIERS[1]
        c0 = ((p1 >> 32) ^ c1).bitwise_xor_(k0).bitwise_and_(_MASK)
        c2 = ((p0 >> 32) ^ c3).bitwise_xor_(k1).bitwise_and_(_MASK)
        # Not masked yet: high halves only reach xors that are masked later; two operations a round are saved.
        c1 = p1
        c3 = p0
    return c0, c1 & _MASK, c2, c3 & _MASK


class Noise:
    """Noise of a batch, one stream a row.

    seeds: B integers in [0, 2**64). choices: B integers in [0, 2**32), each row's index among the `n` of its request.
    `draws` (int64, tiers x B) counts the uniforms each row has used; save and restore it to continue a row elsewhere.
    Other kernels have their own classes, which make the same numbers (`backends.token_sampler.make_noise`).
    """

    def __init__(self, seeds: Sequence[int], choices: Sequence[int], device: torch.device | str = "cpu") -> None:
        self.draws = torch.zeros(_TIERS, len(seeds), dtype=torch.int64, device=device)
        self._keys_R2B = key_schedule(seeds).to(device)
        self.seeds_B = torch.tensor(list(seeds), dtype=torch.uint64).view(torch.int64).to(device)
        self.choices_B = torch.tensor(list(choices), dtype=torch.int64, device=device)
        self.cached_exponentials: dict[tuple[int, int, int], Tensor] = {}

    def exponentials(self, positions_BJ: Array, vocab_size: int) -> Tensor:
        """Return independent Exp(1) variates, float64 (B, J, V), keyed (seed, choice, position, token).

        positions_BJ: int64 in [0, 2**32). argmax(p / E) follows p: it is the Gumbel-max draw. Variates lie in
        [2**-53, 36.8], never 0 nor infinite. The random bits are the same on every device; logarithms may differ in
        their last bit.
        """
        positions_BJ = on_device(positions_BJ, self.draws.device)
        if positions_BJ.device.type != "cpu":  # a look-up of cached keys would be a device sync
            rows_BJ = torch.arange(len(positions_BJ), device=positions_BJ.device)[:, None].expand_as(positions_BJ)
            new_NV = self._exponentials(rows_BJ.flatten(), positions_BJ.flatten(), vocab_size)
            return new_NV.reshape(*positions_BJ.shape, vocab_size)
        requested_keys = [(b, p, vocab_size) for b, row in enumerate(positions_BJ.tolist()) for p in row]
        missing_keys = [key for key in dict.fromkeys(requested_keys) if key not in self.cached_exponentials]
        if missing_keys:
            self._make(missing_keys)
        exponentials_NV = (
            torch.cat([self.cached_exponentials[key] for key in requested_keys])
            if requested_keys
            else torch.empty(0, dtype=torch.float64)
        )
        surplus = len(self.cached_exponentials) - _CACHED_POSITIONS * self.draws.shape[1]
        for key in list(self.cached_exponentials)[: max(0, surplus)]:  # the oldest ones
            del self.cached_exponentials[key]
        return exponentials_NV.view(*positions_BJ.shape, vocab_size)

    def uniforms(self, tier: int, n: int, used_B: Ints) -> Tensor:
        """Return the next n uniforms of each row for a tier: float64 in [0, 1), (B, n), by (seed, choice, tier, draw).

        tier: in [0, 8). used_B: how many of the n each row uses; the unused ones are drawn again by the next call. So a
        row's noise does not depend on how many uniforms its batch neighbours need.
        """
        draw_Bn = self.draws[tier, :, None] + torch.arange(n, device=self.draws.device)
        counter = (draw_Bn & _MASK, draw_Bn >> 32, self.choices_B[:, None], torch.full_like(draw_Bn, 1 + tier))
        high, low, _, _ = philox(counter, self._keys_R2B[..., None])
        self.draws[tier] += on_device(used_B, self.draws.device)
        return _bits(high, low).double() * 2.0**-53

    def _make(self, missing_keys: list[tuple[int, int, int]]) -> None:
        """Make and cache the exponentials of (row, position, vocabulary) keys and of the other keys in their blocks."""
        blocks = ((b, p - p % _POSITIONS_AT_ONCE + i, v) for b, p, v in missing_keys for i in range(_POSITIONS_AT_ONCE))
        keys = list(dict.fromkeys(blocks))
        rows_N, positions_N, _ = torch.tensor(keys).unbind(1)
        self.cached_exponentials.update(zip(keys, self._exponentials(rows_N, positions_N, keys[0][2]), strict=True))

    def _exponentials(self, rows_N: Tensor, positions_N: Tensor, vocab_size: int) -> Tensor:
        """Return the exponentials of N places, float64 (N, V), made tile by tile."""
        pairs = (vocab_size + 1) // 2
        out_NP2 = torch.empty(len(rows_N), pairs, 2, dtype=torch.float64, device=rows_N.device)
        tile = _TILE if rows_N.device.type == "cpu" else out_NP2.numel()
        tile_places = max(tile // max(pairs, 1), 1)
        tile_pairs = max(min(pairs, tile), 1)
        for n, i in product(range(0, len(rows_N), tile_places), range(0, pairs, tile_pairs)):
            pairs_P = torch.arange(i, min(i + tile_pairs, pairs), device=rows_N.device)
            places = slice(n, n + tile_places)
            out_NP2[places, i : i + tile_pairs] = self._tile(rows_N[places], positions_N[places], pairs_P)
        return out_NP2.flatten(1)[:, :vocab_size]

    def _tile(self, rows_N: Tensor, positions_N: Tensor, pairs_P: Tensor) -> Tensor:
        """Return the exponentials of N places and P pairs of tokens, (N, P, 2)."""
        choices_N1 = self.choices_B[rows_N, None]
        counter = (pairs_P[None], positions_N[:, None], choices_N1, torch.zeros_like(choices_N1))
        w0, w1, w2, w3 = philox(counter, self._keys_R2B[..., rows_N, None])
        # Odd multiples of 2**-53 avoid both ends: an exponential of 0 would win every race, even with probability 0.
        bits_NP2 = torch.stack((_bits(w0, w1), _bits(w2, w3)), -1).bitwise_or_(1)
        return bits_NP2.double().mul_(2.0**-53).log_().neg_()


def _bits(high: Tensor, low: Tensor) -> Tensor:
    """Return 53 random bits from two 32-bit words."""
    return (high << 21).bitwise_or_(low >> 11)
