"""Retention: old jobs are removed with all their files; files of users are never removed."""

from __future__ import annotations

import os
import shutil
import time
from contextlib import closing
from datetime import UTC, datetime
from pathlib import Path

import pytest

from svdpp.serve.job import JobState, new_id
from svdpp.serve.queue import JobQueue
from svdpp.serve.retention import (
    bytes_by_job,
    enforce_retention,
    move_orphans_aside,
    remove_job,
    remove_orphans,
)
from svdpp.serve.store import FileStore
from svdpp.serve.verifier import Verifier
from tests.support.engines import add, in_state, job_of, remove_leftovers_now

FILES = ("clips/{id}.mp4", "photos/{id}.png", "clips/{id}.mp4.json")


@pytest.fixture
def folder(tmp_path: Path, store: JobQueue) -> Path:  # noqa: ARG001 (it creates the folder)
    """Data folder of the job queue `store`, with its subfolders."""
    for name in ("photos", "clips", "latents"):
        (tmp_path / "data" / name).mkdir()
    return tmp_path / "data"


def put_files(folder: Path, id: str, num_bytes: int = 100, hours: float = 0.0) -> None:
    """Write the files of a job in a data folder, with modification times `hours` ago."""
    for name in FILES:
        path = folder / name.format(id=id)
        path.write_bytes(bytes(num_bytes // 4 * (1 + (name == FILES[0]))))
        os.utime(path, times=(time.time() - 3600 * hours,) * 2)


def add_completed(store: JobQueue, folder: Path, at: float, num_bytes: int = 100) -> str:
    """Add a job that was completed at the time `at`, with its files; return its id."""
    id = in_state(store, JobState.COMPLETED, created_at=at)
    put_files(folder, id, num_bytes)
    with store.backend.transaction() as connection:
        connection.execute("UPDATE jobs SET finished_at = ? WHERE id = ?", (at, id))
    return id


def ids_of_files(folder: Path) -> set[str]:
    names = os.listdir(folder / "photos") + os.listdir(folder / "clips")
    return {name.partition(".")[0] for name in names}


def ids(store: JobQueue) -> set[str]:
    return set(store.clip_tokens())


def test_jobs_go_by_age_or_by_bytes_the_oldest_first(store: JobQueue, folder: Path) -> None:
    first, second, third = (add_completed(store, folder, at) for at in (300.0, 100.0, 200.0))
    assert enforce_retention(store, 250.0, None, 300) == []
    assert enforce_retention(store, 250.0, 150.0, None) == []
    assert enforce_retention(store, 250.5, 150.0, None) == [second]
    assert ids(store) == ids_of_files(folder) == {first, third}
    assert enforce_retention(store, 250.0, None, 199) == [third]
    assert enforce_retention(store, 1000.0, 0.0, None) == [first]
    assert ids(store) == ids_of_files(folder) == set()


def test_open_jobs_stay_however_old_and_large(store: JobQueue, folder: Path) -> None:
    failed = in_state(store, JobState.FAILED)
    done = add_completed(store, folder, 1.0)
    running, waiting = add(store, created_at=0.0), add(store, created_at=1.0)
    store.claim()
    for id in (waiting, running):
        put_files(folder, id, 10_000)
    assert enforce_retention(store, 1e12, 1.0, 1) == [done, failed]
    assert ids(store) == ids_of_files(folder) == {waiting, running}


def test_one_job_is_removed_on_request_and_none_while_it_is_verified(
    store: JobQueue, folder: Path
) -> None:
    id, other, requested = (add_completed(store, folder, at) for at in (1.0, 2.0, 3.0))
    waiting = add(store)
    put_files(folder, waiting)
    for each in (other, requested):  # both clips wait for the verifier
        store.set_verification(each, "running")
    assert remove_job(store, id)
    for kept in (id, waiting, "../.."):
        assert not remove_job(store, kept)
    with store.lock_clip(other) as is_held:  # the verifier holds this lock during a verification
        assert is_held
        assert enforce_retention(store, 1e9, 1.0, 1) == [requested]
        assert ids(store) == ids_of_files(folder) == {other, waiting}
    assert enforce_retention(store, 1e9, 1.0, 1) == [other]


@pytest.mark.slow
def test_a_clip_that_is_removed_by_its_age_is_not_verified(store: JobQueue, folder: Path) -> None:
    id = add_completed(store, folder, 1.0)
    verifier = Verifier(store, lambda: True, when_idle=True)
    with store.lock_clip(id):
        assert not verifier._verify(id)
    assert job_of(store, id).verification == "none"
    assert verifier._verify(id), "it is let go"


def test_files_of_no_job_are_kept_in_another_place(store: JobQueue, folder: Path) -> None:
    """Files without a job are moved to lost+found.

    Such files exist after the queue was lost, or replaced by an older copy.
    """
    id, waiting = add_completed(store, folder, 1.0), add(store)
    put_files(folder, waiting)
    newer, latest = new_id(), new_id()
    put_files(folder, newer, hours=1.1)
    put_files(folder, latest)
    assert enforce_retention(store, 2.0, None, 10**6) == []
    assert ids_of_files(folder) == {id, waiting, newer, latest}

    moved = move_orphans_aside(store)

    lost = {Path(name.format(id=each)).name for each in (newer, latest) for name in FILES}
    assert {path.name for path in moved} == lost
    (place,) = (folder / "lost+found").iterdir()
    assert all(path.parent == place and path.stat().st_size in (25, 50) for path in moved)
    assert ids_of_files(folder) == {id, waiting}
    assert ids(store) == {id, waiting}
    assert move_orphans_aside(store) == []
    put_files(folder, latest)
    remove_leftovers_now(store)  # removes the image, but never a clip without a row
    assert {path.name for path in folder.glob(f"*/{latest}*")} == {
        f"{latest}.mp4",
        f"{latest}.mp4.json",
    }


def test_images_of_the_last_hour_may_be_of_a_request(store: JobQueue, folder: Path) -> None:
    add(store)
    for id, hours in ((new_id(), 0.0), (old := new_id(), 1.1)):
        put_files(folder, id, hours=hours)
        for name in FILES[:1] + FILES[2:]:
            (folder / name.format(id=id)).unlink()
    assert [path.stem for path in move_orphans_aside(store)] == [old]


def test_clips_whose_rows_were_lost_with_a_part_of_the_log_are_kept_and_reported(
    store: JobQueue, folder: Path, tmp_path: Path, told: list[str]
) -> None:
    """Clips whose rows were lost are moved to lost+found and reported.

    The copy of the SQLite file lacks its write-ahead log, so it has only the rows before the last
    checkpoint.
    """
    before = add_completed(store, folder, 1.0)
    store.backend.maintain()
    after = add_completed(store, folder, 2.0)
    restored = tmp_path / "restored"
    shutil.copytree(folder, restored, ignore=shutil.ignore_patterns("*-wal", "*-shm", "lock"))
    with closing(JobQueue(restored)) as queue:
        assert ids(queue) == {before}
        moved = move_orphans_aside(queue)
        assert {path.name for path in moved} == {Path(name.format(id=after)).name for name in FILES}
        assert all(path.is_relative_to(restored / "lost+found") for path in moved)
        assert ids_of_files(restored) == {before}
        assert "the queue has no rows for clips (number: 1), the newest from 20" in told[-1]
        assert str(moved[0].parent) in told[-1]


def test_what_nobody_needs_goes_unless_it_is_new_or_changes(store: JobQueue, folder: Path) -> None:
    id, requested = add_completed(store, folder, 1.0), new_id()
    image = folder / "photos" / f"{requested}.png"
    upload = folder / "photos" / f".upload-{requested}-{'0' * 8}"
    part = folder / "clips" / f".svdpp-{'0' * 8}-123-{'0' * 8}.mp4"
    for path in (image, upload, part):
        path.touch()
    seen = remove_orphans(store, set())
    assert all(path.exists() for path in (image, upload, part))
    part.write_bytes(b"a rank of another host writes it")
    image.rename(image.with_name(f"{new_id()}.png"))  # as if a new request had uploaded the image
    seen = remove_orphans(store, seen)
    assert not upload.exists()
    assert part.exists()
    remove_orphans(store, seen)
    assert {path.name.partition(".")[0] for path in folder.glob("*/*")} == {id}


def _status(path: Path) -> tuple[int, ...]:
    """Return the status of a file or folder without its access time, to see if it changed."""
    status = path.lstat()
    return status.st_ino, status.st_mode, status.st_size, status.st_mtime_ns, status.st_ctime_ns


def test_what_a_server_did_not_make_is_left_alone(
    store: JobQueue, folder: Path, tmp_path: Path
) -> None:
    outside = tmp_path / "elsewhere"
    outside.mkdir()
    for name in (f"video_{'1' * 32}.png", "keep.txt"):
        (outside / name).write_text("mine")
    photos, clips = folder / "photos", folder / "clips"
    for path in (photos / "cat.jpg", clips / "film.mp4", photos / ".upload-mine", folder / "x.md"):
        path.write_text("mine")
    (photos / "album").mkdir()
    (photos / "album" / "dog.jpg").write_text("mine")
    (photos / f"video_{'2' * 32}.png").mkdir()  # a folder with the name of a job's file
    (clips / f"video_{'3' * 32}.mp4").symlink_to(outside / "keep.txt")
    (clips / "folder").symlink_to(outside)
    before = {path: _status(path) for path in tmp_path.rglob("*") if "queue" not in path.name}

    remove_leftovers_now(store)
    assert move_orphans_aside(store) == []
    assert enforce_retention(store, 1e9, 1.0, 1) == []
    assert {path: _status(path) for path in before} == before
    clips.rename(tmp_path / "clips")
    clips.symlink_to(outside)  # a linked folder is not searched
    (outside / f"video_{'1' * 32}.mp4").write_text("mine")
    assert move_orphans_aside(store) == []
    assert len(list(outside.iterdir())) == 3


@pytest.mark.parametrize("at", [1, 2, 3, 4, 6])
def test_a_removal_that_a_kill_ends_goes_on(
    store: JobQueue, folder: Path, monkeypatch: pytest.MonkeyPatch, at: int
) -> None:
    """A removal that was interrupted by a kill is finished later.

    The server is killed before it removes the `at`-th file (from 1). Each of three jobs has three
    files.
    """
    ids_before = [add_completed(store, folder, end) for end in (1.0, 2.0, 3.0)]
    unlink, removals = Path.unlink, iter(range(1, at))

    def killed(path: Path, missing_ok: bool = False) -> None:
        if next(removals, None) is None:
            raise KeyboardInterrupt
        unlink(path, missing_ok)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Path, "unlink", killed)
        enforce_retention(store, 1e9, 1.0, None)
    left = ids_before[(at - 1) // 3 :]
    assert list(store.finished()) == left
    assert ids_of_files(folder) <= set(left)
    assert all((folder / name.format(id=id)).exists() for name in FILES for id in left[1:])
    assert move_orphans_aside(store) == []
    assert enforce_retention(store, 1e9, 1.0, None) == left
    assert ids(store) == ids_of_files(folder) == set()


def test_with_a_store_only_own_copies_go(store: JobQueue, folder: Path) -> None:
    """If the service has a file store, only unused local copies of stored files are removed.

    The bucket or the folder may also have other programs' files, and files from before the store.
    """
    store.store = FileStore(folder, f"memory://{new_id()}")
    ids = copied, used, _ = [add_completed(store, folder, at=1.0) for _ in range(3)]
    removed = new_id()
    put_files(folder, removed)
    names = ["photos/a.jpg", f"latents/{'0' * 64}.txt", "photos/.other", "clips/a.mp4"]
    for name in names:
        (folder / name).write_bytes(b"theirs")
    scratch = folder / "clips" / ".fetched-0123456789abcdef"
    scratch.write_bytes(b"")
    for name in [*names, *(file.format(id=id) for id in (copied, used, removed) for file in FILES)]:
        store.store.put(folder / name)
    assert bytes_by_job(store).keys() == {copied, used}, "a size of no job would remove others"
    system = store.store._filesystem
    for each in system.store.values():
        each.modified = each.created = datetime.fromtimestamp(time.time() - 30 * 86400, UTC)
    seen = remove_orphans(store, set(), in_use=[used])
    store.store.fetch(folder / FILES[0].format(id=copied))  # someone plays the clip
    remove_orphans(store, seen, in_use=[used])
    left = {str(path.relative_to(folder)) for path in folder.glob("*/*")}
    kept = {file.format(id=id) for id in ids[1:] for file in FILES}
    assert left == {*names, *kept, FILES[0].format(id=copied)}
    objects = {*names, *(file.format(id=id) for id in (copied, used) for file in FILES)}
    objects |= {FILES[0].format(id=removed), FILES[2].format(id=removed)}
    assert set(store.store.objects()) == objects
