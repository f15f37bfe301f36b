"""`svdpp plan --expert-boundary`: the expert and memory of each rank, and what is refused."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from svdpp.plan.costs import Costs
from tests.cli.shell import ROOT, svdpp_here
from tests.plan import plans

WAN = ("plan", "--world", "4", "--steps", "40", "--expert-boundary", "13")
COSTS = replace(plans.WAN["costs"], step_seconds=1, encode_seconds=0, decode_seconds=3)


@pytest.fixture
def costs_file(tmp_path: Path) -> str:
    path = tmp_path / "costs.json"
    path.write_text(json.dumps(COSTS.to_json()), encoding="utf-8")
    return str(path)


def test_the_table_shows_the_expert_and_memory_of_each_rank(costs_file: str) -> None:
    lines = svdpp_here(*WAN, "--costs", costs_file).out.splitlines()
    assert [line.split() for line in lines[:5]] == [
        ["rank", "start", "end", "steps", "expert", "GiB"],
        ["0", "0", "13", "13", "high-noise", "47.0"],
        ["1", "13", "22", "9", "low-noise", "36.0"],
        ["2", "22", "31", "9", "low-noise", "36.0"],
        ["3", "31", "40", "9", "low-noise", "36.5"],
    ]
    shared = svdpp_here(*WAN, "--costs", costs_file, "--share-experts").out.splitlines()
    assert shared[2].split() == ["1", "10", "20", "10", "both", "63.0"]


def test_json_shows_the_experts(costs_file: str) -> None:
    plan = json.loads(svdpp_here(*WAN, "--costs", costs_file, "--json").out)
    assert (plan["layout"]["expert_boundary"], plan["layout"]["share_experts"]) == (13, False)
    assert [rank["experts"] for rank in plan["ranks"]] == [["high-noise"], *[["low-noise"]] * 3]
    assert [rank["peak_gib"] for rank in plan["ranks"]] == [47, 36, 36, 36.5]

    options = (*WAN, "--costs", costs_file, "--layout", "auto", "--device-memory", "80", "--json")
    plan = json.loads(svdpp_here(*options).out)
    assert plan["layout"]["reason"].endswith("; each rank holds both experts")
    assert plan["ranks"][0]["experts"] == ["high-noise", "low-noise"]


#: The estimate of --memory for Wan 2.2 T2V A14B, 81 frames at 480p in bf16, and assumed seconds.
T2V_480P = Costs(
    step_seconds=10,
    encode_seconds=2,
    decode_seconds=10,
    encode_weights_gib=10.58,
    denoise_weights_gib=26.62,
    decode_weights_gib=0.27,
    encode_work_gib=0.12,
    denoise_work_gib=3.48,
    decode_work_gib=7.61,
)


@pytest.mark.parametrize("memory", ["47", "79", "79,47,79,47"])
def test_the_table_of_cards_holds(memory: str, tmp_path: Path) -> None:
    guide = (ROOT / "docs/models.md").read_text(encoding="utf-8")
    [row] = [line for line in guide.splitlines() if f"| `{memory}` |" in line]
    _, _, _, picked, seconds, _ = map(str.strip, row.split("|"))
    path = tmp_path / "costs.json"
    path.write_text(json.dumps(T2V_480P.to_json()), encoding="utf-8")

    options = ("--costs", str(path), "--clips", "64", "--layout", "auto")
    plan = json.loads(svdpp_here(*WAN, *options, "--device-memory", memory, "--json").out)
    assert plan["layout"]["description"] == picked.partition(";")[0]
    assert f"{plan['forecast']['makespan_seconds']:.4g} s" == seconds
