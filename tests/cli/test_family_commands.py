"""`simulate`, `profile`, `bench` and `doctor` with models that take prompts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from svdpp.bench.runner import Bench, read_config
from svdpp.cli.bench import pipeline_config
from svdpp.cli.options.pipeline import PipelineRequest
from svdpp.config import (
    SAMPLING_CLASSES,
    LtxSampling,
    ModelConfig,
    OutputConfig,
    PipelineConfig,
    WanSampling,
)
from svdpp.config.limits import read_costs
from svdpp.diagnostics.machine import measured_config
from svdpp.driver.pipeline import Pipeline
from svdpp.driver.resolve import resolve
from svdpp.media.inputs import EXAMPLE_PROMPT, example_requests
from svdpp.media.video import read_frames, read_sound, write_clip
from svdpp.plan.layout import Roles
from tests.cli.shell import PHOTO, assert_error, parsed, svdpp_here
from tests.models.tiny_families import save_tiny, save_tiny_ltx, save_tiny_wan

ON_CPU = ("--device", "cpu", "--threads", "1")
SIZES = {
    "wan": ("--frames", "5", "--height", "32", "--width", "32", "--max-prompt-tokens", "8"),
    "ltx": ("--frames", "9", "--height", "64", "--width", "96", "--max-prompt-tokens", "8"),
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """A Wan with two experts, and an LTX-Video whose decoder draws noise."""
    wan = save_tiny_wan(tmp_path_factory.mktemp("wan"), boundary_ratio=0.875)
    ltx = save_tiny_ltx(tmp_path_factory.mktemp("ltx"), timestep_conditioning=True)
    return {"wan": str(wan), "ltx": str(ltx)}


def given(command: str, name: str, folders: dict[str, str]) -> tuple[str, ...]:
    """The command line with model, device and sizes."""
    return (command, "--model", folders[name], *ON_CPU, *SIZES[name])


@pytest.mark.parametrize(
    ("name", "options", "said"),
    [
        ("wan", "--layout auto", "layout: data parallel of pairs: a clip takes 3 s and 1 clip "),
        ("wan", "--cfg-parallel auto --layout data-parallel", ", with data parallel 6 s"),
        ("wan", "--cfg-parallel auto", "layout: 1 replica of 2 pairs, balanced: a clip takes"),
        ("wan", "--layout auto --cfg-parallel 1", "layout: data parallel: the next best"),
        ("wan", "--cfg-parallel auto --guidance-scale 1", "; no pairs: the guidance is off"),
        (
            "ltx",
            "--layout auto --cfg-parallel auto",
            "; no pairs: halves of a batch may give other bits",
        ),
    ],
)
def test_auto_chooses_pairs_whose_bits_are_equal(
    name: str, options: str, said: str, folders: dict[str, str]
) -> None:
    command = (*given("run", name, folders), "--prompt", "the sea", "--steps", "6", "--world", "4")
    answer = svdpp_here(*command, *options.split(), "--dry-run")
    assert answer.code == 0, answer
    (line,) = [line for line in answer.err.splitlines() if line.startswith("layout: ")]
    assert said in line
    assert "no times are known: a step counts as 1 s, and all else as 0 s" in line


@pytest.mark.parametrize(
    ("options", "layout"),
    [
        ("--layout auto", "data parallel"),  # with pairs it would refuse clips without guidance
        ("--layout auto --cfg-parallel auto", "data parallel of pairs"),
        ("--cfg-parallel auto", "1 replica of 4 ranks, balanced"),  # two stages are unequal
        (
            "--cfg-parallel auto --share-experts",
            "1 replica of 2 pairs, balanced, shared experts",
        ),
    ],
)
def test_a_server_makes_each_clip_sooner(
    options: str, layout: str, folders: dict[str, str]
) -> None:
    values = parsed(" ".join(("svdpp", *given("serve", "wan", folders), "--world 4", options)))
    how: dict[str, Any] = {"launched": None, "device": "cpu", "from_image": False, "serves": True}
    request = PipelineRequest(options=values["options"], num_clips=1000, **how)
    assert str(request.resolve()[0].layout) == layout


@pytest.mark.processes
@pytest.mark.long
def test_a_profile_is_what_plans_take(folders: dict[str, str], tmp_path: Path) -> None:
    path = tmp_path / "costs.json"
    asked = ("--world", "2", "--repeats", "1", "--out", str(path))
    answer = svdpp_here(*given("profile", "wan", folders), *asked)
    assert answer.code == 0, answer
    costs = read_costs(path)
    assert costs.name.endswith(", 5 frames of 32x32")
    for seconds in (costs.step_seconds, costs.encode_seconds, costs.decode_seconds):
        assert isinstance(seconds, float)
        assert seconds > 0
    assert costs.peak_gib(Roles(encode=True, denoise=True, decode=True))
    planned = svdpp_here(
        *("plan", "--world", "2", "--steps", "10", "--costs", str(path), "--expert-boundary", "4"),
        "--split=balanced",
    )
    assert planned.code == 0, planned


@pytest.mark.parametrize("world_size", range(1, 9))
def test_a_profile_gives_each_rank_a_step_of_its_expert(
    world_size: int, folders: dict[str, str]
) -> None:
    config = PipelineConfig(
        world_size=world_size,
        model=ModelConfig(name=folders["wan"]),
        sampling=WanSampling(height=32, width=32, num_frames=5, flow_shift=8.0),
        split="balanced",
    )
    layout = resolve(measured_config(config))[0].layout
    assert all(rank.denoise for rank in layout.roles)
    assert layout.expert_boundary


def test_example_clips_have_what_the_model_needs(folders: dict[str, str]) -> None:
    model = ModelConfig(name=folders["ltx"])
    text, photo = (
        PipelineConfig(world_size=1, model=model, sampling=LtxSampling(from_image=from_image))
        for from_image in (False, True)
    )
    first, second = example_requests(text, 2, seed=7)
    assert (first.seed, second.seed, first.image) == (7, 8, None)
    assert first.prompt == second.prompt == EXAMPLE_PROMPT
    (request,) = example_requests(photo, 1, prompt="a cat")
    assert request.image is not None
    assert request.prompt == "a cat"


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("profile --model LTX --decode-chunk-size 2", "--decode-chunk-size is for Stable Video"),
        ("simulate --model LTX --flow-shift 3", "no such option '--flow-shift'"),
        ("simulate --model LTX --param stg_scale=3", "has no parameter 'stg_scale'"),
        ("simulate --model LTX --share-experts", "--share-experts is for models with two experts"),
        ("simulate --model demo --prompt cat", "--prompt is not for demo"),
        ("bench LTX.yaml --workload.motion_bucket_id=7", "--motion-bucket-id is not for"),
        ("bench LTX.yaml --workload.guidance_scale_2=7", "has no parameter 'guidance_scale_2'"),
        ("bench LTX.yaml --workload.prompts=[]", "workload.prompts needs 1 or more values, got []"),
        ("bench LTX.yaml --workload.prompts=['']", "--prompt is empty"),
        ("bench smoke --workload.prompts=[cat]", "model 'demo' takes no prompt"),
    ],
)
def test_options_of_another_family_are_refused(
    line: str, words: str, folders: dict[str, str], tmp_path: Path
) -> None:
    names = {"LTX": folders["ltx"], "LTX.yaml": bench_file(tmp_path, "ltx", folders)}
    arguments = [names.get(word, word) for word in line.split()]
    device = () if arguments[0] == "bench" else ("--device", "cpu")
    assert_error(svdpp_here(*arguments, *device), 2, words)


def bench_file(folder: Path, name: str, folders: dict[str, str], **workload: object) -> str:
    """A configuration of a small bench."""
    frames, height, width, tokens = (int(size) for size in SIZES[name][1::2])
    sizes = {"frames": frames, "height": height, "width": width, "max_sequence_length": tokens}
    content = {
        "model": {"name": folders[name]},
        "pipeline": {"world": 2, "device": "cpu", "threads": 1},
        "workload": {"clips": 3, "steps": 4, **sizes, **workload},
        "measure": {"repeats": 1, "warmups": 1, "seeds": [3, 5]},
    }
    path = folder / "mine.yaml"
    path.write_text(yaml.safe_dump(content))
    return str(path)


def bench_of(*arguments: Any, **workload: object) -> Bench:
    point = read_config(bench_file(*arguments, **workload), [])
    return Bench(point, Pipeline(pipeline_config(point)).config)


def test_a_bench_takes_prompts_and_images(folders: dict[str, str], tmp_path: Path) -> None:
    bench = bench_of(tmp_path, "wan", folders, guidance_scale=2.0)
    assert [each.prompt for each in bench.requests] == [EXAMPLE_PROMPT] * 3
    assert [each.seed for each in bench.requests] == [3, 5, 3]
    assert (bench.asked.pipeline.split, bench.config.expert_boundary) == ("balanced", 2)
    assert isinstance(bench.config.sampling, WanSampling)
    assert bench.config.sampling.guidance_scale == 2.0
    given = {"prompts": ["a cat", "the sea"], "images": [PHOTO], "steps": None}
    bench = bench_of(tmp_path, "ltx", folders, **given)
    assert [(each.prompt, each.seed) for each in bench.requests] == [
        *(("a cat", 3), ("the sea", 3), ("a cat", 5)),
    ]
    assert {each.image for each in bench.requests} == {PHOTO}
    assert bench.asked.workload.steps == 50
    assert bench.config.sampling.fps == 25


@pytest.mark.processes
@pytest.mark.long
def test_a_bench_gives_the_bits_of_diffusers(folders: dict[str, str], tmp_path: Path) -> None:
    asked = bench_file(tmp_path, "wan", folders)
    answer = svdpp_here("bench", asked, "--json", "--results", str(tmp_path))
    assert answer.code == 0, answer
    (found,) = json.loads(answer.out)
    assert list(found["cases"]) == ["pipeline", "data parallel", "diffusers"]
    assert found["same_bits"] is True
    assert len(set(found["latents_sha256"])) == 2, "one for each seed: the prompts' ends are cut"


@pytest.mark.processes
def test_a_clip_with_sound_is_made_and_verified(tmp_path: Path) -> None:
    folder = str(save_tiny("ltx2", tmp_path / "model"))
    sizes = ("--frames", "9", "--height", "32", "--width", "32", "--max-prompt-tokens", "8")
    given = ("--prompt", "the sea", "--steps", "3", "--world", "2", "--split", "balanced")
    made = ("--param", "stg_block=1", "--out", str(tmp_path / "out"))
    answer = svdpp_here("run", "--model", folder, *ON_CPU, *sizes, *given, *made)
    assert answer.code == 0, answer.err
    clip = next((tmp_path / "out").glob("*.mp4"))
    record = json.loads(Path(f"{clip}.json").read_text())
    samples, rate = read_sound(clip)
    assert record["audio_sample_rate"] == 16000
    assert (len(samples) > 100, rate) == (True, 48000)
    answer = svdpp_here("verify", str(clip), "--json")
    assert answer.code == 0, answer.err
    checks = json.loads(answer.out)["checks"]
    assert {check["what"]: check["equal"] for check in checks} == dict.fromkeys(
        ("latent", "frames", "audio", "file"), True
    )
    silence = np.zeros((132, 2), np.int16)
    metadata = {**record, "audio_sha256": "0" * 64}
    del metadata["file_sha256"]
    output = OutputConfig(path=str(clip))
    sha256 = write_clip(
        read_frames(clip, "mp4"), output, fps=24, metadata=metadata, sound=(silence, 16000)
    )
    Path(f"{clip}.json").write_text(json.dumps({**metadata, "file_sha256": sha256}))
    answer = svdpp_here("verify", str(clip), "--json")
    wrong = [each for each in json.loads(answer.out)["checks"] if not each["equal"]]
    assert [each["what"] for each in wrong] == ["audio", "file"]
    assert "its sound is not that of the recomputed samples" in wrong[1]["detail"]


def test_the_families_are_listed_with_their_parameters() -> None:
    listed = json.loads(svdpp_here("models", "--json").out)["families"]
    assert [each["family"] for each in listed] == list(SAMPLING_CLASSES)
    ltx2 = svdpp_here("models", "ltx2").out
    assert "\n--param stg_scale " in ltx2
    assert "LTX2ImageToVideoPipeline" in ltx2
    assert_error(svdpp_here("models", "sora"), 2, "there is no family or model 'sora'")
    assert_error(svdpp_here("models", "./sora"), 5, "there is no folder './sora'")


def test_a_checkpoint_is_shown(folders: dict[str, str]) -> None:
    about = json.loads(svdpp_here("models", folders["ltx"], "--json").out)["families"][0]
    assert (about["family"], about["inputs"]) == ("ltx", ["text", "an image"])
    assert "unet" in svdpp_here("models", "demo").out
    assert "experts: 2" in svdpp_here("models", folders["wan"]).out


def test_a_size_that_the_model_cannot_make_is_one_sentence(folders: dict[str, str]) -> None:
    """The tiny model's table of positions ends before those of the default size."""
    asked = ("--prompt", "a cat", "--steps", "4", "--gpus", "2", "--dry-run")
    answer = svdpp_here("run", "--model", folders["wan"], *ON_CPU, *asked)
    assert_error(answer, 2, "cannot make a clip of 832x480 and 81 frames", "--height")
