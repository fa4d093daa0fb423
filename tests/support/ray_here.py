"""Ray in this process, for tests of what hands out the work: no cluster, no processes, so nothing that can die."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

from ray import cloudpickle, exceptions


class Reference:
    """Stands for a value: known, or what a task of an actor will return."""

    def __init__(self, compute: Callable[[], Any], actor: Any = None) -> None:
        self.compute, self.actor = compute, actor


class Actor:
    """Does a task when somebody waits for it; what it is handed are copies, as in another process."""

    def __init__(self, cls: type, cpus: int, *arguments: Any) -> None:
        self.cpus, self.made = cpus, partial(cls, *arguments)
        self.itself: Any = None

    def __getattr__(self, name: str) -> Any:
        return type("Method", (), {"remote": partial(self._task, name)})

    def _task(self, name: str, *arguments: Any) -> Reference:
        return Reference(partial(self._do, name, cloudpickle.dumps(arguments)), self)

    def _do(self, name: str, arguments: bytes) -> Any:
        self.itself = self.itself or self.made()
        try:
            return getattr(self.itself, name)(*cloudpickle.loads(arguments))
        except Exception as error:
            raise exceptions.RayTaskError(name, "", error) from error


class RayHere:
    """What `RayExecutor` uses of the module `ray`; actors are up as long as there are cores for them."""

    cloudpickle, exceptions = cloudpickle, exceptions

    def __init__(self, cores: int) -> None:
        self.cores, self.actors, self.connected, self.node = cores, [], False, 0

    def init(self, **_: Any) -> None:
        self.connected = True
        self.node += 1

    def shutdown(self) -> None:
        self.connected, self.actors = False, []

    def get_runtime_context(self) -> Any:
        return SimpleNamespace(get_node_id=lambda: str(self.node), get_job_id=lambda: "01")

    def is_initialized(self) -> bool:
        return self.connected

    def cluster_resources(self) -> dict[str, float]:
        return {"CPU": float(self.cores)}

    def remote(self, *, num_cpus: int, **_: Any) -> Callable[[type], Any]:
        def hire(cls: type, *arguments: Any) -> Actor:
            self.actors.append(Actor(cls, num_cpus, *arguments))
            return self.actors[-1]

        return lambda cls: type("Class", (), {"remote": partial(hire, cls)})

    def kill(self, actor: Actor) -> None:
        if actor not in self.actors:
            raise exceptions.ActorHandleNotFoundError("actor of an earlier session")
        self.actors = [other for other in self.actors if other is not actor]

    def put(self, value: Any) -> Reference:
        return Reference(lambda: value)

    def get(self, reference: Reference) -> Any:
        return reference.compute()

    def wait(self, references: list[Reference], timeout: float | None) -> tuple[list[Reference], list[Reference]]:
        """Return the last one that can be done: tasks end in another order than they begin."""
        up = self._up()
        done = [each for each in references if each.actor in up][-1:]
        return done, [each for each in references if each not in done]

    def _up(self) -> list[Actor]:
        up, free = [], self.cores
        for actor in self.actors:
            if actor.cpus <= free:
                up.append(actor)
                free -= actor.cpus
        return up
