"""Runs larger than a process: models on the workers of a Ray cluster."""

from .ray import Distributed, RayExecutor, WorkerDiedError, distributed

__all__ = ["Distributed", "RayExecutor", "WorkerDiedError", "distributed"]
