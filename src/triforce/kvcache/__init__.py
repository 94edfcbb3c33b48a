"""KV caches: one pool of pages per model, and the views that tiers look through.

What a view does is said by the protocol `speculation.tier.Cache`.
"""

from triforce.backends.dispatch import PAGE
from triforce.kvcache.offload.sizing import OffloadConfig
from triforce.kvcache.pool import Pool
from triforce.kvcache.retrieval_config import Budget, RetrievalConfig
from triforce.kvcache.views.full import Full
from triforce.kvcache.views.retrieval import Retrieval
from triforce.kvcache.views.streaming import Streaming

__all__ = ["PAGE", "Budget", "Full", "OffloadConfig", "Pool", "Retrieval", "RetrievalConfig", "Streaming"]
