"""Free ports for servers that tests start."""

from __future__ import annotations

import secrets
import socket
from pathlib import Path

_LOWEST = 10_000


def free_port() -> int:
    """Return a port of 127.0.0.1 that is free, and that the kernel gives to no other socket.

    The kernel gives ports of its own range to sockets that ask for any port. Between this call and
    the start of the server that is to have the port, a test in another process could get such a
    port, and its server would then respond instead. So the port is below that range.
    """
    first = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    while True:
        port = _LOWEST + secrets.randbelow(first - _LOWEST)
        try:
            socket.create_server(("127.0.0.1", port)).close()
        except OSError:
            continue  # another server has the port
        return port
