"""The usual way without svdpp: a plain diffusers script over several processes, by accelerate.

    torchrun --nproc-per-node=2 accelerate_script.py MODEL OUT SEEDS IMAGE...

It uses diffusers' pipeline, `split_between_processes` and `export_to_video` (which needs the
package imageio, from the extra `comparison`). `against_accelerate.py` runs it.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from accelerate import PartialState
from diffusers import StableVideoDiffusionPipeline
from diffusers.utils import export_to_video, load_image


def main(model: str, out: Path, num_seeds: int, images: list[str]) -> None:
    """Animates each image with each seed, at the demo model's settings."""
    torch.set_num_threads(1)
    state = PartialState(cpu=True)
    assert state.num_processes > 1, "needs two processes or more"
    pipe = StableVideoDiffusionPipeline.from_pretrained(model, dtype=torch.float32)
    pipe.set_progress_bar_config(disable=True)
    out.mkdir(parents=True, exist_ok=True)
    jobs = [(image, seed) for image in images for seed in range(num_seeds)]
    with state.split_between_processes(jobs) as own:
        for image, seed in own:
            frames = pipe(
                load_image(image),
                height=128,
                width=128,
                num_frames=14,
                num_inference_steps=28,
                motion_bucket_id=40,
                max_guidance_scale=1.1,
                generator=torch.Generator("cpu").manual_seed(seed),
            ).frames[0]
            export_to_video(frames, str(out / f"{Path(image).stem}_{seed}.mp4"), fps=7)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]), sys.argv[4:])
