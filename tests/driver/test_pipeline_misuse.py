"""Misuse is refused at once with a plain sentence, and affects no other clip."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from svdpp.config import ClipRequest
from svdpp.driver.pipeline import Pipeline
from svdpp.errors import ClosedError, NotFiniteError, RequestError
from svdpp.media.inputs import example_photos
from tests.cli.shell import python
from tests.driver.dummies import HANG_SECONDS, clips, config
from tests.faults.damage import Damage
from tests.models.builders import small_svd

KEY = hashlib.sha256(b"clip").hexdigest()

Use = Callable[[Pipeline], object]
USES: dict[str, Use] = {
    "submit": lambda pipeline: pipeline.submit(clips(0)),
    "run": lambda pipeline: pipeline.run(clips(0)),
    "results": lambda pipeline: pipeline.results(),
    "enter": lambda pipeline: pipeline.__enter__(),
}


@pytest.mark.parametrize("name", ["submit", "run", "results"])
def test_a_pipeline_cannot_be_used_before_its_block(name: str) -> None:
    with pytest.raises(ClosedError, match="the pipeline has no ranks yet") as caught:
        USES[name](Pipeline(config()))
    assert "with Pipeline" in caught.value.hint


@pytest.mark.processes
def test_a_pipeline_cannot_be_used_after_its_block_nor_entered_twice() -> None:
    with Pipeline(config()) as pipeline:
        with pytest.raises(ClosedError, match="can be entered once: create another one"):
            pipeline.__enter__()
        (handle,) = pipeline.submit(clips(0))
    for name, use in USES.items():
        words = "can be entered once" if name == "enter" else "the pipeline is closed"
        with pytest.raises(ClosedError, match=words):
            use(pipeline)
    assert handle.result(0).clip == 0
    assert len(pipeline.trace.steps) == 4
    pipeline.close()


_SCRIPT = """
from svdpp import ClipRequest, Pipeline
from tests.driver.dummies import config
with Pipeline(config()) as pipeline:
    pipeline.run(ClipRequest(seed=0))
"""


@pytest.mark.processes
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


def test_only_a_launchers_rank_0_enters_the_block(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    pipeline = Pipeline(config())
    assert pipeline.is_member
    with pytest.raises(ClosedError, match=r"only rank 0 enters the block: .* call serve"):
        pipeline.__enter__()


def test_without_a_launcher_there_are_no_launched_ranks() -> None:
    with pytest.raises(ClosedError, match="no launcher has started this process"):
        Pipeline(config()).serve(say=print)


def test_a_pipeline_that_was_not_entered_closes_without_a_word() -> None:
    Pipeline(config()).close()
    Pipeline(config()).close(drain=False)


@pytest.mark.parametrize("number", [0, -1])
def test_a_history_has_a_clip(number: int) -> None:
    for name in ("history_clips", "trace_clips"):
        with pytest.raises(RequestError, match=f"{name} must be 1 or more, got {number}"):
            Pipeline(config(), **{name: number})


# --- requests ------------------------------------------------------------------------------------


REFUSED: dict[str, tuple[Any, type[Exception], str]] = {
    "text": ("photo.jpg", TypeError, "clip 0 of the list is a str, not a ClipRequest"),
    "number": (7, TypeError, "not iterable"),
    "second of two": ([*clips(0), 7], TypeError, "clip 1 of the list is a int"),
    "no checkpoints": (
        ClipRequest(seed=0, latents_key=KEY, done_steps=2),
        RequestError,
        "the clip has done_steps=2, but there are no latent checkpoints",
    ),
    "no key": (
        ClipRequest(seed=0, latents_key="../elsewhere"),
        RequestError,
        "the clip: latents_key must be 64 hex digits, got ../elsewhere",
    ),
}
REFUSED_METADATA: dict[str, tuple[Any, type[Exception], str]] = {
    "too few": ([{}], RequestError, "got 1 metadata for 2 clips: give one for each clip"),
    "too many": ([{}] * 3, RequestError, "got 3 metadata for 2 clips"),
    "an object": ([{}, {"input": object()}], RequestError, "the clips cannot be sent to the ranks"),
}


@pytest.mark.processes
def test_what_is_no_clip_is_refused_and_nothing_of_it_is_sent(tmp_path: Path) -> None:
    with Pipeline(config()) as pipeline:
        for requests, error, words in REFUSED.values():
            for submit in (pipeline.submit, pipeline.run):
                with pytest.raises(error, match=words):
                    submit(requests)
        for metadata, error, words in REFUSED_METADATA.values():
            with pytest.raises(error, match=words):
                pipeline.submit(clips(0, 1), metadata)
        assert pipeline.submit([]) == pipeline.run([]) == list(pipeline.results()) == []
        (result,) = pipeline.run(clips(8))
        with pytest.raises(RequestError, match="image must be str"):
            pipeline.run(ClipRequest(seed=8, image=tmp_path / "a photo"))  # type: ignore[arg-type]
    assert result.clip == 0, "an index was taken by a clip that was refused"
    assert {span.action.clip for span in pipeline.trace.spans} == {0}


@pytest.mark.processes
def test_steps_beyond_the_last_are_refused(tmp_path: Path) -> None:
    with Pipeline(config(steps=4), latents_folder=str(tmp_path)) as pipeline:
        for done_steps in (5, -1):
            with pytest.raises(RequestError, match=f"must be 0 to (4|1000), got {done_steps}"):
                pipeline.submit(ClipRequest(seed=0, latents_key=KEY, done_steps=done_steps))


@pytest.mark.processes
def test_a_single_request_gives_a_single_handle_and_result() -> None:
    with Pipeline(config()) as pipeline:
        handle = pipeline.submit(ClipRequest(seed=0), [{"note": "first"}])
        assert (handle.clip, handle.request) == (0, ClipRequest(seed=0))
        assert handle.result(HANG_SECONDS).metadata["note"] == "first"
        assert (handle.done(), handle.exception()) == (True, None)
        assert pipeline.run(ClipRequest(seed=1)).request.seed == 1
        assert [each.clip for each in pipeline.submit(each for each in clips(2, 3))] == [2, 3]


@pytest.mark.processes
def test_a_clip_without_an_image_is_refused_where_the_model_starts_from_one() -> None:
    good = ClipRequest(seed=0, image=str(example_photos()[0]))
    with Pipeline(small_svd(2, steps=2)) as pipeline:
        with pytest.raises(RequestError, match=r"clip 1 of the list: .* needs an image") as caught:
            pipeline.submit([good, ClipRequest(seed=1)])
        assert "image=" in caught.value.hint
        with pytest.raises(RequestError, match=r"the clip: .* needs an image"):
            pipeline.submit(ClipRequest(seed=1))
        assert pipeline.run(good).clip == 0


# --- clips that are lost -------------------------------------------------------------------------


@pytest.mark.processes
@pytest.mark.parametrize("history_clips", [None, 1])
def test_each_run_is_about_its_own_clips(history_clips: int | None) -> None:
    fault = Damage("nan", 1, 0)
    with Pipeline(config(), fault=fault, history_clips=history_clips) as pipeline:
        with pytest.raises(NotFiniteError):
            pipeline.run(clips(0, 1, 5))
        assert pipeline._clips.is_idle, "it is raised when all others are made"
        (later,) = pipeline.submit(clips(2))
        assert [result.clip for result in pipeline.run(clips(3, 4))] == [4, 5]
        assert [result.clip for result in pipeline.results()] == [3]
        assert later.result().request.seed == 2
        assert [failure.clip for failure in pipeline.failures] == [0]
