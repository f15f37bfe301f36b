"""Hashes of whole files: a file is read only once, and again after a change."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

import pytest

from svdpp.models import hashes
from svdpp.models.hashes import cached_sha256
from tests.support.range_checks import read_folder


@pytest.fixture(autouse=True)
def hashed_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the files that were read to be hashed in the test. The cache of hashes is new."""
    digest, names = hashlib.file_digest, []

    def file_digest(file: object, name: str) -> object:
        names.append(Path(file.name).name)  # type: ignore[attr-defined]
        return digest(file, name)  # type: ignore[arg-type]

    monkeypatch.setattr(hashlib, "file_digest", file_digest)
    monkeypatch.setattr(hashes, "_known", None)
    monkeypatch.setattr(hashes, "SETTLED_SECONDS", -1.0)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return names


def clear_hashes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Clear the hashes of files that are cached in memory, as in a new process."""
    monkeypatch.setattr(hashes, "_known", None)


def test_a_file_is_read_again_only_after_a_change(
    tmp_path: Path, hashed_files: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "a"
    path.write_bytes(b"first")
    expected = hashlib.sha256(b"first").hexdigest()
    assert [cached_sha256(path), cached_sha256(path)] == [expected] * 2
    clear_hashes(monkeypatch)
    assert cached_sha256(path) == expected
    assert hashed_files == ["a"]
    times = path.stat()
    path.write_bytes(b"other")  # with the same size and modification time
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
    assert cached_sha256(path) == hashlib.sha256(b"other").hexdigest()
    assert hashed_files == ["a", "a"]


def test_a_file_that_may_still_change_is_not_remembered(
    tmp_path: Path, hashed_files: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hashes, "SETTLED_SECONDS", 60.0)
    path = tmp_path / "a"
    path.write_bytes(b"first")
    assert cached_sha256(path) == cached_sha256(path)
    assert hashed_files == ["a", "a"]


@pytest.mark.parametrize("content", [b"", b"[]", b'{"a": 1}', b'{"a": [1, 2]}', b"\xff"])
def test_a_damaged_cache_is_as_good_as_none(
    tmp_path: Path, content: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "a"
    path.write_bytes(b"first")
    cache = tmp_path / "cache" / "svdpp" / "sha256.json"
    cache.parent.mkdir(parents=True)
    cache.write_bytes(content)
    assert cached_sha256(path) == hashlib.sha256(b"first").hexdigest()
    clear_hashes(monkeypatch)
    monkeypatch.setattr(hashes, "_cache_path", lambda: Path("/proc/none/sha256.json"))
    assert cached_sha256(path) == hashlib.sha256(b"first").hexdigest()


def test_a_weight_that_the_fingerprint_does_not_sample_changes_a_files_hash(folder: Path) -> None:
    weights = folder / "unet" / "diffusion_pytorch_model.safetensors"
    before = read_folder(folder).file_hashes()
    assert sorted(before)[1:] == [
        "unet/diffusion_pytorch_model.safetensors",
        "vae/diffusion_pytorch_model.safetensors",
    ]
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1  # fingerprints sample only the middle of a tensor
    weights.write_bytes(data)
    after = read_folder(folder).file_hashes()
    assert [name for name in before if before[name] != after[name]] == [sorted(before)[1]]
