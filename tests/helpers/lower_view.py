"""A retrieval view over rows that observe the attention for its selection, as in `TierBuilder`."""

from __future__ import annotations

from collections.abc import Callable

from triforce.kvcache import FullView, RetrievalConfig, RetrievalView
from triforce.kvcache.selection import Policy


def lower_view(full: FullView, policy: Callable[[], Policy], setting: RetrievalConfig) -> RetrievalView:
    view = RetrievalView(full, policy, setting)
    full.observe(view.unit if view.observes else 0, setting.budget)
    return view
