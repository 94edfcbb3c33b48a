"""Settings of a disk cache: checked before a model is loaded, and used once it is."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from triforce.disk_cache.folder_checks import require_usable
from triforce.disk_cache.write_queue import DiskCache
from triforce.distributed.group import TPGroup
from triforce.errors import RequestError, argument, require_bool
from triforce.interface.byte_size import cache_size_of, size_of
from triforce.interface.user_paths import named_path

USUAL_SIZE = "20GiB"


class DiskCacheSettings(NamedTuple):
    """Place and size of a disk cache, once they are known to be right; without a folder there is none."""

    folder: Path | None = None
    size: int = 0
    network: bool = False

    @staticmethod
    def parse(folder: str | Path | None, size: str | int, network: bool, ranks: TPGroup) -> DiskCacheSettings:
        """Check a folder and its size in bytes; nothing is made. Raises RequestError, CacheError, or TypeError."""
        path, bytes_ = named_path("disk_cache", folder), cache_size_of(size)
        require_bool("disk_cache_network", network)
        if path is None:
            if network or bytes_ != size_of(USUAL_SIZE):
                raise RequestError(
                    f"{argument('disk_cache_size')} and {argument('disk_cache_network')} are of a disk cache; name its "
                    f"folder with {argument('disk_cache')}"
                )
            return DiskCacheSettings()
        if ranks.count > 1:
            raise RequestError(
                f"a disk cache is of one process; leave out {argument('ranks')} and torchrun, or "
                f"{argument('disk_cache')}"
            )
        require_usable(path, network)
        return DiskCacheSettings(path, bytes_, network)

    def open(self) -> DiskCache | None:
        """Return the cache, in a folder that is made where there is none. Raises CacheError."""
        return None if self.folder is None else DiskCache(self.folder, self.size, self.network)
