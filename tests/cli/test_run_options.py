"""The effect of options of `run`: layout and clip names before ranks start, and its last lines."""

from __future__ import annotations

import json
import shlex
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from svdpp.cli.options.pipeline import PipelineOptions, PipelineRequest
from svdpp.config.limits import read_costs
from svdpp.driver import resolve
from svdpp.launch import group as fork_server
from svdpp.plan.forecast import forecast_layout
from svdpp.worker.device import MemoryPressure
from tests.cli.shell import DEMO, PHOTO, TINY, assert_error, parsed, svdpp_and_modules, svdpp_here


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In an empty folder; without the memory estimate, which takes a second, has its own test."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(resolve, "estimate_ranks", lambda *_, **__: [])


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


SHAPES = [
    "--gpus 7",
    "--gpus 8 --split alternating --decoders 2",
    "--gpus 8 --replicas 2",
    "--gpus 8 --layout auto",
    "--gpus 8 --layout data-parallel --cfg-parallel auto",
    "--gpus 8 --layout auto --cfg-parallel 2",
    "--gpus 5 --split balanced --costs svd-xt-h100-pcie",
]


@pytest.mark.parametrize("options", SHAPES)
def test_what_plan_prints_is_what_run_does(options: str) -> None:
    printed = json.loads(svdpp_here("plan", *options.split(), "--clips", "20", "--json").out)
    asked = parsed(f"svdpp run photo.jpg --model demo --device cpu {options}")["options"]
    layout = PipelineRequest(options=asked, num_clips=20, from_image=True).resolve()[0].layout

    assert printed["costs"] == layout.costs.to_json()
    assert printed["layout"]["description"] == str(layout)
    assert [(rank["rank"], rank["start"], rank["end"]) for rank in printed["ranks"]] == [
        (share.rank, share.start, share.end) for share in layout.all_shares
    ]
    forecast = forecast_layout(layout, 20)
    assert printed["forecast"]["makespan_seconds"] == forecast.makespan
    assert printed["forecast"]["latency_seconds"] == forecast.latency


@pytest.mark.parametrize(
    ("device", "gpus", "given", "world_size"),
    [
        ("cuda", 3, {"steps": 6}, 3),
        ("cuda", 8, {"steps": 28}, 7),
        ("cuda", 1, {"steps": 6}, 1),
        ("cpu", 3, {"steps": 28}, 2),
        ("cpu", 3, {"steps": 25}, 1),
        ("cpu", 3, {"steps": 25, "layout": "pipeline"}, 1),
        # Nothing must divide the steps.
        ("cpu", 3, {"steps": 25, "split": "alternating"}, 2),
        ("cpu", 3, {"steps": 25, "layout": "auto"}, 2),
        ("cpu", 3, {"steps": 25, "layout": "data-parallel"}, 2),
    ],
)
def test_by_default_as_many_ranks_as_there_are_gpus_or_two(
    monkeypatch: pytest.MonkeyPatch, device: str, gpus: int, given: dict[str, Any], world_size: int
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    options = PipelineOptions(model="dummy", threads=1, **given)
    request = PipelineRequest(options=options, num_clips=4, device=device)
    assert request.resolve()[0].world_size == world_size


# --- inputs and outputs -------------------------------------------------------------------------


def test_a_dry_run_shows_everything_and_makes_nothing() -> None:
    answer = svdpp_here("run", PHOTO, *DEMO, *TINY, "--seeds", "0-500", "--dry-run")
    result = dry_run(PHOTO, "--seeds", "1-2")

    assert answer.code == 0
    for words in ("501 clips of 2 frames, 32x32, 2 steps, on 2 cpu ranks", "\n... and 401 more\n"):
        assert words in answer.out
    assert list(Path().iterdir()) == []
    assert [clip["seed"] for clip in result["clips"]] == [1, 2]
    assert (result["layout"], result["world_size"]) == ("1 replica of 2 ranks, uniform", 2)


def test_subfolders_are_taken_where_that_is_asked_for() -> None:
    for name in ("photos/a/b/deep.jpg", "photos/a/one.jpg", "photos/.hidden/no.jpg"):
        photograph(name)
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


def test_names_of_clips() -> None:
    two = (PHOTO, photograph("b c.jpg"))
    assert names(*two) == ["rocket_0.mp4", "b c_0.mp4"]
    assert names(*two, "-o", "b c", "--format", "frames") == ["rocket_0", "b c_0"]
    assert names(PHOTO, "-o", "sea.mp4") == ["sea.mp4"]
    assert names(PHOTO, "-o", "deep/{sea}.GIF") == ["{sea}.gif"]
    Path("folder.mp4").mkdir()
    assert names(PHOTO, "-o", "folder.mp4") == ["rocket_0.mp4"]


# --- what a run says at its end -------------------------------------------------------------------


@pytest.mark.processes
def test_a_gpu_that_ran_short_of_memory_is_said_once_for_all_parts_of_a_run(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The ranks are forked, so that they inherit the patched memory pressure."""
    monkeypatch.setattr("svdpp.cli.run._AT_ONCE", 2)
    monkeypatch.setattr(MemoryPressure, "rose", lambda self: True)  # noqa: ARG005
    monkeypatch.setattr(fork_server, "start_method", lambda device: "fork")  # noqa: ARG005
    answer = svdpp_here("run", PHOTO, *DEMO, *TINY, "--seeds", "1-5", "--out", str(tmp_path))

    assert answer.code == 0, answer
    assert answer.out.split() == [f"{tmp_path}/rocket_{seed}.mp4" for seed in range(1, 6)]
    metadata = json.loads((tmp_path / "rocket_1.mp4.json").read_text())
    assert metadata["memory_pressure"] is True
    (warning,) = [line for line in answer.err.splitlines() if "warning" in line]
    assert "bits may differ" in warning
    assert "--decode-chunk-size" in warning
    assert "--gpus" in warning


NASTY = "$(touch x); 'a' b.jpg"


@pytest.mark.processes
def test_what_profile_and_run_suggest_next() -> None:
    costs = "my costs.json"
    profiled = svdpp_here(
        *("profile", "--model", "dummy", "--latent-shape", "1", "4", "2", "8", "8"),
        *("--device", "cpu", "--world", "1", "--repeats", "1", "--out", costs, "--json"),
    )
    assert profiled.code == 0, profiled
    measured = read_costs(costs)
    assert measured.to_json() == json.loads(profiled.out)
    assert (measured.decode_seconds, measured.transfer_seconds) == (0, 0)
    assert (measured.denoise_weights_gib, measured.decode_weights_gib) == (0, None)
    line = profiled.err.splitlines()[-1]
    assert line == "next: svdpp plan --world 1 --costs 'my costs.json' --compare"
    assert svdpp_here(*shlex.split(line)[2:]).code == 0
    again = svdpp_here("profile", "--model", "dummy", "--device", "cpu", "--out", costs)
    assert_error(again, 2, "'my costs.json' exists already", "--overwrite replaces it")

    Path(NASTY).write_bytes(Path(PHOTO).read_bytes())
    made = svdpp_here("run", NASTY, *DEMO, *TINY, "--fit", "crop")
    assert made.code == 0, made
    line = made.err.splitlines()[-1]
    assert shlex.split(line.removeprefix("to prove one: ")) == [
        *("svdpp", "verify", "out/$(touch x); 'a' b_0.mp4"),
    ]
    assert not Path("x").exists()
