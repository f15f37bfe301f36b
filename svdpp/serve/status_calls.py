"""Owns the short way of status calls, which are most of the requests to a busy server.

FastAPI takes several times longer for a call than the call itself. What is not in memory, or not
found, or not allowed, takes the usual way; the answer is the same.
"""

from __future__ import annotations

import re
from types import SimpleNamespace

from starlette.types import ASGIApp, Receive, Scope, Send

from svdpp.serve.service import Service

_PATH = re.compile(r"/v1/videos/(video_[0-9a-f]{32})")
# For metrics, as FastAPI's router sets it.
_ROUTE = SimpleNamespace(path="/v1/videos/{id}")


class StatusCalls:
    """An ASGI application before `app`, behind the check of the key.

    Args:
        app: answers all that this one does not.
        service: has the videos.
    """

    def __init__(self, app: ASGIApp, service: Service) -> None:
        self._app, self._service = app, service

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serves one request."""
        body = self._body(scope)
        if body is None:
            await self._app(scope, receive, send)
            return
        scope["route"] = _ROUTE
        headers = [
            (b"content-length", b"%d" % len(body)),
            (b"content-type", b"application/json"),
        ]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": body})

    def _body(self, scope: Scope) -> bytes | None:
        if scope["type"] != "http" or scope["method"] != "GET":
            return None
        match = _PATH.fullmatch(scope["path"])
        if match is None:
            return None
        video = self._service.video_at_hand(match[1], scope["state"]["owner"])
        return None if video is None else video.model_dump_json().encode()
