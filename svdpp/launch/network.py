"""Owns the choice of the one network interface that the ranks of this host use. Knows no torch."""

from __future__ import annotations

import fcntl
import ipaddress
import os
import socket
import struct
from collections.abc import MutableMapping
from pathlib import Path

from svdpp.errors import RequestError

# Linux, <linux/sockios.h> and <linux/if.h>
_SIOCGIFADDR = 0x8915
_NAME_BYTES = 16


def choose_interface(
    peer: str, *, spans_hosts: bool, environment: MutableMapping[str, str] = os.environ
) -> str:
    """Chooses the address of this host that svdpp listens on, and sets it for gloo and NCCL.

    It is an address of the interface in GLOO_SOCKET_IFNAME. If that is not set, it is the address
    from which this host reaches `peer`.

    Args:
        peer: name or address of the host with the store.
        spans_hosts: whether other hosts must reach the address.
        environment: GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME are set in it.
    """
    name = environment.get("GLOO_SOCKET_IFNAME", "").partition(",")[0]
    address = _address_of(name) if name else _address_towards(peer)
    if spans_hosts and ipaddress.ip_address(address).is_loopback:
        raise RequestError(
            f"{socket.gethostname()} would use {address}, which other hosts cannot reach"
            + (f" (the address for {peer!r})" if not name else ""),
            "set GLOO_SOCKET_IFNAME to the interface of the network between the hosts: "
            + ", ".join(_other_interfaces()),
        )
    found = name or _interface_with(address)
    if found:
        environment["GLOO_SOCKET_IFNAME"] = found
        environment.setdefault("NCCL_SOCKET_IFNAME", found)
    return address


def _address_of(interface: str) -> str:
    if interface not in _interfaces():
        raise RequestError(
            f"GLOO_SOCKET_IFNAME names {interface!r}, which {socket.gethostname()} does not have",
            f"set it to one of {', '.join(_interfaces())}",
        )
    if address := _ipv4(interface) or _ipv6(interface):
        return address
    raise RequestError(f"the interface {interface!r} of {socket.gethostname()} has no IP address")


def _address_towards(peer: str) -> str:
    """The source address of packets to `peer`; sends nothing."""
    try:
        family, kind, protocol, _, target = socket.getaddrinfo(
            peer, 9, type=socket.SOCK_DGRAM, flags=socket.AI_ADDRCONFIG
        )[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.connect(target)
            return str(probe.getsockname()[0])
    except OSError as error:
        raise RequestError(
            f"{socket.gethostname()} cannot reach {peer!r}: {error.strerror}",
            "set MASTER_ADDR to a name or address that every host can resolve",
        ) from error


def _interfaces() -> list[str]:
    return [name for _, name in socket.if_nameindex()]


def _other_interfaces() -> list[str]:
    names = (name for name in _interfaces() if name != "lo")
    return [name for name in names if _ipv4(name) or _ipv6(name)] or ["(this host has none)"]


def _interface_with(address: str) -> str:
    if ipaddress.ip_address(address).is_loopback:
        return "lo"
    names = (name for name in _interfaces() if address in (_ipv4(name), _ipv6(name)))
    return next(names, "")


def _ipv4(interface: str) -> str:
    """The interface's first IPv4 address, or ""; see netdevice(7)."""
    request = struct.pack(f"{_NAME_BYTES}s24x", interface.encode()[: _NAME_BYTES - 1])
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            answer = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, request)
        except OSError:
            return ""
    return socket.inet_ntoa(answer[20:24])


def _ipv6(interface: str) -> str:
    """The interface's first IPv6 address of scope global or host, or ""; see proc(5)."""
    try:
        lines = Path("/proc/net/if_inet6").read_text().splitlines()
    except OSError:
        return ""
    for digits, _, _, scope, _, name in map(str.split, lines):
        if name == interface and scope in ("00", "10"):  # global, host
            return str(ipaddress.ip_address(bytes.fromhex(digits)))
    return ""
