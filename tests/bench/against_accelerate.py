"""Compares `svdpp run --layout auto` with a plain script of diffusers and accelerate.

Both make the same clips with the demo model, from images to mp4 files, in two processes of one
thread each. They run in turn, timed from the command's start to its end. Prints each round and the
ratio.

    python tests/bench/against_accelerate.py [--repeats 3] [--seeds 4]
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import svdpp
from svdpp.media.inputs import example_photos
from svdpp.media.video import read_frames
from tests.bench.options import options

_MODEL = Path(svdpp.__file__).parent / "assets" / "demo-model"
_SCRIPT = Path(__file__).with_name("accelerate_script.py")


def ours(photos: list[str], num_seeds: int, out: Path) -> list[str]:
    return [
        *(sys.executable, "-m", "svdpp", "run", *photos, "--model", "demo", "--device", "cpu"),
        *("--world", "2", "--threads", "1", "--layout", "auto", "--seeds", f"0-{num_seeds - 1}"),
        *("--quiet", "--out", str(out)),
    ]


def theirs(photos: list[str], num_seeds: int, out: Path) -> list[str]:
    """The command line of the script; by torchrun, because without MPI `accelerate launch` starts
    only one CPU process."""
    return [
        *(sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2"),
        *("--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0", str(_SCRIPT), str(_MODEL)),
        *(str(out), str(num_seeds), *photos),
    ]


def seconds(command: list[str], out: Path, num_clips: int) -> float:
    """The wall seconds of `command`; checks that its clips exist and are complete."""
    begun = time.monotonic()
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    taken = time.monotonic() - begun
    if done.returncode:
        sys.exit(f"{' '.join(command[:6])} ... ended with {done.returncode}:\n{done.stderr}")
    counts = [len(read_frames(path, "mp4")) for path in out.glob("*.mp4")]
    assert counts == [14] * num_clips, counts
    return taken


def main() -> None:
    asked = options(__doc__, repeats=3, seeds=4)
    photos = [str(photo) for photo in example_photos()]
    num_clips = len(photos) * asked.seeds
    ratios = []
    for repeat in range(asked.repeats):
        with tempfile.TemporaryDirectory() as name:
            mine = Path(name, "svdpp")
            plain = Path(name, "accelerate")
            both = (
                (ours(photos, asked.seeds, mine), mine),
                (theirs(photos, asked.seeds, plain), plain),
            )
            order = both if repeat % 2 == 0 else both[::-1]
            taken = {out.name: seconds(command, out, num_clips) for command, out in order}
        ratios.append(taken["svdpp"] / taken["accelerate"])
        print(
            f"round {repeat + 1}: {num_clips} clips, svdpp {taken['svdpp']:.1f} s, "
            f"accelerate {taken['accelerate']:.1f} s, ratio {ratios[-1]:.3f}",
            flush=True,
        )
    print(f"median ratio svdpp / accelerate {statistics.median(ratios):.3f}: below 1 is faster")


if __name__ == "__main__":
    main()
