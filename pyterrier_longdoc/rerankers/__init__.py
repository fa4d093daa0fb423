"""The PyTerrier classes. Importing one imports all, so that `load` knows every class that a folder may name."""

from . import list_reranker, maxsim, models, selectors

__all__ = ["list_reranker", "maxsim", "models", "selectors"]
