"""The PyTerrier classes. Importing one imports all, so that `load` knows every class that a folder may name."""

from . import maxsim, models, selectors

__all__ = ["maxsim", "models", "selectors"]
