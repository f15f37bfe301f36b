"""Commands with models that take prompts, videos, references or LoRAs; a clip with sound."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from svdpp.config import (
    SAMPLING_CLASSES,
    ModelConfig,
    OutputConfig,
    ParallelConfig,
    PipelineConfig,
    WanSampling,
)
from svdpp.config.cost_files import read_costs
from svdpp.diagnostics.machine import measured_config
from svdpp.driver.resolve import resolve_config
from svdpp.media.inputs import example_images
from svdpp.media.video import read_audio, read_frames, write_clip
from svdpp.plan.roles import Roles
from tests.support.builders import save_tiny_lora
from tests.support.gguf_writer import save_gguf
from tests.support.pictures import save_video
from tests.support.shell import PHOTO, Answer, assert_error, parsed, svdpp_here
from tests.support.tiny_families import save_tiny, save_tiny_ltx, save_tiny_wan

ON_CPU = "--device cpu --threads 1"
SMALL = "--frames 5 --height 32 --width 32 --max-prompt-tokens 8"
SIZES = {"wan": SMALL, "ltx": "--frames 9 --height 64 --width 96 --max-prompt-tokens 8"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with tiny models, an image and a video, in which the commands run.

    The decoder of the LTX-Video model draws noise.
    """
    folder = tmp_path_factory.mktemp("files")
    save_tiny_wan(folder / "wan", boundary_ratio=0.875)
    save_tiny_wan(folder / "wan21")
    save_tiny_ltx(folder / "ltx", timestep_conditioning=True)
    save_tiny("wan_animate", folder / "animate")
    save_tiny_wan(folder / "wan-image", image=True, boundary_ratio=0.9)
    save_tiny_wan(folder / "flf2v", image=True, image_encoder=True, two_images=True)
    shutil.copy(PHOTO, folder / "rocket.jpg")
    save_video(folder / "talk.mp4")
    return folder


@pytest.fixture(autouse=True)
def _here(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)


def ask(line: str, *more: str) -> Answer:
    return svdpp_here(*line.split(), *more)


def succeed(line: str, *more: str) -> Answer:
    answer = ask(line, *more)
    assert answer.code == 0, answer
    return answer


# --- layouts and measurements -------------------------------------------------------------------


AUTO = [
    ("run wan --layout auto", "data parallel of pairs"),
    ("run wan --cfg-parallel auto --layout data-parallel", "data parallel of pairs"),
    ("run wan --cfg-parallel auto", "1 replica of 2 pairs, balanced"),
    ("run wan --layout auto --cfg-parallel 1", "data parallel"),
    ("run wan --cfg-parallel auto --guidance-scale 1", "1 replica of 4 ranks, balanced"),
    ("run ltx --layout auto --cfg-parallel auto", "data parallel"),
    # A server does not choose CFG pairs by itself, because pairs refuse clips without guidance.
    ("serve wan --layout auto", "data parallel"),
    ("serve wan --layout auto --cfg-parallel auto", "data parallel of pairs"),
    # Two stages of pairs, one for each expert, would be unequal, so pairs are not chosen.
    ("serve wan --cfg-parallel auto", "1 replica of 4 ranks, balanced"),
    (
        "serve wan --cfg-parallel auto --share-experts",
        "1 replica of 2 pairs, balanced, shared experts",
    ),
]


@pytest.mark.parametrize(("line", "layout"), AUTO)
def test_auto_chooses_pairs_whose_bits_are_equal(line: str, layout: str) -> None:
    command, name, options = line.split(maxsplit=2)
    serves = command == "serve"
    steps = "" if serves else "--steps 6"
    asked = f"--model {name} {ON_CPU} {SIZES[name]} --world 4 {steps} {options}"
    request = parsed(f"svdpp {command} {asked}")["options"].request(
        num_clips=1000 if serves else 1,
        device="cpu",
        from_image=False,
        serves=serves,
    )
    assert str(request.resolve()[0].layout) == layout


