"""Runs that are larger than one machine's memory or patience: on disk, in shards, on the workers of a Ray cluster."""

from .ray import Distributed, RayExecutor, distributed

__all__ = ["Distributed", "RayExecutor", "distributed"]
