"""Who may ask: API keys, and a guard before every route but /health.

A key is known by its SHA-256 alone once it is read: nothing here can show one.
"""
from __future__ import annotations

import hashlib
import hmac
import re
from collections.abc import Iterable

from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.types import ASGIApp, Receive, Scope, Send

from api.dialect import refusal
from api.errors import ApiError

PUBLIC_PATHS = frozenset({"/health"})           # as the router sees them: every other spelling is guarded
TENANT = "troupe.tenant"                        # in the scope: who asks, by his key's hash; "" without a key
TENANT_CHARS = 32


class ApiKeys:
    """The keys that open the door; without any it stands open."""

    def __init__(self, keys: Iterable[str] = ()) -> None:
        """Raises: ValueError, without the key, for one that no header can carry."""
        digests = []
        for number, key in enumerate(keys, 1):
            if not re.fullmatch(r"[!-~]{1,512}", key):
                raise ValueError(f"API key {number} must be 1 to 512 printable ASCII characters without spaces")
            digests.append(_digest(key))
        self._digests = tuple(dict.fromkeys(digests))

    def __len__(self) -> int:
        return len(self._digests)

    def has(self, key: str) -> bool:
        """NOTE: takes as long whatever is compared: all keys, and of each a digest of fixed length."""
        digest, found = _digest(key), False
        for known in self._digests:
            found |= hmac.compare_digest(known, digest)
        return found


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode()).digest()


def read_keys(text: str) -> list[str]:
    """The keys of a file: one a line; empty lines and those that begin with # are none."""
    lines = (line.strip() for line in text.splitlines())
    return [line for line in lines if line and not line.startswith("#")]


def sent_key(headers: Headers) -> str:
    """As OpenAI's, Anthropic's and Azure's clients send it; "" without one. The same key is the same by any of them."""
    authorization = headers.get("authorization", "").strip()
    scheme, _, token = authorization.partition(" ")
    key = token.strip() if scheme.lower() == "bearer" else authorization
    return key or headers.get("x-api-key", "").strip() or headers.get("api-key", "").strip()


def tenant_of(request: Request) -> str:
    """Who asks; see `Engine.generate`."""
    return str(request.scope[TENANT])


class Guard:
    """Lets through who has a key, and everyone to the public paths. It stands before the router: what is added there
    later is guarded too, and who has no key does not learn which paths there are."""

    def __init__(self, app: ASGIApp, keys: ApiKeys) -> None:
        self._app = app
        self._keys = keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008})       # none of our routes is one
            return
        if scope["type"] == "http":
            key = sent_key(Headers(scope=scope))
            if len(self._keys) and scope["path"] not in PUBLIC_PATHS and not self._keys.has(key):
                await refusal(_wrong_key(key), scope)(scope, receive, send)
                return
            scope[TENANT] = hashlib.sha256(key.encode()).hexdigest()[:TENANT_CHARS] if key else ""
        await self._app(scope, receive, send)


def _wrong_key(key: str) -> ApiError:
    told = "Incorrect API key provided." if key else "No API key provided: send it as Authorization: Bearer KEY."
    return ApiError(401, told, code="invalid_api_key")
