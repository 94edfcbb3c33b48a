"""The algorithm: drafts, couplings, tiers. Knows no model, no cache and no generator of random numbers."""

from triforce.speculation.ahead import Beside
from triforce.speculation.contract import Proposer, Sampling
from triforce.speculation.coupling import Block, Coupling, Rejection, Seeded, block, rejection, seeded
from triforce.speculation.draft import Draft, Prefix
from triforce.speculation.lookup import Lookup
from triforce.speculation.tier import Record, Tier, Watch

__all__ = [
    "Beside",
    "Block",
    "Coupling",
    "Draft",
    "Lookup",
    "Prefix",
    "Proposer",
    "Record",
    "Rejection",
    "Sampling",
    "Seeded",
    "Tier",
    "Watch",
    "block",
    "rejection",
    "seeded",
]
