"""`svdpp run --jobs FILE --server URL`: the same clips as a local run, despite kills."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from svdpp.client.batch_run import BatchRecord, ServerState, read_state
from svdpp.client.connection import ServerConnection
from svdpp.errors import InputError, RequestError
from tests.support.http_server import DEMO, HttpServer, wait
from tests.support.ports import free_port
from tests.support.shell import PHOTO, PYTHONPATH, TINY, assert_error, svdpp_alone, svdpp_here

_SIZE = ("--steps", "400", "--frames", "2", "--height", "64", "--width", "64")
#: URL of a port without a server.
_NOBODY = "http://127.0.0.1:9"


def write_jobs(folder: Path, *lines: dict[str, Any]) -> str:
    path = folder / "clips.jsonl"
    path.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    return str(path)


def frame_hashes(folder: Path) -> dict[str, str]:
    """Return the frames' hash of each finished clip in `folder`, by file name."""
    found = {}
    for path in folder.glob("*.mp4.json"):
        metadata = json.loads(path.read_text())
        assert (folder / metadata["output"]).exists()
        found[metadata["output"]] = metadata["frames_sha256"]
    return found


class RunAtServer:
    """Process of `svdpp run --server`, with its stderr so far."""

    def __init__(self, folder: Path, *arguments: str) -> None:
        self._path = folder / "stderr"
        with self._path.open("w") as file:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "svdpp", "run", *arguments],
                env={**os.environ, "PYTHONPATH": PYTHONPATH, "COLUMNS": "400"},
                stdout=subprocess.DEVNULL,
                stderr=file,
            )

    @property
    def err(self) -> str:
        return self._path.read_text()

    def wait_for(self, text: str) -> None:
        wait(lambda: text in self.err or self.process.poll() is not None, lambda: self.err)
        assert text in self.err, self.err


@pytest.mark.full  # three minutes; `tools.soak.batch_soak` does the same with more clips and kills
@pytest.mark.slow
def test_the_clips_are_those_of_a_local_run_though_all_is_killed(tmp_path: Path) -> None:
    lines = [{"image": PHOTO, "seed": seed, "steps": 8} for seed in range(5)]
    lines[1]["steps"] = 400  # takes longer than a command needs to start
    lines.append({"image": PHOTO, "steps": 4, "out": "short"})
    jobs = write_jobs(tmp_path, *lines)
    there = ("--out", str(tmp_path / "local"))
    local = svdpp_alone("run", "--jobs", jobs, *DEMO, *_SIZE, *there, "--quiet")
    assert (local.code, local.err) == (0, ""), "neither this process nor a rank prints a remark"
    url, out = f"http://127.0.0.1:{(port := free_port())}", tmp_path / "out"
    arguments = ("--jobs", jobs, "--server", url, "--out", str(out))
    options = (*DEMO, *_SIZE, "--max-steps", "450", "--port", str(port))
    with HttpServer(tmp_path / "data", *options) as server:
        server.wait_ready()
        run = RunAtServer(tmp_path, *arguments)
        run.wait_for("1 of 6 clips")
        run.process.send_signal(signal.SIGINT)
        assert run.process.wait() == 128 + signal.SIGINT
        assert "run the same command with --resume to continue" in run.err
        assert f"curl -X POST {url}/v1/batches/batch_" in run.err
        # This time the command is killed, and cannot clean up.
        run = RunAtServer(tmp_path, *arguments, "--resume")
        run.wait_for("going on with batch_")
        run.process.kill()
        run.process.wait()
        run = RunAtServer(tmp_path, *arguments, "--resume")
        run.wait_for("going on with batch_")
        server.stop(signal.SIGKILL)
        run.wait_for("waiting for the server")
    with HttpServer(tmp_path / "data", *options) as server:
        run.wait_for("the server is back")
        assert run.process.wait() == 0, run.err
        rest = svdpp_alone("run", *arguments, "--resume", "--json")
        assert rest.code == 0, rest
        assert {clip["output"] for clip in json.loads(rest.out)["clips"]} == {*frame_hashes(out)}
        assert len(server.all_ids()) == 6, "a line was sent twice"
        assert frame_hashes(out) == frame_hashes(tmp_path / "local")
        rows = [json.loads(row) for row in (out / "clips.jsonl").read_text().splitlines()]
        assert [(row["line"], row["state"]) for row in rows] == [(n, "done") for n in range(1, 7)]

        # A changed line is made again, a lost file is downloaded again, and the other clips stay.
        lines[0]["seed"] = 9
        write_jobs(tmp_path, *lines)
        (out / "short.mp4").unlink()
        again = svdpp_alone("run", *arguments, "--resume")
        assert again.code == 0, again
        assert again.out.count("(was finished)") == 4
        assert len(server.all_ids()) == 7
        assert frame_hashes(out)["short.mp4"] == frame_hashes(tmp_path / "local")["short.mp4"]

        lines[0]["size"], lines[1]["steps"] = "32x32", 500
        write_jobs(tmp_path, *lines)
        refused = svdpp_alone("run", *arguments, "--resume")
        assert_error(refused, 2, "line 1, width: the server makes clips of 64x64, not of 32x32")
        del lines[0]["size"]
        write_jobs(tmp_path, *lines)
        refused = svdpp_alone("run", *arguments, "--resume")
        assert_error(refused, 2, "line 2, steps: the server says: ")
        assert len(server.all_ids()) == 7


