"""One HTTP exchange: a bounded body in, the engine's deltas out, as events or as one document, in a dialect's words."""
from __future__ import annotations

import asyncio
import dataclasses
import logging
import math
import time
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol, TypeVar, cast

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from actors.messages import TextDelta
from actors.output import merge
from actors.sampling_params import ParameterError, SamplingParams
from api.connections import Connection, connection_of
from api.dialect import REQUEST_ID
from api.errors import ApiError, aborted, bad_parameter, internal_error, queue_full, timed_out
from api.guard import TENANT
from api.metrics import CompletionTimer, Counts, PromptMeter
from api.schemas import ParsedModel, parse
from api.service import UNKNOWN_FIELDS, Service, service_of
from api.sse import ClientGone, deliver_merged, until_client_goes
from api.surface import EngineBusy, EngineDead, EngineSurface, PromptInput, RequestFailed
from api.timings import Times

log = logging.getLogger("troupe.api")

MAX_BODY_BYTES = 16 << 20
PROGRESS_BYTES = 1024                           # that must come before a slow sender is given more time
PARSED_IN_LOOP_BYTES = 1 << 16                  # longer bodies are parsed in a thread: other requests go on

EVENT_STREAM_HEADERS = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache"),
                        (b"x-accel-buffering", b"no")]

Body = TypeVar("Body", bound=ParsedModel)


@dataclass(frozen=True, slots=True)
class Asker:
    """Who asks, and what that changes about order and sharing; see `Engine.generate`."""
    priority: int = 0
    user: str = ""
    cache_salt: str = ""
    tenant: str = ""


@dataclass(frozen=True, slots=True)
class Generation:
    """One completion to ask of the engine."""
    where: str                              # in the request the prompt came, for errors
    prompt: PromptInput
    sampling: SamplingParams
    choice: int = 0
    template: Mapping[str, Any] = field(default_factory=dict)      # of chat messages: options of `Engine.generate`
    asker: Asker = Asker()


class Writer(Protocol):
    """A dialect's side of an answer. `index` is a completion's place in the request's generations."""
    answer_id: str                          # as the client reads it: he may abort by it
    keep_alive: bytes                       # what breaks a stream's silence and says nothing
    wants_metrics: bool                     # the request asks how long its answer took
    metrics: Times | None                   # set before the end, where one completion is all that was asked for

    def events(self, index: int, delta: TextDelta) -> bytes:
        """What a stream says about `delta`. The first brings tokens or the end, and all that came before them."""

    def last_events(self) -> bytes:
        """The end of a stream, when all completions have ended."""

    def error_event(self, error: ApiError) -> bytes:
        """The end of a stream that failed."""

    def document(self, completions: Sequence[TextDelta]) -> bytes:
        """The answer as one document, of each completion's deltas merged."""


async def read_body(request: Request, idle_timeout_s: float | None) -> bytes:
    """Raises: ApiError, 413 as soon as the body is known to be too long, 408 where it does not come."""
    # The declared length is only a way to refuse early; what counts is what comes.
    declared = request.headers.get("content-length", "")
    if declared.isdecimal() and (len(declared) > 18 or int(declared) > MAX_BODY_BYTES):
        raise _too_long()
    body, num_awaited = bytearray(), PROGRESS_BYTES
    try:
        async with asyncio.timeout(idle_timeout_s) as patience:
            async for chunk in request.stream():
                body += chunk
                if len(body) > MAX_BODY_BYTES:
                    raise _too_long()
                if idle_timeout_s is not None and len(body) >= num_awaited:
                    num_awaited = len(body) + PROGRESS_BYTES
                    patience.reschedule(asyncio.get_running_loop().time() + idle_timeout_s)
    except TimeoutError:
        raise ApiError(408, f"The body did not come: less than {PROGRESS_BYTES} bytes in {idle_timeout_s:g} s.",
                       code="body_too_slow") from None
    return bytes(body)


def _too_long() -> ApiError:
    return ApiError(413, f"The body is longer than {MAX_BODY_BYTES} bytes.", code="body_too_long")


async def parse_body(request: Request, schema: type[Body]) -> Body:
    """Raises: ApiError (400, 408, 413); ClientDisconnect."""
    config = service_of(request).config
    body = await read_body(request, config.idle_timeout_s)
    if len(body) <= PARSED_IN_LOOP_BYTES:
        parsed, unknown = parse(body, schema, config.strict)
    else:
        parsed, unknown = await asyncio.to_thread(parse, body, schema, config.strict)
    if unknown:
        request.scope[UNKNOWN_FIELDS] = unknown
    return parsed


