"""`doctor`, `report`, tables of the console, and `bench`."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import pytest
import torch

from svdpp.bench.runner import Bench
from svdpp.bench.targets import PIPELINE
from svdpp.cli import bench
from svdpp.cli.console import Console
from svdpp.config import DEFAULT_MODEL
from tests.support.made_up_runs import EVEN, leave, replayed, round_of
from tests.support.shell import Answer, assert_error, svdpp_here

#: First line that `doctor` prints, before its slow imports.
BEGIN = "importing PyTorch and diffusers, then running the checks one by one"


@pytest.mark.slow
def test_a_healthy_machine(tmp_path: Path) -> None:
    answer = svdpp_here(
        *("doctor", "--device", "cpu", "--world", "2", "--out", str(tmp_path / "out")),
        *("--height", "32", "--width", "32", "--frames", "2", "--threads", "1"),
    )

    assert answer.code == 0, answer
    assert "2 ranks on cpu, 1 thread each" in answer.out
    assert answer.err == (
        f"{BEGIN}\n"
        "demo on 2 cpu ranks has what it needs\n"
        f"svdpp run has another default model: svdpp doctor --model {DEFAULT_MODEL}\n"
    )
    verdicts = [line[:32].split(None, 1) for line in answer.out.splitlines() if line[0] != " "]
    names = [
        *("devices", "ffmpeg", "output folder", "model", "memory", "transfers"),
        # Only attention backends that run on a CPU and need no further package are checked.
        *("attention native", "attention _native_flash", "attention _native_math", "cut test"),
    ]
    assert [(verdict, name.strip()) for verdict, name in verdicts] == [("ok", n) for n in names]
    assert not (tmp_path / "out").exists()


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_broken_machine_names_every_fix(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "model").mkdir()
    command = ("doctor", "--device", "cuda", "--world", "1", "--out", str(tmp_path / "file/out"))
    model = ("--model", str(tmp_path / "model"))
    words, answer = (
        svdpp_here(*command, *model, *more, env={"IMAGEIO_FFMPEG_EXE": "/nowhere/ffmpeg"})
        for more in ((), ("--json",))
    )

    assert words.err == f"{BEGIN}\n4 of 8 checks failed\n"
    assert f"failed  {'ffmpeg':<24}mp4 needs ffmpeg, which was not found\n" in words.out
    assert "\n" + " " * 32 + "fix: pip install imageio-ffmpeg\n" in words.out
    report = json.loads(answer.out)
    checks = {check["name"]: check for check in report["checks"]}
    assert not report["healthy"]
    assert report["examined"] == {"model": model[1], "device": "cuda", "world_size": 1}
    assert words.code == answer.code == 2  # the exit code is that of the first failed check
    failed = {name: check["exit_code"] for name, check in checks.items() if check["exit_code"]}
    assert failed == {"devices": 2, "ffmpeg": 8, "output folder": 8, "model": 5}
    fixes = {"devices": "--device cpu", "output folder": "--out", "model": "--model"}
    assert all(words in checks[name]["fix"] for name, words in fixes.items())
    for name in ("memory", "transfers", "attention", "cut test"):
        assert checks[name]["verdict"] == "skipped"
        assert checks[name]["detail"] == "the check 'devices' has not passed"


@pytest.mark.slow
def test_the_report_fits_one_page(tmp_path: Path) -> None:
    leave(tmp_path / "out", replayed(EVEN, clips=2, world_size=4, num_steps=12))

    answer = svdpp_here("report", str(tmp_path / "out"))

    assert answer.code == 0, answer
    assert "clips: 1 done, 1 failed" in answer.out
    assert "a_1.mp4: a latent is not finite" in answer.out
    assert "2 clips cannot fill 4 ranks" in answer.out
    assert "    --layout data-parallel\n" in answer.out
    assert answer.out.count("  1.00\n") == 4, answer.out
    assert len(answer.out.splitlines()) <= 40


def test_a_table_in_a_file_is_not_cut(capsys: pytest.CaptureFixture[str]) -> None:
    cells = ("a" * 70, "b" * 70)
    Console().table([dict(zip(("one", "two"), cells, strict=True))])
    assert capsys.readouterr().out.splitlines()[1].split() == list(cells)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, "has no run.json"),
        ("{", "is not a run's manifest"),
        ("[]", "is not a run's manifest"),
        ('{"schema_version": 9, "clips": []}', "schema_version must be 1"),
        ('{"schema_version": 1, "clips": [{}]}', "has no results of its clips"),
        ('{"schema_version": 1, "clips": [{"state": "failed"}]}', "has no results"),
        ('{"schema_version": 1, "clips": [], "measured": {}}', "metrics are damaged"),
    ],
)
def test_a_folder_without_a_readable_run_is_one_sentence(
    content: str | None, words: str, tmp_path: Path
) -> None:
    if content is not None:
        (tmp_path / "run.json").write_text(content)
    assert_error(svdpp_here("report", str(tmp_path)), 7, words)


@pytest.mark.slow
def test_several_runs_in_one_folder_are_told_apart(tmp_path: Path) -> None:
    content = leave(tmp_path / "one", replayed()).read_text()
    for name in ("sea", "sky"):
        (tmp_path / f"{name}.run.json").write_text(content)
    several = svdpp_here("report", str(tmp_path))
    assert_error(several, 7, "has 2 runs", "a file *.run.json in it")
    (tmp_path / "sky.run.json").unlink()
    report = json.loads(svdpp_here("report", str(tmp_path), "--json").out)
    assert report["findings"][0]["kind"] == "balanced"


# --- bench ---------------------------------------------------------------------------------------

BENCH = (
    *("--model.name=dummy", "--model.latent_shape=[1, 4, 2, 8, 8]", "--workload.clips=2"),
    *("--workload.steps=2", "--measure.repeats=1", "--measure.warmups=1"),
)


def test_different_bits_end_the_command(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A bench whose rounds have different bits fails.

    The measurement is replaced by fixed rounds.
    """

    def run(_: Console, one: Bench, *others: object) -> dict[str, Any]:
        assert others
        one.rounds = [round_of(PIPELINE, n, sha256=sha256) for n, sha256 in enumerate("ab")]
        return {}

    monkeypatch.setattr(bench, "_run", run)
    answer = svdpp_here("bench", "smoke", *BENCH, "--results", str(tmp_path))
    assert_error(answer, 3, "bits differ")


