"""KV caches: one pool of pages per model, and the views that tiers look through.

What a view does is said by the protocol `speculation.tier.Cache`.
"""

from triforce.backends.dispatch import PAGE
from triforce.cache.budget import Budget, Setting
from triforce.cache.full import Full
from triforce.cache.pool import Pool
from triforce.cache.retrieval import Retrieval
from triforce.cache.room import Offload
from triforce.cache.streaming import Streaming

__all__ = ["PAGE", "Budget", "Full", "Offload", "Pool", "Retrieval", "Setting", "Streaming"]
