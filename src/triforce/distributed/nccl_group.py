"""NcclGroup: ranks with a GPU each. NCCL moves their activations, by torch.distributed; sockets move all else.

Shape suffixes as in group.py.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from triforce.distributed.group import spans
from triforce.distributed.socket_group import PATIENCE, RESTART, SocketGroup
from triforce.errors import RankError

# torch versions with the newer name warn about the older one.
_all_gather: Callable[..., Any] = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_stores: Any = dist  # torch does not declare its stores as exported


class NcclGroup(SocketGroup):
    """Rank of a group of processes; its GPU is the current device of CUDA. Arguments as of `SocketGroup`."""

    def __init__(self, rank: int, count: int, meeting: str, exact: bool = True, patience: float = PATIENCE) -> None:
        super().__init__(rank, count, meeting, exact, patience)
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._try(self._init_nccl, meeting)

    def _init_nccl(self, meeting: str) -> None:
        host = urlsplit(meeting).hostname
        store = self._network_store(host) if host else self._folder_store()
        timeout = timedelta(seconds=self._patience)
        dist.init_process_group("nccl", store=store, rank=self.rank, world_size=self.count, timeout=timeout)
        dist.all_reduce(torch.zeros(1, device="cuda"))  # connects the GPUs now, not in the first pass

    def _folder_store(self) -> Any:
        """Return a store in a folder of rank 0: ranks of one machine tell by it where NCCL listens."""
        if self.rank == 0:
            self._folder = tempfile.TemporaryDirectory(prefix="triforce-")
        folder = self.broadcast(self._folder.name if self._folder else "")
        return _stores.FileStore(str(Path(folder) / "store"), self.count)

    def _network_store(self, host: str) -> Any:
        """Return a store at a free port of rank 0, whose machine is `host`."""
        if self.rank:
            return _stores.TCPStore(host, self.broadcast(0), self.count, False)
        store = _stores.TCPStore(host, 0, self.count, True, wait_for_workers=False)
        self.broadcast(store.port)
        return store

    def gather(self, part_NX: Tensor, width: int) -> Tensor:
        sizes = spans(width, self.count)
        (N, own_width) = part_NX.shape
        max_width = max(sizes)
        padded_NX = F.pad(part_NX, (0, max_width - own_width)) if own_width < max_width else part_NX.contiguous()
        all_RNX = padded_NX.new_empty(self.count, N, max_width)
        # As bytes: NCCL does not support every type.
        bytes_RB = all_RNX.view(self.count, -1).view(torch.uint8)
        self._try(_all_gather, bytes_RB, padded_NX.view(-1).view(torch.uint8))
        if min(sizes) == max_width:
            return all_RNX.transpose(0, 1).reshape(N, width)
        return torch.cat([rank_NX[:, :size] for rank_NX, size in zip(all_RNX, sizes, strict=True)], 1)

    def add(self, x_NX: Tensor) -> Tensor:
        sum_NX = x_NX.float() if x_NX.dtype != torch.float32 else x_NX.clone()
        self._try(dist.all_reduce, sum_NX)
        return sum_NX.to(x_NX.dtype)

    def leave(self) -> None:
        """Leave the group, as the last call. CUDA graphs with NCCL's kernels must have been freed before."""
        super().leave()
        if dist.is_initialized():
            dist.destroy_process_group()
        if self._folder:
            self._folder.cleanup()

    def _try(self, call: Callable[..., Any], *arguments: Any) -> None:
        """Call torch.distributed; raise RankError where it reports a lost rank."""
        try:
            call(*arguments)
        except RuntimeError as error:
            reason = str(error).strip().partition("\n")[0]
            raise RankError(
                f"another rank has ended, or did not answer for {self._patience:g} seconds ({reason}). {RESTART}"
            ) from error
