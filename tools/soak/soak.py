"""Soak test of a pipeline: kill, stop and signal a run repeatedly, resume it, and count lost clips.

    make soak        or        python -m tools.soak.soak [--clips 200] [--minutes 30] [--seed 0]

The run makes 200 clips of the dummy model on 4 ranks. About once a minute a random fault occurs: a
rank or the parent process is killed, a rank is stopped, or the parent gets a signal. After each
fault the run is started again. The soak prints one line for each start of the run. At the end it
prints the numbers of hangs, orphaned processes and wrong clips, which must be 0. It also prints the
growth of the parent's memory, which must be at most 5%. If a number is wrong, the exit code is 1.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import torch
import typer

from benchmarks.options import options
from svdpp.cli.console import Console
from svdpp.cli.failures import report_errors
from svdpp.config import ClipRequest, LatentSpec, ModelConfig, PipelineConfig, SvdSampling
from svdpp.driver.pipeline import Pipeline
from svdpp.media import output_files
from svdpp.models.base import LATENTS
from svdpp.models.dummy import DummyModel
from svdpp.plan.costs import CostModel
from svdpp.worker import device
from svdpp.worker.tensor_files import saved_steps, tensor_sha256
from tests.support.processes import MARK, marked

CONFIG = PipelineConfig(
    world_size=4,
    # Steps sleep for half a second, which does not depend on the machine's load. So there is time
    # for faults to hit every kind of action.
    model=ModelConfig(name="dummy", dummy_latent_shape=(1, 4, 14, 32, 32), dummy_sleeps=True),
    costs=CostModel(step_seconds=0.5),
    sampling=SvdSampling(num_inference_steps=28),
    heartbeat_timeout_seconds=15.0,
    checksum=True,
)
# Maximum seconds from a fault to the end of the run: the heartbeat timeout, and the time to stop.
END_SECONDS = CONFIG.heartbeat_timeout_seconds + 10.0
FAULTS = {
    "kill a rank": ("rank", signal.SIGKILL),
    "freeze a rank": ("rank", signal.SIGSTOP),
    "interrupt a rank": ("rank", signal.SIGINT),
    "kill the parent": ("parent", signal.SIGKILL),
    "end the parent": ("parent", signal.SIGTERM),
    "Ctrl-C": ("parent", signal.SIGINT),
}


@dataclass
class Tally:
    """Counters of the soak test: runs, faults, hangs, and processes and files that were left."""

    lives: int = 0
    faults: Counter[str] = field(default_factory=Counter)
    hangs: int = 0
    orphans: int = 0
    litter: set[str] = field(default_factory=set)
    resumed: int = 0
    growth: list[float] = field(default_factory=list)


def main() -> int:
    """Run the soak test of a pipeline until no clip is missing; return the exit code."""
    asked = options(__doc__, clips=200, minutes=30.0, seconds_between=60.0, seed=0)
    chance = random.Random(asked.seed)
    begun, tally = time.monotonic(), Tally()
    with tempfile.TemporaryDirectory(prefix="soak-") as name:
        folder = Path(name)
        for part in ("done", "checkpoints", "tmp"):
            (folder / part).mkdir()
        while missing(folder, asked.clips) and time.monotonic() - begun < asked.minutes * 60:
            live(folder, asked.clips, chance, asked.seconds_between, tally)
        left = missing(folder, asked.clips)
        bad = wrong_clips(folder)
        litter = tally.litter | {path.name for path in (folder / "checkpoints").iterdir()}
    minutes = (time.monotonic() - begun) / 60
    growth = max(tally.growth, default=0.0)
    print(f"{asked.clips - len(left)} of {asked.clips} clips in {minutes:.1f} min, ", end="")
    print(f"starts of the run: {tally.lives}, clips resumed from a checkpoint: {tally.resumed}")
    print("faults:", ", ".join(f"{what} {count}" for what, count in sorted(tally.faults.items())))
    print(f"hangs {tally.hangs}, orphans {tally.orphans}, wrong clips {len(bad)}, ", end="")
    print(f"files left {sorted(litter) or 0}, growth of the parent's memory {growth:.1%} at most")
    failed = left or bad or tally.hangs or tally.orphans or litter or growth > 0.05
    return int(bool(failed))


def live(folder: Path, clips: int, chance: random.Random, between: float, tally: Tally) -> None:
    """Start the run, inject one fault, wait until the run has ended, and count what it left."""
    tally.lives += 1
    before = set((folder / "done").iterdir())
    environment = {**os.environ, MARK: folder.name, "TMPDIR": str(folder / "tmp")}
    with (folder / "errors.txt").open("w") as errors:
        worker = subprocess.Popen(
            [sys.executable, "-m", "tools.soak.soak", "work", str(folder), str(clips)],
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            env=environment,
        )
        assert worker.stdout is not None
        said = json.loads(worker.stdout.readline() or "{}")
        tally.resumed += said.get("resumed", 0)
        what = _disturb(worker, said.get("ready", []), chance, between)
        fault_at = time.monotonic()
        try:
            worker.wait(END_SECONDS if what else None)
        except subprocess.TimeoutExpired:
            tally.hangs += 1
            worker.kill()
            worker.wait()
    tally.faults[what or "left alone"] += 1
    seconds = time.monotonic() - fault_at
    tally.orphans += _wait_for_none_left(folder.name)
    tally.litter |= {path.name for path in (folder / "tmp").iterdir()}
    new = sorted(set((folder / "done").iterdir()) - before, key=lambda path: path.stat().st_mtime)
    tally.growth += _growth(new)
    last_words = (folder / "errors.txt").read_text().strip().splitlines()
    print(
        f"start {tally.lives}: new clips {len(new)}, {what or 'left alone'}, "
        f"exit code {worker.returncode} after {seconds:.1f} s: "
        f"{last_words[-1][:100] if last_words else ''}",
        flush=True,
    )


def _disturb(
    worker: subprocess.Popen[str], ranks: list[int], chance: random.Random, between: float
) -> str:
    """Wait for a random time, then kill, stop or signal a rank or the parent; return the fault.

    The result is the fault's name, or an empty string if the run ended before the fault.
    """
    until = time.monotonic() + chance.uniform(0.5, 1.5) * between
    while time.monotonic() < until:
        if worker.poll() is not None:
            return ""
        time.sleep(0.05)
    what = chance.choice(sorted(FAULTS))
    target, number = FAULTS[what]
    try:
        os.kill(chance.choice(ranks) if target == "rank" else worker.pid, number)
    except ProcessLookupError:
        return ""  # the process had already ended
    return what


def _wait_for_none_left(mark: str) -> int:
    """Return how many processes of the run still exist after a second, and kill them."""
    deadline = time.monotonic() + 1.0
    while (left := marked(mark)) and time.monotonic() < deadline:
        time.sleep(0.05)
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    return len(left)


def _growth(results: list[Path]) -> list[float]:
    """Return the relative growth of the parent's memory from its second to its last clip.

    The list has one number, or none if there are fewer than three clips.
    """
    sizes = [json.loads(path.read_text())["rss_bytes"] for path in results[1:]]
    return [sizes[-1] / sizes[0] - 1] if len(sizes) > 1 else []


def wrong_clips(folder: Path) -> list[int]:
    """Return the indices of finished clips whose latent differs from that of a plain loop."""
    device.apply_settings(num_threads=CONFIG.num_threads, device="cpu")
    shape, steps = CONFIG.model.dummy_latent.shape, CONFIG.sampling.num_inference_steps
    model = DummyModel(LatentSpec(shape=shape), steps, torch.device("cpu"))
    wrong = []
    for path in (folder / "done").iterdir():
        latent = model.encode({}, ClipRequest(seed=int(path.stem)))[LATENTS]
        latent = model.denoise({LATENTS: latent}, 0, steps, lambda *_: None)[LATENTS]
        if tensor_sha256(latent) != json.loads(path.read_text())["latents_sha256"]:
            wrong.append(int(path.stem))
    return wrong


# --- code of the run's process: make missing clips until all are done or a fault ends the run -----


def missing(folder: Path, num_clips: int) -> list[int]:
    """Return the indices of the soak test's clips that have no result yet."""
    done = {int(path.stem) for path in (folder / "done").glob("*.json")}
    return [clip for clip in range(num_clips) if clip not in done]


