"""KV caches: one pool of pages per model, and the views that tiers look through. Start with `view.py`."""

from triforce.cache.full import Full
from triforce.cache.pool import PAGE, Pool
from triforce.cache.retrieval import Budget, Retrieval, Setting
from triforce.cache.streaming import Streaming
from triforce.cache.view import View

__all__ = ["PAGE", "Budget", "Full", "Pool", "Retrieval", "Setting", "Streaming", "View"]
