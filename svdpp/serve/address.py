"""The server's address: its socket, and which hosts may be served without keys."""

from __future__ import annotations

import functools
import ipaddress
import socket
from pathlib import Path

from svdpp.errors import RequestError
from svdpp.serve.keys import Keys, read_keys


def check_host(host: str, key_file: Path | None) -> Keys | None:
    """The API keys; None if there are none, which only a loopback address may have."""
    if key_file is not None:
        return read_keys(key_file)
    if not is_loopback(host):
        raise RequestError(
            f"--host {host} lets other machines in, and there are no API keys",
            "svdpp serve --new-key NAME --api-key-file FILE creates one; then add "
            "--api-key-file FILE",
            details={"host": host},
        )
    return None


@functools.lru_cache(64)  # for each request
def is_loopback(host: str) -> bool:
    """Whether `host` is a name or an address of this machine alone."""
    if host.lower().rstrip(".") == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def bind(host: str, port: int) -> socket.socket:
    """A bound socket that does not listen yet; port 0 takes a free one."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (OSError, UnicodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise RequestError(f"--host {host!r} is not found: {reason}") from error
    family, kind, protocol, _, address = found[0]
    bound = socket.socket(family, kind, protocol)
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(address)
    except OSError as error:
        bound.close()
        raise RequestError(
            f"cannot listen on {host} port {port}: {error.strerror}",
            f"--port {port + 1} or --port 0 takes another one" if port else "",
            details={"host": host, "port": port},
        ) from error
    return bound


def url_of(bound: socket.socket) -> str:
    """The address for a browser."""
    host, port = bound.getsockname()[:2]
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
