"""`svdpp.generate`: jobs from arguments, early refusals, and clips with frames."""

from __future__ import annotations

import gc
import hashlib
import io
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from rich.console import Console

import svdpp
from svdpp import ClipRequest, ClipResult, InputError, ModelConfig, RequestError
from svdpp.config import SvdSampling
from svdpp.driver.progress_bar import ProgressBar
from svdpp.driver.run_plan import submit_and_collect
from svdpp.driver.sources import SourceReader
from svdpp.media.images import read_image
from svdpp.models.checkpoint import find_checkpoint
from svdpp.worker.messages import ClipDone, ClipFailed, StepDone
from tests.support.shell import PHOTO, python
from tests.support.tiny_families import save_tiny

DEMO: dict[str, Any] = {"model": "demo", "device": "cpu"}
TINY = {"steps": 2, "frames": 2, "width": 32, "height": 32}
CIRCLE = "a red circle moves right on a blue background"


def reader(folder: Path, model: str = "demo", **parameters: Any) -> SourceReader:
    config = ModelConfig(name=model)
    checkpoint = find_checkpoint(config, weights=False)
    return SourceReader(config, checkpoint, parameters, format="mp4", folder=folder)


# --- arguments ----------------------------------------------------------------------------------


def test_each_image_gets_each_prompt_and_each_seed(tmp_path: Path) -> None:
    texts = reader(tmp_path, "demo-text").jobs((), ["a", "b"], "dark", [3, 4])
    found = [(job.made_from.prompt, job.made_from.negative_prompt, job.seed) for job in texts]
    assert found == [("a", "dark", 3), ("a", "dark", 4), ("b", "dark", 3), ("b", "dark", 4)]
    images = reader(tmp_path).jobs([PHOTO, Path(PHOTO).parent / "c*.jpg"], None, None, 0)
    names = [job.made_from.name for job in images]
    assert names == ["rocket", "chelsea", "coffee"]


def test_parameters_have_their_names_in_requests_and_in_diffusers(tmp_path: Path) -> None:
    named = reader(tmp_path, steps=4, num_frames=2, height=64, fit="crop", max_guidance_scale=2)
    sampling = named.sampling(from_image=True)
    assert isinstance(sampling, SvdSampling)
    assert (sampling.num_inference_steps, sampling.num_frames, sampling.fit) == (4, 2, "crop")
    assert (sampling.width, sampling.motion_bucket_id) == (128, 40)  # the demo's defaults


def test_a_dict_is_one_clip_and_overrides_the_arguments(tmp_path: Path) -> None:
    clips = [
        {"image": Path(PHOTO), "seed": 3, "steps": 5},
        PHOTO,
        {"image": Image.open(PHOTO), "out": "last.mp4", "num_frames": 3},
    ]
    jobs = reader(tmp_path, **TINY).jobs(clips, None, None, None)
    assert [job.seed for job in jobs] == [3, 0, 0]
    sizes = [(job.sampling.num_inference_steps, job.sampling.num_frames) for job in jobs]
    assert sizes == [(5, 2), (2, 2), (2, 3)]
    assert [job.out for job in jobs] == ["", "", "last"]
    assert [job.made_from.name for job in jobs] == ["rocket"] * 3


def test_references_of_a_dict_are_paths_and_images(tmp_path: Path) -> None:
    save_tiny("wan_vace", tmp_path / "model")
    config = ModelConfig(name=str(tmp_path / "model"))
    source = SourceReader(
        config,
        find_checkpoint(config, weights=False),
        {"width": 32, "height": 32},
        format="mp4",
        folder=tmp_path,
    )
    references = (Path(PHOTO), PHOTO, Image.open(PHOTO).rotate(90, expand=True))
    clip = {"image": PHOTO, "prompt": "sea", "references": references}
    (job,) = source.jobs(clip, None, None, None)
    assert job.sampling is not None
    assert job.sampling.num_references == 3
    first, second, third = job.made_from.references
    assert (first.path, first.sha256) == (Path(PHOTO), second.sha256)
    assert (third.width, third.height) == (first.height, first.width)
    with pytest.raises(RequestError, match="need an image, too, which is the first reference"):
        source.jobs({"prompt": "sea", "references": references}, None, None, None)


