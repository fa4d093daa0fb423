"""What can go wrong between a prompt and a ranking."""

from __future__ import annotations


class BackendError(RuntimeError):
    """A model could not be asked: bad key, bad request, outage, time-out; never turned into a ranking."""


class MalformedReplyError(BackendError):
    """The server answered, but not in the form of its API."""


class ContextOverflowError(BackendError):
    """The prompt has more tokens than the model takes."""


class UnreadableReplyError(ValueError):
    """The model's text is no ranking (or no grade), after all retries."""


class SpendCapError(RuntimeError):
    """The next call might cost more than `max_cost` allows."""


class NotInCacheError(LookupError):
    """A run that may only replay its cache asked something new."""


class IncompleteReplyWarning(UserWarning):
    """Replies could not be read, or left documents out, and the run went on without them."""
