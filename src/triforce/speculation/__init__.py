"""The algorithm: drafts, couplings, tiers. Knows no model, no cache and no generator of random numbers."""

from triforce.speculation.draft import Draft, SequenceState
from triforce.speculation.ngram import NgramProposer
from triforce.speculation.protocols import Grant, Proposer, TokenSampler, all_of_it
from triforce.speculation.tier import PromptLogitsHook, Tier
from triforce.speculation.verification import BlockRejection, Rejection, Seeded, Verification, block, rejection, seeded

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
    "all_of_it",
    "block",
    "rejection",
    "seeded",
]
