"""What a client is told when a request cannot be served: OpenAI's error object."""
from __future__ import annotations

import orjson

from actors.sampling_params import ParameterError

MAX_MESSAGE_CHARS = 2000


class ApiError(Exception):
    """A refusal with its HTTP status. `param` names the request's field."""

    def __init__(self, status: int, message: str, *, param: str | None = None, code: str | None = None,
                 retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code
        self.retry_after_s = retry_after_s

    def body(self) -> bytes:
        kind = ("rate_limit_error" if self.status == 429 else
                "invalid_request_error" if self.status < 500 else "server_error")
        return orjson.dumps({"error": {
            "message": self.message[:MAX_MESSAGE_CHARS], "type": kind, "param": self.param, "code": self.code}})


def bad_parameter(error: ParameterError) -> ApiError:
    return ApiError(400, str(error), param=error.field)


def engine_dead() -> ApiError:
    return ApiError(503, "The engine has ended; this server answers no more requests.", code="engine_dead")


def shutting_down() -> ApiError:
    return ApiError(503, "The server is shutting down.", code="stopping")


def queue_full(message: str, retry_after_s: float) -> ApiError:
    return ApiError(429, f"The server is busy: {message}.", code="queue_full", retry_after_s=retry_after_s)


def timed_out(after_s: float | None) -> ApiError:
    return ApiError(504, f"The answer was not complete after {after_s:g} s, which is this server's limit.",
                    code="timeout")


def aborted() -> ApiError:
    return ApiError(499, "The request was aborted.", code="aborted")


def internal_error() -> ApiError:
    # NOTE: what failed inside is logged and never sent: exception texts hold paths and class names.
    return ApiError(500, "The server failed to answer this request.", code="internal_error")
