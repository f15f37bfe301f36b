"""`svdpp report` on folders of runs, and on others."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from svdpp.cli.console import Console
from tests.bench.made_up_benches import leave_bench
from tests.cli.shell import assert_error, svdpp_here
from tests.diagnostics.made_up_runs import EVEN, leave, replayed


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


@pytest.mark.parametrize("command", ["svdpp report", "curl -F seed=1"])
def test_a_command_to_copy_stays_on_one_line(
    command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    monkeypatch.setenv("TTY_COMPATIBLE", "1")
    text = f"a remark: {command} {'x' * 39}"
    Console().info(text, text.replace(command, "words"))
    assert [len(line) > 40 for line in capsys.readouterr().err.splitlines()] == [True, False, False]


def test_a_run_that_left_no_figures(tmp_path: Path) -> None:
    path = leave(tmp_path, None)
    answer = svdpp_here("report", str(path))
    assert answer.code == 0
    assert "times: none" in answer.out


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
    assert_error(svdpp_here("report", str(tmp_path)), 7, "2 runs", "*.run.json")
    (tmp_path / "sky.run.json").unlink()
    report = json.loads(svdpp_here("report", str(tmp_path), "--json").out)
    assert report["findings"][0]["kind"] == "balanced"
