"""TorchGroup: ranks that are processes, by torch.distributed. gloo between CPUs, NCCL between GPUs.

There are two groups, as ranks wait for two reasons. In a forward pass all ranks compute the same: a rank that does not
answer within `PATIENCE` is treated as failed. Between two passes rank 0 may wait for users, and other ranks for rank 0;
messages there are numbered, so that ranks that have diverged end with an error and do not wait.

Shape suffixes as in group.py.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from triforce.distributed.group import TPGroup, spans
from triforce.errors import RankError

T = TypeVar("T")

PATIENCE = 30.0
"""Seconds that a rank waits for another one in a forward pass. A dead rank is noticed at once."""

FOREVER = timedelta(days=365)

MESSAGE_BYTES = 1024
"""Bytes of a message between two passes."""
HEADER_BYTES = 24
"""Bytes of a message's header: broadcasts so far, votes so far, and a number."""

# The older name warns where there is the newer one.
_all_gather: Callable[..., Any] = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


class TorchGroup(TPGroup):
    """Rank of a torch.distributed group. meeting: a URL for init_process_group. exact: see `TPGroup`.

    The constructor and every call raise RankError where another rank is missing.
    """

    def __init__(
        self, rank: int, count: int, meeting: str, cuda: bool, exact: bool = True, patience: float = PATIENCE
    ) -> None:
        self.rank = rank
        self.count = count
        self.exact = exact
        self._patience = patience
        self._broadcasts = self._votes = 0
        pass_timeout = timedelta(seconds=patience)
        self._try(dist.init_process_group, "gloo", init_method=meeting, rank=rank, world_size=count, timeout=FOREVER)
        self._pass_group = self._try(dist.new_group, backend="gloo", timeout=pass_timeout)
        self._nccl_group = self._try(dist.new_group, backend="nccl", timeout=pass_timeout) if cuda else None

    def gather(self, part_NX: Tensor, width: int) -> Tensor:
        sizes = spans(width, self.count)
        (N, own_width) = part_NX.shape
        max_width = max(sizes)
        padded_NX = F.pad(part_NX, (0, max_width - own_width)) if own_width < max_width else part_NX.contiguous()
        all_RNX = padded_NX.new_empty(self.count, N, max_width)
        # As bytes: not every backend supports every type.
        bytes_RB = all_RNX.view(self.count, -1).view(torch.uint8)
        own_B = padded_NX.view(-1).view(torch.uint8)
        if self._nccl_group is None:
            self._try(self._exchange, bytes_RB, own_B, self._pass_group)
        else:
            self._try(_all_gather, bytes_RB, own_B, group=self._nccl_group)
        if min(sizes) == max_width:
            return all_RNX.transpose(0, 1).reshape(N, width)
        return torch.cat([rank_NX[:, :size] for rank_NX, size in zip(all_RNX, sizes, strict=True)], 1)

    def add(self, x_NX: Tensor) -> Tensor:
        sum_NX = x_NX.float() if x_NX.dtype != torch.float32 else x_NX.clone()
        self._try(dist.all_reduce, sum_NX, group=self._pass_group if self._nccl_group is None else self._nccl_group)
        return sum_NX.to(x_NX.dtype)

    def broadcast(self, value: T) -> T:
        self._broadcasts += 1
        if self.rank:
            received: T = self._receive()
            return received
        data = torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)
        message_B = self._message(len(data))
        message_B[HEADER_BYTES : HEADER_BYTES + len(data)] = data[: MESSAGE_BYTES - HEADER_BYTES]
        for message in (message_B, data)[: 1 + (len(data) > MESSAGE_BYTES - HEADER_BYTES)]:
            for work in [self._try(dist.isend, message, rank) for rank in range(1, self.count)]:
                self._try(work.wait)
        return value

    def _receive(self) -> Any:
        message_B = torch.empty(MESSAGE_BYTES, dtype=torch.uint8)
        self._try(dist.recv, message_B, 0)
        length = self._read(message_B)
        data = message_B[HEADER_BYTES : HEADER_BYTES + length]
        if len(data) < length:
            data = torch.empty(length, dtype=torch.uint8)
            self._try(dist.recv, data, 0)
        return pickle.loads(data.numpy().tobytes())

    def all_true(self, value: bool) -> bool:
        self._votes += 1
        messages_RB = torch.empty(self.count, MESSAGE_BYTES, dtype=torch.uint8)
        self._try(self._exchange, messages_RB, self._message(int(value)), None)
        return all([self._read(message_B) for message_B in messages_RB])

    def _message(self, number: int) -> Tensor:
        """Return a message with `number` in its header, and an empty body."""
        message_B = torch.zeros(MESSAGE_BYTES, dtype=torch.uint8)
        message_B[:HEADER_BYTES] = torch.tensor([self._broadcasts, self._votes, number]).view(torch.uint8)
        return message_B

    def _read(self, message_B: Tensor) -> int:
        """Return the number of a message. Raises RankError where its sender's counts differ from this rank's."""
        numbers: list[int] = message_B[:HEADER_BYTES].view(torch.int64).tolist()
        broadcasts, votes, number = numbers
        if (broadcasts, votes) != (self._broadcasts, self._votes):
            raise RankError(
                f"ranks do not do the same any more: one has {broadcasts} broadcasts and {votes} votes behind it, rank "
                f"{self.rank} {self._broadcasts} and {self._votes}. That is a fault of triforce, please report it. "
                "Start again; --tp 1 does without it"
            )
        return number

    def compare(self, number: int, what: str) -> None:
        numbers_R1 = torch.empty(self.count, 1, dtype=torch.int64)
        self._try(self._exchange, numbers_R1, torch.tensor([number]), self._pass_group)
        numbers_R = numbers_R1[:, 0]
        if differing_ranks := [r for r, rank_number in enumerate(numbers_R.tolist()) if rank_number != numbers_R[0]]:
            names = ", ".join(map(str, differing_ranks))
            raise RankError(
                f"{what} of rank {names} differ from those of rank 0, so nothing it says can be trusted; "
                "all ranks need the same files, versions and kind of processor. Start again"
            )

    def _exchange(self, all_RB: Tensor, own_B: Tensor, group: dist.ProcessGroup | None) -> None:
        """Gather by sends and receives: a quarter of the time of gloo's all-gather, which switches threads per call."""
        all_RB[self.rank] = own_B
        other_ranks = [rank for rank in range(self.count) if rank != self.rank]
        works: list[Any] = [dist.irecv(all_RB[rank], rank, group=group) for rank in other_ranks]
        works += [dist.isend(own_B, rank, group=group) for rank in other_ranks]
        for work in works:
            work.wait()

    def barrier(self) -> None:
        self._try(dist.barrier)

    def leave(self) -> None:
        """Leave the group, as the last call: ranks that still wait for this rank get an error."""
        dist.destroy_process_group()

    def _try(self, call: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        """Call torch.distributed; raise RankError where it reports a lost rank."""
        try:
            return call(*arguments, **options)
        except RuntimeError as error:
            reason = str(error).strip().partition("\n")[0]
            raise RankError(
                f"another rank has ended, or did not answer for {self._patience:g} seconds ({reason}). Start again; "
                "--tp 1 does without it"
            ) from error
