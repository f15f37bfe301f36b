"""Verification of finished clips: each is made again on one device and compared.

A verification runs while the ranks are idle, in a process of low priority that does the same as
`svdpp verify CLIP`. The process is ended at once when the ranks get work. The process runs this
module: `verifier JSON INPUT PARENT_PID`, where JSON is the clip's metadata file, and INPUT is the
image, or empty for text-to-video. The last line of the process's output is the result.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from loguru import logger

from svdpp.config import PipelineConfig
from svdpp.errors import InputError, OutOfMemoryError, SvdppError, error_to_dict, without_folders
from svdpp.launch.process_lifetime import (
    end_with_parent,
    exit_on_signals,
    exit_with_signal_code,
    start_helper,
    tune_gc,
)
from svdpp.serve.job import Job, JobState, VerificationStatus
from svdpp.serve.periodic_thread import PeriodicThread
from svdpp.serve.queue import JobQueue

# Seconds between two checks of whether a running verification must stop.
_POLL_SECONDS = 0.05
# Seconds between two searches for clips to verify. The second value is for servers that share a
# queue. It is larger, because each search queries the shared database.
_LOOK_SECONDS, _SHARED_LOOK_SECONDS = 0.5, 10.0
# Seconds after SIGTERM in which the process can remove its temporary files.
_END_SECONDS = 5.0
_NICE = 19


class Verifier:
    """Thread that verifies finished clips while the ranks are idle. Any thread may call any method.

    One clip is verified at a time. Requested verifications go first, and the owners of the clips
    take turns. If the ranks get work during a verification, the verification is stopped, and
    repeated later.

    Args:
        queue: Queue with the jobs of the clips.
        is_idle: Function that returns whether the ranks are ready and have no work.
        when_idle: Whether to also verify clips whose verification nobody requested, newest first.
        on_result: Function that the verifier's thread calls with the result of each comparison.
    """

    def __init__(
        self,
        queue: JobQueue,
        is_idle: Callable[[], bool],
        *,
        when_idle: bool = False,
        on_result: Callable[[VerificationStatus], None] = lambda _: None,
    ) -> None:
        self._queue = queue
        self._folder = queue.store.folder
        self._is_idle = is_idle
        self._when_idle = when_idle
        self._on_result = on_result
        self.running: str | None = None
        """Id of the job whose clip is being verified; None: no clip is."""
        self._cancelled: str | None = None
        self._num_begun = 0
        self._last_turns: dict[str, int] = {}
        """Number of each owner's latest verification, by the owner's name. This server numbers its
        verifications from 1; the owner with the lowest number has the next turn."""
        seconds = _SHARED_LOOK_SECONDS if queue.is_shared else _LOOK_SECONDS
        error_message = "the verification of a clip failed"
        self.thread = PeriodicThread(
            "verifier", self._run_once, seconds, error_message=error_message
        )
        """Thread that verifies clips, including clips whose verification was requested before the
        server was last started."""

    def request(self, id: str) -> bool:
        """Request the verification of a completed clip.

        Returns:
            Whether the clip will be verified; False if it is not completed or has no video file.
        """
        job = self._queue.get(id)
        if job is None or job.state is not JobState.COMPLETED or "file_sha256" not in job.metadata:
            return False
        is_taken = self._queue.set_verification(id, "running")
        self.thread.wake()
        return is_taken

    def cancel(self, id: str) -> None:
        """Withdraw the request to verify a clip; a running verification of the clip soon stops."""
        self._queue.set_verification(id, "none")
        self._cancelled = id

    # --- methods for the verifier's thread only ---------------------------------------------------

    def _run_once(self) -> None:
        while not self.thread.is_closing and any(map(self._verify, self._candidates())):
            pass

    def _candidates(self) -> list[str]:
        if not self._is_idle():
            return []
        owners = self._queue.pending_verifications()
        return [
            *sorted(owners, key=lambda id: self._last_turns.get(owners[id], 0)),
            *(self._queue.unverified() if self._when_idle else ()),
        ]

    def _verify(self, id: str) -> bool:
        """Verify a clip in a process, unless the ranks have work.

        Returns:
            Whether the verification was begun. False if the ranks have work, or another server is
            verifying or has verified the clip.
        """
        if not self._is_idle():
            return False
        with self._queue.lock_clip(id) as is_held:
            job = self._queue.get(id) if is_held else None
            is_wanted = ("running", "none") if self._when_idle else ("running",)
            if job is None or job.verification not in is_wanted:
                return False
            self._cancelled, self.running = None, id
            self._num_begun += 1
            self._last_turns[job.owner] = self._num_begun
            try:
                if not self._queue.set_verification(id, "running"):
                    return False
                result = self._run_process(job)
                if result is not None and self._cancelled != id:
                    self._record(job, result)
            finally:
                self.running = None
        return True

    def _record(self, job: Job, result: dict[str, Any]) -> None:
        if result["equal"] is None:
            error = result["error"]["message"]
            logger.warning("{} could not be verified: {}", job.id, error)
            self._queue.set_verification(job.id, "failed", without_folders(error))
            return
        status: VerificationStatus = "equal" if result["equal"] else "different"
        if status == "different":
            logger.error(
                "{} differs from the clip that one device makes: {}", job.id, result["differences"]
            )
        self._queue.set_verification(job.id, status, without_folders(result["differences"]) or None)
        self._on_result(status)

    def _missing_files(self, job: Job) -> str:
        """Fetch the files that a verification needs from the store; return which are missing.

        Returns:
            Message that names the missing files; empty: none is missing.
        """
        clip = job.clip_path(self._folder)
        needed = {"clip": clip, "clip's JSON": clip.with_suffix(".mp4.json")}
        image = job.input_path(self._folder)
        if image is not None:
            needed["image"] = image
        needed |= job.further_paths(self._folder)
        for path in needed.values():
            self._queue.store.fetch(path)
        missing = [name for name, path in needed.items() if not path.is_file()]
        return f"file missing: the {' and the '.join(missing)}" if missing else ""

    def _run_process(self, job: Job) -> dict[str, Any] | None:
        """Verify a job's clip in a process, and return the result.

        Return None if the process was stopped, because the ranks got work, the request was
        withdrawn, or the server is closing.
        """
        if missing := self._missing_files(job):
            return _error_result(InputError(missing))
        with self._start_process(job) as process:
            while True:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    output, _ = process.communicate(timeout=_POLL_SECONDS)
                    return _parse_result(output, process.returncode)
                is_cancelled = self._cancelled == job.id or self.thread.is_closing
                if is_cancelled or not self._is_idle():
                    return None

    @contextlib.contextmanager
    def _start_process(self, job: Job) -> Iterator[subprocess.Popen[bytes]]:
        """Run the process that verifies a job's clip; end it after the `with` block."""
        clip, image = job.clip_path(self._folder), job.input_path(self._folder)
        process = start_helper(
            "svdpp.serve.verifier",
            *(f"{clip}.json", image or "", os.getpid()),
            variables=os.environ,
            stderr=subprocess.STDOUT,
        )
        with process:
            try:
                yield process
            finally:
                process.terminate()
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(_END_SECONDS)
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)


