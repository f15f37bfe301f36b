"""`svdpp bench`: its options, output and errors."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import pytest

from svdpp.bench.runner import PIPELINE, Bench
from svdpp.cli import bench
from svdpp.cli.console import Console
from tests.bench.made_up_benches import round_of
from tests.cli.shell import assert_error, svdpp_here

TINY = (
    *("--model.name=dummy", "--model.latent_shape=[1, 4, 2, 8, 8]", "--workload.clips=2"),
    *("--workload.steps=2", "--measure.repeats=1", "--measure.warmups=1"),
)


def test_different_bits_end_the_command(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Replaces the measurement."""

    def run(_: Console, one: Bench, *others: object) -> dict[str, Any]:
        assert others
        one.rounds = [round_of(PIPELINE, n, sha256=sha256) for n, sha256 in enumerate("ab")]
        return {}

    monkeypatch.setattr(bench, "_run", run)
    answer = svdpp_here("bench", "smoke", *TINY, "--results", str(tmp_path))
    assert_error(answer, 3, "bits differ")


@pytest.mark.processes
@pytest.mark.long
def test_a_bench_and_its_comparison_with_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    asked = ("bench", "smoke", *TINY, "--measure.repeats=4", "--profile=true")
    answer = svdpp_here(*asked, "--json")

    assert answer.code == 0, answer
    assert "nothing of SVD" in answer.err
    (found,) = json.loads(answer.out)
    assert list(found["cases"]) == ["pipeline", "data parallel", "diffusers"]
    assert found["same_bits"] is True
    assert len(found["latents_sha256"]) == 2
    folder = tmp_path / found["folder"]
    kernels = json.loads((folder / "profile.json").read_text())["traceEvents"]
    assert "aten::conv3d" in {event["name"] for event in kernels}
    (command,) = [line for line in answer.err.splitlines() if line.startswith("plan with it: ")]
    planned = svdpp_here(*shlex.split(command)[4:-2], str(folder / "costs.json"), "--compare")
    assert planned.code == 0, planned
    assert "data parallel" in planned.out

    rounds = (folder / "rounds.jsonl").read_text().splitlines()
    measured = [json.loads(line)["measured"]["ranks"] for line in rounds]
    counts = [sum(rank["step"]["count"] for rank in ranks) for ranks in measured]
    assert counts == [4] * 12, "without the warm-up"
    assert all(rank["peak_bytes"] > 0 for ranks in measured for rank in ranks)

    compare = ("bench", "--compare", str(folder), str(folder))
    compared = json.loads(svdpp_here(*compare, "--json").out)
    assert (compared["equal"], compared["same_bits"]) == (True, True)
    answer = svdpp_here(*compare)
    assert answer.out.endswith("verdict: equal: every difference is noise\n")
    assert max(map(len, answer.out.splitlines()[3:])) <= 80