@pytest.mark.slow
def test_a_profile_is_what_plans_take(tmp_path: Path) -> None:
    path = tmp_path / "costs.json"
    succeed(f"profile --model wan {ON_CPU} {SMALL} --world 2 --repeats 1 --out", str(path))
    costs = read_costs(path)
    assert costs.name.endswith(", 5 frames of 32x32")
    for seconds in (costs.step_seconds, costs.encode_seconds, costs.decode_seconds):
        assert isinstance(seconds, float)
        assert seconds > 0
    assert costs.peak_gib(Roles(encode=True, denoise=True, decode=True))
    plan = "plan --world 2 --steps 10 --expert-boundary 4 --split balanced --costs"
    succeed(plan, str(path))


@pytest.mark.parametrize("world_size", range(1, 9))
def test_a_profile_gives_each_rank_a_step_of_its_expert(world_size: int) -> None:
    config = PipelineConfig(
        world_size=world_size,
        model=ModelConfig(name="wan"),
        sampling=WanSampling(height=32, width=32, num_frames=5, flow_shift=8.0),
        parallel=ParallelConfig(split="balanced"),
    )
    layout = resolve_config(measured_config(config))[0].layout
    assert all(rank.denoise for rank in layout.roles)
    assert layout.expert_boundary


@pytest.mark.slow
@pytest.mark.full
def test_a_bench_gives_the_bits_of_diffusers(tmp_path: Path) -> None:
    sizes = ("clips=3", "frames=5", "height=32", "width=32", "max_sequence_length=8")
    fields = ("prompts=[the sea, a cat]", *sizes)
    answer = succeed(
        f"{BENCH_OF}wan --measure.repeats=1 --measure.seeds=[3,5] --json --results",
        *(str(tmp_path), *(f"--workload.{field}" for field in fields)),
    )
    (found,) = json.loads(answer.out)
    assert list(found["cases"]) == ["pipeline", "data parallel", "diffusers"]
    assert found["same_bits"] is True
    assert len(set(found["latents_sha256"])) == 3, "one for each prompt and seed"


# --- refusals -----------------------------------------------------------------------------------