def _error_result(error: SvdppError) -> dict[str, Any]:
    return {"equal": None, "error": error_to_dict(error)}


def _parse_result(output: bytes, code: int) -> dict[str, Any]:
    with contextlib.suppress(ValueError):
        result = json.loads(output.rpartition(b"\n")[2])
        if isinstance(result, dict):
            return result
    tail = output[-2000:].decode(errors="replace")
    text = f"the verifying process ended with code {code} and no result: {tail}"
    return _error_result(SvdppError(text, details={"exit_code": code, "output": tail}))


# --- code of the process that verifies a clip -----------------------------------------------------


def main(clip: str, image: str, parent: str) -> None:
    """Verify a server's clip in this process, and write the result to stdout as JSON.

    Args:
        clip: Path of the clip's metadata file.
        image: Path of the image; empty for text-to-video.
        parent: Process id of the server. If the server ends, this process ends, too.
    """
    exit_on_signals(exit_with_signal_code)
    end_with_parent(int(parent), signal.SIGTERM)
    os.nice(_NICE)
    tune_gc()
    result = _verify_clip(Path(clip), Path(image) if image else None)
    sys.stdout.write(f"\n{json.dumps(result)}")


def _verify_clip(clip: Path, image: Path | None) -> dict[str, Any]:
    # Imported here, so that the import of torch, which takes seconds, already runs at low priority.
    from svdpp.verification.clip_tasks import VerificationSettings, plan_verification
    from svdpp.verification.clip_verification import verify_clips

    try:
        groups, results = plan_verification(
            [clip], VerificationSettings(image=image, local_files_only=True)
        )
        for tasks in groups:
            _check_gpu(tasks[0].config)
            results += verify_clips(tasks)
        (result,) = results
        return {**result.to_json(), "differences": result.differences}
    except SvdppError as error:
        return _error_result(error)


def _check_gpu(config: PipelineConfig) -> None:
    """Raise an `OutOfMemoryError` unless the GPU has room for a verification beside the ranks."""
    if config.device == "cpu":
        return
    from svdpp.driver.resolve import estimate_ranks, resolve_config
    from svdpp.launch.gpus import free_bytes

    (need,) = estimate_ranks(*resolve_config(config, weights="none"))
    free = free_bytes(config.device)
    if need > free:
        raise OutOfMemoryError(
            f"the whole model needs about {need / 2**30:.1f} GiB on a GPU beside the "
            f"ranks, and {config.device} has {free / 2**30:.1f} GiB free",
            details={
                **{"requested_bytes": round(need), "free_bytes": free},
                "device": config.device,
            },
        )


if __name__ == "__main__":
    main(*sys.argv[1:])
