"""Measures drafts: each rank's frames against the exact clip's, over all example photographs.

It uses the demo model with the defaults of `svdpp run`. The baseline is the plain sampler with as
many steps as the draft takes rounds, which is how to get a clip sooner without svdpp.

    python tests/bench/draft_distance.py [--steps 14,25,28,50] [--worlds 2,4,8] [--photos 4]
"""

from __future__ import annotations

import argparse
import math
import statistics
import time
from collections import defaultdict
from dataclasses import replace

import torch

from svdpp.config import ModelConfig, PipelineConfig, SvdSampling, sampling_defaults
from svdpp.diagnostics.draft_sweep import DraftSimulator
from svdpp.driver.resolve import resolve
from svdpp.media import image as photos
from svdpp.media.distance import Difference, distance
from svdpp.media.examples import example_photos
from svdpp.models import determinism
from svdpp.models.svd.model import SvdModel, load_svd
from svdpp.plan.draft import DraftPlan
from svdpp.plan.draft_starts import default_start_steps
from svdpp.plan.layout import Roles


def load(num_steps: int) -> SvdModel:
    """The demo model for clips of `num_steps` steps."""
    config = PipelineConfig(
        world_size=1,
        model=ModelConfig(name="demo"),
        sampling=SvdSampling(num_inference_steps=num_steps, **sampling_defaults("demo")),
    )
    config, checkpoint = resolve(config)
    assert checkpoint is not None
    roles = Roles(encode=True, denoise=True, decode=True)
    return load_svd(checkpoint, config.model, config.sampling, "cpu", roles)


def measure(
    model: SvdModel, num_steps: int, plans: list[DraftPlan], num_photos: int
) -> dict[tuple[int, ...], list[Difference]]:
    """By start steps of a rank and those before it, its distance on each photograph.

    The key (rounds,) is that of the plain sampler with `rounds` steps.
    """
    found = defaultdict(list)
    sampling = SvdSampling(num_inference_steps=num_steps, **sampling_defaults("demo"))
    for path in example_photos()[:num_photos]:
        photo, _ = photos.read_photo(path)
        fitted = photos.fit_photo(photo, sampling.width, sampling.height, sampling.fit)
        tensors = model.encode(model.prepare(fitted), 0)
        lab = DraftSimulator(model, tensors, num_steps)
        exact = lab.frames((0,))
        for draft_plan in plans:
            for rank in range(1, draft_plan.world_size):
                start_steps = draft_plan.start_steps[: rank + 1]
                found[start_steps].append(distance(lab.frames(start_steps), exact).whole)
            lab.forget(depth=1)
        for rounds in sorted(
            {draft_plan.rounds(draft_plan.world_size - 1) for draft_plan in plans}
        ):
            fewer = model.with_sampling(
                replace(sampling, num_inference_steps=rounds).resolved(model_frames=len(exact))
            )
            tensors = fewer.encode(fewer.prepare(fitted), 0)
            plain = DraftSimulator(fewer, tensors, rounds).frames((0,))
            found[rounds,].append(distance(plain, exact).whole)
    return found


def words(differences: list[Difference]) -> str:
    """The worst and median PSNR over the photographs, and the largest difference."""
    psnr = [each.psnr_db for each in differences]
    most = max(each.max_levels for each in differences)
    if math.isinf(min(psnr)):
        return "equal"
    levels = "1 level" if most == 1 else f"{most} levels"
    return f"{min(psnr):.1f} dB (median {statistics.median(psnr):.1f}), {levels}"


def main() -> None:
    """Prints a table in Markdown."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", default="14,25,28,50")
    parser.add_argument("--worlds", default="2,4,8")
    parser.add_argument("--photos", type=int, default=4)
    options = parser.parse_args()
    determinism.apply_settings(num_threads=1, device="cpu")
    print("| N | starts | rounds | sooner | distance, worst photograph |\n|---|---|---|---|---|")
    for num_steps in map(int, options.steps.split(",")):
        begun = time.monotonic()
        plans = [
            DraftPlan(num_steps=num_steps, start_steps=default_start_steps(num_steps, world))
            for world in map(int, options.worlds.split(","))
        ]
        with torch.no_grad():
            found = measure(load(num_steps), num_steps, plans, options.photos)
        for draft_plan in plans:
            for rank in range(draft_plan.world_size - 1, 0, -1):
                start_steps = (
                    " ".join(map(str, draft_plan.start_steps))
                    if rank == draft_plan.world_size - 1
                    else ""
                )
                rounds = draft_plan.rounds(rank)
                own = draft_plan.start_steps[: rank + 1]
                row = (
                    f"| {num_steps if start_steps else ''} | {start_steps} | {rounds}, rank {rank} "
                )
                row += f"| {num_steps / rounds:.2f}x | {words(found[own])} |"
                print(row, flush=True)
        for rounds in sorted(key[0] for key in found if len(key) == 1):
            row = f"| {num_steps} | plain sampler, {rounds} steps | {rounds} "
            print(row + f"| {num_steps / rounds:.2f}x | {words(found[rounds,])} |")
        print(f"<!-- {time.monotonic() - begun:.0f} s -->", flush=True)


if __name__ == "__main__":
    main()
