"""One life of the soak: makes the missing clips until all are done or a fault ends it.

    python tests/soak/worker.py FOLDER NUM_CLIPS

Each finished clip leaves `FOLDER/done/<clip>.json`, written atomically; latent checkpoints are in
`FOLDER/checkpoints`. A line on stdout says when the ranks are ready, with their pids.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
from pathlib import Path

import click

from svdpp.cli.command import answered
from svdpp.cli.console import Console
from svdpp.config import ClipRequest, ModelConfig, PipelineConfig, SvdSampling
from svdpp.driver.pipeline import Pipeline
from svdpp.media import output_files
from svdpp.plan.costs import Costs
from svdpp.worker.tensor_files import saved_steps

CONFIG = PipelineConfig(
    world_size=4,
    # Steps sleep half a second, whatever the machine's load, so that faults hit every place.
    model=ModelConfig(name="dummy", dummy_latent_shape=(1, 4, 14, 32, 32), dummy_sleeps=True),
    costs=Costs(step_seconds=0.5),
    sampling=SvdSampling(num_inference_steps=28),
    heartbeat_timeout_seconds=15.0,
    checksum=True,
)


def missing(folder: Path, num_clips: int) -> list[int]:
    """Clips without a result."""
    done = {int(path.stem) for path in (folder / "done").glob("*.json")}
    return [clip for clip in range(num_clips) if clip not in done]


def requests(folder: Path, clips: list[int]) -> list[ClipRequest]:
    """One request for each of `clips`, which resume from their latest latent checkpoints."""
    found = []
    for clip in clips:
        key = hashlib.sha256(f"soak {clip}".encode()).hexdigest()
        kept = saved_steps(folder / "checkpoints", key)
        found.append(ClipRequest(seed=clip, latents_key=key, done_steps=max(kept, default=0)))
    return found


def _say(**what: object) -> None:
    print(json.dumps(what), flush=True)


def work(folder: Path, num_clips: int) -> None:
    """Makes the missing clips."""
    clips = missing(folder, num_clips)
    todo = requests(folder, clips)
    with Pipeline(CONFIG, latents_folder=str(folder / "checkpoints")) as pipeline:
        group = pipeline._entered._group
        resumed = sum(request.done_steps > 0 for request in todo)
        _say(ready=group.pids, resumed=resumed)
        pipeline.submit(todo)
        for result in pipeline.results():
            record = {
                "latents_sha256": result.metadata["latents_sha256"],
                "rss_bytes": _rss_bytes(),
            }
            output_files.write_json(folder / "done" / f"{clips[result.clip]}.json", record)


def _rss_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


if __name__ == "__main__":
    try:
        with answered(Console(), debug=False):
            work(folder=Path(sys.argv[1]), num_clips=int(sys.argv[2]))
    except click.exceptions.Exit as ended:
        sys.exit(ended.exit_code)
