"""Python API: the programs in docs/api.md, requests of every kind, and misuse."""

from __future__ import annotations

import os
import runpy
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from svdpp.config import (
    ClipRequest,
    Lora,
    LtxSampling,
    ModelConfig,
    OutputConfig,
    ParallelConfig,
    PipelineConfig,
    SvdSampling,
)
from svdpp.driver.pipeline import Pipeline
from svdpp.driver.request_scheduler import RequestScheduler
from svdpp.driver.resolve import resolve_config
from svdpp.errors import ClosedError, ModelError, NotFiniteError, RequestError
from svdpp.media.images import fit_image, read_image
from svdpp.media.inputs import example_images
from svdpp.media.video import frames_sha256, read_frames
from svdpp.models.hashes import cached_sha256
from svdpp.plan.actions import Kind
from svdpp.verification.verify import run_reference
from svdpp.worker.messages import parse
from svdpp.worker.routes import Router
from svdpp.worker.tensor_files import tensor_sha256
from tests.support.builders import save_tiny_lora, small_svd
from tests.support.damage import Damage
from tests.support.dummies import HANG_SECONDS, clips, config
from tests.support.markdown_pages import code_blocks
from tests.support.range_checks import whole_clip
from tests.support.shell import PYTHONPATH, Answer, python
from tests.support.tiny_families import save_tiny_ltx

PAGE = Path(__file__).parents[2] / "docs" / "api.md"
_BLOCKS = code_blocks(PAGE.read_text())
#: Programs in docs/api.md, each with the output that the page shows below it.
PROGRAMS = [
    (program.text, output.text)
    for program, output in pairwise(_BLOCKS)
    if (program.language, output.language) == ("python", "text")
]


def test_loras_of_requests_are_found_and_checked_when_they_are_submitted(tmp_path: Path) -> None:
    folder = save_tiny_ltx(tmp_path / "ltx")
    file = save_tiny_lora(folder, tmp_path / "x.safetensors", seed=1)
    sampling = LtxSampling(num_inference_steps=2, height=64, width=64, num_frames=9)
    whole, checkpoint = resolve_config(
        PipelineConfig(world_size=2, model=ModelConfig(name=str(folder)), sampling=sampling)
    )
    scheduler = RequestScheduler(whole, checkpoint)

    def found(*loras: Lora) -> tuple[Lora, ...]:
        request = ClipRequest(seed=0, prompt="sea", loras=loras)
        return scheduler.resolve_requests([request])[0].loras

    lora = Lora(name=str(file), weight=0.5)
    resolved = replace(lora, sha256=cached_sha256(file))
    assert found(lora, replace(lora, weight=2.0)) == (resolved, replace(resolved, weight=2.0))
    assert found(resolved) == (resolved,)
    with pytest.raises(RequestError, match="has one denoiser"):
        found(replace(resolved, expert="low"))
    weights = next((folder / "transformer").glob("*.safetensors"))
    for name, words in (
        (str(tmp_path / "y"), "the file does not exist"),
        (str(weights), "the LoRA"),
    ):
        with pytest.raises(ModelError, match=words):
            found(Lora(name=name))
    with pytest.raises(RequestError, match="the dummy model takes no `loras`"):
        RequestScheduler(config(2), None).resolve_request(ClipRequest(seed=0, loras=(lora,)))