@pytest.mark.parametrize("mode", ["RGB", "L", "P", "RGBA", "LA", "1", "CMYK", "I;16"])
def test_an_image_in_memory_keeps_its_colours(mode: str, tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    if mode == "I;16":
        image = Image.fromarray(rng.integers(0, 2**16, (40, 48), np.uint16))
    else:
        image = Image.fromarray(rng.integers(0, 256, (40, 48, 3), np.uint8)).convert(mode)
    (job,) = reader(tmp_path).jobs([image], None, None, 0)
    assert job.made_from.media_file is not None
    read = read_image(job.made_from.media_file.path)[0]
    if mode in ("RGB", "L", "P", "1", "CMYK"):
        assert np.array_equal(read, image.convert("RGB"))
    image.save(tmp_path / "same.tif")  # a lossless file of this mode
    assert np.array_equal(read, read_image(tmp_path / "same.tif")[0])


def test_an_image_in_memory_counts_as_it_is_and_is_saved_once(tmp_path: Path) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6  # the EXIF tag for a rotation by 90 degrees
    Image.new("RGB", (64, 32), "red").save(tmp_path / "turned.jpg", exif=exif)
    image = Image.open(tmp_path / "turned.jpg")
    twice = [{"image": image, "seed": seed} for seed in range(2)]
    jobs = reader(tmp_path).jobs(twice, None, None, None)
    files = {job.made_from.media_file for job in jobs}
    assert [(file.width, file.height) for file in files if file] == [(64, 32)]
    same_name = [Image.open(tmp_path / "turned.jpg"), Image.new("RGB", (16, 16))]
    (tmp_path / "b").mkdir()
    names = [job.made_from.name for job in reader(tmp_path / "b").jobs(same_name, None, None, None)]
    assert names == ["turned", "image"]


# --- refusals -----------------------------------------------------------------------------------

REFUSED: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"stepz": 4}, RequestError, "'stepz' is neither an argument"),
    ({"steps": 4, "num_inference_steps": 4}, RequestError, "already given"),
    ({"steps": 0}, RequestError, "`num_inference_steps` must be 1 to"),
    ({"inputs": ()}, RequestError, "neither an image nor a prompt"),
    ({"inputs": [3]}, RequestError, r"inputs\[0\] must be a path, a PIL image or a dict"),
    ({"inputs": "gone.jpg"}, InputError, "'gone.jpg' does not exist"),
    ({"inputs": Image.new("F", (64, 64))}, InputError, r"inputs\[0\] has 32-bit grey levels"),
    ({"prompts": "a cat"}, RequestError, "takes no prompt"),
    ({"inputs": [{"image": PHOTO}], "seeds": [1]}, RequestError, "each dict is one clip"),
    ({"inputs": [{"image": PHOTO}], "seeds": 0}, RequestError, "each dict is one clip"),
    ({"seeds": [0, -1]}, RequestError, "`seed` must be 0 to"),
    ({"seeds": []}, RequestError, "got 0"),
    ({"inputs": [{"image": PHOTO, "seed": -1}]}, RequestError, r"inputs\[0\], seed"),
    ({"inputs": [{"image": PHOTO}, {"imag": PHOTO}]}, RequestError, r"inputs\[1\], imag"),
    ({"out": "clip.avi"}, RequestError, "unsupported output format"),
    ({"out": "clip.mp4", "seeds": [1, 2]}, RequestError, "would both get the name 'clip'"),
    ({"world_size": 3, "steps": 4}, RequestError, "4 steps"),
    ({"model": "dummy"}, RequestError, "the dummy model makes no video files"),
    ({"model": "./gone"}, svdpp.ModelError, "there is no folder"),
    (
        {"model": "demo-text", "inputs": [{"prompt": CIRCLE}, {"prompt": CIRCLE, "frames": 8}]},
        RequestError,
        r"inputs\[1\]: `num_frames` must be 16",
    ),
]


