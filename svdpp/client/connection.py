"""Connection to a server: requests that outlive its restarts, and its errors by their types."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeVar

import httpx2

from svdpp.config.limits import require
from svdpp.errors import RequestError, ServerError, SvdppError, first_line, redact

#: Environment variable that has the API key; its name makes `redact` remove the value everywhere.
KEY_VARIABLE = "SVDPP_API_KEY"

# Statuses of a server that is full, restarts, or is away behind a proxy.
_RETRIED = frozenset({429, 502, 503, 504})
_FIRST_WAIT_SECONDS, _MAX_WAIT_SECONDS = 0.5, 15.0
_TIMEOUT = httpx2.Timeout(120.0, connect=10.0)

_T = TypeVar("_T")


class NotThereError(ServerError):
    """The server has nothing of that id, or not any more."""


class Connection:
    """Requests to one server, repeated while it is away. A context manager.

    Args:
        url: URL of the server, such as `http://127.0.0.1:8000`.
        key: API key; None: the server needs none.
        patience_seconds: Time for which the server may be away, or full, in a row.
        say: Function that is told once that the client waits, and once that the server is back.

    Raises:
        RequestError: The URL is none of HTTP, or has a password.
    """

    def __init__(
        self,
        url: str,
        key: str | None,
        *,
        patience_seconds: float,
        say: Callable[[str], None] = lambda _: None,
    ) -> None:
        try:
            parsed = httpx2.URL(url)
        except httpx2.InvalidURL as error:
            raise RequestError(f"`server` is no URL: {first_line(error)}") from error
        is_http = parsed.scheme in ("http", "https") and bool(parsed.host)
        require(is_http, "`server` takes a URL such as http://127.0.0.1:8000")
        has_secret = bool(parsed.userinfo or parsed.query or parsed.fragment)
        hint = f"the API key is in the variable {KEY_VARIABLE}"
        require(not has_secret, "`server` has more than scheme, host, port and path", hint)
        self.url = str(parsed).rstrip("/")
        """URL of the server, without a slash at its end."""
        self._patience_seconds, self._say = patience_seconds, say
        self._has_key = key is not None
        headers = {} if key is None else {"Authorization": f"Bearer {key}"}
        self._client = httpx2.Client(base_url=self.url, headers=headers, timeout=_TIMEOUT)

    def __enter__(self) -> Connection:
        return self

    def __exit__(self, *_: object) -> None:
        self._client.close()

    def get(self, path: str, **params: Any) -> dict[str, Any]:
        """Return the JSON object that the server answers.

        Args:
            path: Path of the route.
            params: Parameters of the query; those that are None are left out.

        Raises:
            SvdppError: The server refuses the request, or was away for too long.
        """
        given = {name: value for name, value in params.items() if value is not None}
        found: dict[str, Any] = self._repeat(
            lambda: self._answer(self._client.get(path, params=given)).json()
        )
        return found

    def post(
        self,
        path: str,
        content: Callable[[], Iterator[bytes]] = lambda: iter(()),
        headers: Mapping[str, str] | None = None,
    ) -> dict[str, Any]:
        """Return the JSON object that the server answers to a request, which may be repeated.

        Args:
            path: Path of the route.
            content: Function that returns the body, anew for each attempt.
            headers: Headers of the request.

        Raises:
            SvdppError: The server refuses the request, or was away for too long.
        """

        def send() -> dict[str, Any]:
            answer = self._client.post(path, content=content(), headers=dict(headers or {}))
            found: dict[str, Any] = self._answer(answer).json()
            return found

        return self._repeat(send)

    def lines(self, path: str) -> list[str]:
        """Return the lines of a file.

        Args:
            path: Path of the route.

        Raises:
            SvdppError: The server refuses the request, or was away for too long.
        """
        return self._repeat(lambda: self._answer(self._client.get(path)).text.splitlines())

    def download(self, path: str, write: Callable[[Iterator[bytes]], None]) -> None:
        """Pass the content of a file to `write`, from its beginning in each attempt.

        Args:
            path: Path of the route.
            write: Function that writes the parts of the content.

        Raises:
            SvdppError: The server refuses the request, or was away for too long.
        """

        def fetch() -> None:
            with self._client.stream("GET", path) as answer:
                if answer.is_error:
                    answer.read()
                write(self._answer(answer).iter_bytes())

        self._repeat(fetch)

    def _repeat(self, attempt: Callable[[], _T]) -> _T:
        """Call `attempt` until the server answers it."""
        failed_at: float | None = None
        wait = _FIRST_WAIT_SECONDS
        while True:
            try:
                found = attempt()
            except (httpx2.TransportError, _BusyError) as error:
                if failed_at is None:
                    failed_at = time.monotonic()
                if time.monotonic() - failed_at >= self._patience_seconds:
                    raise self._away_error(error) from error
                if wait == 2 * _FIRST_WAIT_SECONDS:  # the second time
                    self._say(f"waiting for the server: {self._reason(error)}")
                wished = error.retry_seconds if isinstance(error, _BusyError) else 0.0
                time.sleep(min(max(wait, wished), _MAX_WAIT_SECONDS))
                wait = min(2 * wait, _MAX_WAIT_SECONDS)
                continue
            if wait > 2 * _FIRST_WAIT_SECONDS:
                self._say("the server is back")
            return found

    def _reason(self, error: Exception) -> str:
        return redact(first_line(error))

    def _away_error(self, error: Exception) -> ServerError:
        seconds = self._patience_seconds
        return ServerError(
            f"the server {self.url} cannot be used for {seconds:g} s: {self._reason(error)}",
            "start it, or name another URL; `server_timeout` waits longer",
            details={
                "server": self.url,
                "timeout_seconds": seconds,
                "reason": self._reason(error),
            },
        )

    def _answer(self, answer: httpx2.Response) -> httpx2.Response:
        """Return an answer that is none of an error.

        Raises:
            SvdppError: It is one of an error.
        """
        if answer.is_success:
            return answer
        error = _error_in(answer)
        if answer.status_code in _RETRIED:
            raise _BusyError(error["message"], answer.headers.get("retry-after", ""))
        raise self._error(answer.status_code, error)

    def _error(self, status: int, error: Mapping[str, Any]) -> SvdppError:
        details = {**error["details"], "server": self.url, "status": status, "code": error["code"]}
        message = f"the server {self.url} says: {error['message']}"
        if status in (401, 403):
            hint = f"put the key into the variable {KEY_VARIABLE}"
            return ServerError(message, error["hint"] if self._has_key else hint, details=details)
        if status == 404:
            return NotThereError(message, error["hint"], details=details)
        kind = RequestError if status in (400, 409, 413, 415, 422) else ServerError
        return kind(message, error["hint"], details=details)


class _BusyError(Exception):
    """Answer of a server that may take the same request later."""

    def __init__(self, message: str, retry_after: str) -> None:
        super().__init__(message)
        self.retry_seconds = float(retry_after) if retry_after.isdigit() else 0.0


def _error_in(answer: httpx2.Response) -> dict[str, Any]:
    """Return the error of an answer, also if it is not one of svdpp, but of a proxy."""
    error: Any = None
    try:
        error = answer.json()["error"]
        if not isinstance(error["message"], str):
            raise ValueError("it is no error of svdpp")
    except (ValueError, KeyError, TypeError):
        error = {"message": f"HTTP {answer.status_code} {answer.reason_phrase}"}
    return {"hint": "", "code": "", **error, "details": error.get("details") or {}}


@contextmanager
def connected(
    url: str, key: str | None, patience_seconds: float, say: Callable[[str], None]
) -> Iterator[Connection]:
    """Yield a connection to a server that is there now.

    Args:
        url: URL of the server.
        key: API key; None: the server needs none.
        patience_seconds: Time for which it may be away later, in seconds.
        say: Function that gets remarks.

    Raises:
        SvdppError: The URL is wrong, or the server does not answer.
    """
    # A wrong URL is told at once; a server that restarts at this moment is waited for.
    with Connection(url, key, patience_seconds=min(5.0, patience_seconds)) as first:
        first.get("/v1/models")
    with Connection(url, key, patience_seconds=patience_seconds, say=say) as connection:
        yield connection
