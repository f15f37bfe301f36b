"""What limits the pipeline of a bench, in its summary and on the terminal."""

from __future__ import annotations

import json
import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any

from svdpp.bench.compare import ROUNDS, SUMMARY
from svdpp.bench.config import BenchConfig, read_config
from tests.bench.made_up_benches import FIGURES, leave_bench
from tests.diagnostics.made_up_runs import EVEN, delayed, replayed

_DECODE = replayed(replace(EVEN, decode_seconds=1.0))


def _limits(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / SUMMARY).read_text())["limits"]
    return found


def _asked(command: str) -> BenchConfig:
    program, name, config, *changes = shlex.split(command)
    assert (program, name) == ("svdpp", "bench")
    point = read_config(config, [change.removeprefix("--") for change in changes])
    return point


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
    """Data parallel is not advised by forecast: it is measured beside the pipeline."""
    folder = leave_bench(tmp_path, replayed(slow=(1.0, 2.0)))
    asked = _asked(_limits(folder)["advice"]["command"]).pipeline
    assert (asked.split, asked.replicas) == ("alternating", 1)
    assert asked.costs == str(folder / "costs.json")
    assert _limits(leave_bench(tmp_path, _DECODE))["advice"] is None


def test_writing_limits_no_bench(tmp_path: Path) -> None:
    figures = delayed(FIGURES, 1, 20.0, writer_wait=20.0)
    limits = _limits(leave_bench(tmp_path, replace(figures, write_tail=2.0)))
    assert [each["kind"] for each in limits["findings"]] == ["balanced"]
