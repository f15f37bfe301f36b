"""Webhooks: requests to the `callback_url` of a job when its clip is completed or failed.

The queue has what is due, so that a server that was killed goes on with it: each webhook arrives at
least once, always with the same id. They are signed as https://www.standardwebhooks.com says.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import hmac
import ipaddress
import json
import socket
import ssl
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from urllib.parse import urlsplit

import httpx2
from loguru import logger

from svdpp.errors import OutputError, RequestError
from svdpp.serve.job import Job
from svdpp.serve.middleware import HOST_PATTERN
from svdpp.serve.periodic_thread import PeriodicThread
from svdpp.serve.queue import JobQueue
from svdpp.serve.schemas import ApiError, Video

#: Attempts after which a webhook is given up, 20 hours after the first one.
MAX_ATTEMPTS = 10
#: Seconds of one attempt, from the lookup of the host to the status of the response.
ATTEMPT_SECONDS = 10.0
#: Attempts at the same time.
MAX_CONCURRENT = 16

_FIRST_RETRY_SECONDS = 5.0
_MAX_RETRY_SECONDS = 6 * 3600.0
# Seconds after which an attempt has ended, unless the server that made it has died. Another
# attempt may then be made.
_ATTEMPT_LEASE_SECONDS = 3 * ATTEMPT_SECONDS
_POLL_SECONDS = 10.0
# Lookups of one name at the same time: a resolver that is down keeps each thread for long.
_MAX_LOOKUPS = 4
_UNICAST = ipaddress.IPv6Network("2000::/3")


class Webhooks:
    """Sender of the webhooks of a queue, in a thread. Any thread may call it.

    They go to `hosts` alone, each written as in a URL, with its port unless that is the scheme's.
    Every webhook is signed with each of the `secrets`, so that a receiver can change from an old
    secret to a new one.
    """

    def __init__(
        self,
        queue: JobQueue,
        hosts: Sequence[str],
        secrets: Sequence[bytes],
        view: Callable[[Job], Video],
    ) -> None:
        for host in hosts:
            if HOST_PATTERN.fullmatch(host) is None:
                text = f"`callback_hosts` takes hosts such as example.org:8443, got {host!r}"
                raise RequestError(text)
        self._queue = queue
        self._hosts = frozenset(host.lower() for host in hosts)
        self._secrets = secrets
        self._view = view
        self._tls = ssl.create_default_context()
        # Number of threads that look up each name now.
        self._lookups = Counter[str]()
        self._lookups_lock = threading.Lock()
        self.thread = PeriodicThread(
            "webhooks",
            self._send_due,
            _POLL_SECONDS,
            error_message="webhooks wait",
            on_close=self._send_due,
        )
        """Thread that sends what is due; at its end each once."""

    def check(self, url: str) -> None:
        """Refuse a URL of a host that is not allowed; one with a user name has no such host.

        Raises:
            ApiError: 422, `callback_refused`.
        """
        with suppress(ValueError):  # it is no URL
            if urlsplit(url).netloc.lower() in self._hosts:
                return
        text = f"this server sends no webhooks to {url.partition('?')[0][:100]!r}"
        hint = "whoever starts the server can allow its host"
        raise ApiError(422, "callback_refused", text, hint, field="callback_url")

    # --- the thread -------------------------------------------------------------------------------

    def _send_due(self) -> None:
        """Try what is due, some at the same time; the next ones wait until these have ended."""
        end = time.monotonic() + _ATTEMPT_LEASE_SECONDS
        while time.monotonic() < end:
            jobs: list[Job] = []
            while len(jobs) < MAX_CONCURRENT and (
                job := self._queue.claim_callback(_ATTEMPT_LEASE_SECONDS)
            ):
                jobs.append(job)
            if not jobs:
                return
            errors = asyncio.run(self._post_all(jobs))
            for job, error in zip(jobs, errors, strict=True):
                with suppress(OutputError):  # it is tried again
                    self._record_attempt(job, error)

    def _record_attempt(self, job: Job, error: str | None) -> None:
        """Store the outcome of a try; one that is not stored is tried again."""
        seconds = None
        if error is not None and job.callback_attempts < MAX_ATTEMPTS:
            seconds = _FIRST_RETRY_SECONDS * 4 ** (job.callback_attempts - 1)
            seconds = min(seconds, _MAX_RETRY_SECONDS)
        self._queue.set_callback(job, seconds, error)
        if error is not None:
            level, what = ("ERROR", "given up") if seconds is None else ("INFO", "tried again")
            logger.log(level, "{}: its webhook is {}: {}", job.id, what, error)

    async def _post_all(self, jobs: Sequence[Job]) -> list[str | None]:
        return await asyncio.gather(*map(self._attempt, jobs))

    async def _attempt(self, job: Job) -> str | None:
        """Try once; return what went wrong, or None."""
        try:
            async with asyncio.timeout(ATTEMPT_SECONDS):
                status = await self._post(job)
        except TimeoutError:
            return f"no answer within {ATTEMPT_SECONDS:g} s"
        except Exception as error:  # whatever one receiver does, the others get theirs
            return str(error) or type(error).__name__
        return None if 200 <= status < 300 else f"the answer was {status}"

    async def _post(self, job: Job) -> int:
        """Return the status of the answer, whose body is not read; follow no redirect."""
        assert job.callback_url is not None
        self.check(job.callback_url)  # an earlier server may have allowed another host
        url = urlsplit(job.callback_url)
        host = url.hostname or ""
        port = url.port or (443 if url.scheme == "https" else 80)
        address = await self._address(host, port, job.callback_attempts)
        id = f"evt_{job.id.removeprefix('video_')}"  # the same in each try
        body = _event_body(id, job, self._view(job))
        headers = {
            "host": url.netloc,
            "content-type": "application/json",
            **sign(id, int(time.time()), body, self._secrets),
        }
        async with httpx2.AsyncClient(verify=self._tls, trust_env=False, timeout=None) as client:
            request = client.build_request(
                "POST",
                httpx2.URL(job.callback_url).copy_with(host=address),
                content=body,
                headers=headers,
                extensions={"sni_hostname": host},  # the certificate is that of the name
            )
            response = await client.send(request, stream=True)
            await response.aclose()
            return response.status_code

    async def _address(self, host: str, port: int, attempt: int) -> str:
        """Return the address to connect to, another one with each attempt; all are checked."""
        addresses = await self._resolve_host(host, port)
        for address in addresses:
            if not _is_public(address) and address != host:
                raise RequestError(f"{host} has an address that is not public")
        return addresses[attempt % len(addresses)]

    async def _resolve_host(self, host: str, port: int) -> list[str]:
        """Return the addresses of a name, by a thread of its own.

        A lookup cannot be stopped, and a resolver that is down takes longer than a lease. The end
        of an event loop would wait for its threads, and with it the webhooks of all other hosts.

        Raises:
            OSError: The name has no address.
            RequestError: Earlier lookups of the name have no answer yet.
        """
        if self._lookups[host] >= _MAX_LOOKUPS:
            raise RequestError(f"earlier lookups of {host} have no answer yet")
        loop = asyncio.get_running_loop()
        addresses_future: asyncio.Future[list[str]] = loop.create_future()

        def set_result(addresses: list[str], error: Exception | None) -> None:
            if addresses_future.done():  # nobody waits for it any more
                return
            if error is None:
                addresses_future.set_result(addresses)
            else:
                addresses_future.set_exception(error)

        def look_up() -> None:
            addresses: list[str] = []
            failure: Exception | None = None
            try:
                found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
                addresses = [str(address[0]) for *_, address in found]
            except (OSError, UnicodeError) as error:
                failure = error
            finally:
                with self._lookups_lock:
                    self._lookups[host] -= 1
            with suppress(RuntimeError):  # the loop has ended
                loop.call_soon_threadsafe(set_result, addresses, failure)

        with self._lookups_lock:
            self._lookups[host] += 1
        threading.Thread(target=look_up, name=f"lookup of {host}", daemon=True).start()
        return await addresses_future


def sign(id: str, timestamp: int, body: bytes, secrets: Sequence[bytes]) -> dict[str, str]:
    """Return the headers of Standard Webhooks (https://www.standardwebhooks.com).

    Args:
        id: Id of the event, the same in each try.
        timestamp: Unix time of the try, in seconds.
        body: Body of the request.
        secrets: Keys of HMAC-SHA256; there is one signature for each.
    """
    content = f"{id}.{timestamp}.".encode() + body
    digests = (hmac.digest(secret, content, hashlib.sha256) for secret in secrets)
    return {
        "webhook-id": id,
        "webhook-timestamp": str(timestamp),
        "webhook-signature": " ".join(f"v1,{base64.b64encode(each).decode()}" for each in digests),
    }


def _event_body(id: str, job: Job, video: Video) -> bytes:
    """Return the JSON body of a webhook, as OpenAI's, with the JSON of the video as `data`."""
    event = {
        "id": id,
        "object": "event",
        "type": f"video.{job.state}",
        "created_at": int(job.finished_at or 0),
        "data": video.model_dump(mode="json"),
    }
    return json.dumps(event).encode()


def _is_public(text: str) -> bool:
    """Whether an address is one of the internet; of IPv6 that of a host, without IPv4 inside."""
    address = ipaddress.ip_address(text)
    if isinstance(address, ipaddress.IPv6Address):
        return address.is_global and address in _UNICAST and address.sixtofour is None
    return address.is_global and not address.is_multicast
