"""Compare `svdpp run --layout auto` with a plain script that uses diffusers and accelerate.

    python -m benchmarks.against_accelerate [--repeats 3] [--seeds 4]

Both commands make the same clips with the demo model, from images to mp4 files, in two processes of
one thread each. The commands run one after the other, and each is timed from its start to its end.
The benchmark prints the times of each round and their ratio. The plain script is
`accelerate_script`. It shows the usual way without svdpp: diffusers' pipeline,
`split_between_processes` and `export_to_video`, which needs the package imageio from the extra
`comparison`.
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
from benchmarks.options import options
from svdpp.media.inputs import example_images
from svdpp.media.video import read_frames

_MODEL = Path(svdpp.__file__).parent / "assets" / "demo-model"


def accelerate_script(out: Path, num_seeds: int, images: list[str]) -> None:
    """Animate each image with each seed by diffusers and accelerate, without svdpp."""
    import torch
    from accelerate import PartialState
    from diffusers import StableVideoDiffusionPipeline
    from diffusers.utils import export_to_video, load_image

    torch.set_num_threads(1)
    state = PartialState(cpu=True)
    assert state.num_processes > 1, "needs two processes or more"
    pipe = StableVideoDiffusionPipeline.from_pretrained(_MODEL, dtype=torch.float32)
    pipe.set_progress_bar_config(disable=True)
    out.mkdir(parents=True, exist_ok=True)
    jobs = [(image, seed) for image in images for seed in range(num_seeds)]
    size = {"height": 128, "width": 128, "num_frames": 14}
    with state.split_between_processes(jobs) as own:
        for image, seed in own:
            frames = pipe(
                load_image(image),
                **size,
                num_inference_steps=28,
                motion_bucket_id=40,
                max_guidance_scale=1.1,
                generator=torch.Generator("cpu").manual_seed(seed),
            ).frames[0]
            export_to_video(frames, str(out / f"{Path(image).stem}_{seed}.mp4"), fps=7)


def commands(photos: list[str], num_seeds: int, folder: Path) -> dict[str, list[str]]:
    """Return the commands to compare, `svdpp run` and the plain script, by output folder.

    torchrun starts the plain script, because accelerate starts only one process on the CPU if MPI
    is not installed.
    """
    ours, theirs = str(folder / "svdpp"), str(folder / "accelerate")
    return {
        ours: [
            *(sys.executable, "-m", "svdpp", "run", *photos, "--model", "demo", "--device", "cpu"),
            *("--world", "2", "--threads", "1", "--layout", "auto", "--quiet", "--out", ours),
            *("--seeds", f"0-{num_seeds - 1}"),
        ],
        theirs: [
            *(sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2"),
            *("--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0", __file__),
            *("accelerate", theirs, str(num_seeds), *photos),
        ],
    }


def timed_run(command: list[str], out: Path, num_clips: int) -> float:
    """Run a command, check that all its clips are complete, and return its wall time in seconds."""
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    begun = time.monotonic()
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=env)
    taken = time.monotonic() - begun
    if done.returncode:
        sys.exit(f"{' '.join(command[:6])} ... ended with {done.returncode}:\n{done.stderr}")
    counts = [len(read_frames(path, "mp4")) for path in out.glob("*.mp4")]
    assert counts == [14] * num_clips, counts
    return taken


def main() -> None:
    asked = options(__doc__, repeats=3, seeds=4)
    photos = [str(photo) for photo in example_images()]
    ratios = []
    for repeat in range(asked.repeats):
        with tempfile.TemporaryDirectory() as name:
            both = list(commands(photos, asked.seeds, Path(name)).items())
            taken = {
                Path(out).name: timed_run(command, Path(out), len(photos) * asked.seeds)
                for out, command in (both if repeat % 2 == 0 else both[::-1])
            }
        ratios.append(taken["svdpp"] / taken["accelerate"])
        print(f"round {repeat + 1}: {taken}, ratio {ratios[-1]:.3f}", flush=True)
    print(
        f"median ratio svdpp / accelerate {statistics.median(ratios):.3f} (svdpp is faster below 1)"
    )


if __name__ == "__main__":
    if sys.argv[1:2] == ["accelerate"]:
        accelerate_script(Path(sys.argv[2]), int(sys.argv[3]), sys.argv[4:])
    else:
        main()
