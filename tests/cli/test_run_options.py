"""The effect of `run` options before ranks start: clip names, layout, remarks."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from svdpp.cli.console import Console
from svdpp.cli.options.files import TraceOptions
from svdpp.cli.options.pipeline import PipelineOptions
from svdpp.cli.request import PipelineRequest
from svdpp.cli.run import Run
from svdpp.config import PipelineConfig
from svdpp.driver.pipeline import Pipeline
from svdpp.errors import RequestError
from svdpp.plan.forecast import forecast_layout
from tests.cli.shell import DEMO, PHOTO, TINY, assert_error, svdpp_and_modules, svdpp_here
from tests.cli.test_help import parsed

pytestmark = pytest.mark.usefixtures("elsewhere", "without_memory")


def photograph(name: str) -> str:
    """Copies a photograph to that name."""
    Path(name).parent.mkdir(parents=True, exist_ok=True)
    shutil.copy(PHOTO, name)
    return name


def dry_run(*options: str) -> dict[str, Any]:
    answer = svdpp_here("run", *options, *DEMO, *TINY, "--dry-run", "--json", "-q")
    assert answer.code == 0, answer
    result: dict[str, Any] = json.loads(answer.out)
    return result


def names(*options: str) -> list[str]:
    """The names of the clips that a run would make."""
    return [clip["output"] for clip in dry_run(*options)["clips"]]


# --- what plan prints is what run does ----------------------------------------------------------


def config_of(options: str, num_clips: int) -> PipelineConfig:
    """The layout of `svdpp run` with these options."""
    values = parsed(f"svdpp run photo.jpg --model demo --device cpu {options}")
    asked = Run(console=Console(), launched=None, options=values["options"], traces=TraceOptions())
    return asked.config(num_clips)[0]


SHAPES = [
    "--gpus 7",
    "--gpus 8 --split alternating --decoders 2",
    "--gpus 8 --replicas 2",
    "--gpus 4 --layout pipeline",
    "--gpus 8 --layout auto",
    "--gpus 8 --layout data-parallel --cfg-parallel auto",
    "--gpus 8 --layout auto --cfg-parallel 2",
    "--gpus 5 --split balanced --costs svd-xt-h100-pcie",
]


@pytest.mark.parametrize("options", SHAPES)
def test_what_plan_prints_is_what_run_does(options: str) -> None:
    printed = json.loads(svdpp_here("plan", *options.split(), "--clips", "20", "--json").out)
    layout = config_of(options, num_clips=20).layout

    assert printed["costs"] == layout.costs.to_json()
    assert printed["layout"]["description"] == str(layout)
    assert [(rank["rank"], rank["start"], rank["end"]) for rank in printed["ranks"]] == [
        (share.rank, share.start, share.end) for share in layout.all_shares
    ]
    forecast = forecast_layout(layout, 20)
    assert printed["forecast"]["makespan_seconds"] == forecast.makespan
    assert printed["forecast"]["latency_seconds"] == forecast.latency


# --- how many ranks, and which layout -------------------------------------------------------------


@pytest.mark.parametrize("option", ["layout", "cfg_parallel"])
def test_auto_needs_the_number_of_clips(option: str) -> None:
    layout: dict[str, Any] = {option: "auto"}
    options = PipelineOptions(model="demo", world=4, threads=1, steps=25, **layout)
    with pytest.raises(RequestError, match=r"auto needs .* only rank 0 knows it"):
        PipelineRequest(options=options, num_clips=None, device="cpu").resolve()


def test_all_ranks_may_be_used_where_nothing_must_divide() -> None:
    def world(**given: Any) -> int:
        options = PipelineOptions(model="demo", threads=1, steps=25, **given)
        request = PipelineRequest(options=options, num_clips=4, device="cpu")
        return request.resolve()[0].world_size

    assert world() == world(layout="pipeline") == 1
    assert world(split="alternating") == world(layout="auto") == world(layout="data-parallel") == 2


@pytest.mark.parametrize(
    ("device", "gpus", "steps", "world_size"),
    [("cuda", 3, 6, 3), ("cuda", 8, 28, 7), ("cuda", 1, 6, 1), ("cpu", 3, 8, 4), ("cpu", 3, 6, 3)],
)
def test_simulate_starts_as_many_ranks_as_there_are_gpus(
    monkeypatch: pytest.MonkeyPatch, device: str, gpus: int, steps: int, world_size: int
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    started: list[int] = []

    def start(self: Pipeline) -> None:
        started.append(self.config.world_size)
        raise RequestError("this test starts no ranks")

    monkeypatch.setattr(Pipeline, "__enter__", start)
    answer = svdpp_here("simulate", "--device", device, "--steps", str(steps))
    assert_error(answer, 2, "this test starts no ranks")
    assert started == [world_size]


# --- what is said before a run ------------------------------------------------------------------


def test_photographs_that_are_stretched_are_named_once() -> None:
    options = ("run", PHOTO, photograph("other.jpg"), *DEMO, *TINY, "--dry-run")
    stretched, cropped = svdpp_here(*options), svdpp_here(*options, "--fit", "crop")

    said = "fit: 'rocket.jpg' and 1 more are stretched to 32x32; --fit crop keeps"
    assert stretched.err.count("fit:") == 1
    assert said in stretched.err
    assert "fit:" not in cropped.err
    assert "fit:" not in svdpp_here(*options, "--width", "48").err  # the photographs' shape


def test_a_dry_run_shows_everything_and_makes_nothing() -> None:
    answer = svdpp_here("run", PHOTO, *DEMO, *TINY, "--seeds", "0-500", "--dry-run")
    result = dry_run(PHOTO, "--seeds", "1-2")

    assert answer.code == 0
    for words in (
        "501 clips to make: 2 frames of 32x32, 2 steps",
        "folder: out\n",
        "\n... and 401 more\n",
        "\nrocket_99.mp4 ",
    ):
        assert words in answer.out
    assert list(Path().iterdir()) == []
    assert [clip["seed"] for clip in result["clips"]] == [1, 2]
    assert (result["layout"], result["world_size"]) == ("1 replica of 2 ranks, uniform", 2)


# --- inputs -------------------------------------------------------------------------------------


def test_subfolders_are_taken_where_that_is_asked_for() -> None:
    for name in ("photos/a/b/deep.jpg", "photos/a/one.jpg", "photos/.hidden/no.jpg"):
        photograph(name)
    Path("photos/a/text.txt").write_text("x")
    Path("photos/link").symlink_to("a")
    refused = svdpp_here("run", "photos", *DEMO, *TINY)

    assert_error(refused, 7, "'photos' is a folder without images", "--recursive")
    assert names("photos", "--recursive") == ["one_0.mp4", "deep_0.mp4"]


def test_one_unreadable_photograph_names_the_option_that_leaves_it_out() -> None:
    photograph("photos/one.jpg")
    Path("photos/bad.png").write_text("x")
    answer = svdpp_here("run", "photos", *DEMO, *TINY)

    assert_error(answer, 7, "'photos/bad.png' is not an image", "--keep-going makes the clips of")
    assert names("photos", "--keep-going") == ["one_0.mp4"]
    assert "--keep-going" not in svdpp_here("run", "photos/bad.png", *DEMO, *TINY).err
    assert "--keep-going" not in svdpp_here("verify", "photos", *DEMO, *TINY).err


def test_a_misspelt_photograph_is_refused_before_torch_is_imported() -> None:
    answer, loaded = svdpp_and_modules("run", "roket.jpg", *DEMO)

    assert_error(answer, 7, "'roket.jpg' does not exist")
    assert not loaded & {"torch", "diffusers"}


# --- outputs ------------------------------------------------------------------------------------


def test_names_of_clips() -> None:
    two = (PHOTO, photograph("b c.jpg"))
    assert names(*two) == ["rocket_0.mp4", "b c_0.mp4"]
    assert names(PHOTO, "-o", "sea.mp4") == ["sea.mp4"]
    assert names(PHOTO, "-o", "deep/sea.GIF") == ["sea.gif"]
    assert names(PHOTO, "-o", "{{sea}}.mp4") == ["{{sea}}.mp4"]  # a template needs fields
    template = "clips/{index:02}-{name}-{seed}.webp"
    assert names(*two, "--seeds", "7,8", "-o", template) == [
        *("01-rocket-7.webp", "02-rocket-8.webp", "03-b c-7.webp", "04-b c-8.webp"),
    ]
    assert names(*two, "-o", "{name}", "--format", "frames") == ["rocket", "b c"]
    Path("folder.mp4").mkdir()
    assert names(PHOTO, "-o", "folder.mp4") == ["rocket_0.mp4"]


@pytest.mark.parametrize(
    ("out", "more", "words"),
    [
        ("a.avi", (), ("clips are mp4, gif or webp", "--out a.mp4")),
        ("a b.mov", (), ("--out 'a b.mp4'",)),
        ("c/{nam}.mp4", (), ("--out 'c/{nam}.mp4' is not", "'nam'", "{name}, {seed} and {index}")),
        ("{}.mp4", (), ("is not a template",)),
        ("{name.mp4", (), ("'{name.mp4' is not a template",)),
        ("{seed:x y}.mp4", (), ("is not a template",)),
        ("{name}/{seed}.mp4", (), ("are allowed only in the last part",)),
        ("a.mp4", ("--format", "gif"), ("--out a.mp4 is mp4, --format says gif",)),
        ("a.mp4", ("--seeds", "1-2"), ("would both become 'a.mp4'", "--out '{name}_{index}.mp4'")),
    ],
)
def test_names_that_cannot_be(out: str, more: tuple[str, ...], words: tuple[str, ...]) -> None:
    assert_error(svdpp_here("run", PHOTO, *DEMO, *TINY, "-o", out, *more), 2, *words)
    assert list(Path().iterdir()) == []