@pytest.mark.slow
@pytest.mark.parametrize(
    "index",
    [pytest.param(index, marks=[pytest.mark.full] if index % 3 else []) for index in range(11)],
)
def test_every_program_of_the_page_prints_what_it_says(
    index: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    assert len(PROGRAMS) == len(code_blocks(PAGE.read_text(), "python")) == 11
    program, output = PROGRAMS[index]
    path = tmp_path / "example.py"
    path.write_text(program)
    if index == 0:
        assert python(str(path), cwd=tmp_path) == Answer(0, output, "")
    else:  # in this process, which is faster because its fork server runs already
        monkeypatch.chdir(tmp_path)
        runpy.run_path(str(path), run_name="__main__")
        assert capfd.readouterr() == (output, "")


# --- use and misuse -----------------------------------------------------------------------------

USES: dict[str, Callable[[Pipeline], object]] = {
    "submit": lambda pipeline: pipeline.submit(clips(0)),
    "run": lambda pipeline: pipeline.run(clips(0)),
    "results": lambda pipeline: pipeline.results(),
}


def test_a_pipeline_cannot_be_used_before_its_block_which_only_rank_0_enters(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pipeline = Pipeline(config())
    for use in USES.values():
        with pytest.raises(ClosedError, match="the pipeline has no ranks yet") as caught:
            use(pipeline)
        assert "with Pipeline" in caught.value.hint
    with pytest.raises(ClosedError, match="started this process: use the pipeline in a with"):
        pipeline.serve(say=print)
    pipeline.close()
    pipeline.close(drain=False)
    with pytest.raises(
        RequestError, match="history_clips and trace_clips must be 1 or more, got 0"
    ):
        Pipeline(config(), history_clips=0)
    for name, value in {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(
        ClosedError, match=r"only rank 0 uses the pipeline in a with block: .* call serve"
    ):
        Pipeline(config()).__enter__()


@pytest.mark.slow
def test_a_pipeline_cannot_be_used_after_its_block_nor_entered_twice() -> None:
    with Pipeline(config()) as pipeline:
        (handle,) = pipeline.submit(clips(0))
    for use in USES.values():
        with pytest.raises(ClosedError, match="the pipeline is closed"):
            use(pipeline)
    with pytest.raises(ClosedError, match="can be entered only once: create another one"):
        pipeline.__enter__()
    assert handle.result(0).clip == 0
    assert len(pipeline.trace.steps) == 4
    pipeline.close()


_SCRIPT = """
from svdpp import ClipRequest, Pipeline
from tests.support.dummies import config
with Pipeline(config()) as pipeline:
    pipeline.run([ClipRequest(seed=0)])
"""


@pytest.mark.slow
@pytest.mark.full
@pytest.mark.parametrize("source", ["file", "stdin"])
def test_a_script_that_ranks_cannot_import_is_told_what_to_do(tmp_path: Path, source: str) -> None:
    (tmp_path / "script.py").write_text(_SCRIPT)
    arguments = ("script.py",) if source == "file" else ("-",)
    done = python(*arguments, cwd=tmp_path, stdin=_SCRIPT)
    assert done.code == 1
    assert "multiprocessing" not in done.err, "ranks have their say too"
    last = done.err.splitlines()[-1]
    assert last.startswith("svdpp.errors.R")
    assert 'under `if __name__ == "__main__":`, and run it from a file' in last


# --- requests -----------------------------------------------------------------------------------

KEY, PHOTO = "ab" * 32, str(example_images()[0])
NO_CHECKPOINTS = "clip 0: done_steps is 2, but there are no latent checkpoints"
FIVE = SvdSampling(num_inference_steps=5)
REFUSED: list[tuple[Any, type[Exception], str]] = [
    ("photo.jpg", TypeError, "clip 0 is a str, not a ClipRequest"),
    (7, TypeError, "not iterable"),
    ([*clips(0), 7], TypeError, "clip 1 is a int"),
    ([ClipRequest(seed=0, latents_key=KEY, done_steps=2)], RequestError, NO_CHECKPOINTS),
    ([ClipRequest(seed=0, latents_key="../elsewhere")], RequestError, "must be 64 hex digits, got"),
    ([ClipRequest(seed=0, sampling=FIVE)], RequestError, "5 steps cannot be split evenly"),
]
REFUSED_METADATA: list[tuple[Any, str]] = [
    ([{}], "metadata must have one mapping for each clip: expected 2, got 1"),
    ([{}, {"input": object()}], "the clips cannot be sent to the ranks"),
]


@pytest.mark.slow
def test_what_is_no_clip_is_refused_and_nothing_of_it_is_sent(tmp_path: Path) -> None:
    with Pipeline(config()) as pipeline:
        for requests, error, words in REFUSED:
            for submit in (pipeline.submit, pipeline.run):
                with pytest.raises(error, match=words):
                    submit(requests)
        for metadata, words in REFUSED_METADATA:
            with pytest.raises(RequestError, match=words):
                pipeline.submit(clips(0, 1), metadata)
        assert pipeline.submit([]) == pipeline.run([]) == list(pipeline.results()) == []
        handle = pipeline.submit(ClipRequest(seed=8), [{"note": "first"}])
        assert (handle.clip, handle.request) == (0, ClipRequest(seed=8)), "an index was taken"
        assert handle.result(HANG_SECONDS).metadata["note"] == "first"
        assert (handle.done(), handle.exception()) == (True, None)
        with pytest.raises(RequestError, match="`image` must be str"):
            ClipRequest(seed=8, image=tmp_path / "a photo")  # type: ignore[arg-type]
        assert {span.action.clip for span in pipeline.trace.spans} == {0}
        assert pipeline.run(clips(1))[0].request.seed == 1
        assert [each.clip for each in pipeline.submit(each for each in clips(2, 3))] == [2, 3]


def test_a_clip_that_the_model_or_its_checkpoints_do_not_allow_is_refused() -> None:
    scheduler = RequestScheduler(*resolve_config(small_svd(2, steps=4)), keeps_latents=True)
    good = ClipRequest(seed=0, image=PHOTO)
    with pytest.raises(RequestError, match=r"clip 1: .* needs an image") as caught:
        scheduler.resolve_requests([good, ClipRequest(seed=1)])
    assert caught.value.hint == "name an image"
    with pytest.raises(RequestError, match="done_steps must be at most 4"):
        scheduler.resolve_requests([replace(good, latents_key=KEY, done_steps=5)])
    with pytest.raises(RequestError, match="sampling parameters"):
        run_reference(config(1), [ClipRequest(seed=0, sampling=SvdSampling())])


@pytest.mark.slow
def test_each_run_is_about_its_own_clips() -> None:
    with Pipeline(config(), fault=Damage("nan", 1, 0), history_clips=1) as pipeline:
        with pytest.raises(NotFiniteError):
            pipeline.run(clips(0, 1, 5))
        assert pipeline._clips.is_idle, "it is raised when all others are made"
        (later,) = pipeline.submit(clips(2))
        assert [result.clip for result in pipeline.run(clips(3, 4))] == [4, 5]
        assert [result.clip for result in pipeline.results()] == [3]
        assert later.result().request.seed == 2
        assert [failure.clip for failure in pipeline.failures] == [0]


# --- clips with parameters of their own ---------------------------------------------------------

_CHANGES: list[dict[str, Any]] = [
    {},
    {"num_inference_steps": 9},
    {"num_inference_steps": 2},
    {"num_inference_steps": 1, "num_frames": 3},
    {"height": 64, "width": 96, "fit": "crop"},
    {"fps": 12, "motion_bucket_id": 200, "noise_aug_strength": 0.1},
    {"max_guidance_scale": 1.0},
    {"min_guidance_scale": 1.5, "max_guidance_scale": 2.5, "decode_chunk_size": 1},
]


@pytest.mark.usefixtures("one_thread")
@pytest.mark.slow
def test_each_clip_has_the_bits_of_diffusers(tmp_path: Path) -> None:
    pipeline_config = small_svd(3, parallel=ParallelConfig(split="alternating"))
    sampling = pipeline_config.sampling
    requests = [
        ClipRequest(
            seed=seed,
            image=PHOTO,
            sampling=replace(sampling, **changes),
            output=OutputConfig(path=str(tmp_path / f"{seed}.mp4")),
        )
        for seed, changes in enumerate(_CHANGES)
    ]
    with Pipeline(pipeline_config) as pipeline:
        results = pipeline.run(requests)
        assert {span.action.clip for span in pipeline.replayed(requests)} == set(
            range(len(_CHANGES))
        )
    for result in results:
        own = result.request.sampling or pipeline.config.sampling
        image = fit_image(read_image(Path(PHOTO))[0], own.width, own.height, own.fit)
        model = pipeline_config.model
        latents, frames, _ = whole_clip(model, own, result.request, image)
        assert result.metadata["latents_sha256"] == tensor_sha256(latents[-1]), own
        assert result.metadata["frames_sha256"] == frames_sha256(frames), own
    assert len(read_frames(tmp_path / "3.mp4", "mp4")) == 3
    assert read_frames(tmp_path / "4.mp4", "mp4").shape[1:3] == (64, 96)


def test_the_pipelines_own_values_fill_those_that_a_clip_leaves_open() -> None:
    config, checkpoint = resolve_config(small_svd(2))
    own = replace(config.sampling, num_frames=14, decode_chunk_size=4)
    scheduler = RequestScheduler(replace(config, sampling=own), checkpoint)
    open_ = replace(own, num_frames=None, decode_chunk_size=None)
    assert scheduler.resolve_request(ClipRequest(seed=0, sampling=open_)).sampling is None
    short = replace(own, num_frames=3, decode_chunk_size=None)
    filled = scheduler.resolve_request(ClipRequest(seed=0, sampling=short)).sampling
    assert filled == replace(short, decode_chunk_size=3)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("locale", "prompt"),
    [
        ({"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}, "café".encode()),
        ({"LC_ALL": "C.UTF-8"}, b"caf\xe9"),
    ],
)
def test_a_prompt_whose_bytes_are_no_text_is_refused_at_once(
    locale: dict[str, str], prompt: bytes
) -> None:
    """A prompt that is not UTF-8 is refused with exit code 2.

    Otherwise the tokenizers in the ranks would fail.
    """
    command = [sys.executable, "-m", "svdpp", "run", "--model", "/nowhere", "--prompt", prompt]
    environment = {**os.environ, "PYTHONPATH": PYTHONPATH, **locale}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 2, done.stderr
    assert "--prompt is not UTF-8" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("layout", "parallel", "expected"),
    [
        ("auto", ParallelConfig(), "data parallel of pairs"),
        ("auto", ParallelConfig(cfg_parallel_size=2), "data parallel of pairs"),
        ("data-parallel", ParallelConfig(), "data parallel"),
        ("pipeline", ParallelConfig(split="balanced"), "1 replica of 4 ranks, balanced"),
    ],
)
def test_python_programs_ask_for_a_layout_by_name(
    layout: Any, parallel: ParallelConfig, expected: str
) -> None:
    pipeline = Pipeline(config(4, steps=8, parallel=parallel), layout=layout, num_clips=1)
    assert str(pipeline.config.layout) == expected
    assert bool(pipeline.layout_reason) == (layout == "auto")


def test_a_layout_by_name_refuses_what_it_chooses_and_needs_the_number_of_clips() -> None:
    balanced = config(4, steps=8, parallel=ParallelConfig(split="balanced"))
    with pytest.raises(RequestError, match="`layout` auto chooses `split`: leave it out"):
        Pipeline(balanced, layout="auto", num_clips=1)
    with pytest.raises(RequestError, match="auto needs the number of clips"):
        Pipeline(config(4, steps=8), layout="auto")


def test_ranks_find_the_actions_that_the_plan_prints_from_clips_and_requests() -> None:
    """Ranks derive the plan's actions from the requests, so messages to ranks contain no actions.

    Each message has the requests of all clips that it starts, so every rank knows all routes.
    """
    pipeline_config, checkpoint = resolve_config(
        config(3, steps=8, parallel=ParallelConfig(split="alternating"))
    )
    scheduler = RequestScheduler(pipeline_config, checkpoint)
    own = replace(pipeline_config.sampling, num_inference_steps=5)
    requests = scheduler.resolve_requests(
        [ClipRequest(seed=1), ClipRequest(seed=2, sampling=own), ClipRequest(seed=3)]
    )
    schedule = scheduler.router.schedule(requests, 4)
    for rank, message in scheduler.messages(requests, [{"a": 1}] * 3, 4).items():
        jobs = parse(message).jobs
        assert [(job.clip, job.request) for job in jobs] == [*enumerate(requests, 4)]
        finished = {action.clip for action in schedule[rank] if action.kind is Kind.FINISH}
        assert {job.clip for job in jobs if job.metadata} == finished
        assert b"DENOISE" not in message
        router = Router(pipeline_config, checkpoint)
        assert router.schedule([job.request for job in jobs], jobs[0].clip) == schedule
