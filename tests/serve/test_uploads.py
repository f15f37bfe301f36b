"""Uploads: hostile images are refused, and harm neither the server nor its folder."""

from __future__ import annotations

import hashlib
import io
import os
import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest
from PIL import Image

from svdpp.errors import InputError
from svdpp.serve import uploads as uploads_module
from svdpp.serve.job import new_id
from svdpp.serve.uploads import DecoderBusyError, DecoderSlots, UploadStore, sanitize_filename
from tests.support.dummies import HANG_SECONDS
from tests.support.pictures import encoded, gradient, png
from tests.support.processes import children_of, wait_until

DECODER = "svdpp.serve.uploads"


@pytest.fixture
def uploads(tmp_path: Path) -> UploadStore:
    return UploadStore(tmp_path / "photos")


def refusal(uploads: UploadStore, data: bytes, name: str = "cat.png") -> InputError:
    """Save an upload that is refused, check that no file is left, and return the error."""
    with pytest.raises(InputError) as refused:
        uploads.save(io.BytesIO(data), new_id(), name)
    assert os.listdir(uploads._folder) == []
    return refused.value


def slow_jpeg(num_scans: int = 20_000) -> bytes:
    """Return a progressive JPEG that repeats its last scan: 600 kB that take minutes to decode."""
    data = encoded(Image.new("RGB", (4000, 4000)), "JPEG", progressive=True)
    end = data.rindex(b"\xff\xd9")
    return data[:end] + data[data.rindex(b"\xff\xda") : end] * num_scans + data[end:]


@pytest.mark.parametrize(
    ("format", "suffix"),
    [
        ("PNG", ".png"),
        pytest.param("MPO", ".jpg", marks=pytest.mark.slow),
        pytest.param("TIFF", ".tif", marks=pytest.mark.slow),
    ],
)
def test_a_photograph_gets_the_name_of_its_job(
    uploads: UploadStore, tmp_path: Path, format: str, suffix: str
) -> None:
    more = {"save_all": True, "append_images": [gradient()]} if format == "MPO" else {}
    data = encoded(gradient(48, 32), format, **more)
    id = new_id()
    photo = uploads.save(io.BytesIO(data), id, "holiday.exe")
    assert photo.path == tmp_path / "photos" / f"{id}{suffix}"
    assert photo.path.read_bytes() == data
    assert photo.path.stat().st_mode & 0o077 == 0
    assert photo.sha256 == hashlib.sha256(data).hexdigest()
    assert (photo.width, photo.height) == (48, 32)
    assert os.listdir(photo.path.parent) == [photo.path.name]


def test_the_decoder_is_light() -> None:
    check = "import sys, svdpp.serve.uploads; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", check], capture_output=True, check=True)
    assert not {"torch", "diffusers", "fastapi", "sqlite3"} & set(loaded.stdout.decode().split())


@pytest.mark.slow
# 250 MiB are too little to read any file, and 420 MiB are too little to decode this file.
@pytest.mark.parametrize("mebibytes", [250, 420])
def test_a_photograph_that_takes_much_memory_is_refused(
    uploads: UploadStore, monkeypatch: pytest.MonkeyPatch, mebibytes: int
) -> None:
    monkeypatch.setattr(uploads_module, "MAX_DECODER_BYTES", mebibytes * 2**20)
    big = png(7000, 7000, 8, 2, bytes(7000 * 21_001))  # 143 kB, decoded 196 MB
    assert refusal(uploads, big).message == "'cat.png' does not fit in memory"


@pytest.mark.slow
def test_the_largest_photograph_is_kept(uploads: UploadStore) -> None:
    photo = uploads.save(io.BytesIO(png(7071, 7071, 16, 0, bytes(14_143 * 7071))), new_id(), "x")
    assert photo.width * photo.height > 49_990_000
    assert photo.conversion == "scaled", "its grey has 16 bits"


