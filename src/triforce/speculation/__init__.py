"""The algorithm: drafts, couplings, tiers. Knows no model, no cache and no generator of random numbers."""

from triforce.speculation.contract import Grant, Proposer, Sampling, all_of_it
from triforce.speculation.coupling import Block, Coupling, Rejection, Seeded, block, rejection, seeded
from triforce.speculation.draft import Draft, Prefix
from triforce.speculation.lookup import Lookup
from triforce.speculation.tier import Record, Tier, Watch

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