BENCH_OF = "bench smoke --model.name="
V2V = f"--model wan21 --family wan_v2v --steps 4 --gpus 2 --prompt sea {SMALL} --dry-run"
ANIMATE = f"run rocket.jpg --model animate --steps 4 --gpus 2 --prompt sea {SMALL} --dry-run"
POSE, FACE = "--video pose_video=rocket.jpg", "--video face_video=rocket.jpg"
LAST = "--last-image rocket.jpg"
TWO = f"--steps 4 --gpus 2 --prompt sea {SMALL} --dry-run"
REFUSED = [
    ("profile --model ltx --decode-chunk-size 2", 2, "--decode-chunk-size is for Stable Video"),
    ("simulate --model ltx --flow-shift 3", 2, "no such option: --flow-shift"),
    ("simulate --model ltx --param stg_scale=3", 2, "has no parameter 'stg_scale'"),
    ("simulate --model ltx --share-experts", 2, "--share-experts is for models with two experts"),
    ("simulate --model demo --prompt cat", 2, "demo takes no --prompt"),
    # The default size needs more positions than the tiny model's table has.
    (
        "run --model wan --prompt cat --steps 4 --gpus 2 --dry-run",
        2,
        "cannot make a clip of 832x480 and 81 frames",
    ),
    (f"{BENCH_OF}ltx --workload.motion_bucket_id=7", 2, "--workload.motion_bucket_id is not for"),
    (f"{BENCH_OF}ltx --workload.guidance_scale_2=7", 2, "no parameter 'guidance_scale_2'"),
    (f"{BENCH_OF}ltx --workload.prompts=[]", 2, "workload.prompts needs 1 or more values, got []"),
    (f"{BENCH_OF}ltx --workload.frames=9 --workload.prompts=['']", 2, "--prompt is empty"),
    ("bench smoke --workload.prompts=[cat]", 2, "model 'demo' takes no prompt"),
    (f"run talk.mp4 {V2V} --family wan", 7, "is a video, but an image is needed"),
    (
        f"run talk.mp4 {V2V} --frames 9",
        7,
        "has 7 of the 9 frames that the clip takes\nhint: give a longer video",
    ),
    (f"run {V2V}", 2, "needs a video"),
    (f"run talk.mp4 {V2V} --model demo", 2, "--family 'wan_v2v' does not run"),
    (f"run rocket.jpg {V2V} --family ltx", 2, "does not run"),
    (f"run talk.mp4 {V2V} --model wan", 5, "only Wan 2.1 checkpoints for clips from text can make"),
    (f"run talk.mp4 {V2V} --param strength=0.001", 2, "the limit is 1000"),
    (f"run talk.mp4 {V2V} --param strength=0", 2, "strength must be above 0"),
    (f"{ANIMATE} {POSE}", 2, "needs the video face_video\nhint: give --video face_video=FILE"),
    (
        f"{ANIMATE} {POSE} --video fac=rocket.jpg",
        2,
        "no video 'fac'\nhint: it takes pose_video and",
    ),
    (f"{ANIMATE} {POSE} {FACE} --video mask_video=x", 2, "takes no video 'mask_video'"),
    (f"{ANIMATE} {POSE} --video face_video", 2, "--video takes NAME=FILE, got 'face_video'"),
    (f"{ANIMATE} {POSE} --video face_video=gone.mp4", 7, "does not exist"),
    (f"{ANIMATE} {POSE} --video face_video=talk.mp4 --frames 9", 7, "has 7 of the 9 frames"),
    (f"{ANIMATE} {POSE} {FACE} --frames 81", 2, "5 to 77, one segment"),
    (f"run rocket.jpg --model demo {POSE} --dry-run", 2, "family svd takes no video 'pose_video'"),
    (
        f"run rocket.jpg --model demo {LAST}",
        2,
        "family svd takes no --last-image\nhint: these families take one: wan, ltx_condition, ltx2",
    ),
    (f"{ANIMATE} {POSE} {FACE} {LAST}", 2, "the family wan_animate takes no --last-image"),
    (f"run rocket.jpg --model wan {TWO} {LAST}", 2, "no --last-image: the model makes clips"),
    (f"run --model wan-image {TWO} {LAST}", 2, "--last-image needs a first image, too"),
    (f"run rocket.jpg --model wan-image {TWO} {LAST} --frames 1", 2, "2 --frames, got 1"),
    (
        f"run rocket.jpg --model flf2v {TWO}",
        2,
        "needs a --last-image\nhint: the model makes clips betw",
    ),
    (f"run rocket.jpg --model wan-image {TWO} --last-image talk.mp4", 7, "an image is needed"),
    (f"run rocket.jpg --model wan-image {TWO} --last-image gone.jpg", 7, "does not exist"),
]


@pytest.mark.parametrize(("line", "code", "words"), REFUSED)
def test_what_a_family_does_not_take_is_refused(line: str, code: int, words: str) -> None:
    on_cpu = "" if line.startswith("bench") else " --device cpu"
    assert_error(ask(line + on_cpu), code, words)


# --- lists --------------------------------------------------------------------------------------