def test_a_wild_range_is_as_short_as_another() -> None:
    assert bench.format_range(0.9123, 1.128) == "0.912..1.13"
    assert bench.format_range(0.000555, 1834.0) == "6e-04..2e+03"


@pytest.fixture(scope="module")
def benched(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Answer]:
    """Folder in which `svdpp bench` was run, and the result of the command."""
    place = tmp_path_factory.mktemp("benched")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(place)
        options = ("--measure.repeats=4", "--profile=true", "--json")
        return place, svdpp_here("bench", "smoke", *BENCH, *options)


@pytest.mark.slow
@pytest.mark.full
def test_a_bench_measures_every_case_and_its_costs_make_a_plan(
    benched: tuple[Path, Answer],
) -> None:
    place, answer = benched
    assert answer.code == 0, answer
    assert "nothing about real models" in answer.err
    (found,) = json.loads(answer.out)
    assert list(found["cases"]) == ["pipeline", "data parallel", "diffusers"]
    assert found["same_bits"] is True
    assert len(found["latents_sha256"]) == 2
    folder = place / found["folder"]
    kernels = json.loads((folder / "profile.json").read_text())["traceEvents"]
    assert "aten::conv3d" in {event["name"] for event in kernels}
    (command,) = [
        line for line in answer.err.splitlines() if line.startswith("plan with these costs: ")
    ]
    planned = svdpp_here(*shlex.split(command)[5:-2], str(folder / "costs.json"), "--compare")
    assert planned.code == 0, planned
    assert "data parallel" in planned.out

    rounds = (folder / "rounds.jsonl").read_text().splitlines()
    measured = [json.loads(line)["measured"]["ranks"] for line in rounds]
    counts = [sum(rank["step"]["count"] for rank in ranks) for ranks in measured]
    assert counts == [4] * 12, "without the warm-up"
    assert all(rank["peak_bytes"] > 0 for ranks in measured for rank in ranks)


@pytest.mark.slow
def test_a_bench_equals_itself(benched: tuple[Path, Answer]) -> None:
    place, answer = benched
    (found,) = json.loads(answer.out)
    compare = ("bench", "--compare", *[str(place / found["folder"])] * 2)
    compared = json.loads(svdpp_here(*compare, "--json").out)
    assert (compared["equal"], compared["same_bits"]) == (True, True)
    answer = svdpp_here(*compare)
    assert answer.out.endswith("verdict: equal: every difference is noise\n")
    assert max(map(len, answer.out.splitlines()[3:])) <= 80