@pytest.mark.parametrize(("arguments", "kind", "words"), REFUSED, ids=range(len(REFUSED)))
def test_what_cannot_be_made_is_refused_first(
    arguments: dict[str, Any],
    kind: type[Exception],
    words: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(kind, match=words):
        svdpp.generate(**{"inputs": PHOTO, **DEMO, **arguments})
    assert [*tmp_path.iterdir()] == []


def test_a_launchers_process_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"):
        monkeypatch.setenv(name, "1" if name == "WORLD_SIZE" else "0")
    with pytest.raises(RequestError, match="a launcher has started this process"):
        svdpp.generate(PHOTO, **DEMO)


def test_a_clip_without_a_file_has_no_frames() -> None:
    result = ClipResult(0, ClipRequest(seed=0), {})
    assert result.path is None
    with pytest.raises(RequestError, match="the clip has no file"):
        _ = result.frames


# --- clips --------------------------------------------------------------------------------------


@pytest.mark.slow
def test_clips_with_frames_in_a_temporary_folder_and_in_a_folder(tmp_path: Path) -> None:
    seen: list[int] = []
    images = [PHOTO, Image.open(PHOTO)]
    results = svdpp.generate(
        images, seeds=range(2), on_result=lambda made: seen.append(made.clip), **DEMO, **TINY
    )
    assert sorted(seen) == [made.clip for made in results] == [0, 1, 2, 3]
    names = [made.path.name for made in results if made.path]
    assert names == ["rocket_0", "rocket_1", "rocket-2_0", "rocket-2_1"]
    hashes = [made.metadata["frames_sha256"] for made in results]
    assert hashes[:2] == hashes[2:]  # the image is read from a file, or is already in memory
    frames = results[1].frames
    assert (frames.shape, frames.dtype) == ((2, 32, 32, 3), np.uint8)
    assert hashlib.sha256(np.ascontiguousarray(frames)).hexdigest() == hashes[1]
    folder = results[0].path.parent if results[0].path else tmp_path
    del results
    gc.collect()
    assert not folder.exists()

    clips = [{"image": PHOTO, "seed": 1}, {"image": PHOTO, "steps": 4, "out": "longer"}]
    made = svdpp.generate(clips, out=tmp_path / "clips", **DEMO, **TINY)
    assert made[0].metadata["frames_sha256"] == hashes[1]
    assert [each.path.name for each in made if each.path] == ["rocket_1.mp4", "longer.mp4"]
    assert made[1].frames.shape == (2, 32, 32, 3)
    with pytest.raises(RequestError, match="2 outputs exist already"):
        svdpp.generate(clips, out=tmp_path / "clips", **DEMO, **TINY)
    again = svdpp.generate([*clips, PHOTO], out=tmp_path / "clips", resume=True, **DEMO, **TINY)
    assert [each.request.seed for each in again] == [1, 0, 0]
    assert again[:2] == [replace(each, metadata=again[n].metadata) for n, each in enumerate(made)]
    written = [each.metadata["parameters_sha256"] for each in made]
    assert [each.metadata["parameters_sha256"] for each in again[:2]] == written
    assert sorted(path.name for path in (tmp_path / "clips").glob("*.json*")) == [
        *("clips.jsonl", "longer.mp4.json", "rocket_0.mp4.json", "rocket_1.mp4.json", "run.json"),
    ]


@pytest.mark.slow
def test_a_lost_clip_leaves_the_others_in_its_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """If a clip is lost, the error has the results of the other clips.

    Their temporary folder exists as long as the error does.
    """
    monkeypatch.setenv("FORCE_COLOR", "1")  # show the progress as on a terminal
    last = tmp_path / "last.jpg"
    shutil.copyfile(PHOTO, last)

    def collect(*arguments: Any) -> Iterator[ClipResult]:
        last.unlink()  # the file disappears after all checks
        return submit_and_collect(*arguments)

    monkeypatch.setattr("svdpp.driver.generate.submit_and_collect", collect)
    with pytest.raises(InputError, match="1 of 3 clips failed") as lost:
        svdpp.generate([PHOTO, last, Image.open(PHOTO)], **DEMO, **TINY)
    results = lost.value.results
    assert [made.clip for made in results] == [0, 2]
    assert all(made.frames.shape == (2, 32, 32, 3) for made in results)
    assert "2 of 3 clips, 1 failed" in capfd.readouterr().err
    folder = results[0].path.parent
    del results, lost
    gc.collect()
    assert not folder.exists()


@pytest.mark.parametrize(
    "shown", [(True, True), (True, False), (False, True)], ids=["shown", "hidden", "no terminal"]
)
def test_the_progress_bar_counts_steps_and_clips(shown: tuple[bool, bool]) -> None:
    """The progress bar counts steps and clips. It appears only on a terminal, unless it is hidden.

    The first clip resumes at step 1. A step of the second clip is reported by both ranks of a CFG
    pair, but counts once.
    """
    is_terminal, is_shown = shown
    console = Console(file=io.StringIO(), force_terminal=is_terminal, width=80)
    bar = ProgressBar([4, 2, 2], [1, 0, 0], is_shown=is_shown, console=console)
    (task,) = bar.tasks
    with bar:
        for event, completed in (
            (StepDone(clip=0, step=1, seconds=1.0), 1),
            (StepDone(clip=1, step=0, seconds=1.0), 2),
            (StepDone(clip=1, step=0, seconds=1.0), 2),
            (ClipFailed(clip=1, error={}), 3),
            (ClipDone(clip=0, metadata={}), 5),
        ):
            bar(0, event)
            assert (task.completed, task.total) == (completed, 7)
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert ("1 of 3 clips, 1 failed" in text) == all(shown)
    assert bool(text) == all(shown)


@pytest.mark.slow
@pytest.mark.full
def test_a_script_without_a_guard_is_told_so_and_starts_no_chain(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        f"import svdpp\nprint('imported', flush=True)\nsvdpp.generate({PHOTO!r}, **{DEMO | TINY})\n"
    )
    ended = python(str(script), cwd=tmp_path)
    assert ended.code == 1
    assert "put its main code under `if __name__ ==" in ended.err
    assert ended.out.count("imported") <= 3  # this process and two ranks
