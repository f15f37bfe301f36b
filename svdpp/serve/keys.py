"""The API keys: a file of names and hashes, and the owner of a client's key.

A key has 256 random bits, so its plain SHA-256 is safe to store: no one can guess a key, and a slow
hash, which protects passwords, would only delay each request.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import re
import secrets
import stat
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from svdpp.errors import InputError, OutputError, RequestError
from svdpp.media import output_files
from svdpp.plan.small_file import read_small_file

_WHAT = "API key file"
_PREFIX = "svdpp_"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._@-]{0,63}")
_HASH = re.compile(r"[0-9a-f]{64}")
_LIMIT = re.compile(r"open=([1-9][0-9]{0,5})")


@dataclass(frozen=True)
class Owner:
    """Whose jobs a request is about.

    Args:
        name: of the API key; empty without keys.
        max_open: jobs that may be queued or in progress; None: no limit.
    """

    name: str = ""
    max_open: int | None = None


class Keys:
    """The keys that a server accepts: the owner of each, by its hash.

    An owner can have several, such as an old and a new one.
    """

    def __init__(self, keys: Mapping[str, Owner]) -> None:
        self._keys = dict(keys)

    def find(self, key: str) -> Owner | None:
        """The owner of a client's key; None if the key is unknown.

        The time that it takes does not depend on how much of a key is right.
        """
        given = key_hash(key)
        found = None
        for sha256, owner in self._keys.items():  # all of them, also after a match
            if hmac.compare_digest(sha256, given):
                found = owner
        return found


def new_key() -> tuple[str, str]:
    """A new random key, and its hash for the file."""
    key = _PREFIX + secrets.token_urlsafe(32)
    return key, key_hash(key)


def key_hash(key: str) -> str:
    """The hash of a key, as the file has it."""
    return hashlib.sha256(key.encode(errors="surrogatepass")).hexdigest()


def add_key(path: Path, name: str) -> str:
    """Creates a key, which is stored nowhere, and appends its hash to the file.

    The file is created if it does not exist. An owner that has a key gets another.
    """
    key, sha256 = new_key()
    try:
        _take_words([name, sha256], {})
    except ValueError as error:
        raise RequestError(f"--new-key {name!r}: {error}") from None
    if path.exists() and path.stat().st_size:
        read_keys(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        # O_APPEND, so that two commands at once add two lines.
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        try:
            before = path.read_bytes()[-1:]
            gap = "" if before in (b"", b"\n") else "\n"
            os.write(file, f"{gap}{name} {sha256}\n".encode())
            os.fsync(file)
        finally:
            os.close(file)
    except OSError as error:
        reason = output_files.reason(error)
        raise OutputError(f"cannot write {str(path)!r}: {reason}") from error
    return key


def read_keys(path: Path) -> Keys:
    """Read a file of keys: in each line a name, a hash and, optionally, `open=N`.

    Empty lines and lines that begin with `#` are ignored. A name's limit need not be repeated in
    its further lines. No error shows a line's text, because it may be a key.
    """
    _check_private(path)
    try:
        text = read_small_file(path, _WHAT).decode("ascii")
    except UnicodeDecodeError:
        raise InputError(f"{_WHAT} {str(path)!r} has characters other than ASCII") from None
    keys: dict[str, Owner] = {}
    for number, line in enumerate(text.splitlines(), start=1):
        if line.strip() and not line.lstrip().startswith("#"):
            try:
                _take_words(line.split(), keys)
            except ValueError as error:
                raise InputError(
                    f"{_WHAT} {str(path)!r}, line {number}: {error}",
                    "a line is: NAME HASH [open=N]",
                ) from None
    if not keys:
        raise InputError(f"{_WHAT} {str(path)!r} has no keys")
    return Keys(keys)


def _check_private(path: Path) -> None:
    try:
        mode = path.stat().st_mode
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise InputError(f"{_WHAT} {str(path)!r} cannot be read: {reason}") from error
    if mode & stat.S_IRWXO:
        raise RequestError(
            f"{_WHAT} {str(path)!r} is open to other users: its mode is {stat.S_IMODE(mode):04o}",
            f"chmod 600 {str(path)!r}",
        )


def _take_words(words: Sequence[str], keys: dict[str, Owner]) -> None:
    """Adds the key of one line to those of the lines before it; a ValueError says what is wrong."""
    if len(words) not in (2, 3):
        raise ValueError(f"it has {len(words)} words instead of 2 or 3")
    if _NAME.fullmatch(words[0]) is None:
        raise ValueError("the name must be 1 to 64 letters, digits or ._@-")
    if _HASH.fullmatch(words[1]) is None:
        raise ValueError("the hash must be 64 lower-case hex digits")
    limit = _LIMIT.fullmatch(words[2]) if len(words) == 3 else None
    if len(words) == 3 and limit is None:
        raise ValueError("the limit must be open=N, with N from 1 to 999999")
    max_open = None if limit is None else int(limit[1])
    for sha256, other in keys.items():
        if sha256 == words[1]:
            raise ValueError("an earlier line has the same hash")
        if other.name == words[0] and max_open is None:
            max_open = other.max_open
        elif other.name == words[0] and other.max_open != max_open:
            raise ValueError("an earlier line has the same name with another limit")
    keys[words[1]] = Owner(words[0], max_open)