class Reply:
    """Runs the generations and sends their answer. When the client goes, all of them are aborted, waiting ones too."""

    def __init__(self, service: Service, engine: EngineSurface, generations: Sequence[Generation], writer: Writer,
                 stream: bool) -> None:
        arrival_s = time.monotonic()
        self._service = service
        self._engine = engine
        self._generations = generations
        self._writer = writer
        self._stream = stream
        self._tells_times = writer.wants_metrics or service.config.per_request_metrics
        self._timers = _timers(service.counts, arrival_s, generations)
        # Those of one request are let into the queue together or not at all.
        self._family: dict[str, Any] = {} if len(generations) == 1 else {
            "parent_id": uuid.uuid4().hex, "num_children": len(generations)}
        self._num_unfinished = len(generations)
        self._not_admitted = set(range(len(generations)))
        self._started = False                   # a stream's headers are out
        self._unsent = b""                      # events, as long as they are not
        self._begun: set[int] = set()           # completions of a stream that have tokens
        self._deltas: list[list[TextDelta]] = [[] for _ in generations]     # until they are sent
        self._quiet_since_s = arrival_s         # of a stream; inf while something is being sent
        self._limit: asyncio.Timeout | None = None      # while it runs
        self._aborted = False
        self._connection: Connection | None = None      # of a stream whose events may be written at once
        self._failure: Exception | None = None          # while they were

    def abort(self) -> None:
        """End it, on its owner's wish; he learns of it by an error."""
        self._aborted = True
        if self._limit is not None:
            with suppress(RuntimeError):        # its time has just run out
                self._limit.reschedule(0.0)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        names = (scope[REQUEST_ID], self._writer.answer_id)
        if self._stream and len(self._generations) == 1:        # events of several are written together
            self._connection = connection_of(scope)
        with self._service.open_request(scope[TENANT], names, self.abort):
            try:
                await until_client_goes(receive, self._answer(scope, receive, send))
            except ClientGone:
                self._end_timers("abort")

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        streams = [self._generate(generation) for generation in self._generations]
        timeout_s = 0.0 if self._aborted else self._service.config.request_timeout_s
        try:
            async with asyncio.timeout(timeout_s) as self._limit, self._kept_alive(send):
                await deliver_merged(streams, partial(self._send_events, send) if self._stream else self._keep)
        except ClientGone:
            raise
        except Exception as error:
            told = self._told(error)
            if not self._started:
                raise told from None
            # Status and headers are out: one event says what went wrong, and the stream ends.
            await _send(send, {"type": "http.response.body", "body": self._writer.error_event(told)})
            return
        if not self._stream:
            self._tell_times()
            content = self._writer.document([merge(deltas) for deltas in self._deltas])
            headers = {name.decode(): value.decode() for name, value in self._timing_headers(is_over=True)}
            await Response(content, headers=headers, media_type="application/json")(scope, receive, send)

    def _tell_times(self) -> None:
        """As in vLLM: of one completion, for those of several are times of the one and the other."""
        if self._tells_times and len(self._timers) == 1:
            self._writer.metrics = self._timers[0].timings.metrics()

    def _timing_headers(self, is_over: bool) -> list[tuple[bytes, bytes]]:
        """What is known when the headers go out: of a stream, what came before its first token."""
        if not self._tells_times or len(self._timers) > 1:
            return []
        told = self._timers[0].timings.header(time.monotonic(), is_over)
        return [(b"server-timing", told.encode())] if told else []

    @asynccontextmanager
    async def _kept_alive(self, send: Send) -> AsyncIterator[None]:
        """Meanwhile a stream has a comment whenever nothing else has come for a while: proxies end silent ones."""
        period_s = self._service.config.keep_alive_s
        if not self._stream or period_s is None:
            yield
            return
        speaking = asyncio.create_task(self._break_silence(send, period_s))
        try:
            yield
        finally:
            speaking.cancel()

    async def _break_silence(self, send: Send, period_s: float) -> None:
        with suppress(ClientGone):
            while True:
                left_s = self._quiet_since_s + period_s - time.monotonic()
                if left_s > 0.0 or self._not_admitted:      # until then its status is not known
                    await asyncio.sleep(min(left_s, period_s) if left_s > 0.0 else period_s)
                else:
                    await self._write(send, self._writer.keep_alive)

    async def _generate(self, generation: Generation) -> AsyncGenerator[TextDelta, None]:
        """The engine's deltas. Raises: ParameterError, which names a prompt as the request does."""
        deltas = cast("AsyncGenerator[TextDelta, None]", self._engine.generate(
            generation.prompt, generation.sampling, choice=generation.choice,
            **generation.template, **dataclasses.asdict(generation.asker), **self._family,
            on_delta=None if self._connection is None else self._write_at_once))
        try:
            async with aclosing(deltas):
                async for delta in deltas:
                    yield delta
        except ParameterError as error:
            if error.field != "prompt":
                raise
            raise ParameterError(generation.where, error.message) from None

    def _observe(self, items: list[tuple[int, TextDelta]]) -> None:
        for index, delta in items:
            if delta.finish is not None:
                if delta.finish not in ("stop", "length"):
                    raise RequestFailed(f"{delta.finish}: {delta.error}")
                self._num_unfinished -= 1
            self._timers[index].observe(delta)

    async def _keep(self, items: list[tuple[int, TextDelta]]) -> None:
        self._observe(items)
        for index, delta in items:
            self._deltas[index].append(delta)

    async def _send_events(self, send: Send, items: list[tuple[int, TextDelta]]) -> None:
        """One write for all that came at once.

        Headers wait until every completion is admitted: if one is refused, the request is, with a status that says so.
        """
        if self._failure is not None:
            raise self._failure
        self._observe(items)
        data = b"".join([self._events(index, delta) for index, delta in items])
        over = self._num_unfinished == 0
        if over:
            self._tell_times()
            data += self._writer.last_events()
        if not self._started:
            self._not_admitted.difference_update(index for index, _ in items)
            self._unsent += data
            if self._not_admitted or not self._unsent:
                return
            data = self._unsent
        if data:
            await self._write(send, data, more=not over)

    def _write_at_once(self, delta: TextDelta) -> bool:
        """What a running stream says of `delta`, without waking its task up; False where that must wait or end it."""
        connection = self._connection
        if not self._begun or not self._started or connection is None or not connection.takes_chunks:
            return False
        try:
            self._timers[0].observe(delta)
            data = self._writer.events(0, delta)
        except Exception as error:
            self._failure = error               # raised by its own task
            return False
        if data:
            connection.write_chunk(data)
            self._quiet_since_s = time.monotonic()
        return True

    async def _write(self, send: Send, data: bytes, more: bool = True) -> None:
        self._quiet_since_s = math.inf
        if not self._started:
            self._started = True
            headers = EVENT_STREAM_HEADERS + self._timing_headers(is_over=False)
            await _send(send, {"type": "http.response.start", "status": 200, "headers": headers})
        await _send(send, {"type": "http.response.body", "body": data, "more_body": more})
        self._quiet_since_s = time.monotonic()

    def _events(self, index: int, delta: TextDelta) -> bytes:
        """NOTE: nothing is said of a completion before it has a token: clients take its first event for that."""
        if index in self._begun:
            return self._writer.events(index, delta)
        self._deltas[index].append(delta)
        if not delta.token_ids and delta.finish is None:
            return b""
        self._begun.add(index)
        return self._writer.events(index, merge(self._deltas[index]))

    def _told(self, error: Exception) -> ApiError:
        """What the client learns of a failure."""
        if isinstance(error, ParameterError):
            self._end_timers(None)
            return bad_parameter(error)
        if isinstance(error, EngineBusy):
            self._end_timers(None)
            self._service.counts.num_rejected[error.limit] += 1
            return queue_full(str(error), error.retry_after_s)
        if isinstance(error, TimeoutError) and self._limit is not None and self._limit.expired():
            self._end_timers("abort")
            return aborted() if self._aborted else timed_out(self._service.config.request_timeout_s)
        self._end_timers("error")
        if isinstance(error, EngineDead):
            return self._service.ended()
        log.error("a request failed: %s", error, exc_info=None if isinstance(error, RequestFailed) else error)
        return internal_error()

    def _end_timers(self, reason: str | None) -> None:
        for timer in self._timers:
            timer.end(reason)


def _timers(counts: Counts, arrival_s: float, generations: Sequence[Generation]) -> list[CompletionTimer]:
    """One for each; those of one prompt share its meter."""
    by_field: dict[str, list[Generation]] = {}
    for generation in generations:
        by_field.setdefault(generation.where, []).append(generation)
    meters = {where: PromptMeter(counts, len(same)) for where, same in by_field.items()}
    return [CompletionTimer(counts, meters[generation.where], arrival_s, generation.sampling.max_tokens)
            for generation in generations]


async def _send(send: Send, message: Message) -> None:
    try:
        await send(message)
    except OSError:
        # How servers of ASGI 2.4 and later say that the client is gone; earlier ones only say it through `receive`.
        raise ClientGone from None