def test_families_and_checkpoints_are_shown_with_what_they_take() -> None:
    listed = json.loads(succeed("models --json").out)["families"]
    assert [each["family"] for each in listed] == list(SAMPLING_CLASSES)
    ltx2 = succeed("models ltx2").out
    assert "\n--param stg_scale " in ltx2
    assert "LTX2ImageToVideoPipeline" in ltx2
    replaced = json.loads(succeed("models wan_replace --json").out)["families"][0]
    assert replaced["inputs"] == ["an image, pose_video, face_video, background_video, mask_video"]
    assert_error(ask("models sora"), 2, "there is no family or model 'sora'")
    assert_error(ask("models ./sora"), 5, "there is no folder './sora'")
    about = json.loads(succeed("models ./ltx --json").out)["families"][0]
    assert (about["family"], about["inputs"]) == ("ltx", ["text", "an image"])
    uses = {
        name: "optional" if name == "wan-image" else "needed" for name in ("wan-image", "flf2v")
    }
    for name, use in uses.items():
        assert (
            json.loads(succeed(f"models ./{name} --json").out)["families"][0]["last_image"] == use
        )
    assert "unet" in succeed("models demo").out
    assert "experts: 2" in succeed("models ./wan").out


# --- clips --------------------------------------------------------------------------------------


def metadata_of(clip: Path) -> dict[str, Any]:
    return json.loads(Path(f"{clip}.json").read_text())


@pytest.mark.slow
@pytest.mark.full
def test_a_clip_with_sound_is_made_and_verified(tmp_path: Path) -> None:
    model, out = save_tiny("ltx2", tmp_path / "model"), tmp_path / "out"
    sizes = "--frames 9 --height 32 --width 32 --max-prompt-tokens 8 --param stg_block=1"
    asked = f"--prompt sea --steps 3 --world 2 --split balanced {sizes} {ON_CPU}"
    succeed(f"run {asked}", "--model", str(model), "--out", str(out))
    (clip,) = out.glob("*.mp4")
    metadata = metadata_of(clip)
    samples, rate = read_audio(clip)
    assert metadata["audio_sample_rate"] == 16000
    assert (len(samples) > 100, rate) == (True, 48000)
    checks = json.loads(succeed("verify --json", str(clip)).out)["checks"]
    assert {check["what"]: check["equal"] for check in checks} == dict.fromkeys(
        ("latent", "frames", "audio", "file"), True
    )
    metadata["audio_sha256"] = "0" * 64
    del metadata["file_sha256"]
    sound = (np.zeros((132, 2), np.int16), 16000)
    frames, output = read_frames(clip, "mp4"), OutputConfig(path=str(clip))
    sha256 = write_clip(frames, output, fps=24, metadata=metadata, audio=sound)
    Path(f"{clip}.json").write_text(json.dumps({**metadata, "file_sha256": sha256}))
    checks = json.loads(ask("verify --json", str(clip)).out)["checks"]
    wrong = {check["what"]: check["detail"] for check in checks if not check["equal"]}
    assert list(wrong) == ["audio", "file"]
    assert "the sound is not that of the recomputed samples" in wrong["file"]


@pytest.mark.slow
def test_a_clip_from_a_video_is_made_and_verified(tmp_path: Path) -> None:
    video, out = save_video(tmp_path / "talk.mp4"), tmp_path / "out"
    asked = f"{V2V} {ON_CPU} --param strength=0.6".replace(" --dry-run", "")
    succeed(f"run {asked}", video, "--out", str(out))
    metadata = metadata_of(out / "talk_0.mp4")
    names = ("family", "strength", "num_inference_steps")
    assert [metadata[name] for name in names] == ["wan_v2v", 0.6, 4]
    succeed("verify", str(out / "talk_0.mp4"))
    save_video(tmp_path / "talk.mp4", seed=1)
    assert_error(ask("verify", str(out / "talk_0.mp4")), 7, "is not at")
    again = ask(f"run {asked} --resume", video, "--out", str(out))
    assert_error(again, 2, "input_sha256")


