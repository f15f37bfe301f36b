"""The files of API keys and of secrets for webhooks, and the hosts that are served without keys.

A key has 256 random bits, so its plain SHA-256 is safe to store: no one can guess a key, and a slow
hash, which protects passwords, would only delay each request.
"""

from __future__ import annotations

import base64
import functools
import hashlib
import hmac
import ipaddress
import os
import re
import secrets
import stat
from dataclasses import dataclass
from pathlib import Path

from svdpp.config.limits import read_small_file
from svdpp.errors import InputError, RequestError
from svdpp.media import output_files

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._@-]{0,63}")
_LINE = re.compile(rf"\s*({_NAME.pattern})\s+([0-9a-f]{{64}})(?:\s+open=([1-9][0-9]{{0,5}}))?\s*")
_DIGIT = "[A-Za-z0-9+/]"
_SECRET = re.compile(rf"\s*whsec_((?:{_DIGIT}{{4}}){{8,21}}(?:{_DIGIT}{{2}}==|{_DIGIT}{{3}}=)?)\s*")
NEW_SECRET = 'echo "whsec_$(openssl rand -base64 32)" makes one'


@dataclass(frozen=True)
class Owner:
    """Whose jobs a request is about.

    Args:
        name: of the API key; empty without keys.
        max_open: jobs that may be queued or in progress; None: no limit.
    """

    name: str = ""
    max_open: int | None = None


class Keys(dict[str, Owner]):
    """The owners of the keys that a server accepts, by the keys' hashes.

    An owner can have several, such as an old and a new one.
    """

    def find(self, key: str) -> Owner | None:
        """The owner of a client's key; None if the key is unknown.

        The time that it takes does not depend on how much of a key is right.
        """
        given, match = key_hash(key), None
        for sha256, owner in self.items():  # all of them, also after a match
            if hmac.compare_digest(sha256, given):
                match = owner
        return match


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


def new_key() -> tuple[str, str]:
    """A new random key, and its hash for the file."""
    key = f"svdpp_{secrets.token_urlsafe(32)}"
    return key, key_hash(key)


def key_hash(key: str) -> str:
    """The hash of a key, as the file has it."""
    return hashlib.sha256(key.encode(errors="surrogatepass")).hexdigest()


def add_key(path: Path, name: str) -> str:
    """Creates a key, which is stored nowhere, and appends its hash to the file.

    The file is created if it does not exist. An owner that has a key gets another.
    """
    if _NAME.fullmatch(name) is None:
        raise RequestError(f"--new-key {name!r}: the name must be 1 to 64 letters, digits or ._@-")
    key, sha256 = new_key()
    if path.exists() and path.stat().st_size:
        read_keys(path)
    with output_files.disk_errors(f"cannot write {str(path)!r}"):
        path.parent.mkdir(parents=True, exist_ok=True)
        # O_APPEND, so that two commands at once add two lines.
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        try:
            gap = "" if path.read_bytes()[-1:] in (b"", b"\n") else "\n"
            os.write(file, f"{gap}{name} {sha256}\n".encode())
            os.fsync(file)
        finally:
            os.close(file)
    return key


def read_keys(path: Path) -> Keys:
    """Read a file of keys: in each line a name, a hash and, optionally, `open=N`.

    Empty lines and lines that begin with `#` are ignored. A name's limit need not be repeated in
    its further lines. No error shows a line's text, because it may be a key.
    """
    lines = _private_lines(path, "API key file")
    file = f"API key file {str(path)!r}"
    keys = Keys()
    for number, line in lines:
        if (match := _LINE.fullmatch(line)) is None:
            raise InputError(
                f"{file}, line {number}: it is not NAME HASH [open=N]",
                "NAME has 1 to 64 letters, digits or ._@-, HASH 64 lower-case hex digits, and N is "
                "1 to 999999",
            )
        name, sha256, limit = match.groups()
        same = next((owner for owner in keys.values() if owner.name == name), None)
        max_open = int(limit) if limit else same.max_open if same else None
        if sha256 in keys:
            raise InputError(f"{file}, line {number}: an earlier line has the same hash")
        if same and same.max_open != max_open:
            text = "an earlier line has the same name with another limit"
            raise InputError(f"{file}, line {number}: {text}")
        keys[sha256] = Owner(name, max_open)
    if not keys:
        raise InputError(f"{file} has no keys")
    return keys


def read_secrets(path: Path) -> list[bytes]:
    """Read a file of secrets that sign webhooks: in each line `whsec_` and base64.

    Lines are ignored, and errors show no text of them, as in `read_keys`.
    """
    lines = _private_lines(path, "webhook secret file")
    file = f"webhook secret file {str(path)!r}"
    secrets = []
    for number, line in lines:
        if (match := _SECRET.fullmatch(line)) is None:
            raise InputError(
                f"{file}, line {number}: it is not whsec_ and 24 to 65 bytes in base64",
                NEW_SECRET,
            )
        secrets.append(base64.b64decode(match[1]))
    if not secrets:
        raise InputError(f"{file} has no secrets", NEW_SECRET)
    return secrets


def _private_lines(path: Path, what: str) -> list[tuple[int, str]]:
    """The numbered lines of a file that is closed to other users, without empty ones and `#`."""
    file = f"{what} {str(path)!r}"
    _check_private(path, file)
    try:
        text = read_small_file(path, what).decode("ascii")
    except UnicodeDecodeError:
        raise InputError(f"{file} has characters other than ASCII") from None
    lines = enumerate(text.splitlines(), start=1)
    return [(number, line) for number, line in lines if not re.match(r"\s*(#|$)", line)]


def _check_private(path: Path, file: str) -> None:
    try:
        mode = path.stat().st_mode
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise InputError(f"{file} cannot be read: {reason}") from error
    if mode & stat.S_IRWXO:
        raise RequestError(
            f"{file} is open to other users: its mode is {stat.S_IMODE(mode):04o}",
            f"chmod 600 {str(path)!r}",
        )
