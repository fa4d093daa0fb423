"""What backends that ask a server through its vendor's client have in common."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass, field
from typing import Any, ClassVar

from ..parallel import Lock
from .base import check_parameters


@dataclass(eq=False, repr=False)
class ServerBackend:
    """A model behind a server; the client is made when it is first needed, and is not pickled.

    Args:
        model: its name.
        client: a client of your own, instead of `timeout` and `max_retries`.
        parameters: of the request.
        timeout: seconds to wait for a reply.
        max_retries: most further requests after failed ones.

    Raises:
        ValueError: for parameters that could hold keys.
    """

    model: str
    _: KW_ONLY
    client: Any = None
    parameters: Mapping[str, Any] = field(default_factory=dict)
    timeout: float = 60.0
    max_retries: int = 5

    _api: ClassVar[str]

    def __post_init__(self) -> None:
        check_parameters(self.parameters)
        self._connection: Any = None
        self._lock = Lock()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.model!r})"

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_connection": None}

    @property
    def settings(self) -> Mapping[str, Any]:
        """The request's parameters."""
        return {"api": self._api, **self.parameters}

    def _connect(self) -> Any:
        if self.client is not None:
            return self.client
        with self._lock:
            if self._connection is None:
                self._connection = self._make_client()
            return self._connection

    def _make_client(self) -> Any:
        """The vendor's client."""
        raise NotImplementedError
