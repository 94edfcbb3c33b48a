"""Pages that a retrieval view reads: policies score chunks, and `select_pages` keeps to the budget."""

from triforce.kvcache.selection.policies import POLICIES, MeanKey, Observed, Policy, Quest, Recent

__all__ = ["POLICIES", "MeanKey", "Observed", "Policy", "Quest", "Recent"]
