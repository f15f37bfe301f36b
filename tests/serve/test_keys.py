"""API keys are random, stored only as hashes, and read from a private file only."""

from __future__ import annotations

import hashlib
import hmac
from pathlib import Path

import pytest

from svdpp.errors import InputError, RequestError
from svdpp.serve.auth import Owner, new_key, read_keys

HASH = "0123456789abcdef" * 4


def put(folder: Path, text: str | bytes, mode: int = 0o600) -> Path:
    path = folder / "keys"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    path.chmod(mode)
    return path


def test_a_new_key_is_accepted_by_its_hash(tmp_path: Path) -> None:
    (first, first_hash), (second, second_hash) = new_key(), new_key()
    path = put(tmp_path, f"# who: when\n\nann {first_hash} open=5\n  bob.2@home\t{second_hash}\r\n")
    found = read_keys(path)
    assert found.find(first) == Owner("ann", 5)
    assert found.find(second) == Owner("bob.2@home", None)
    assert first not in path.read_text()
    assert first_hash == hashlib.sha256(first.encode()).hexdigest()
    # 43 characters of 6 bits hold 256 bits.
    assert first[6:] != second[6:]
    assert [len(key.removeprefix("svdpp_")) for key in (first, second)] == [43, 43]


@pytest.mark.parametrize(
    "wrong",
    ["", " ", "svdpp_", HASH, "ann", "\ud800", "\0", "é" * 40, "x" * 10**6],
    ids=lambda wrong: ascii(wrong[:10]),
)
def test_a_wrong_key_is_no_key(tmp_path: Path, wrong: str) -> None:
    key, hash = new_key()
    found = read_keys(put(tmp_path, f"ann {hash}\nbob {HASH}\n"))
    for each in (wrong, key[:-1], key + " ", key.upper(), hash):
        assert found.find(each) is None


def test_every_key_is_compared_in_constant_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = [new_key() for _ in range(3)]
    found = read_keys(put(tmp_path, "".join(f"n{i} {each[1]}\n" for i, each in enumerate(made))))
    compared: list[str] = []
    real = hmac.compare_digest

    def compare(one: str, other: str) -> bool:
        compared.append(one)
        return real(one, other)

    monkeypatch.setattr(hmac, "compare_digest", compare)
    for key in (made[0][0], made[2][0], "wrong"):
        compared.clear()
        found.find(key)
        assert compared == [hash for _, hash in made]


@pytest.mark.parametrize("limits", [("open=2", ""), ("", "open=2"), ("open=9", "open=2")])
def test_an_owner_can_change_keys_without_a_gap(tmp_path: Path, limits: tuple[str, str]) -> None:
    (old, old_hash), (new, new_hash) = new_key(), new_key()
    found = read_keys(put(tmp_path, f"ann {old_hash} {limits[0]}\nann {new_hash} {limits[1]}\n"))
    for key in (old, new):
        owner = found.find(key)
        assert owner is not None
        assert (owner.name, owner.max_open) == ("ann", 2)


@pytest.mark.parametrize("mode", [0o604, 0o602, 0o601, 0o644, 0o666])
def test_a_file_that_others_may_open_is_refused_by_name(tmp_path: Path, mode: int) -> None:
    path = put(tmp_path, f"ann {HASH}\n", mode)
    with pytest.raises(RequestError) as refused:
        read_keys(path)
    assert repr(str(path)) in refused.value.message
    assert f"{mode:04o}" in refused.value.message
    assert refused.value.hint.startswith("chmod 600")
    path.chmod(0o640)
    assert read_keys(path)


KEY = "svdpp_AAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAA"


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "has no entries"),
        (f"ann {KEY}\n", "line 1: it is not NAME HASH"),
        (f"\n{KEY}\n", "line 2: it is not NAME HASH"),
        (f"{KEY} {KEY} {KEY}\n", "line 1: it is not NAME HASH"),
        (f"ann {HASH.upper()}\n", "line 1: it is not NAME HASH"),
        (f"a/b {HASH}\n", "line 1: it is not NAME HASH"),
        (f"ann {HASH} open=0\n", "line 1: it is not NAME HASH"),
        (f"ann {HASH} closed=5\n", "line 1: it is not NAME HASH"),
        (f"ann {HASH} open=5 open=6\n", "line 1: it is not NAME HASH"),
        (b"ann \xff\xfe", "line 1: it is not NAME HASH"),
        (f"# {'x' * 1_000_001}", "is larger than"),
    ],
)
def test_a_wrong_file_is_refused_and_no_key_is_shown(
    tmp_path: Path, text: str | bytes, reason: str
) -> None:
    path = put(tmp_path, text)
    with pytest.raises(InputError, match=reason) as refused:
        read_keys(path)
    assert repr(str(path)) in refused.value.message
    assert KEY not in refused.value.message + refused.value.hint
    assert refused.value.__cause__ is None or KEY not in str(refused.value.__cause__)


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    for path in (tmp_path / "none", tmp_path, Path("a\0b")):
        with pytest.raises(InputError, match="API key file"):
            read_keys(path)
