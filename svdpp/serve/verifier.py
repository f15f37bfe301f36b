"""Verification of finished clips on one device, on request or when the ranks are idle.

Each runs in a process of low priority, as `svdpp verify CLIP` does it, and is ended at once when
work arrives for the ranks. This module is also that process: `verifier JSON INPUT PARENT_PID`,
where INPUT is empty for a clip from text alone. Its last line of output is the result.
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

_POLL_SECONDS = 0.05
# Seconds between looks for idle time. In a fleet, each look is a query of the shared database.
_LOOK_SECONDS, _SHARED_LOOK_SECONDS = 0.5, 10.0
# Seconds for a process to remove its temporary files when it is ended.
_END_SECONDS = 5.0
_NICE = 19


class Verifier:
    """Verifier of clips, one at a time, requested ones first. Any thread may call it.

    Owners take turns, so that nobody's requests keep another's waiting.

    With `when_idle` clips are verified without a request, the newest first. What is stopped stays
    requested. `on_verdict` is called in the verifier's thread.
    """

    def __init__(
        self,
        queue: JobQueue,
        is_idle: Callable[[], bool],
        *,
        when_idle: bool = False,
        on_verdict: Callable[[VerificationStatus], None] = lambda _: None,
    ) -> None:
        self._queue = queue
        self._folder = queue.store.folder
        self._is_idle = is_idle
        self._when_idle = when_idle
        self._on_verdict = on_verdict
        self.running: str | None = None
        """The id of the job that is being verified."""
        self._cancelled: str | None = None
        self._num_begun = 0
        self._last_turns: dict[str, int] = {}
        """Number of the last verification that was begun for each owner."""
        seconds = _SHARED_LOOK_SECONDS if queue.is_shared else _LOOK_SECONDS
        error_message = "the verification of a clip failed"
        self.thread = PeriodicThread(
            "verifier", self._run_once, seconds, error_message=error_message
        )
        """The thread, which also answers the requests to earlier servers."""

    def request(self, id: str) -> bool:
        """Have a completed clip verified once the ranks are idle.

        Returns:
            Whether it will be verified. False for a clip that is not completed, or whose video was
            not written.
        """
        job = self._queue.get(id)
        if job is None or job.state is not JobState.COMPLETED or "file_sha256" not in job.metadata:
            return False
        is_taken = self._queue.set_verification(id, "running")
        self.thread.wake()
        return is_taken

    def cancel(self, id: str) -> None:
        """Drop the request to verify a clip; soon nothing reads its files."""
        self._queue.set_verification(id, "none")
        self._cancelled = id

    # --- the verifier's thread --------------------------------------------------------------------

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
        """Verifies a clip; False if another server does or did, or the ranks have work."""
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
        verdict: VerificationStatus = "equal" if result["equal"] else "different"
        if verdict == "different":
            logger.error("{} is DIFFERENT from one device: {}", job.id, result["differences"])
        self._queue.set_verification(
            job.id, verdict, without_folders(result["differences"]) or None
        )
        self._on_verdict(verdict)

    def _missing_files(self, job: Job) -> str:
        """Which file the verification lacks, also after a look in the store; empty if none."""
        clip = job.clip_path(self._folder)
        needed = {"clip": clip, "clip's JSON": clip.with_suffix(".mp4.json")}
        needed |= {"image": photo} if (photo := job.input_path(self._folder)) else {}
        needed |= job.further_paths(self._folder)
        for path in needed.values():
            self._queue.store.fetch(path)
        missing = [name for name, path in needed.items() if not path.is_file()]
        return f"file missing: the {' and the '.join(missing)}" if missing else ""

    def _run_process(self, job: Job) -> dict[str, Any] | None:
        """Verify a clip in a process; return its result, None if it was stopped."""
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
        """Start the process that verifies a job's clip; end it and its children after the block."""
        clip, photo = job.clip_path(self._folder), job.input_path(self._folder)
        process = start_helper(
            "svdpp.serve.verifier",
            *(f"{clip}.json", photo or "", os.getpid()),
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
    text = f"its process ended with code {code} without an answer: {tail}"
    return _error_result(SvdppError(text, details={"exit_code": code, "output": tail}))


# --- the process ----------------------------------------------------------------------------------


def main(clip: str, photo: str, parent: str) -> None:
    """Verify the clip and write the answer."""
    exit_on_signals(exit_with_signal_code)
    end_with_parent(int(parent), signal.SIGTERM)
    os.nice(_NICE)
    tune_gc()
    result = _verify_clip(Path(clip), Path(photo) if photo else None)
    sys.stdout.write(f"\n{json.dumps(result)}")


def _verify_clip(clip: Path, photo: Path | None) -> dict[str, Any]:
    # Imported late: torch takes seconds, and by then the process has its low priority.
    from svdpp.verification.clip_verification import (
        VerificationSettings,
        plan_verification,
        verify_clips,
    )

    try:
        groups, proofs = plan_verification(
            [clip], VerificationSettings(image=photo, local_files_only=True)
        )
        for tasks in groups:
            _check_gpu(tasks[0].config)
            proofs += verify_clips(tasks)
        (proof,) = proofs
        return {**proof.to_json(), "differences": proof.differences}
    except SvdppError as error:
        return _error_result(error)


def _check_gpu(config: PipelineConfig) -> None:
    """Refuse a GPU on which the ranks leave too little: they must not run out of memory."""
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
