"""The algorithm: drafts, couplings, tiers. Knows no model, no cache and no generator of random numbers."""

from triforce.speculation.draft import Draft, Prefix
from triforce.speculation.ngram import Lookup
from triforce.speculation.protocols import Grant, Proposer, Sampling, all_of_it
from triforce.speculation.tier import Record, Tier, Watch
from triforce.speculation.verification import Block, Coupling, Rejection, Seeded, block, rejection, seeded

__all__ = [
    "Block",
    "Coupling",
    "Draft",
    "Grant",
    "Lookup",
    "Prefix",
    "Proposer",
    "Record",
    "Rejection",
    "Sampling",
    "Seeded",
    "Tier",
    "Watch",
    "all_of_it",
    "block",
    "rejection",
    "seeded",
]
