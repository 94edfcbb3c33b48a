"""The algorithm: drafts, verification, tiers. It depends on no model, no cache and no generator of random numbers."""

from triforce.speculation.draft import Draft, SequenceState
from triforce.speculation.ngram import NgramProposer
from triforce.speculation.protocols import Grant, Proposer, TokenSampler, grant_all
from triforce.speculation.tier import PromptLogitsHook, Tier
from triforce.speculation.verification import BlockRejection, Rejection, Seeded, Verification

__all__ = [
    "BlockRejection",
    "Draft",
    "Grant",
    "NgramProposer",
    "PromptLogitsHook",
    "Proposer",
    "Rejection",
    "Seeded",
    "SequenceState",
    "Tier",
    "TokenSampler",
    "Verification",
    "grant_all",
]
