"""What the routes share: the engine once it is there, and whether requests are taken."""
from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from starlette.requests import Request

from api.answers.choice import AnswerFormats, answer_formats
from api.answers.formats import AUTO
from api.doors import Doors, OneDoor
from api.errors import ApiError, engine_dead, shutting_down
from api.guard import ApiKeys
from api.metrics import Counts
from api.surface import EngineSurface

if TYPE_CHECKING:
    from api.engine import Engine

# In a request's scope: names of the body's, if there are any; for the answer's Warning header.
UNKNOWN_FIELDS = "troupe.unknown_fields"


@dataclass(frozen=True, slots=True)
class DoorConfig:
    """What can be set about the door."""
    keys: ApiKeys = field(default_factory=ApiKeys)
    allow_origins: tuple[str, ...] = ()     # of web pages that may ask: "https://host:port"; "*": all
    request_timeout_s: float | None = None  # from a request's arrival to the end of its answer; None: no limit
    idle_timeout_s: float | None = 60.0     # for a client that sends or takes nothing; None: no limit
    keep_alive_s: float | None = 15.0       # a stream says something at least so often; None: it does not
    strict: bool = False                    # unknown fields are refused
    tool_call_parser: str = AUTO            # how answers are read: see `api.answers.choice`
    reasoning_parser: str = AUTO
    per_request_metrics: bool = False       # every answer tells how long it took, asked or not


class Service:
    """Used in the server's event loop. `serve` follows the engine's start, `drain` goes before its end."""

    def __init__(self, config: DoorConfig | None = None, created_s: int | None = None) -> None:
        """created_s: since when its models are there, by the clock; None: now."""
        self.config = config or DoorConfig()
        self.created_s = int(time.time()) if created_s is None else created_s
        self._engine: EngineSurface | None = None
        self._doors: Doors | None = None
        self.counts = Counts()
        self._answers: AnswerFormats | None = None
        self._draining = False
        self.num_open = 0
        self._aborts: dict[tuple[str, str], list[Callable[[], None]]] = {}      # by tenant and name
        self._drained = asyncio.Event()

    def serve(self, engine: Engine) -> None:
        """By this door alone."""
        self.serve_beside(engine, OneDoor(self, engine))

    def serve_beside(self, engine: EngineSurface, doors: Doors) -> None:
        """By one of its doors."""
        self._engine, self._doors = engine, doors
        self.counts = Counts()
        self._answers = answer_formats(engine.info, self.config.tool_call_parser, self.config.reasoning_parser)

    @property
    def status(self) -> str:
        """starting, ready, stopping or dead."""
        if self._draining:
            return "stopping"
        if self._engine is None:
            return "starting"
        return "ready" if self._engine.dead is None else "dead"

    @property
    def doors(self) -> Doors:
        """Raises: ApiError (503) before the engine is there."""
        if self._doors is None:
            raise ApiError(503, "The model is still being loaded.", code="starting")
        return self._doors

    @property
    def answers(self) -> AnswerFormats:
        """How answers of the model are read. Raises: ApiError (503) before the engine is there."""
        if self._answers is None:
            raise ApiError(503, "The model is still being loaded.", code="starting")
        return self._answers

    def ready_engine(self) -> EngineSurface:
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
    def open_request(self, tenant: str = "", names: Iterable[str] = (),
                     abort: Callable[[], None] = lambda: None) -> Iterator[None]:
        """While the block runs the request is open, and `tenant` may abort it by any of its names.

        NOTE: names may be the client's own: several requests can have the same.
        """
        keys = [(tenant, name) for name in dict.fromkeys(names)]
        self.num_open += 1
        for key in keys:
            self._aborts.setdefault(key, []).append(abort)
        try:
            yield
        finally:
            for key in keys:
                self._aborts[key].remove(abort)
                if not self._aborts[key]:
                    del self._aborts[key]
            self.num_open -= 1
            if self._draining and self.num_open == 0:
                self._drained.set()

    def abort(self, tenant: str, names: Iterable[str]) -> list[str]:
        """End the tenant's open requests of these names. Returns those that were open."""
        found = []
        for name in dict.fromkeys(names):
            aborts = tuple(self._aborts.get((tenant, name), ()))
            for abort in aborts:
                abort()
            if aborts:
                found.append(name)
        return found

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