@pytest.mark.slow
def test_a_clip_with_further_videos_is_made_verified_and_resumed(tmp_path: Path) -> None:
    inputs, out = tmp_path / "inputs", tmp_path / "out"
    inputs.mkdir()
    pose = save_video(inputs / "pose.mp4")
    line = f"{ANIMATE} {ON_CPU} {FACE}".replace(" --dry-run", "")
    asked = (line, "--video", f"pose_video={pose}", "--out", str(out))
    succeed(*asked)
    (clip,) = out.glob("*.mp4")
    record = metadata_of(clip)
    assert record["videos"]["pose_video"] == "../inputs/pose.mp4"
    succeed("verify", str(clip))
    succeed(*asked, "--resume")
    assert metadata_of(clip) == record
    (inputs / "pose.mp4").rename(inputs / "moved.mp4")
    assert_error(ask("verify", str(clip)), 7, "the pose_video of", "--image FOLDER")
    shutil.copy(PHOTO, inputs / "photo.jpg")
    succeed("verify", str(clip), "--image", str(inputs))
    save_video(inputs / "pose.mp4", seed=1)
    assert_error(ask(*asked, "--resume"), 2, "videos_sha256")
    succeed(*asked, "--overwrite")
    other = metadata_of(clip)
    assert other["videos_sha256"]["face_video"] == record["videos_sha256"]["face_video"]
    assert other["latents_sha256"] != record["latents_sha256"]


@pytest.mark.slow
def test_a_clip_with_references_is_made_verified_and_resumed(tmp_path: Path) -> None:
    model = save_tiny("wan_vace", tmp_path / "model")
    inputs = tmp_path / "inputs"
    inputs.mkdir()
    first, second = inputs / "first.jpg", inputs / "second.jpg"
    for path, image in zip((first, second), example_images(), strict=False):
        shutil.copy(image, path)
    line = f"{SMALL} --steps 2 --world 2 --prompt sea"
    out = ("--model", str(model), "--out", str(tmp_path / "out"))
    asked = (f"run {line} {ON_CPU}", str(first), "--reference", str(second), *out)
    answer = succeed(*asked)
    assert "stretched" not in answer.err  # the pipeline does not stretch references
    (clip,) = (tmp_path / "out").glob("*.mp4")
    record = metadata_of(clip)
    assert record["references"] == ["../inputs/second.jpg"]
    assert "bitwise equal" in succeed("verify", str(clip)).out
    succeed(*asked, "--resume")
    assert metadata_of(clip) == record
    second.rename(inputs / "moved.jpg")
    assert_error(ask("verify", str(clip)), 7, "the reference_1 of", "--image FOLDER")
    succeed("verify", str(clip), "--image", str(inputs))
    both = (f"run {line} {ON_CPU}", str(first), *("--reference", str(first)) * 2, *out)
    assert_error(ask(*both, "--resume"), 2, "exists with another value of references_sha256")


@pytest.mark.slow
def test_references_that_a_clip_cannot_have_are_refused(tmp_path: Path) -> None:
    """A clip of 5 frames has 2 latent frames, and diffusers fails with more than 2 references."""
    model = save_tiny("wan_vace", tmp_path / "model")
    line = f"run rocket.jpg --model {model} {TWO} --device cpu"
    reference = " --reference rocket.jpg"
    assert ask(line + reference).code == 0
    assert_error(ask(line + reference * 2), 2, "cannot make a clip of 32x32 and 5 frames")
    assert_error(ask(f"{line} --reference talk.mp4"), 7, "is a video, but an image is needed")


@pytest.mark.slow
def test_inputs_that_cosmos_has_in_diffusers_alone_are_refused(tmp_path: Path) -> None:
    model = save_tiny("cosmos3", tmp_path / "model")
    line = f"run rocket.jpg --model {model} --device cpu --family"
    for family in ("cosmos3", "cosmos3_sound"):
        control = ask(f"{line} {family} {TWO} --video control_video=talk.mp4")
        assert_error(control, 2, "takes no video 'control_video'")
        action = ask(f"{line} {family} {TWO} --param action=x")
        assert_error(action, 2, f"the family {family} has no parameter 'action'")
        video = ask(f"run talk.mp4 --model {model} --family {family} {TWO} --device cpu")
        assert_error(video, 7, "is a video, but an image is needed")


