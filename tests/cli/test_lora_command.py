"""`--lora` of `run` and `verify`: clips, their JSON, and what another LoRA changes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.cli.shell import ROOT, assert_error, svdpp_here
from tests.models.builders import save_tiny_lora
from tests.models.tiny_families import save_tiny_wan

SIZES = ("--frames", "5", "--height", "32", "--width", "32", "--max-prompt-tokens", "8")
ASKED = ("--prompt", "the sea", "--steps", "4", "--world", "2", "--split", "balanced")


def test_the_forecast_of_four_steps_on_four_ranks_is_what_plan_prints() -> None:
    table = (ROOT / "docs/lora.md").read_text(encoding="utf-8").split("| 100 clips on 4 ranks |")[1]
    rows = [line.split("|")[2:5] for line in table.splitlines()[2:6]]
    asked = ("plan", "--gpus", "4", "--clips", "100", "--encode-seconds", "1", "--json")
    few = ("--steps", "4", "--step-seconds", "6", "--expert-boundary", "2")
    many = ("--steps", "40", "--step-seconds", "12", "--expert-boundary", "17")
    told = [
        json.loads(svdpp_here(*asked, "--decode-seconds", "3", *steps, "--split", split).out)
        for steps, split in ((many, "balanced"), (few, "balanced"), (few, "alternating"))
    ]
    told = [plan["forecast"] for plan in told]
    told.append(told[1]["data_parallel"])
    for row, forecast in zip(rows, told, strict=True):
        names = ("seconds_per_clip", "first_clip_seconds", "makespan_seconds")
        written = [float(cell.strip().removesuffix(" s").replace(",", "")) for cell in row]
        assert written == pytest.approx([forecast[name] for name in names], rel=0.001)


@pytest.mark.processes
@pytest.mark.long
def test_clips_with_loras_are_made_verified_and_told_apart(tmp_path: Path) -> None:
    folder, out = save_tiny_wan(tmp_path / "wan", boundary_ratio=0.875), tmp_path / "out"
    high = save_tiny_lora(folder, tmp_path / "high.safetensors", seed=1)
    low = save_tiny_lora(folder, tmp_path / "low.safetensors", part="transformer_2", seed=2)
    model = ("--model", str(folder), "--device", "cpu", "--threads", "1", *SIZES, *ASKED)
    loras = ("--lora", f"{high}:0.5:high", "--lora", f"{low}:low")

    made = svdpp_here("run", *model, *loras, "--out", str(out))
    assert made.code == 0, made
    (clip,) = out.glob("*.mp4")
    metadata = json.loads(Path(f"{clip}.json").read_text())
    assert [(each["weight"], each["expert"]) for each in metadata["lora"]] == [
        (0.5, "high"),
        (1.0, "low"),
    ]
    proof = svdpp_here("verify", str(clip))
    assert (proof.code, "bitwise equal" in proof.out) == (0, True), proof

    again = svdpp_here("run", *model, *loras, "--out", str(out), "--resume")
    assert (again.code, "was finished" in again.out) == (0, True), again
    for others in ((), (*loras[:2], "--lora", f"{low}:0.9:low")):
        other = svdpp_here("run", *model, *others, "--out", str(out), "--resume")
        assert_error(other, 2, "exists with another lora")

    save_tiny_lora(folder, high, seed=3)
    changed = svdpp_here("verify", str(clip))
    assert "has changed since the clip was made" in changed.out + changed.err
    assert changed.code != 0
