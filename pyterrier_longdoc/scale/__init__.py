"""Runs that are larger than one machine's memory or patience: on disk, in shards, on the workers of a Ray cluster."""

from .ray import Distributed, RayExecutor, WorkerDiedError, distributed

__all__ = ["Distributed", "RayExecutor", "WorkerDiedError", "distributed"]
