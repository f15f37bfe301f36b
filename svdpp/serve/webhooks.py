"""Webhooks: HTTP requests to the `callback_url` of a job when the job is completed or failed.

Due webhooks are stored in the queue, so that they are sent even if a server is killed. A webhook is
tried again until it is delivered, but at most `MAX_ATTEMPTS` times. A webhook may arrive more than
once, always with the same id. Webhooks are signed as described at https://www.standardwebhooks.com.
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

#: Maximum number of attempts to send a webhook. The last one is about 20 hours after the first one.
MAX_ATTEMPTS = 10
#: Maximum seconds of one attempt, from the DNS lookup to the status of the response.
ATTEMPT_SECONDS = 10.0
#: Maximum number of webhooks that are sent at the same time.
MAX_CONCURRENT = 16

# Seconds between the first two attempts. The time grows fourfold with each attempt, up to the
# maximum.
_FIRST_RETRY_SECONDS = 5.0
_MAX_RETRY_SECONDS = 6 * 3600.0
# Seconds from the start of an attempt until another attempt may begin. By then, the attempt has
# ended, or its server has died.
_ATTEMPT_LEASE_SECONDS = 3 * ATTEMPT_SECONDS
# Seconds between two searches for due webhooks.
_POLL_SECONDS = 10.0
# Maximum number of concurrent DNS lookups of one host. Each lookup occupies a thread, which waits
# for minutes if the DNS server is down.
_MAX_LOOKUPS = 4
_UNICAST = ipaddress.IPv6Network("2000::/3")


class Webhooks:
    """Thread that sends the due webhooks of a queue. Any thread may call any method.

    Args:
        queue: Queue with the jobs whose webhooks are sent.
        hosts: Hosts to which webhooks may be sent, such as `example.org`. A port other than the
            default port of the URL's scheme is a part of the host, as in `example.org:8443`.
        secrets: Keys of the signatures. Every webhook has a signature with each key, so that
            receivers can change from an old key to a new one.
        view: Function that returns the API's representation of a job.
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
        # Number of DNS lookups in progress for each host name.
        self._lookups = Counter[str]()
        self._lookups_lock = threading.Lock()
        self.thread = PeriodicThread(
            "webhooks",
            self._send_due,
            _POLL_SECONDS,
            error_message="webhooks cannot be sent now",
            on_close=self._send_due,
        )
        """Thread that sends due webhooks, for a last time just before the thread ends."""

    def check(self, url: str) -> None:
        """Raise an `ApiError` unless webhooks may be sent to the host of a callback URL.

        A URL with a user name or password is always rejected.

        Raises:
            ApiError: The host is not allowed: status 422, `callback_refused`.
        """
        with suppress(ValueError):  # `url` cannot be parsed
            if urlsplit(url).netloc.lower() in self._hosts:
                return
        text = f"this server sends no webhooks to {url.partition('?')[0][:100]!r}"
        hint = "the server's operator can allow the host of the URL"
        raise ApiError(422, "callback_refused", text, hint, field="callback_url")

    # --- methods for the webhooks' thread only ----------------------------------------------------

    def _send_due(self) -> None:
        """Send due webhooks, `MAX_CONCURRENT` at a time, until none is due or 30 s have passed."""
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
                with suppress(OutputError):  # the webhook stays due and is sent again
                    self._record_attempt(job, error)

    def _record_attempt(self, job: Job, error: str | None) -> None:
        """Store the outcome of an attempt to send a webhook; after a failure, set the next time."""
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
        """Send a webhook once; return the reason of a failure, or None after a success."""
        try:
            async with asyncio.timeout(ATTEMPT_SECONDS):
                status = await self._post(job)
        except TimeoutError:
            return f"no response within {ATTEMPT_SECONDS:g} s"
        except Exception as error:  # an error of one receiver must not stop webhooks to others
            return str(error) or type(error).__name__
        return None if 200 <= status < 300 else f"the response was {status}"

    async def _post(self, job: Job) -> int:
        """Send a webhook; return the status of the response. Redirects are not followed."""
        assert job.callback_url is not None
        self.check(job.callback_url)  # the list of allowed hosts may have changed since the request
        url = urlsplit(job.callback_url)
        host = url.hostname or ""
        port = url.port or (443 if url.scheme == "https" else 80)
        address = await self._address(host, port, job.callback_attempts)
        # every attempt to send the webhook has the same id
        id = f"evt_{job.id.removeprefix('video_')}"
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
                # TLS checks the certificate against the host name, not the address.
                extensions={"sni_hostname": host},
            )
            response = await client.send(request, stream=True)
            await response.aclose()
            return response.status_code

    async def _address(self, host: str, port: int, attempt: int) -> str:
        """Return the IP address for an attempt; attempts take turns among the host's addresses.

        A private address is accepted only if the callback URL itself has the address as its host.

        Raises:
            RequestError: The host name has an address that is not public.
        """
        addresses = await self._resolve_host(host, port)
        for address in addresses:
            if not _is_public(address) and address != host:
                raise RequestError(f"{host} has an address that is not public")
        return addresses[attempt % len(addresses)]

    async def _resolve_host(self, host: str, port: int) -> list[str]:
        """Return the IP addresses of a webhook's host name.

        The lookup runs in a separate thread instead of the event loop's executor. A lookup cannot
        be stopped, and takes minutes if the DNS server is down. An event loop waits at its end for
        the threads of its executor, which would delay the webhooks to all other hosts.

        Raises:
            OSError: The host name has no address.
            UnicodeError: The host name cannot be encoded for DNS.
            RequestError: Too many earlier lookups of the host name are still in progress.
        """
        if self._lookups[host] >= _MAX_LOOKUPS:
            raise RequestError(f"earlier lookups of {host} are still in progress")
        loop = asyncio.get_running_loop()
        addresses_future: asyncio.Future[list[str]] = loop.create_future()

        def set_result(addresses: list[str], error: Exception | None) -> None:
            if addresses_future.done():  # the attempt has timed out
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
            with suppress(RuntimeError):  # the event loop has ended
                loop.call_soon_threadsafe(set_result, addresses, failure)

        with self._lookups_lock:
            self._lookups[host] += 1
        threading.Thread(target=look_up, name=f"lookup of {host}", daemon=True).start()
        return await addresses_future


