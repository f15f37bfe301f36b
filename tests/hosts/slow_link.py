"""A slow and lossy link between two network namespaces, by TUN devices.

`tc netem` does the same if the kernel has it; this needs only /dev/net/tun.

    python -m tests.hosts.slow_link NAMESPACE_A NAMESPACE_B DEVICE DELAY_SECONDS LOSS

Prints `ready` when both ends exist, and at its end the numbers of packets carried and lost.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import heapq
import itertools
import os
import random
import select
import signal
import struct
import sys
import time

_TUNSETIFF = 0x400454CA
_IFF_TUN, _IFF_NO_PI = 0x0001, 0x1000
_CLONE_NEWNET = 0x40000000


def main(first: str, second: str, device: str, delay: float, loss: float) -> None:
    ends = [_open_end(name, device) for name in (first, second)]
    signal.signal(signal.SIGTERM, lambda *_: sys.exit())
    print("ready", flush=True)
    chance = random.Random(0)
    on_their_way: list[tuple[float, int, int, bytes]] = []
    numbers = itertools.count()
    carried = lost = 0
    try:
        while True:
            wait = max(0.0, on_their_way[0][0] - time.monotonic()) if on_their_way else None
            for end in select.select(ends, [], [], wait)[0]:
                packet = os.read(end, 65_536)
                number = next(numbers)
                if chance.random() < loss:
                    lost += 1
                    continue
                other = ends[1] if end == ends[0] else ends[0]
                heapq.heappush(on_their_way, (time.monotonic() + delay, number, other, packet))
            while on_their_way and on_their_way[0][0] <= time.monotonic():
                _, _, end, packet = heapq.heappop(on_their_way)
                if _deliver(end, packet):
                    carried += 1
                else:
                    lost += 1
    finally:
        print(f"carried {carried} lost {lost}", flush=True)


def _open_end(namespace: str, device: str) -> int:
    """A TUN device in `namespace`: packets written here arrive there, and vice versa."""
    with open(f"/run/netns/{namespace}") as there:
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.setns(there.fileno(), _CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), f"cannot enter {namespace}")
    end = os.open("/dev/net/tun", os.O_RDWR)
    fcntl.ioctl(end, _TUNSETIFF, struct.pack("16sH22x", device.encode(), _IFF_TUN | _IFF_NO_PI))
    return end


def _deliver(end: int, packet: bytes) -> bool:
    """Whether the packet arrived: a device that is not up takes none, like a real one."""
    try:
        os.write(end, packet)
    except OSError as error:
        if error.errno != errno.EIO:
            raise
        return False
    return True


if __name__ == "__main__":
    first, second, device, delay, loss = sys.argv[1:]
    main(first, second, device, float(delay), float(loss))
