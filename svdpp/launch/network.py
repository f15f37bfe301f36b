"""Owns which of this host's addresses ranks use: never more than one interface. Knows no torch."""

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
    """This host's address for everything that svdpp listens on; gloo and NCCL are told the same.

    That of GLOO_SOCKET_IFNAME; where it is not set, of the interface by which `peer` is reached.

    Args:
        peer: name or address of the host with the store.
        spans_hosts: whether other hosts must reach the address.

    Raises:
        RequestError: there is no such interface, or none that other hosts can reach.
    """
    name = environment.get("GLOO_SOCKET_IFNAME", "").partition(",")[0]
    address = _address_of(name) if name else _address_towards(peer)
    if spans_hosts and ipaddress.ip_address(address).is_loopback:
        raise RequestError(
            f"{socket.gethostname()} would use {address}, which other hosts cannot reach"
            + (f" (its own name for {peer!r})" if not name else ""),
            "set GLOO_SOCKET_IFNAME to the network between the hosts: "
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
            f"it has {', '.join(_interfaces())}",
        )
    if address := _ipv4(interface) or _ipv6(interface):
        return address
    raise RequestError(f"the interface {interface!r} of {socket.gethostname()} has no address")


def _address_towards(peer: str) -> str:
    """The address that packets to `peer` leave from; nothing is sent."""
    try:
        family, kind, protocol, _, target = socket.getaddrinfo(
            peer, 9, type=socket.SOCK_DGRAM, flags=socket.AI_ADDRCONFIG
        )[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.connect(target)
            return str(probe.getsockname()[0])
    except OSError as error:
        raise RequestError(
            f"{socket.gethostname()} has no way to {peer!r}: {error.strerror}",
            "is MASTER_ADDR a name or address that every host knows?",
        ) from error


def _interfaces() -> list[str]:
    return [name for _, name in socket.if_nameindex()]


def _other_interfaces() -> list[str]:
    names = (name for name in _interfaces() if name != "lo")
    return [name for name in names if _ipv4(name) or _ipv6(name)] or ["this host has none"]


def _interface_with(address: str) -> str:
    if ipaddress.ip_address(address).is_loopback:
        return "lo"
    names = (name for name in _interfaces() if address in (_ipv4(name), _ipv6(name)))
    return next(names, "")


def _ipv4(interface: str) -> str:
    """Its first address; empty where it has none. As netdevice(7) has it."""
    request = struct.pack(f"{_NAME_BYTES}s24x", interface.encode()[: _NAME_BYTES - 1])
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            answer = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, request)
        except OSError:
            return ""
    return socket.inet_ntoa(answer[20:24])


def _ipv6(interface: str) -> str:
    """Its first global address; empty where it has none. As proc(5) has it: scope 00."""
    try:
        lines = Path("/proc/net/if_inet6").read_text().splitlines()
    except OSError:
        return ""
    for digits, _, _, scope, _, name in map(str.split, lines):
        if name == interface and scope in ("00", "10"):  # global, or of the host itself
            return str(ipaddress.ip_address(bytes.fromhex(digits)))
    return ""
