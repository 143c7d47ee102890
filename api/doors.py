"""What is asked of all doors of an engine: there is one, or one in each of several processes."""
from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

from api.metrics import Metrics

if TYPE_CHECKING:
    from api.engine import Engine
    from api.service import Service


class Doors(Protocol):
    """Answers are the engine's, whichever of its doors is asked. Raises: EngineDead."""

    async def metrics(self) -> bytes:
        """As Prometheus reads them."""

    async def num_requests(self) -> tuple[int, int]:
        """(running, waiting)"""

    async def abort(self, tenant: str, names: Sequence[str]) -> list[str]:
        """End the tenant's open requests of these names. Returns those that were open."""


class OneDoor:
    """The only one, in the engine's process."""

    def __init__(self, service: Service, engine: Engine) -> None:
        self._service = service
        self._engine = engine

    async def metrics(self) -> bytes:
        return Metrics(self._engine, self._service.counts).text()

    async def num_requests(self) -> tuple[int, int]:
        stats = self._engine.stats()
        return stats.num_requests_running, stats.num_requests_waiting

    async def abort(self, tenant: str, names: Sequence[str]) -> list[str]:
        return self._service.abort(tenant, names)