@pytest.mark.slow
def test_a_wrong_key_is_refused_and_never_shown(keyed: HttpServer, tmp_path: Path) -> None:
    arguments = ("run", "--jobs", write_jobs(tmp_path, {"image": PHOTO}), "--server", keyed.url)
    without = svdpp_here(*arguments, env={"SVDPP_API_KEY": None})
    assert_error(without, 11, "an API key is needed", "SVDPP_API_KEY")
    key = "svdpp_this-key-is-unknown-to-all"
    wrong = svdpp_here(*arguments, env={"SVDPP_API_KEY": key})
    assert_error(wrong, 11, "the API key is unknown")
    assert key not in wrong.err + wrong.out


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--gpus", "2"), "--gpus is only for a run on this machine"),
        (("--split", "uniform"), "--split is only for a run on this machine"),
        (("--latents-dir", "x"), "--latents-dir is only for a run on this machine"),
        (("--format", "gif"), "--format is only for a run on this machine"),
        (("--server-timeout", "0"), "--server-timeout must be above 0"),
        (("--out", "one.mp4"), "--out names a file"),
        (("--prompt", "a wave"), "--prompt is only for a run on this machine"),
    ],
    ids=str,
)
def test_an_option_that_a_server_cannot_follow_is_refused(
    tmp_path: Path, options: tuple[str, ...], words: str
) -> None:
    jobs = write_jobs(tmp_path, {"image": PHOTO})
    assert_error(svdpp_here("run", "--jobs", jobs, "--server", _NOBODY, *options), 2, words)


def test_a_server_needs_a_jobs_file_and_must_be_there(tmp_path: Path) -> None:
    without = svdpp_here("run", PHOTO, "--server", _NOBODY, *TINY[:4])
    assert_error(without, 2, "--server needs --jobs FILE, which lists the clips")
    jobs = write_jobs(tmp_path, {"image": PHOTO})
    away = svdpp_here("run", "--jobs", jobs, "--server", _NOBODY, "--server-timeout", "0.1")
    assert_error(away, 11, "was unavailable for 0.1 s", "raise --server-timeout to wait longer")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "url", ["ftp://host", "host:8000", "http://", "http://me:secret-word@host", "http://h?key=1"]
)
def test_another_url_is_refused(url: str) -> None:
    with pytest.raises(RequestError, match="`server`") as refused:
        ServerConnection(url, None, patience_seconds=1.0)
    assert "secret-word" not in f"{refused.value} {refused.value.hint}"


def test_the_state_of_a_run_is_read_as_it_was_written(tmp_path: Path) -> None:
    path = tmp_path / "server.json"
    assert read_state(path) is None
    state = ServerState("http://host", "demo", [BatchRecord("key", None, {"a_1": "0"})])
    state.write(path)
    assert read_state(path) == state
    for text in ("", "[]", "{}", path.read_text().replace('"key"', '"keys"')):
        path.write_text(text)
        with pytest.raises(InputError, match="is not the state of a run at a server"):
            read_state(path)
