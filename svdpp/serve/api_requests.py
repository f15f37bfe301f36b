"""What the routes share: what they take from a request, and threads for calls that may be long."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from typing import Annotated, TypeVar, TypeVarTuple

from anyio import CapacityLimiter, to_thread
from fastapi import Depends, Header, Request

from svdpp.serve.api_errors import ApiError
from svdpp.serve.auth import Owner
from svdpp.serve.service import Service

_MAX_KEY = 255
_WAITERS = 256

_T = TypeVar("_T")
_Ts = TypeVarTuple("_Ts")


async def in_thread(function: Callable[[*_Ts], _T], *arguments: *_Ts) -> _T:
    """Calls what may wait for long, for a decoder or the ranks, in a thread beside the pool's."""
    return await to_thread.run_sync(function, *arguments, limiter=_waiters())


@functools.cache  # needs the event loop
def _waiters() -> CapacityLimiter:
    return CapacityLimiter(_WAITERS)


# Coroutines, because FastAPI gives each plain function a thread.
async def _service(request: Request) -> Service:
    service: Service = request.app.state.service
    return service


async def _owner(request: Request) -> Owner:
    """The owner of the request's key, which the guard has checked."""
    owner: Owner = request.scope["state"]["owner"]
    return owner


async def _idempotency_key(
    key: Annotated[
        str | None,
        Header(
            alias="Idempotency-Key",
            description="A repeated request with the same key returns the first one's video.",
        ),
    ] = None,
) -> str | None:
    if key is not None and not re.fullmatch(rf"[\x21-\x7e]{{1,{_MAX_KEY}}}", key):
        raise ApiError(
            400,
            "invalid_idempotency_key",
            f"Idempotency-Key must be 1 to {_MAX_KEY} visible ASCII characters without spaces",
        )
    return key


async def _last_event_id(
    text: Annotated[
        str | None, Header(alias="Last-Event-ID", description="The last event that was received.")
    ] = None,
) -> int | None:
    return int(text) if text is not None and re.fullmatch(r"[0-9]{1,18}", text) else None


Served = Annotated[Service, Depends(_service)]
Owned = Annotated[Owner, Depends(_owner)]
IdempotencyKey = Annotated[str | None, Depends(_idempotency_key)]
LastEventId = Annotated[int | None, Depends(_last_event_id)]