def resuming_requests(folder: Path, clips: list[int]) -> list[ClipRequest]:
    """Return a request for each clip, which resumes from the clip's latest latent checkpoint."""
    found = []
    for clip in clips:
        key = hashlib.sha256(f"soak {clip}".encode()).hexdigest()
        kept = saved_steps(folder / "checkpoints", key)
        found.append(ClipRequest(seed=clip, latents_key=key, done_steps=max(kept, default=0)))
    return found


def _say(**what: object) -> None:
    print(json.dumps(what), flush=True)


def work(folder: Path, num_clips: int) -> None:
    """Make the soak test's clips that have no result yet, and save the result of each."""
    clips = missing(folder, num_clips)
    todo = resuming_requests(folder, clips)
    with Pipeline(CONFIG, latents_folder=str(folder / "checkpoints")) as pipeline:
        group = pipeline._running_supervisor._group
        resumed = sum(request.done_steps > 0 for request in todo)
        _say(ready=group.pids, resumed=resumed)
        pipeline.submit(todo)
        for result in pipeline.results():
            rss = psutil.Process().memory_info().rss
            record = {"latents_sha256": result.metadata["latents_sha256"], "rss_bytes": rss}
            output_files.write_json(folder / "done" / f"{clips[result.clip]}.json", record)


if __name__ == "__main__":
    if sys.argv[1:2] != ["work"]:
        sys.exit(main())
    try:
        with report_errors(Console(), debug=False):
            work(folder=Path(sys.argv[2]), num_clips=int(sys.argv[3]))
    except typer.Exit as ended:
        sys.exit(ended.exit_code)
