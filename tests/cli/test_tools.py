"""`report` on folders of runs, tables of the console, `env` and `doctor`."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch

from svdpp import __version__
from svdpp.cli.console import Console
from svdpp.config import DEFAULT_MODEL
from svdpp.diagnostics import machine
from tests.bench.made_up_benches import leave_bench
from tests.cli.shell import assert_error, svdpp_alone, svdpp_here
from tests.diagnostics.made_up_runs import EVEN, leave, replayed

#: The first line of `doctor`, before its imports.
BEGIN = "importing PyTorch and diffusers, then trying one thing after the other"
NO_FFMPEG = {"IMAGEIO_FFMPEG_EXE": "/nowhere/ffmpeg"}
NO_GPU = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")


@pytest.mark.long
def test_env_in_words_and_as_json() -> None:
    words, values = svdpp_alone("env"), svdpp_here("env", "--json")

    assert (words.code, words.err) == (0, "")
    assert words.out.split()[:3] == ["versions", "svdpp:", __version__]
    for name in ("torch:", "cpu:", "memory:", "ffmpeg", "hub cache", "HF_HUB_OFFLINE"):
        assert re.search(rf"\n *{name}", words.out)
    facts = json.loads(values.out)
    assert facts["schema_version"] == 1
    assert facts["variables"]["HF_HUB_OFFLINE"] == "1"


@pytest.mark.long
@pytest.mark.processes
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
        f"svdpp run has another default: svdpp doctor --model {DEFAULT_MODEL}\n"
    )
    verdicts = [line[:26].split(None, 1) for line in answer.out.splitlines() if line[0] != " "]
    names = ["devices", "ffmpeg", "output folder", "model", "memory", "transfers", "cut test"]
    assert [(verdict, name.strip()) for verdict, name in verdicts] == [("ok", n) for n in names]
    assert not (tmp_path / "out").exists()


@NO_GPU
def test_doctor_says_what_it_has_examined(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "_CHECKS", {})  # other tests cover their results
    answer = svdpp_here("doctor", "--world", "1", "--out", str(tmp_path))
    assert answer.code == 0
    assert answer.err.splitlines() == [
        BEGIN,
        "demo on 1 cpu rank has what it needs",
        f"svdpp run has another default: svdpp doctor --model {DEFAULT_MODEL}",
    ]


def test_doctor_of_the_dummy_needs_no_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checks = {check: machine._CHECKS[check] for check in ("devices", "model")}
    monkeypatch.setattr(machine, "_CHECKS", checks)
    common = ("--device", "cpu", "--world", "2", "--out", str(tmp_path))
    answer = svdpp_here("doctor", "--model", "dummy", *common)
    assert answer.code == 0
    assert "skipped model" in answer.out


@NO_GPU
def test_a_broken_machine_names_every_mend(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "model").mkdir()
    command = (
        *("doctor", "--device", "cuda", "--world", "1"),
        *("--out", str(tmp_path / "file" / "out"), "--model", str(tmp_path / "model")),
    )
    words, answer = (
        svdpp_here(*command, env=NO_FFMPEG),
        svdpp_here(*command, "--json", env=NO_FFMPEG),
    )

    assert words.err == f"{BEGIN}\n4 of 7 checks failed\n"
    assert "failed  ffmpeg            mp4 needs ffmpeg, which was not found\n" in words.out
    assert "\n" + " " * 26 + "fix: pip install imageio-ffmpeg\n" in words.out
    report = json.loads(answer.out)
    checks = {check["name"]: check for check in report["checks"]}
    assert not report["healthy"]
    examined = {"model": str(tmp_path / "model"), "device": "cuda", "world_size": 1}
    assert report["examined"] == examined
    assert words.code == answer.code == 2  # the line of the first check, the devices
    codes = {name: check["exit_code"] for name, check in checks.items()}
    assert codes == {
        **{"devices": 2, "ffmpeg": 8, "output folder": 8, "model": 5},
        **{"memory": 0, "transfers": 0, "cut test": 0},
    }
    assert "--device cpu" in checks["devices"]["fix"]
    assert checks["ffmpeg"]["fix"] == "pip install imageio-ffmpeg"
    assert "--out" in checks["output folder"]["fix"]
    assert "--model" in checks["model"]["fix"]
    for name in ("memory", "transfers", "cut test"):
        assert (checks[name]["verdict"], checks[name]["detail"]) == ("skipped", "needs devices")


def test_the_report_fits_one_page(tmp_path: Path) -> None:
    leave(tmp_path / "out", replayed(EVEN, clips=2, world_size=4, num_steps=12))

    answer = svdpp_here("report", str(tmp_path / "out"))

    assert answer.code == 0, answer
    assert "clips: 1 done, 1 failed" in answer.out
    assert "a_1.mp4: a latent is not finite" in answer.out
    assert "2 clips cannot fill 4 ranks" in answer.out
    assert "--split uniform --replicas 4 --decoders 1\n" in answer.out
    assert answer.out.count("  1.00\n") == 4, answer.out
    assert len(answer.out.splitlines()) <= 40


def test_a_bench_is_no_run(tmp_path: Path) -> None:
    answer = svdpp_here("report", str(leave_bench(tmp_path)))
    assert_error(answer, 7, "has no run.json", "a bench prints what limits it")


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
        ('{"schema_version": 1, "clips": [{}]}', "does not say what became of its clips"),
        ('{"schema_version": 1, "clips": [{"state": "failed"}]}', "does not say"),
        ('{"schema_version": 1, "clips": [], "measured": {}}', "figures are damaged"),
    ],
)
def test_a_folder_without_a_readable_run_is_one_sentence(
    content: str | None, words: str, tmp_path: Path
) -> None:
    if content is not None:
        (tmp_path / "run.json").write_text(content)
    assert_error(svdpp_here("report", str(tmp_path)), 7, words)


def test_several_runs_in_one_folder_are_told_apart(tmp_path: Path) -> None:
    content = leave(tmp_path / "one", replayed()).read_text()
    for name in ("sea", "sky"):
        (tmp_path / f"{name}.run.json").write_text(content)
    assert_error(
        svdpp_here("report", str(tmp_path)), 7, "has 2 runs", "one of its files *.run.json"
    )
    (tmp_path / "sky.run.json").unlink()
    report = json.loads(svdpp_here("report", str(tmp_path), "--json").out)
    assert report["findings"][0]["kind"] == "balanced"
