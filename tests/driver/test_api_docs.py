"""The programs in docs/api.md run as written and print what the page says."""

from __future__ import annotations

import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[2] / "docs" / "api.md"
_PROGRAM = re.compile(r"^```python\n(.*?)^```\n\n^```text\n(.*?)^```\n", re.DOTALL | re.MULTILINE)


def _programs() -> dict[str, tuple[str, str]]:
    """Program and output, by heading."""
    found = {}
    for section in PAGE.read_text().split("\n## ")[1:]:
        for program, output in _PROGRAM.findall(section):
            assert section.partition("\n")[0] not in found, "one program a section"
            found[section.partition("\n")[0]] = program, output
    return found


def test_every_program_of_the_page_is_run() -> None:
    assert len(_programs()) == PAGE.read_text().count("```python\n") == 9


_FIRST = next(iter(_programs()))
_MARKED = [
    pytest.param(heading, marks=[pytest.mark.long] if index % 2 else [])
    for index, heading in enumerate(_programs())
]


@pytest.mark.processes
@pytest.mark.parametrize("heading", _MARKED)
def test_a_program_prints_what_the_page_says(
    heading: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    program, output = _programs()[heading]
    path = tmp_path / "example.py"
    path.write_text(program)
    if heading == _FIRST:
        done = subprocess.run(
            [sys.executable, str(path)], cwd=tmp_path, capture_output=True, text=True, timeout=600
        )
        assert (done.returncode, done.stdout) == (0, output), done.stderr
        assert done.stderr == ""
    else:  # in this process, whose fork server has imported everything
        monkeypatch.chdir(tmp_path)
        runpy.run_path(str(path), run_name="__main__")
        assert capfd.readouterr() == (output, "")
