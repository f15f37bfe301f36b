"""Draft options: the plan, refused requests, files and messages."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest

from svdpp.cli.profile_draft import _given
from svdpp.config import ModelConfig, PipelineConfig
from svdpp.media.video import read_frames
from tests.cli.shell import DEMO, PHOTO, assert_error, svdpp_alone, svdpp_here
from tests.plan.test_draft_plan import PLAN

SMALL = ("--height", "64", "--width", "64", "--frames", "2", "--threads", "1", "--steps", "14")
#: A step takes a second, everything else no time.
STEPS_ALONE = ("--step-seconds", "1", "--encode-seconds", "0", "--decode-seconds", "0")
STARTS = ("--draft-starts", "0,3,5", "--steps", "8")


def test_plan_shows_the_draft_plan() -> None:
    answer = svdpp_here("plan", "--draft", *STARTS, *STEPS_ALONE)
    assert answer.code == 0
    lines = answer.out.splitlines()
    assert lines[:4] == [
        "rank  start  sigma  rounds  sooner  corrected",
        "0         0    700  8 of 8   1.00x          0",
        "1         3  30.99  6 of 8   1.33x          1",
        "2         5  1.168  5 of 8   1.60x          1",
    ]
    assert lines[5:8] == [
        "rank 0 |oooooooo| exact after 8",
        "rank 1 |.oo+oo..| nearer after 6",
        "rank 2 |..o+o...| draft after 5",
    ]
    assert "draft after 5 s, exact clip after 8 s" in answer.out


def test_plan_as_json_is_the_schedule() -> None:
    content = json.loads(svdpp_here("plan", "--draft", *STARTS, *STEPS_ALONE, "--json").out)
    assert content["schedule"] == [list(map(str, rank)) for rank in PLAN.schedule([0])]
    assert (content["draft_seconds"], content["exact_seconds"]) == (5, 8)
    assert (content["evaluations"], content["messages"]) == (PLAN.num_evaluations, 6)


def test_plan_counts_decode_and_compares_with_layouts() -> None:
    options = ("plan", "--world", "4", "--steps", "28", "--costs", "svd-xt-a100", "--json")
    alone = json.loads(svdpp_here(*options, "--draft").out)
    rows = json.loads(svdpp_here(*options, "--compare", "--clips", "8").out)["layouts"]
    (draft,) = [row for row in rows if row["name"] == "draft"]
    (parallel,) = [row for row in rows if row["name"] == "data parallel"]
    assert draft["layout"]["start_steps"] == alone["start_steps"]
    assert draft["forecast"]["preview_seconds"] == pytest.approx(alone["draft_seconds"])
    assert draft["forecast"]["latency_seconds"]["mean"] == pytest.approx(alone["exact_seconds"])
    # The first frames are earlier, and the rate is lower.
    assert draft["forecast"]["preview_seconds"] < parallel["forecast"]["preview_seconds"]
    assert draft["forecast"]["seconds_per_clip"] > 3 * parallel["forecast"]["seconds_per_clip"]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--draft-starts", "0,14"), ("--draft-starts needs --draft", "add --draft")),
        (("--draft-psnr", "60dB"), ("--draft-psnr needs --draft",)),
        (("--draft", "--draft-starts", "0,30"), ("below the 28 steps",)),
        (
            ("--draft", "--draft-starts", "0,14", "--world", "3"),
            ("names 2 ranks, but there are 3",),
        ),
        (
            ("--draft", "--draft-starts", "a"),
            ("--draft-starts must be steps", "--draft-starts 0,14"),
        ),
        (("--draft", "--world", "1"), ("has no default start steps", "use --world 2 to 8")),
        (("--draft", "--world", "9"), ("use --world 2 to 8, or give the start steps",)),
        (("--draft", "--world", "8", "--steps", "12"), ("use --world 2 to 7",)),
        (("--draft", "--world", "2", "--steps", "3"), ("use --steps 4 or more",)),
        (("--draft", "--world", "2", "--draft-psnr", "60"), ("use --world 3 or more",)),
        (
            ("--draft", "--draft-starts", "0,14", "--draft-psnr", "60"),
            ("as many --draft-starts if given",),
        ),
        (("--draft", "--world", "3", "--draft-psnr", "good"), ("must be a PSNR in dB", "60dB")),
        (("--draft", "--world", "3", "--draft-psnr", "0dB"), ("finite PSNR above 0",)),
        (("--draft", "--split", "dithered"), ("leave out --split",)),
        (("--draft", "--replicas", "2"), ("leave out --replicas",)),
        (("--draft", "--layout", "auto"), ("leave out --layout",)),
        (("--draft", "--latents-dir", "saved"), ("leave out --latents-dir",)),
    ],
)
def test_requests_that_are_refused(
    options: tuple[str, ...], words: tuple[str, ...], tmp_path: Path
) -> None:
    answer = svdpp_here("run", PHOTO, *DEMO, "--out", str(tmp_path), *options)
    assert_error(answer, 2, *words)


def test_a_file_of_starts_that_is_none(tmp_path: Path) -> None:
    path = tmp_path / "draft.json"
    path.write_text("{}")
    options = ("--draft", "--draft-starts", str(path))
    assert_error(svdpp_here("plan", *options), 7, "is not a draft profile", "svdpp profile --draft")


def test_photographs_are_for_drafts_alone() -> None:
    answer = svdpp_here("profile", PHOTO, "--model", "demo", "--device", "cpu")
    assert_error(answer, 2, "PHOTO has an effect only with --draft", "add --draft")


def test_profile_names_the_run_that_it_is_for() -> None:
    usual = PipelineConfig(world_size=2, device="cuda")
    assert _given(usual) == []
    demo = replace(usual, model=ModelConfig(name="demo", variant="fp16"), device="cpu")
    assert _given(demo) == ["--model", "demo", "--variant", "fp16", "--device", "cpu"]


def test_a_draft_of_one_step_is_not_measured(tmp_path: Path) -> None:
    out = tmp_path / "draft.json"
    answer = svdpp_here("profile", "--draft", *DEMO, *SMALL[:-1], "1", "--out", str(out))
    assert answer.code == 2
    assert "no draft of 2 ranks or more fits into 1 steps" in answer.err
    assert not out.exists()


@pytest.mark.processes
def test_run_says_what_came_when(tmp_path: Path) -> None:
    out = tmp_path / "out"
    answer = svdpp_here(
        *("run", PHOTO, *DEMO, *SMALL, "--draft", "--world", "3", "--out", str(out))
    )
    assert answer.code == 0, answer.err
    assert answer.out == f"{out}/rocket_0.mp4\n"
    assert "each clip has a draft after 8 of 14 rounds, start steps 0," in answer.err
    assert "8 of 14 rounds -> rocket_0.draft.mp4" in answer.err
    (line,) = [line for line in answer.err.splitlines() if "exact, after" in line]
    assert re.search(r"its draft, after [\d.]+ s, was [\d.]+ dB", line)
    assert sorted(path.name for path in out.iterdir()) == [
        *("rocket_0.mp4", "rocket_0.mp4.json", "run.json")
    ]
    (clip,) = json.loads((out / "run.json").read_text())["clips"]
    assert clip["state"] == "done"
    assert "draft" not in clip


@pytest.mark.processes
@pytest.mark.long
def test_an_accepted_draft_is_kept_resumed_and_never_verified(tmp_path: Path) -> None:
    out = tmp_path / "out"
    command = ("run", PHOTO, *DEMO, *SMALL, "--world", "3", "--out", str(out))
    drafting = (*command, "--draft", "--draft-starts", "0,7,9")
    answer = svdpp_here(*drafting, "--draft-psnr", "10dB")
    assert answer.code == 0, answer.err
    assert answer.out == f"{out}/rocket_0.draft.mp4\n"
    assert "approximate: the result of rank 1" in answer.err
    assert "to prove one" not in answer.err
    assert len(read_frames(out / "rocket_0.draft.mp4", "mp4")) == 2
    record = json.loads((out / "rocket_0.draft.mp4.json").read_text())
    assert record["exact"] is False
    (clip,) = json.loads((out / "run.json").read_text())["clips"]
    assert (clip["state"], clip["exact"], clip["output"]) == ("done", False, "rocket_0.draft.mp4")

    refused = svdpp_here("verify", str(out / "rocket_0.draft.mp4.json"))
    assert_error(refused, 2, "marked as not exact", "without --draft-psnr")
    again = svdpp_here(*drafting, "--draft-psnr", "10dB", "--resume")
    assert again.out == f"{out}/rocket_0.draft.mp4  (was finished)\n"
    better = svdpp_here(*drafting, "--resume")
    assert better.out == f"{out}/rocket_0.mp4\n", better.err
    assert not (out / "rocket_0.draft.mp4").exists()
    assert json.loads((out / "rocket_0.mp4.json").read_text())["exact"] is True


@pytest.mark.processes
@pytest.mark.long
@pytest.mark.full
def test_profile_measures_starts_that_run_takes(tmp_path: Path) -> None:
    path = tmp_path / "draft.json"
    answer = svdpp_alone(
        *("profile", "--draft", PHOTO, *DEMO, "--world", "3", "--steps", "8", "--frames", "2"),
        *("--height", "64", "--width", "64", "--threads", "1", "--out", str(path)),
    )
    assert answer.code == 0, answer.err
    content = json.loads(path.read_text())
    assert content["photographs"] == ["rocket.jpg"]
    assert {len(choice["start_steps"]) for choice in content["choices"]} == {2, 3}
    assert (
        "svdpp run PHOTO --draft --model demo --device cpu --steps 8 --draft-starts" in answer.err
    )
    planned = svdpp_here("plan", "--draft", "--steps", "8", "--draft-starts", str(path), "--json")
    start_steps = json.loads(planned.out)["start_steps"]
    assert start_steps in [choice["start_steps"] for choice in content["choices"]]


@pytest.mark.processes
@pytest.mark.long
def test_verify_and_simulate_know_drafts(tmp_path: Path) -> None:
    page = tmp_path / "proof.html"
    verified = svdpp_here(
        *("verify", PHOTO, *DEMO, *SMALL, *STARTS, "--draft", "--clips", "1"),
        *("--report", str(page)),
    )
    assert verified.code == 0, verified.err
    assert "bitwise equal: 1 clip, 4 comparisons" in verified.out
    assert "draft's frames" in verified.out
    text = page.read_text()
    assert "Drafts" in text
    assert "Draft by rank 2, after 5 rounds" in text
    scaled = svdpp_here(
        *("simulate", "--draft", *STARTS, "--latent-shape", "1", "4", "2", "8", "8", "--json")
    )
    assert scaled.code == 0, scaled.err
    content = json.loads(scaled.out)
    assert content["start_steps"] == [0, 3, 5]
    assert [rank["steps_done"] for rank in content["ranks"]] == [
        content["clips"] * steps for steps in (8, 5, 3)
    ]
