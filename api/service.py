"""What the routes share: the engine once it is there, and whether requests are taken."""
from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from contextlib import contextmanager

from starlette.requests import Request

from api.engine import Engine
from api.errors import ApiError, engine_dead, shutting_down
from api.metrics import Metrics


class Service:
    """Used in the server's event loop. `serve` follows the engine's start, `drain` goes before its end."""

    def __init__(self) -> None:
        self.created_s = int(time.time())
        self._engine: Engine | None = None
        self._metrics: Metrics | None = None
        self._draining = False
        self.num_open = 0
        self._drained = asyncio.Event()

    def serve(self, engine: Engine) -> None:
        self._engine = engine
        self._metrics = Metrics(engine)

    @property
    def status(self) -> str:
        """starting, ready, stopping or dead."""
        if self._draining:
            return "stopping"
        if self._engine is None:
            return "starting"
        return "ready" if self._engine.dead is None else "dead"

    @property
    def metrics(self) -> Metrics:
        """Raises: ApiError (503) before the engine is there."""
        if self._metrics is None:
            raise ApiError(503, "The model is still being loaded.", code="starting")
        return self._metrics

    def ready_engine(self) -> Engine:
        """The engine, while it takes requests. Raises: ApiError (503)."""
        if self._draining:
            raise shutting_down()
        if self._engine is None:
            raise ApiError(503, "The model is still being loaded.", code="starting")
        if self._engine.dead is not None:
            raise self.ended()
        return self._engine

    def ended(self) -> ApiError:
        """Why the engine answers no more: it died, or the server stops and could not wait for it any longer."""
        return shutting_down() if self._draining else engine_dead()

    def check_model(self, name: str | None) -> None:
        """A name is compared with the served ones and used for nothing else. Raises: ApiError (404)."""
        names = self.ready_engine().info.model_names
        if name is not None and name not in names:
            raise ApiError(404, f"The model does not exist here; served: {', '.join(names)}.", param="model",
                           code="model_not_found")

    @contextmanager
    def open_request(self) -> Iterator[None]:
        self.num_open += 1
        try:
            yield
        finally:
            self.num_open -= 1
            if self._draining and self.num_open == 0:
                self._drained.set()

    async def drain(self, timeout_s: float) -> bool:
        """Take no more requests and wait for the open ones. False if some are still open after `timeout_s`."""
        self._draining = True
        if self.num_open == 0:
            return True
        try:
            async with asyncio.timeout(timeout_s):
                await self._drained.wait()
        except TimeoutError:
            return False
        return True


def service_of(request: Request) -> Service:
    service = request.app.state.service
    assert isinstance(service, Service), "create_app sets it"
    return service
