"""Clients of the soak test of `svdpp serve`: each requests a clip, and follows, cancels or deletes
it.
"""

from __future__ import annotations

import contextlib
import io
import json
import random
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, Literal

import httpx
from PIL import Image

Fate = Literal["keep", "cancel", "delete", "repeat"]
_FINAL = ("completed", "failed", "cancelled")
# Statuses after which clients repeat a request, because the server is restarting or full.
_LATER = (429, 503)
_BURST = 15


@dataclass
class Request:
    """Request for one clip, and what the soak test's client has seen of the clip."""

    number: int
    form: dict[str, int]
    photo: int
    fate: Fate
    follows: bool
    """Whether the client follows the event stream; otherwise it polls the status."""
    id: str = ""
    status: str = ""
    """Final status that the client saw; "deleted" after the client removed the clip."""
    completed_at: int | None = None
    retries: int = 0
    problems: list[str] = field(default_factory=list)
    """Descriptions of wrong responses."""

    @property
    def key(self) -> str:
        """Idempotency key of the request."""
        return f"request-{self.number}"


def photos() -> list[bytes]:
    """Return the file contents of two small images, for requests of the soak test."""
    found = []
    for seed in range(2):
        file = io.BytesIO()
        noise = random.Random(seed).randbytes(8 * 8 * 3)
        Image.frombytes("RGB", (8, 8), noise).resize((96, 80)).save(file, "PNG")
        found.append(file.getvalue())
    return found


def random_requests(number: int, chance: random.Random) -> list[Request]:
    """Return `number` random requests for clips, for the soak test's clients.

    Many of the requests are equal, so that few reference clips have to be made.
    """
    fates: tuple[Fate, ...] = ("keep", "cancel", "delete", "repeat")
    return [
        Request(
            number=index,
            form={
                "seed": chance.randrange(3),
                "steps": chance.randint(4, 8),
                "frames": chance.randint(2, 4),
            },
            photo=chance.randrange(2),
            fate=chance.choices(fates, weights=(70, 12, 9, 9))[0],
            follows=chance.random() < 0.5,
        )
        for index in range(number)
    ]


class Clients:
    """Concurrent clients of one or several servers, each with one request at a time.

    Requests are sent in bursts.
    """

    def __init__(
        self,
        url: str,
        asked: list[Request],
        *,
        at_once: int,
        seconds: float,
        chance: random.Random,
        transport: httpx.BaseTransport,
    ) -> None:
        self._client = httpx.Client(
            base_url=url,
            timeout=httpx.Timeout(20.0),
            limits=httpx.Limits(max_connections=2 * at_once),
            transport=transport,
        )
        self._photos = photos()
        self._chance = chance
        self._begun = time.monotonic()
        self._seconds_each = seconds / len(asked)
        self._stop = threading.Event()
        self._pool = ThreadPoolExecutor(at_once)
        self._futures = [self._pool.submit(self._live, request) for request in asked]

    @property
    def num_done(self) -> int:
        return sum(future.done() for future in self._futures)

    @property
    def are_done(self) -> bool:
        return self.num_done == len(self._futures)

    def close(self) -> None:
        """Stop all clients of the soak test, even if their clips have not ended."""
        self._stop.set()
        self._pool.shutdown(cancel_futures=True)
        self._client.close()

    def _live(self, request: Request) -> None:
        at = self._begun + self._seconds_each * (request.number // _BURST * _BURST)
        self._stop.wait(max(0.0, at - time.monotonic()))
        try:
            self._create(request)
            if request.fate == "repeat":
                first = request.id
                self._create(request)
                if request.id != first:
                    request.problems.append(
                        f"its idempotency key gave two clips: {first}, {request.id}"
                    )
            if request.fate == "cancel":
                self._stop.wait(self._chance.uniform(0.0, 8.0))
            self._see_the_end(request)
            if request.fate == "delete" and request.status:
                self._until(request, lambda: self._client.delete(f"/v1/videos/{request.id}"))
                if self._get(request) is not None:
                    request.problems.append("its row is left after DELETE")
                request.status = "deleted"
        except _EndedError:
            pass
        except Exception as error:
            request.problems.append(repr(error))

    def _create(self, request: Request) -> None:
        answer = self._until(
            request,
            lambda: self._client.post(
                "/v1/videos",
                data={name: str(value) for name, value in request.form.items()},
                files={"input_reference": ("photo.png", self._photos[request.photo])},
                headers={"Idempotency-Key": request.key},
            ),
        )
        if answer.status_code != 202:
            raise RuntimeError(f"request: {answer.status_code} {answer.text[:300]}")
        request.id = answer.json()["id"]

    def _until(self, request: Request, call: Callable[[], httpx.Response]) -> httpx.Response:
        """Repeat an HTTP request until a server responds, even if servers are killed meanwhile."""
        while not self._stop.is_set():
            with contextlib.suppress(httpx.TransportError):
                answer = call()
                if answer.status_code not in _LATER:
                    return answer
            request.retries += 1
            self._stop.wait(self._chance.uniform(0.3, 1.0))
        raise _EndedError

    def _get(self, request: Request) -> dict[str, Any] | None:
        answer = self._until(request, lambda: self._client.get(f"/v1/videos/{request.id}"))
        if answer.status_code not in (200, 404):
            raise RuntimeError(f"status: {answer.status_code} {answer.text[:300]}")
        return answer.json() if answer.status_code == 200 else None

    def _see_the_end(self, request: Request) -> None:
        """Wait for a clip's final state, or cancel the clip first; record the final state."""
        while True:
            try:
                if request.fate == "cancel":
                    self._client.post(f"/v1/videos/{request.id}/cancel")
                elif request.follows:
                    self._stream(request)
            except httpx.TransportError:
                request.retries += 1
            found = self._get(request)
            if found is None:
                raise RuntimeError("the clip is lost")
            if found["status"] in _FINAL:
                self._note(request, found)
                return
            if self._stop.wait(self._chance.uniform(0.3, 1.0)):
                raise _EndedError

    def _stream(self, request: Request) -> None:
        """Read a clip's server-sent events until they end or break; record a final state."""
        with self._client.stream("GET", f"/v1/videos/{request.id}/events") as answer:
            for line in answer.iter_lines():
                if line.startswith("data: "):
                    video = json.loads(line.removeprefix("data: "))
                    if video["status"] in _FINAL:
                        self._note(request, video)
                if self._stop.is_set():
                    raise _EndedError

    @staticmethod
    def _note(request: Request, video: dict[str, Any]) -> None:
        """Record a clip's final state. A second, different final state is a problem of the test."""
        seen = request.status, request.completed_at
        now = video["status"], video["completed_at"]
        if request.status and seen != now:
            request.problems.append(f"ended twice: {seen}, then {now}")
        request.status, request.completed_at = now


class _EndedError(Exception):
    """Exception that ends a client's work, because the soak test has ended."""
