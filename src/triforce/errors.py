"""What a user can put right. The command line prints the text of any of these and exits with code 2."""

from __future__ import annotations


class TriforceError(Exception):
    """A user's mistake. The text says what is wrong and what to do about it."""


class ModelError(TriforceError):
    """A model that cannot be found, read or supported, or two models that do not fit together."""


class RequestError(TriforceError):
    """A prompt or a sampling parameter that cannot be served."""


class CacheError(TriforceError):
    """A saved KV cache that cannot be read, written or used with this model."""


class RankError(TriforceError):
    """Processes that share a model have lost one of them, or do not agree."""