@pytest.mark.slow
def test_a_photograph_that_takes_long_is_refused(
    uploads: UploadStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(uploads_module, "CPU_SECONDS", 1)
    monkeypatch.setattr(uploads_module, "MAX_SCANS", 10**6)
    error = refusal(uploads, slow_jpeg())
    assert "takes too long" in error.message
    assert children_of(os.getpid(), DECODER) == []


def test_a_jpeg_of_many_scans_is_refused_before_it_is_decoded(uploads: UploadStore) -> None:
    data = slow_jpeg(200)
    usual = data[: data.index(b"\xff\xda")].count(b"\xff\xc2")
    assert usual == 1  # the JPEG is progressive
    error = refusal(uploads, data)
    assert error.message == "'cat.png' is a JPEG of 210 scans, and the limit is 100"
    assert error.details == {"scans": 210, "limit": 100}
    thumbnail = b"\xff\xe1" + (2 + 2 * 150).to_bytes(2) + b"\xff\xda" * 150
    good = encoded(gradient(), "JPEG", progressive=True)
    uploads.save(io.BytesIO(good[:2] + thumbnail + good[2:]), new_id(), "x")


def test_keys_take_turns_at_the_decoders() -> None:
    """Keys take turns: an image waits for at most one image of a key that has sent many."""
    slots = DecoderSlots(2)
    order: list[str] = []
    started = threading.Semaphore(0)
    go_on = threading.Semaphore(0)

    def decode(owner: str) -> None:
        with slots.acquire(owner, HANG_SECONDS):
            order.append(owner)
            started.release()
            go_on.acquire()

    with ThreadPoolExecutor(9) as threads:
        for number, owner in enumerate(["alice"] * 6 + ["bob"] * 2):
            threads.submit(decode, owner)
            there = partial(lambda most: len(order) + len(slots._waiting) == most, number + 1)
            wait_until(there, HANG_SECONDS, "a request does not wait")
        for _ in range(2):
            started.acquire()
        with pytest.raises(DecoderBusyError) as refused, slots.acquire("carol", 0.01):
            pass
        assert refused.value.details == {"timeout_seconds": 0.01}
        for _ in range(8):
            go_on.release()
            started.acquire(timeout=0.5)
    assert sorted(order[:2]) == ["alice", "alice"]
    assert order[2] == "bob"
    assert order.count("bob") == 2
    assert set(order[2:5]) == {"alice", "bob"}


@pytest.mark.slow
def test_uploads_wait_for_a_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    long = int(HANG_SECONDS)
    limits = {
        "CPU_SECONDS": long,
        "TIMEOUT_SECONDS": long,
        "MAX_DECODERS": 1,
        "_MAX_WAIT_SECONDS": 0.2,
    }
    limits["MAX_SCANS"] = 10**6
    for name, limit in limits.items():
        monkeypatch.setattr(uploads_module, name, limit)
    uploads = UploadStore(tmp_path / "photos")
    with ThreadPoolExecutor(1) as threads:
        slow = threads.submit(refusal, uploads, slow_jpeg())
        wait_until(lambda: children_of(os.getpid(), DECODER), HANG_SECONDS, "no decoder")
        with pytest.raises(DecoderBusyError):
            uploads.save(io.BytesIO(encoded(gradient(), "PNG")), new_id(), "x")
        os.kill(children_of(os.getpid(), DECODER)[0], signal.SIGKILL)
        assert "ended with SIGKILL" in slow.result().message


def test_the_decoder_ends_with_its_server(
    uploads: UploadStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = os.getpid() + 1  # another parent than the decoder's, as if the server had ended
    monkeypatch.setattr(os, "getpid", lambda: server)
    assert "ended with SIGKILL" in refusal(uploads, encoded(gradient(), "PNG")).message


@pytest.mark.slow
@pytest.mark.parametrize(
    ("script", "reason"),
    [
        ('[ -z "$HF_TOKEN" ] && kill -ABRT $$', "ended with SIGABRT"),
        ("kill -SEGV $$", "ended with SIGSEGV"),
        (f"printf '{'0' * 64} /../../x 9 9'", "ended with exit code 0"),
        ("yes", "takes too long"),
        ("exec >&-; exec sleep 100", "takes too long"),
    ],
)
def test_what_the_decoder_says_is_not_trusted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str, reason: str
) -> None:
    monkeypatch.setenv("HF_TOKEN", "secret")
    decoder = tmp_path / "decoder"
    decoder.write_text(f"#!/bin/sh\n{script}\n")
    decoder.chmod(0o700)
    monkeypatch.setattr(sys, "executable", str(decoder))
    seconds = 1.0 if reason == "takes too long" else HANG_SECONDS
    monkeypatch.setattr(uploads_module, "TIMEOUT_SECONDS", seconds)
    uploads = UploadStore(tmp_path / "photos")
    assert reason in refusal(uploads, b"any").message


@pytest.mark.parametrize(
    ("name", "shown"),
    [
        ("../../etc/passwd", "passwd"),
        ("C:\\Users\\ann\\cat.png", "cat.png"),
        (None, "photo"),
        ("a\0b\n\x1b[31m\u202e.png", "ab[31m.png"),
        ("x" * 5000, "x" * 100),
        ("  猫 \u00e9.png ", "猫 \u00e9.png"),
    ],
)
def test_a_clients_name_is_only_shown(name: str | None, shown: str) -> None:
    assert sanitize_filename(name) == shown
