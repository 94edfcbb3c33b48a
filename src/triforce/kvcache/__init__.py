"""KV caches: one pool of pages per model, and the views of tiers (see `speculation.protocols.Cache`)."""

from triforce.backends.kernel_api import PAGE
from triforce.kvcache.eagle_memory import EagleHeadMemory
from triforce.kvcache.offload_sizing import OffloadConfig
from triforce.kvcache.pool import PagePool
from triforce.kvcache.retrieval_config import Budget, RetrievalConfig
from triforce.kvcache.views.full import FullView
from triforce.kvcache.views.retrieval import RetrievalView
from triforce.kvcache.views.streaming import StreamingView

__all__ = [
    "PAGE",
    "Budget",
    "EagleHeadMemory",
    "FullView",
    "OffloadConfig",
    "PagePool",
    "RetrievalConfig",
    "RetrievalView",
    "StreamingView",
]
