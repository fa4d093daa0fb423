"""The PyTerrier classes; whichever part is imported, all of them are known by name to `LongDocReranker.load`."""

from . import cross as cross
