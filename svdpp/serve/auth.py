"""API keys and webhook secrets, read from files. A server without keys must use a loopback host.

The file of keys has the plain SHA-256 of each key. This is safe, because nobody can guess a key of
256 random bits. A slow hash, which passwords need, would only delay each request.
"""

from __future__ import annotations

import base64
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
_KEY_LINE = re.compile(rf"({_NAME.pattern})\s+([0-9a-f]{{64}})(?:\s+open=([1-9][0-9]{{0,5}}))?")
_DIGIT = "[A-Za-z0-9+/]"
_SECRET_LINE = re.compile(rf"whsec_((?:{_DIGIT}{{4}}){{8,21}}(?:{_DIGIT}{{2}}==|{_DIGIT}{{3}}=)?)")
_NEW_SECRET = 'echo "whsec_$(openssl rand -base64 32)" creates a secret'


@dataclass(frozen=True)
class Owner:
    """Owner of jobs, identified by the name of an API key. Without API keys, the name is empty."""

    name: str = ""
    max_open: int | None = None
    """Maximum number of the owner's jobs that are queued or in progress. None: no limit."""


class Keys(dict[str, Owner]):
    """Owners of the API keys that a server accepts, by the SHA-256 of the key."""

    def find_owner(self, key: str) -> Owner | None:
        """Return the owner of a client's API key; None if the key is unknown.

        The comparison takes the same time however many characters of the key are right.
        """
        presented, match = _hash(key), None
        # the loop has no `break`, so that its time does not show which key matches
        for sha256, owner in self.items():
            if hmac.compare_digest(sha256, presented):
                match = owner
        return match


def load_keys(host: str, key_file: Path | None) -> Keys | None:
    """Return the API keys in a file. Without a file, raise unless `host` is a loopback address.

    Args:
        host: Host name or IP address on which the server listens.
        key_file: File of keys; None: the server has no keys.

    Returns:
        The keys; None: the server has no keys, and other machines cannot reach it.

    Raises:
        RequestError: `key_file` is None and `host` is not a loopback address, or the mode of the
            file gives access to other users.
        InputError: The file cannot be read, or is malformed.
    """
    if key_file is not None:
        return read_keys(key_file)
    if not is_loopback(host):
        raise RequestError(
            f"`host` {host} accepts requests from other machines, and the server has no API keys",
            "create a key with svdpp serve --new-key NAME --api-key-file FILE; start the server "
            "with `api_key_file` FILE",
        )
    return None


def is_loopback(host: str) -> bool:
    """Whether `host` is a loopback name or address, which only this machine can reach."""
    if host.lower().rstrip(".") == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def new_key() -> tuple[str, str]:
    """Return a new random API key, and the key's SHA-256 for the file of keys."""
    key = f"svdpp_{secrets.token_urlsafe(32)}"
    return key, _hash(key)


def _hash(key: str) -> str:
    return hashlib.sha256(key.encode(errors="surrogatepass")).hexdigest()


def add_key(path: Path, name: str) -> str:
    """Create an API key, and append its hash to the file of keys. The key itself is not stored.

    Args:
        path: File of keys. The file and its folder are created if they do not exist.
        name: Owner of the key, 1 to 64 letters, digits or `._@-`.

    Returns:
        The key, which cannot be recovered from the file.

    Raises:
        RequestError: The name has other characters or another length, or the mode of the existing
            file gives access to other users.
        InputError: The existing file is not a file of keys.
        OutputError: The file cannot be written.
    """
    if _NAME.fullmatch(name) is None:
        raise RequestError(
            f"`new_key` {name!r}: the name must be 1 to 64 letters, digits or ._@-",
            details={"name": name, "min_length": 1, "max_length": 64},
        )
    key, sha256 = new_key()
    if path.exists() and path.stat().st_size:
        read_keys(path)
    with output_files.disk_errors(f"cannot write {str(path)!r}"):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch(0o600)
        # A single unbuffered write appends a whole line, even if two commands append at the same
        # time.
        with open(path, "ab", buffering=0) as file:
            gap = b"" if path.read_bytes()[-1:] in (b"", b"\n") else b"\n"
            file.write(gap + f"{name} {sha256}\n".encode())
            os.fsync(file.fileno())
    return key


def read_keys(path: Path) -> Keys:
    """Return the owners of the API keys in a file, by the hash of the key.

    Each line is `NAME HASH` or `NAME HASH open=N`. A name may have several keys, and so several
    lines. The last `open=N`, which sets `Owner.max_open`, applies to all keys of the name. Error
    messages do not quote lines, because a line may contain a key.

    Raises:
        RequestError: The mode of the file gives access to other users.
        InputError: The file cannot be read, a line is malformed, or two names have the same hash.
    """
    form = "NAME HASH [open=N]; NAME has 1 to 64 letters, digits or ._@-, HASH 64 of 0-9a-f"
    lines = [line.groups() for line in _match_lines(path, "API key file", _KEY_LINE, form)]
    names = {(sha256, name) for name, sha256, _ in lines}
    if len(names) > len({sha256 for sha256, _ in names}):
        text = f"API key file {str(path)!r} has one hash under two names"
        raise InputError(text, details={"path": str(path)})
    limits = {name: int(limit) for name, _, limit in lines if limit}
    return Keys({sha256: Owner(name, limits.get(name)) for name, sha256, _ in lines})


def read_secrets(path: Path) -> list[bytes]:
    """Read the secrets for signing webhooks from a file.

    Each line is one secret: `whsec_`, then 24 to 65 bytes in base64.

    Raises:
        RequestError: The mode of the file gives access to other users.
        InputError: The file cannot be read, or a line is malformed.
    """
    form = "whsec_ and 24 to 65 bytes in base64"
    lines = _match_lines(path, "webhook secret file", _SECRET_LINE, form, _NEW_SECRET)
    return [base64.b64decode(line[1]) for line in lines]


def _match_lines(
    path: Path, what: str, line: re.Pattern[str], form: str, hint: str = ""
) -> list[re.Match[str]]:
    """Match each line of a private file of keys or secrets, except comments; return the matches.

    Args:
        path: Path of the file.
        what: Kind of the file for error messages, such as `API key file`.
        line: Pattern that each line has to match.
        form: Format of a valid line, for error messages.
        hint: Hint of the errors about malformed or missing lines.

    Raises:
        RequestError: The mode of the file gives access to other users.
        InputError: The file cannot be read, a line does not match, or the file has no entries.
    """
    file = f"{what} {str(path)!r}"
    content = read_small_file(path, what)
    mode = path.stat().st_mode
    if mode & stat.S_IRWXO:
        raise RequestError(
            f"{file} is open to other users: its mode is {stat.S_IMODE(mode):04o}",
            f"chmod 600 {str(path)!r}",
            details={"path": str(path), "mode": f"{stat.S_IMODE(mode):04o}"},
        )
    lines = []
    for number, text in enumerate(content.decode("ascii", "replace").splitlines(), start=1):
        if re.match(r"\s*(#|$)", text):
            continue
        if (match := line.fullmatch(text.strip())) is None:
            details = {"path": str(path), "line": number, "format": form}
            raise InputError(f"{file}, line {number} is not {form}", hint, details=details)
        lines.append(match)
    if not lines:
        raise InputError(f"{file} has no entries", hint, details={"path": str(path)})
    return lines
