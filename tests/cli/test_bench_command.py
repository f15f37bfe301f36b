"""`svdpp bench`: its options, output and errors."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import pytest

from svdpp.bench.compare import PIPELINE
from svdpp.bench.runner import Bench
from svdpp.cli import bench
from svdpp.cli.bench import _sorted_out
from svdpp.cli.console import Console
from tests.bench.made_up_benches import round_of
from tests.cli.shell import assert_error, svdpp_here

TINY = (
    *("--model.name=dummy", "--model.latent_shape=[1, 4, 2, 8, 8]", "--workload.clips=2"),
    *("--workload.steps=2", "--measure.repeats=1", "--measure.warmups=1"),
)


def test_overrides_stand_anywhere() -> None:
    assert _sorted_out(["--a.b=1", "smoke", "--c=--d"]) == (["smoke"], ["a.b=1", "c=--d"])


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        ((), 2, ("one configuration, got none", "svdpp bench smoke")),
        (("smoke", "svd-xt"), 2, ("got smoke svd-xt",)),
        (("smoke", "--comapre", "a"), 2, ("no such option: --comapre",)),
        (("smoke", "-x"), 2, ("no such option: -x",)),
        (("smoke", "--pipeline.world=3"), 2, ("4 steps",)),
        (("smoke", "--workload.height=65"), 2, ("multiple of 8 from 8 to 4096, got 65",)),
        (("smoke", "--model.name=/absent"), 5, ("/absent",)),
        (("smoke", "--workload.images=[/absent.jpg]"), 7, ("/absent.jpg",)),
        (("smoke", "--results", "/dev/null"), 8, ("/dev/null",)),
        (("smoke", "--compare", "a", "b"), 2, ("and no configuration",)),
        (("--compare", "/absent/a", "/absent/b"), 7, ("/absent/a/summary.json",)),
    ],
)
def test_what_cannot_be_measured_is_refused_first(
    arguments: tuple[str, ...], code: int, words: tuple[str, ...]
) -> None:
    assert_error(svdpp_here("bench", *arguments), code, *words)


def test_ranks_of_a_launcher_are_refused() -> None:
    world = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "3"}
    answer = svdpp_here("bench", "smoke", env=world)
    assert_error(answer, 2, "svdpp bench starts its own ranks", "without torchrun or srun")


def test_a_missed_target_decides_the_exit_code_only_if_nothing_else_failed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Replaces the measurement; other tests cover when a target is missed."""
    outcomes = {"overhead": {"verdict": "missed"}, "bubble": {"verdict": "met"}}
    sha256 = ["aa", "bb"]

    def run(_: Console, one: Bench, *others: object) -> dict[str, Any]:
        assert others
        one.rounds = [round_of(PIPELINE, n, sha256=sha256[n]) for n in range(2)]
        return {"targets": outcomes}

    monkeypatch.setattr(bench, "_run", run)
    arguments = ("bench", "smoke", *TINY, "--results", str(tmp_path))
    assert_error(svdpp_here(*arguments), 3, "bits differ")
    sha256[1] = "aa"
    assert_error(svdpp_here(*arguments), 10, "missed 1 target: overhead")


@pytest.mark.processes
@pytest.mark.long
def test_a_bench_with_targets_and_its_comparison_with_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    asked = ("bench", "smoke", *TINY, "--measure.repeats=4", "--profile=true")
    targets = ("--targets.step_p95_seconds=< 100", "--targets.makespan_seconds=< 0.000000001")
    answer = svdpp_here(*asked, *targets, "--json")

    assert answer.code == 10, answer
    assert "missed 1 target: makespan_seconds" in answer.err
    assert "nothing of SVD" in answer.err
    (found,) = json.loads(answer.out)
    verdicts = [each["verdict"] for each in found["targets"].values()]
    assert verdicts == ["met", "missed"]
    assert list(found["cases"]) == ["pipeline", "data parallel", "diffusers"]
    assert found["same_bits"] is True
    assert len(found["latents_sha256"]) == 2
    folder = tmp_path / found["folder"]
    assert json.loads((folder / "summary.json").read_text())["targets"] == found["targets"]
    kernels = json.loads((folder / "profile.json").read_text())["traceEvents"]
    assert "aten::conv3d" in {event["name"] for event in kernels}
    (command,) = [line for line in answer.err.splitlines() if line.startswith("plan with it: ")]
    planned = svdpp_here(*shlex.split(command)[4:-2], str(folder / "costs.json"), "--compare")
    assert planned.code == 0, planned
    assert "data parallel" in planned.out

    rounds = (folder / "rounds.jsonl").read_text().splitlines()
    diagnosed = [json.loads(line)["measured"] for line in rounds]
    counts = [sum(rank["step"]["count"] for rank in each["ranks"]) for each in diagnosed]
    assert counts == [4] * 12, "without the warm-up"
    assert all(rank["peak_bytes"] > 0 for each in diagnosed for rank in each["ranks"])
    assert (folder / "rounds.jsonl").stat().st_size < 80_000

    answer = svdpp_here("bench", "--compare", str(folder), str(folder), "--json")
    assert answer.code == 0, answer
    compared = json.loads(answer.out)
    assert compared["equal"] is True
    assert compared["same_bits"] is True
    answer = svdpp_here("bench", "--compare", str(folder), str(folder))
    assert answer.out.endswith("verdict: equal: every difference is within noise\n")
