"""Connection to a server: repeats requests while the server restarts, and raises typed errors."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeVar

import httpx2

from svdpp.config.limits import require
from svdpp.errors import RequestError, ServerError, SvdppError, first_line, redact

#: Environment variable with the API key. `redact` removes its value from messages, because its name
#: ends with `_KEY`.
KEY_VARIABLE = "SVDPP_API_KEY"

# HTTP statuses after which a request is repeated: the server is full or restarts, or a proxy cannot
# reach it.
_RETRIED = frozenset({429, 502, 503, 504})
_FIRST_WAIT_SECONDS, _MAX_WAIT_SECONDS = 0.5, 15.0
_TIMEOUT = httpx2.Timeout(120.0, connect=10.0)

_T = TypeVar("_T")


class NotThereError(ServerError):
    """Error for an id that the server does not know, or does not know any more."""


class ServerConnection:
    """HTTP connection to a server, which repeats requests until the server responds.

    It is used as a context manager.

    Args:
        url: URL of the server, such as `http://127.0.0.1:8000`.
        key: API key; None: the server needs no key.
        patience_seconds: Seconds for which a request is repeated without success before it fails.
        say: Function that prints a message when the client begins to wait for the server, and when
            the server responds again.

    Raises:
        RequestError: The URL is not an HTTP URL, or contains a password, a query or a fragment.
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
            raise RequestError(f"`server` is not a URL: {first_line(error)}") from error
        is_http = parsed.scheme in ("http", "https") and bool(parsed.host)
        require(is_http, "`server` takes a URL such as http://127.0.0.1:8000")
        has_secret = bool(parsed.userinfo or parsed.query or parsed.fragment)
        hint = f"put an API key into the variable {KEY_VARIABLE}"
        require(not has_secret, "`server` has more than scheme, host, port and path", hint)
        self.url = str(parsed).rstrip("/")
        """URL of the server, without a slash at its end."""
        self._patience_seconds, self._say = patience_seconds, say
        self._has_key = key is not None
        headers = {} if key is None else {"Authorization": f"Bearer {key}"}
        self._client = httpx2.Client(base_url=self.url, headers=headers, timeout=_TIMEOUT)

    def __enter__(self) -> ServerConnection:
        return self

    def __exit__(self, *_: object) -> None:
        self._client.close()

    def get(self, path: str, **params: Any) -> dict[str, Any]:
        """Send a GET request, and return the JSON object in the response.

        Args:
            path: Path of the route.
            params: Query parameters; parameters that are None are left out.

        Raises:
            SvdppError: The server rejects the request, or did not respond for too long.
        """
        given = {name: value for name, value in params.items() if value is not None}
        found: dict[str, Any] = self._repeat(
            lambda: self._checked(self._client.get(path, params=given)).json()
        )
        return found

    def post(
        self,
        path: str,
        content: Callable[[], Iterator[bytes]] = lambda: iter(()),
        headers: Mapping[str, str] | None = None,
    ) -> dict[str, Any]:
        """Send a POST request, perhaps repeatedly, and return the JSON object in the response.

        Args:
            path: Path of the route.
            content: Function that returns the body, called for each attempt.
            headers: Headers of the request.

        Raises:
            SvdppError: The server rejects the request, or did not respond for too long.
        """

        def send() -> dict[str, Any]:
            response = self._client.post(path, content=content(), headers=dict(headers or {}))
            found: dict[str, Any] = self._checked(response).json()
            return found

        return self._repeat(send)

    def lines(self, path: str) -> list[str]:
        """Download a text file from the server, and return its lines.

        Args:
            path: Path of the route.

        Raises:
            SvdppError: The server rejects the request, or did not respond for too long.
        """
        return self._repeat(lambda: self._checked(self._client.get(path)).text.splitlines())

    def download(self, path: str, write: Callable[[Iterator[bytes]], None]) -> None:
        """Download a file from the server; each attempt starts from the beginning of the file.

        Args:
            path: Path of the route.
            write: Function that writes the content, given an iterator of its parts.

        Raises:
            SvdppError: The server rejects the request, or did not respond for too long.
        """

        def fetch() -> None:
            with self._client.stream("GET", path) as response:
                if response.is_error:
                    response.read()
                write(self._checked(response).iter_bytes())

        self._repeat(fetch)

    def _repeat(self, attempt: Callable[[], _T]) -> _T:
        """Send a request by calling `attempt`; repeat the call until the server responds.

        Raises:
            ServerError: The server did not respond for `patience_seconds`.
        """
        failed_at: float | None = None
        wait = _FIRST_WAIT_SECONDS
        while True:
            try:
                found = attempt()
            except (httpx2.TransportError, _BusyError) as error:
                if failed_at is None:
                    failed_at = time.monotonic()
                if time.monotonic() - failed_at >= self._patience_seconds:
                    raise self._unavailable_error(error) from error
                # A single failure is not worth a message. After the second failure, the message is
                # printed once.
                if wait == 2 * _FIRST_WAIT_SECONDS:
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

    def _unavailable_error(self, error: Exception) -> ServerError:
        seconds = self._patience_seconds
        return ServerError(
            f"the server {self.url} was unavailable for {seconds:g} s: {self._reason(error)}",
            "start the server, or name another URL, or raise `server_timeout` to wait longer",
            details={
                "server": self.url,
                "timeout_seconds": seconds,
                "reason": self._reason(error),
            },
        )

    def _checked(self, response: httpx2.Response) -> httpx2.Response:
        """Return the server's response, or raise a typed error if its status is an error.

        Raises:
            SvdppError: The status is an error.
        """
        if response.is_success:
            return response
        error = _error_in(response)
        if response.status_code in _RETRIED:
            raise _BusyError(error["message"], response.headers.get("retry-after", ""))
        raise self._error(response.status_code, error)

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
    """Error for a server that is busy, and may accept the same request later."""

    def __init__(self, message: str, retry_after: str) -> None:
        super().__init__(message)
        self.retry_seconds = float(retry_after) if retry_after.isdigit() else 0.0


def _error_in(response: httpx2.Response) -> dict[str, Any]:
    """Return the error in a response, as a dict with `message`, `hint`, `code` and `details`.

    If the response has no such dict, because a proxy sent it, `message` is the HTTP status, and the
    other values are empty.
    """
    error: Any = None
    try:
        error = response.json()["error"]
        if not isinstance(error["message"], str):
            raise ValueError("the body is not an error of svdpp")
    except (ValueError, KeyError, TypeError):
        error = {"message": f"HTTP {response.status_code} {response.reason_phrase}"}
    return {"hint": "", "code": "", **error, "details": error.get("details") or {}}


@contextmanager
def connected(
    url: str, key: str | None, patience_seconds: float, say: Callable[[str], None]
) -> Iterator[ServerConnection]:
    """Yield a connection to a server, after a first request has shown that the server responds.

    Args:
        url: URL of the server.
        key: API key; None: the server needs no key.
        patience_seconds: Seconds for which a later request is repeated without success before it
            fails.
        say: Function that prints a message for the user.

    Raises:
        SvdppError: The URL is wrong, or the server does not respond.
    """
    # The first request waits at most 5 s, so that a wrong URL is reported soon. A server that is
    # just restarting responds within this time.
    with ServerConnection(url, key, patience_seconds=min(5.0, patience_seconds)) as first:
        first.get("/v1/models")
    with ServerConnection(url, key, patience_seconds=patience_seconds, say=say) as connection:
        yield connection
