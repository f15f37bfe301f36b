"""Output files and folders, which are written completely or not at all."""

from __future__ import annotations

import errno
import fcntl
import os
import re
import signal
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from svdpp.errors import OutputError, RequestError
from svdpp.media.output_files import atomic_output, check_replaceable, check_writable, lock_folder

FILE, FOLDER = None, re.compile("[a-z]")


def put(place: Path, text: str, files: re.Pattern[str] | None) -> None:
    with atomic_output(str(place), ".part", files) as temporary:
        assert temporary.parent == place.parent
        assert re.fullmatch(r"\.svdpp-[0-9a-f]{8}-\d+-[0-9a-f]{8}\.part", temporary.name)
        (temporary if files is FILE else temporary / text).write_text(text)


def content(place: Path) -> str:
    return place.read_text() if place.is_file() else " ".join(os.listdir(place))


@pytest.mark.parametrize("files", [FILE, FOLDER])
@pytest.mark.parametrize(
    ("error", "message"),
    [
        (OSError(28, "No space left on device"), "No space left on device"),
        (RequestError("the cause", "the fix"), "the cause"),
        (KeyboardInterrupt(), None),
    ],
)
def test_the_new_takes_the_place_of_the_old_when_it_is_complete(
    tmp_path: Path, files: re.Pattern[str] | None, error: BaseException, message: str | None
) -> None:
    place = tmp_path / "x"
    for text in ("a", "b"):
        put(place, text, files)
        assert content(place) == text
    with (
        pytest.raises(type(error) if message is None else OutputError) as caught,
        atomic_output(str(place), "", files),
    ):
        raise error
    if isinstance(caught.value, OutputError):
        assert caught.value.message == f"{str(place)!r} cannot be written: {message}"
        assert caught.value.hint == getattr(error, "hint", "")
    assert content(place) == "b"
    assert os.listdir(tmp_path) == ["x"]


@pytest.mark.parametrize("files", [FILE, FOLDER])
def test_it_gets_the_umask_and_links_are_followed(
    tmp_path: Path, files: re.Pattern[str] | None
) -> None:
    real, link = tmp_path / "real", tmp_path / "link"
    put(real, "a", files)
    link.symlink_to(real)
    put(link, "b", files)
    assert link.is_symlink()
    assert content(real) == "b"
    umask = os.umask(0)
    os.umask(umask)
    bits = 0o666 if files is FILE else 0o777
    assert stat.S_IMODE(real.stat().st_mode) == bits & ~umask


@pytest.mark.parametrize("files", [FILE, FOLDER])
def test_places_that_cannot_be_written(tmp_path: Path, files: re.Pattern[str] | None) -> None:
    (tmp_path / "file").write_text("x")
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "thesis.txt").write_text("years of work")
    os.mkfifo(tmp_path / "fifo")
    other = "the path is not a regular file or folder"
    places = {
        str(tmp_path / "file" / "x"): "File exists",
        str(tmp_path / "fifo"): other,
        str(tmp_path / "folder"): other if files is FILE else "other files, such as 'thesis.txt'",
        "/dev/null": other,
        str(tmp_path / "a\0b"): "null",
        str(tmp_path / ("x" * 300)): "File name too long",
        **({} if files is FILE else {str(tmp_path / "file"): other}),
    }
    for name, cause in places.items():
        with pytest.raises(OutputError) as caught:
            put(Path(name), "a", files)
        assert caught.value.message.startswith(f"{name!r} cannot be written: ")
        assert cause in caught.value.message
    with pytest.raises(OutputError, match=other):
        check_replaceable(str(tmp_path / "fifo"), files)
    assert sorted(os.listdir(tmp_path)) == ["fifo", "file", "folder"]
    assert (tmp_path / "folder" / "thesis.txt").read_text() == "years of work"


@pytest.mark.parametrize("files", [FILE, FOLDER])
def test_what_a_killed_writer_left_goes_and_what_is_being_written_stays(
    tmp_path: Path, files: re.Pattern[str] | None
) -> None:
    script = (
        "import os, re, sys\nfrom svdpp.media.output_files import atomic_output\n"
        "with atomic_output(sys.argv[1], '', re.compile('x') if sys.argv[2] else None):\n"
        "    os.kill(os.getpid(), 9)\n"
    )
    place = str(tmp_path / "killed")
    done = subprocess.run([sys.executable, "-c", script, place, "x" * bool(files)], check=False)
    assert done.returncode == -signal.SIGKILL
    (left,) = tmp_path.iterdir()
    foreign = tmp_path / ".svdpp-00000000-1-00000000"
    foreign.touch()
    with atomic_output(str(tmp_path / "living"), "", files) as temporary:
        check_writable(tmp_path)
        assert temporary.exists()
        assert not left.exists()
    assert foreign.exists(), "another host's"
    assert sorted(os.listdir(tmp_path)) == [foreign.name, "living"]


@pytest.mark.parametrize(
    ("first", "second", "is_refused"),
    [("", "", True), ("", "a", True), ("a", "a", True), ("a", "b", False)],
)
def test_runs_that_write_the_same_files_exclude_each_other(
    tmp_path: Path, first: str, second: str, is_refused: bool
) -> None:
    folder = tmp_path / "new"
    with lock_folder(folder, first) as why_not:
        assert why_not == ""
        if is_refused:
            refused = pytest.raises(RequestError, match="another svdpp run is writing into")
            with refused, lock_folder(folder, second):
                pass
        else:
            with lock_folder(folder, second), pytest.raises(RequestError), lock_folder(folder):
                pass
    assert os.listdir(tmp_path) == [], "nothing was written"


def test_a_file_system_without_locks_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: int) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", refuse)
    with lock_folder(tmp_path) as why_not:
        assert why_not == "No locks available"
