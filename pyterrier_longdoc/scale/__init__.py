"""Large runs: on disk, in shards, and on the workers of a Ray cluster."""

from .ray import Distributed, distributed

__all__ = ["Distributed", "distributed"]