def test_references_of_another_family_are_refused() -> None:
    answer = ask("run rocket.jpg --model ./wan-image --reference rocket.jpg --prompt x --dry-run")
    assert_error(answer, 2, "the family wan takes no --reference", "minimax_h3_references")


@pytest.mark.slow
@pytest.mark.full
def test_a_clip_that_ends_at_an_image_is_made_verified_and_resumed(tmp_path: Path) -> None:
    first, last = tmp_path / "first.jpg", tmp_path / "last.jpg"
    shutil.copy(PHOTO, first)
    shutil.copy(example_images()[1], last)
    line = f"--model wan-image {TWO} {ON_CPU}".replace(" --dry-run", "")
    out = ("--out", str(tmp_path / "out"))
    asked = (f"run {line}", str(first), "--last-image", str(last), *out)
    succeed(*asked)
    (clip,) = (tmp_path / "out").glob("*.mp4")
    record = metadata_of(clip)
    assert record["last_image"] == "../last.jpg"
    assert "bitwise equal" in succeed("verify", str(clip)).out
    succeed(*asked, "--resume")
    assert metadata_of(clip) == record

    last.rename(tmp_path / "out" / "moved.jpg")
    succeed("verify", str(clip))  # the moved image is found by its hash
    (tmp_path / "out" / "moved.jpg").unlink()
    assert_error(ask("verify", str(clip)), 7, "the last_image of", "--image FOLDER")
    shutil.copy(example_images()[2], last)
    assert_error(ask(*asked, "--resume"), 2, "exists with another value of last_image_sha256")
    assert_error(ask(f"run {line}", str(first), *out, "--resume"), 2, "another last_image_sha256")
    succeed(*asked, "--overwrite")
    assert metadata_of(clip)["latents_sha256"] != record["latents_sha256"]


@pytest.mark.slow
@pytest.mark.full
def test_lines_with_loras_of_their_own_are_made_by_the_same_ranks(
    folder: Path, tmp_path: Path
) -> None:
    """Lines of a jobs file may have different LoRAs; the same two ranks make all clips.

    Each rank has one expert. Every clip is verified with a fresh pipeline of diffusers.
    """
    lines = []
    for seed in (1, 2):
        high, low = (tmp_path / f"{seed}-{expert}.safetensors" for expert in ("high", "low"))
        save_tiny_lora(folder / "wan", high, seed=seed)
        save_tiny_lora(folder / "wan", low, part="transformer_2", seed=seed)
        # The paths are relative to the jobs file.
        lora = [f"{high.name}:0.5:high", {"name": low.name, "scale": 0.5, "expert": "low"}]
        lines.append({"prompt": "sea", "out": f"lora{seed}", "lora": lora})
    lines += [{"prompt": "sea", "out": "plain"}, {**lines[0], "out": "again"}]
    jobs = tmp_path / "jobs.jsonl"
    jobs.write_text("".join(json.dumps(line) + "\n" for line in lines))
    asked = f"run --model wan --jobs {jobs} --steps 4 --world 2 --split balanced {ON_CPU} {SMALL}"
    out = ("--out", str(tmp_path / "out"))

    bad = {"prompt": "sea", "lora": ["2-low.safetensors:high", "1-low.safetensors:low"]}
    other = tmp_path / "bad.jsonl"
    wrong = [{**bad, "lora": "none.safetensors:high"}, {**bad, "lora": "2-low.safetensors"}, bad]
    other.write_text("".join(json.dumps(line) + "\n" for line in wrong))
    refused = ask(asked.replace(str(jobs), str(other)), *out, "--dry-run")
    assert refused.code == 2
    assert "bad.jsonl: 2 of 3 lines cannot be used" in refused.err
    assert "line 1, lora: 'none.safetensors': the file does not exist" in refused.err
    assert "line 2, lora: model 'wan' has two experts, but" in refused.err

    succeed(asked, *out)
    names = ("lora1", "again", "lora2", "plain")
    latents = [metadata_of(tmp_path / "out" / f"{name}.mp4")["latents_sha256"] for name in names]
    assert latents[0] == latents[1]
    assert len(set(latents)) == 3
    clips = [str(tmp_path / "out" / f"{name}.mp4") for name in names]
    assert "4 of 4 clips are bitwise equal" in succeed("verify", *clips).out
    assert succeed(asked, *out, "--resume").out.count("was finished") == 4
    lines[1]["lora"][0] = "2-high.safetensors:0.75:high"
    jobs.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert succeed(asked, *out, "--resume").out.count("was finished") == 3


