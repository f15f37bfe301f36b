"""Every row, cut after every step: packets, latents and frames of diffusers' whole `__call__`."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import pytest
import torch
from diffusers.pipelines.hunyuan_video1_5.image_processor import (
    generate_crop_size_list,
    get_closest_ratio,
)

from svdpp.config import SAMPLING_CLASSES, SamplingConfig
from svdpp.errors import ModelError, RequestError
from svdpp.models.engine.hunyuan import image_sizes
from svdpp.models.engine.rows import REFUSED
from svdpp.models.memory import estimate, num_bytes
from tests.models.diffusers_pipeline import whole_clip
from tests.models.range_checks import (
    check_every_cut,
    loaded,
    model_of,
    photograph,
    ranks,
    read_folder,
    request_of,
)
from tests.models.tiny_rows import save_tiny

pytestmark = pytest.mark.usefixtures("one_thread")

STEPS = 3
SIZES: dict[str, Any] = {"num_inference_steps": STEPS, "max_sequence_length": 8}
KANDINSKY = {"height": 32, "width": 32, "num_frames": 17, "max_sequence_length": 1024}
LTX = {"height": 64, "width": 64, "num_frames": 9}
LTX2 = {"height": 32, "width": 32, "num_frames": 9, "stg_block": 1}
DPM = diffusers.CogVideoXDPMScheduler(prediction_type="v_prediction", timestep_spacing="trailing")


@dataclass(frozen=True)
class Case:
    """A tiny checkpoint and a clip of it."""

    family: str
    sampling: dict[str, Any]
    image: bool = False
    changes: dict[str, Any] = field(default_factory=dict)

    def config(self, **changes: Any) -> SamplingConfig:
        """The clip's sampling parameters."""
        kind: Any = SAMPLING_CLASSES[self.family]
        values = {**SIZES, **self.sampling, **changes}
        config: SamplingConfig = kind(**values, from_image=self.image)
        return config


CASES = {
    "ltx2": Case("ltx2", LTX2),
    "ltx2-image": Case("ltx2", {**LTX2, "stg_scale": 0.0, "audio_stg_scale": 0.0}, image=True),
    "hunyuan-video": Case("hunyuan_video", {"height": 16, "width": 16, "num_frames": 9}),
    "hunyuan-video-image": Case(
        "hunyuan_video",
        {"height": 16, "width": 16, "num_frames": 9, "max_sequence_length": 420},
        image=True,
    ),
    "framepack": Case("framepack", {"height": 32, "width": 32, "num_frames": 37}, image=True),
    "framepack-chunks": Case(
        "framepack",
        {"height": 32, "width": 32, "num_frames": 109, "num_inference_steps": 6},
        image=True,
    ),
    "hunyuan-video-1.5-image": Case(
        "hunyuan_video_15", {"height": 16, "width": 16, "num_frames": 9}, image=True
    ),
    "hunyuan-video-1.5": Case("hunyuan_video_15", {"height": 16, "width": 16, "num_frames": 9}),
    "cogvideox": Case("cogvideox", {"height": 32, "width": 32, "num_frames": 9}),
    "cogvideox-dpm": Case(
        "cogvideox", {"height": 32, "width": 32, "num_frames": 9}, changes={"scheduler": DPM}
    ),
    "cogvideox-image": Case("cogvideox", {"height": 32, "width": 32, "num_frames": 9}, image=True),
    "skyreels-v2": Case("skyreels_v2", {"height": 16, "width": 16, "num_frames": 9}),
    "skyreels-v2-image": Case(
        "skyreels_v2", {"height": 16, "width": 16, "num_frames": 9}, image=True
    ),
    "skyreels-v2-df": Case("skyreels_v2_df", {"height": 16, "width": 16, "num_frames": 9}),
    "ltx-condition": Case("ltx_condition", LTX),
    "ltx-condition-image": Case(
        "ltx_condition", {**LTX, "decode_timestep": 0.05, "decode_noise_scale": 0.025}, image=True
    ),
    "kandinsky5": Case("kandinsky5", KANDINSKY),
    "kandinsky5-image": Case("kandinsky5", KANDINSKY, image=True),
    "wan-vace": Case("wan_vace", {"height": 32, "width": 32, "num_frames": 9}),
    "wan-vace-image": Case("wan_vace", {"height": 32, "width": 32, "num_frames": 9}, image=True),
    "latte": Case("latte", {"height": 16, "width": 16, "num_frames": 2}),
    "mochi": Case("mochi", {"height": 16, "width": 16, "num_frames": 7}),
}

#: The rows that have tests of their own.
OTHERS = {
    "wan": Case("wan", {"height": 16, "width": 16, "num_frames": 9}),
    "wan-image": Case("wan", {"height": 16, "width": 16, "num_frames": 9}, image=True),
    "ltx": Case("ltx", LTX),
    "ltx-image": Case("ltx", LTX, image=True),
}


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Any]:
    """The tiny checkpoint of each case, saved once."""

    @functools.cache
    def checkpoint(name: str) -> Any:
        case, folder = {**CASES, **OTHERS}[name], tmp_path_factory.mktemp(name)
        return read_folder(save_tiny(case.family, folder, image=case.image, **case.changes))

    return checkpoint