def sign(id: str, timestamp: int, body: bytes, secrets: Sequence[bytes]) -> dict[str, str]:
    """Return the headers that identify and sign a webhook (https://www.standardwebhooks.com).

    Args:
        id: Id of the event, the same in each attempt.
        timestamp: Unix time of the attempt, in seconds.
        body: Body of the request.
        secrets: Keys of HMAC-SHA256. The header has one signature for each key.
    """
    content = f"{id}.{timestamp}.".encode() + body
    digests = (hmac.digest(secret, content, hashlib.sha256) for secret in secrets)
    return {
        "webhook-id": id,
        "webhook-timestamp": str(timestamp),
        "webhook-signature": " ".join(f"v1,{base64.b64encode(each).decode()}" for each in digests),
    }


def _event_body(id: str, job: Job, video: Video) -> bytes:
    """Return the JSON body of a webhook: an event as in OpenAI's API, with the video as `data`."""
    event = {
        "id": id,
        "object": "event",
        "type": f"video.{job.state}",
        "created_at": int(job.finished_at or 0),
        "data": video.model_dump(mode="json"),
    }
    return json.dumps(event).encode()


def _is_public(text: str) -> bool:
    """Whether a webhook's IP address is public and unicast.

    6to4 addresses are excluded, because they embed an IPv4 address, which may be private.
    """
    address = ipaddress.ip_address(text)
    if isinstance(address, ipaddress.IPv6Address):
        return address.is_global and address in _UNICAST and address.sixtofour is None
    return address.is_global and not address.is_multicast