@pytest.mark.slow
def test_clips_of_a_gguf_file_are_made_verified_and_told_apart(tmp_path: Path) -> None:
    folder = save_tiny_wan(tmp_path / "wan", width=4)
    eight, four = (save_gguf(folder, tmp_path / f"{kind}.gguf", kind) for kind in ("Q8_0", "Q4_0"))
    next((folder / "transformer").glob("*.safetensors")).unlink()
    model = f"--model {folder} --prompt sea --steps 4 --world 2 {ON_CPU} {SMALL}"
    out = ("--out", str(tmp_path / "out"))
    used = ("--denoiser", str(eight))

    succeed(f"run {model}", *used, *out)
    (clip,) = (tmp_path / "out").glob("*.mp4")
    (recorded,) = metadata_of(clip)["denoiser"]
    assert (recorded["expert"], len(recorded["sha256"])) == (None, 64)
    assert "gguf" in metadata_of(clip)["versions"]
    assert "bitwise equal" in succeed("verify", str(clip)).out
    assert "was finished" in succeed(f"run {model}", *used, *out, "--resume").out
    other = ask(f"run {model}", "--denoiser", str(four), *out, "--resume")
    assert_error(other, 2, "exists with another value of denoiser")
    succeed(f"verify {model}", "--denoiser", str(four))

    shutil.copy(four, eight)
    assert_error(ask("verify", str(clip)), 5, "has changed since the clip was made")
    eight.unlink()
    assert_error(ask("verify", str(clip)), 5, "the file does not exist")
    single = ask(f"run --model {four} --prompt sea", *out)
    assert_error(single, 5, "reads only folders and hub models", "--denoiser FILE.gguf")


@pytest.mark.slow
def test_clips_with_loras_are_made_verified_and_told_apart(folder: Path, tmp_path: Path) -> None:
    high, low = tmp_path / "high.safetensors", tmp_path / "low.safetensors"
    save_tiny_lora(folder / "wan", high, seed=1)
    save_tiny_lora(folder / "wan", low, part="transformer_2", seed=2)
    asked = f"run --model wan --prompt sea --steps 4 --world 2 --split balanced {ON_CPU} {SMALL}"
    out = ("--out", str(tmp_path / "out"))
    loras = ("--lora", f"{high}:0.5:high", "--lora", f"{low}:low")

    succeed(asked, *loras, *out)
    (clip,) = (tmp_path / "out").glob("*.mp4")
    used = [(lora["weight"], lora["expert"]) for lora in metadata_of(clip)["lora"]]
    assert used == [(0.5, "high"), (1.0, "low")]
    assert "bitwise equal" in succeed("verify", str(clip)).out
    assert "was finished" in succeed(asked, *loras, *out, "--resume").out
    for others in ((), (*loras[:2], "--lora", f"{low}:0.9:low")):
        other = ask(asked, *others, *out, "--resume")
        assert_error(other, 2, "exists with another value of lora")

    save_tiny_lora(folder / "wan", high, seed=3)
    changed = ask("verify", str(clip))
    assert "has changed since the clip was made" in changed.out + changed.err
    assert changed.code != 0
