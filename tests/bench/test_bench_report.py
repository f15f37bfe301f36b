"""What limits the pipeline of a bench, in its summary and on the terminal."""

from __future__ import annotations

import json
import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any

from svdpp.bench.compare import ROUNDS, SUMMARY
from svdpp.bench.config import read_config
from tests.bench.made_up_benches import leave_bench
from tests.diagnostics.made_up_runs import EVEN, replayed

_DECODE = replayed(replace(EVEN, decode_seconds=1.0))


def _limits(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / SUMMARY).read_text())["limits"]
    return found


def test_the_known_bottleneck_of_the_pipeline_comes_first(tmp_path: Path) -> None:
    folder = leave_bench(tmp_path, _DECODE)

    limits = _limits(folder)

    first = limits["findings"][0]
    assert (first["kind"], first["rank"], limits["round"]) == ("decode", 1, 1)
    assert "its decodes take 67% of its work" in limits["headline"]
    rounds = [json.loads(line) for line in (folder / ROUNDS).read_text().splitlines()]
    assert [each["case"] for each in rounds] == ["pipeline", "data parallel", "diffusers"] * 3
    assert rounds[3]["measured"] == limits["measured"], "of the median round"


def test_layouts_are_advised_as_fields_of_the_configuration(tmp_path: Path) -> None:
    folder = leave_bench(tmp_path, replayed(slow=(1.0, 2.0)))
    options = shlex.split(_limits(folder)["advice"]["options"])
    asked = read_config("smoke", [each.removeprefix("--") for each in options]).pipeline
    assert (asked.split, asked.replicas) == ("alternating", 1)
    assert asked.costs == str(folder / "costs.json")
