"""EngineParts: models, settings and caches of all engines of an LLM. It fingerprints KV that is written to files."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from warnings import warn
from zlib import crc32

from triforce.backends import dispatch
from triforce.disk_cache import prompt_file
from triforce.disk_cache.prefixes import DiskPrefixes, KVProfile
from triforce.disk_cache.write_queue import DiskCache
from triforce.distributed.group import TPGroup
from triforce.engine.model_loader import ModelPair
from triforce.engine.tier_builder import SharedKV, SpeculativeConfig
from triforce.errors import CacheError, CacheWarning
from triforce.kvcache import FullView, PagePool
from triforce.planner import CostModel


@dataclass(frozen=True, slots=True)
class EngineParts:
    """Models, settings, costs and disk cache that all engines of an LLM share."""

    pair: ModelPair
    speculation: SpeculativeConfig
    coupling: str
    costs: CostModel
    """Measured costs of passes, acceptance rates, and findings about searched layers. Engines add their own."""
    disk: DiskCache | None
    """The disk cache, if there is one."""

    @property
    def ranks(self) -> TPGroup:
        """Ranks that share the target."""
        return self.pair.target.decoder.ranks

    def disk_prefixes(self, store: SharedKV) -> DiskPrefixes | None:
        """Return the prefixes on disk whose KV fits a store, if there is a disk cache."""
        if self.disk is None:
            return None
        profile = KVProfile(self.pair.name, self.pair.kv_fingerprint, self._kernels(store.pool))
        return DiskPrefixes(self.disk, profile, store.pool, store.prefix_unit)

    def open_prompt(self, path: Path, pool: PagePool) -> prompt_file.SavedCache:
        """Open the saved KV of a prompt.

        Raises CacheError if the file cannot be read, is damaged, or was saved with another model or other kernels.
        """
        return prompt_file.SavedCache(path, self._cache_fingerprint(pool))

    def prompt_saver(self, path: Path, pool: PagePool, prompt: list[int]) -> Callable[[FullView], None]:
        """Reserve disk space, and return a function that writes the file. If writing fails, the function only warns."""
        fingerprint = self._cache_fingerprint(pool)
        reserved = prompt_file.reserve(path, prompt_file.size_of(pool, len(prompt) - 1))

        def save(full: FullView) -> None:
            reserved.close()
            try:
                prompt_file.save(path, fingerprint, full, 0, prompt)
            except CacheError as error:
                warn(str(error), CacheWarning, stacklevel=2)

        return save

    def _cache_fingerprint(self, pool: PagePool) -> prompt_file.CacheFingerprint:
        """Return the identity of the models and kernels that compute the pages of a pool."""
        return prompt_file.CacheFingerprint(self.pair.kv_fingerprint, self._kernels(pool))

    def _kernels(self, pool: PagePool) -> str:
        """Return the name of the kernels that compute a pool's KV, as saved prompts and the disk cache record it."""
        return f"{dispatch.identity(self.pair.decoders.target.model, pool.kv)}, {dispatch.build_identity()}"


def compare(ranks: TPGroup, what: str, facts: object) -> None:
    """Raise RankError unless all ranks have the same facts: otherwise they would wait for each other forever."""
    if ranks.count > 1:
        level = dispatch.native.level() if dispatch.native else "torch"
        ranks.compare(crc32(repr((level, facts)).encode()), what)
