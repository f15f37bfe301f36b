"""`svdpp plan`: table of ranks, grid, forecast, and refused options."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from svdpp.plan.costs import PRESETS, CostModel
from tests.support import plans
from tests.support.markdown_pages import code_blocks, table_rows
from tests.support.shell import ROOT, svdpp_here

A100_COSTS = PRESETS["svd-xt-a100"]
#: Costs with which a step takes one second, and everything else takes no time.
STEPS_ALONE = ("--step-seconds", "1", "--encode-seconds", "0", "--decode-seconds", "0")


def test_json_is_that_of_the_issue() -> None:
    """`--json` prints the plan with these keys and values.

    The option names of diffusers and torchrun are aliases.
    """
    answer = svdpp_here("plan", "--total-steps", "28", "--gpus", "7", *STEPS_ALONE, "--json")

    assert (answer.code, answer.err) == (0, "")
    plan = json.loads(answer.out)
    layout = {"split": "uniform", "replicas": 1, "decoders": 1}
    layout |= {"cfg_parallel": 1, "decode_ranks": 1, "reason": None}
    parts = [{"encode": rank == 0, "denoise": True, "decode": rank == 6} for rank in range(7)]
    alone = {"step_seconds": 1.0, "encode_seconds": 0.0, "decode_seconds": 0.0}
    assert plan == {
        **{"schema_version": 2, "num_steps": 28, "world_size": 7, "split": "uniform"},
        "layout": {"description": "1 replica of 7 ranks, uniform", **layout},
        "ranks": [
            {"rank": rank, "start": 4 * rank, "end": 4 * rank + 4, "mean_steps": 4, **parts[rank]}
            | {"peak_gib": None}
            for rank in range(7)
        ],
        "costs": A100_COSTS.to_json() | alone,
        "forecast": {
            "clips": 14,
            "makespan_seconds": (14 + 7 - 1) * 4,
            "first_clip_seconds": 28,
            "seconds_per_clip": 4,
            "bubble": pytest.approx(6 / 20),
            "jitter_seconds": 0,
            "latency_seconds": 28,
            "computed_clips": 14,
            "data_parallel": {
                "makespan_seconds": 56,
                "first_clip_seconds": 28,
                "seconds_per_clip": 28 / 7,
            },
        },
    }


def test_the_assumed_costs_are_named() -> None:
    answer = svdpp_here("plan", "--step-seconds", "2")

    assert "with the costs of svd-xt-a100 (A100 80GB SXM)" in answer.err
    assert json.loads(svdpp_here("plan", "--json").out)["costs"] == A100_COSTS.to_json()


def test_comparison_in_json_says_the_same() -> None:
    asked = ("plan", "--steps", "25", "--world", "8", "--compare", "--json")
    result = json.loads(svdpp_here(*asked).out)

    assert (result["schema_version"], result["clips"]) == (2, 128)
    rows = {row["name"]: row for row in result["layouts"]}
    layouts = ["uniform", "balanced", "alternating", "2 decoders", "auto", "data parallel", "pairs"]
    assert list(rows) == layouts
    assert rows["uniform"]["forecast"] is None
    assert "cannot be split evenly" in rows["uniform"]["note"]
    assert rows["2 decoders"]["layout"]["decoders"] == 2
    seconds = rows["data parallel"]["forecast"]["seconds_per_clip"]
    assert seconds == pytest.approx(32.15 / 8, rel=1e-3)


def test_ranks_without_work_are_a_warning() -> None:
    answer = svdpp_here("plan", "--world", "64", "--split", "balanced")

    assert answer.code == 0
    assert "warning: this layout: 34 of 64 ranks have nothing to do\n" in answer.err
    assert "warning" not in svdpp_here("plan", "--world", "4", "--split", "balanced").err


# --- two experts ---------------------------------------------------------------------------------

WAN = ("plan", "--world", "4", "--steps", "40", "--expert-boundary", "13")
COSTS = replace(plans.WAN["costs"], step_seconds=1, encode_seconds=0, decode_seconds=3)


def save(costs: CostModel, folder: Path) -> str:
    (folder / "costs.json").write_text(json.dumps(costs.to_json()), encoding="utf-8")
    return str(folder / "costs.json")


def test_the_experts_and_memory_of_each_rank_are_shown(tmp_path: Path) -> None:
    costs_file = save(COSTS, tmp_path)
    plan = json.loads(svdpp_here(*WAN, "--costs", costs_file, "--json").out)
    assert (plan["layout"]["expert_boundary"], plan["layout"]["share_experts"]) == (13, False)
    assert [rank["experts"] for rank in plan["ranks"]] == [["high-noise"], *[["low-noise"]] * 3]
    assert [rank["peak_gib"] for rank in plan["ranks"]] == [47, 36, 36, 36.5]

    shared = svdpp_here(*WAN, "--costs", costs_file, "--share-experts").out.splitlines()
    assert shared[3].split()[1:4] == ["10", "20", "10"]
    assert shared[3].split()[-4:] == ["high-noise,", "low-noise", "63", "GiB"]


#: Costs of Wan 2.2 T2V A14B, 81 frames at 480p in bf16: memory as estimated by --memory, and
#: assumed times.
T2V_480P = CostModel(
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
    [row] = [row for row in table_rows(guide) if f"`{memory}`" in row]
    *_, picked, seconds = row
    options = ("--costs", save(T2V_480P, tmp_path), "--clips", "64", "--layout", "auto")
    plan = json.loads(svdpp_here(*WAN, *options, "--device-memory", memory, "--json").out)
    assert plan["layout"]["description"] == picked.partition(";")[0]
    assert f"{plan['forecast']['makespan_seconds']:.4g} s" == seconds


# --- docs/scheduling.md -------------------------------------------------------------------------

GUIDE = (ROOT / "docs/scheduling.md").read_text(encoding="utf-8")
#: Arguments and printed output of each command in the guide.
SHOWN = [
    (command.removeprefix("$ svdpp "), output)
    for command, _, output in (
        block.text.partition("\n") for block in code_blocks(GUIDE, "console")
    )
]
#: Costs files by name. The guide shows their contents in this order.
FILES = dict(
    zip(
        ("tight.json", "mixed.json"),
        (block.text for block in code_blocks(GUIDE, "json")),
        strict=True,
    )
)


def test_the_guide_shows_commands() -> None:
    assert len(SHOWN) == GUIDE.count("$ svdpp") >= 8


@pytest.mark.parametrize(("command", "output"), SHOWN, ids=[command for command, _ in SHOWN])
def test_the_guide_shows_what_its_commands_print(
    command: str, output: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name, content in FILES.items():
        (tmp_path / name).write_text(content, encoding="utf-8")
    answer = svdpp_here(*command.split())

    assert answer.code == 0, answer.err
    assert [line.rstrip() for line in answer.out.splitlines()] == output.splitlines()


@pytest.mark.parametrize(
    ("options", "most"),
    [
        ((), 1 / 2),  # the number of chunks is unknown
        (("--frames", "25", "--decode-chunk-size", "10"), 15 / 25),  # one rank decodes 10 + 5
        (("--frames", "24", "--decode-chunk-size", "6"), 1 / 2),
    ],
)
def test_a_plan_counts_the_chunks_that_ranks_decode(options: tuple[str, ...], most: float) -> None:
    asked = ("plan", "--gpus", "2", "--clips", "1", "--decode-ranks", "2", "--json", *options)
    plan = json.loads(svdpp_here(*asked).out)
    forecast, costs = plan["forecast"], A100_COSTS
    fractions = [rank["decode_fraction"] for rank in plan["ranks"]]
    assert (max(fractions), sum(fractions)) == (pytest.approx(most), 1)
    others = costs.encode_on(0) + 28 * costs.step_on(0) + most * costs.decode_on(1)
    assert forecast["makespan_seconds"] == pytest.approx(others, rel=1e-3)


def test_the_old_name_of_a_split_is_taken() -> None:
    plan = json.loads(svdpp_here("plan", "--world", "2", "--split", "dithered", "--json").out)
    assert plan["layout"]["split"] == "alternating"