#: Rows of which another case is cut in `make test`.
AGAIN = {
    *("ltx2", "framepack", "hunyuan-video-1.5", "skyreels-v2", "cogvideox", "wan-vace"),
    *("ltx-condition", "kandinsky5", "hunyuan-video"),
}


@pytest.mark.parametrize(
    "name",
    [pytest.param(each, marks=pytest.mark.long) if each in AGAIN else each for each in CASES],
)
def test_every_cut_gives_the_bits_of_the_whole_call(
    checkpoints: Callable[[str], Any], name: str
) -> None:
    case, checkpoint = CASES[name], checkpoints(name)
    sampling = checkpoint.resolve(case.config())
    request, image = request_of(), photograph() if case.image else None
    latents, frames, audio = whole_clip(model_of(checkpoint), sampling, request, image)
    rank_for, steps = ranks(checkpoint, sampling), sampling.num_inference_steps
    check_every_cut(rank_for, steps, (latents, frames), request, image)
    assert (audio is None) == (checkpoint.row.vocoder is None)
    if audio is not None:
        ours = rank_for(steps, steps).audio
        assert ours is not None
        assert torch.equal(ours.samples, audio.samples)
        assert audio.samples.unique().numel() > 1
        assert ours.rate == audio.rate
    assert {*loaded(rank_for(0, 1))} == {*checkpoint.row.denoisers} & {*checkpoint.weighted}


QUICK = "ltx2"


@pytest.mark.parametrize(
    "name",
    [name if name == QUICK else pytest.param(name, marks=pytest.mark.long) for name in CASES],
)
def test_the_estimate_runs_the_call_without_weights(
    checkpoints: Callable[[str], Any], name: str
) -> None:
    case, checkpoint = CASES[name], checkpoints(name)
    sampling = checkpoint.resolve(case.config())
    estimated = estimate(checkpoint, model_of(checkpoint), sampling, device="cpu")
    rank_for, steps = ranks(checkpoint, sampling), sampling.num_inference_steps
    encoder = rank_for(0, 0)
    for part, model in (
        ("encode", encoder),
        ("denoise", rank_for(0, 1)),
        ("decode", rank_for(steps, steps)),
    ):
        memory = getattr(estimated, part)
        assert memory.weight_bytes == num_bytes(loaded(model).values()), part
        assert min(memory.activation_bytes, memory.flops) > 0
    packet = encoder.encode(
        encoder.prepare(photograph()) if case.image else {}, request_of("a cat")
    )
    shapes = {key: each.shape for key, each in packet.items() if key != "structure"}
    probe = encoder.probe_packet()
    assert {key: each.shape for key, each in probe.items() if key != "structure"} == shapes


@pytest.mark.parametrize("name", REFUSED)
def test_pipelines_that_cannot_be_right_are_refused_by_name(tmp_path: Path, name: str) -> None:
    assert hasattr(diffusers, name)
    (tmp_path / "model_index.json").write_text(json.dumps({"_class_name": name}))
    with pytest.raises(ModelError, match=re.escape(REFUSED[name])):
        read_folder(tmp_path)


REFUSALS: list[tuple[str, dict[str, Any], str]] = [
    ("hunyuan-video-1.5-image", {"height": 16, "width": 48}, "no clips of --height 16 --width 48"),
    ("framepack", {"num_inference_steps": 3, "num_frames": 73}, "a multiple of 2, got 3"),
    ("framepack", {"num_frames": 1}, "--frames must be 37 or more"),
    ("framepack", {"num_frames": 38}, "nearest: --frames 37 or --frames 73"),
    ("kandinsky5-image", {"num_frames": 13}, "--frames must be at least 17"),
    ("skyreels-v2-df", {"num_frames": 101}, "--frames must be at most 97"),
]


@pytest.mark.parametrize(("name", "changes", "words"), REFUSALS)
def test_what_a_row_cannot_run_is_refused(
    checkpoints: Callable[[str], Any], name: str, changes: dict[str, Any], words: str
) -> None:
    with pytest.raises(RequestError) as caught:
        checkpoints(name).resolve(CASES[name].config(**changes))
    assert words in f"{caught.value.message} {caught.value.hint}"


@pytest.mark.parametrize(
    ("name", "options", "words"),
    [
        ("hunyuan-video-image", {"image_condition_type": "latent_concat"}, "first four frames"),
        ("kandinsky5", {"attention_type": "nabla"}, "sparse attention"),
    ],
)
def test_transformers_that_a_row_does_not_cover_are_refused(
    tmp_path: Path, name: str, options: dict[str, str], words: str
) -> None:
    case = CASES[name]
    save_tiny(case.family, tmp_path, image=case.image)
    config = tmp_path / "transformer" / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), **options}))
    with pytest.raises(ModelError, match=words):
        read_folder(tmp_path)


def test_sizes_for_an_image_are_those_of_the_pipeline() -> None:
    for target, unit in ((640, 16), (960, 16), (16, 4)):
        ours, theirs = image_sizes(target, unit), generate_crop_size_list(target, unit)
        ratios = np.array([round(h / w, 5) for h, w in theirs])
        fitting = theirs[1:-1]  # diffusers fails for the first or last, by its rounding
        kept = [size for size in fitting if get_closest_ratio(*size, ratios, theirs)[0] == size]
        assert [size for size in ours if size in fitting] == kept
        assert len(kept) > 1
