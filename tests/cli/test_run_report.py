"""What `svdpp run` says at its end."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from rich.console import Console as RichConsole

from svdpp.cli.console import Console
from svdpp.cli.run_report import print_clips
from svdpp.config import VideoFormat


@pytest.mark.parametrize(
    ("output", "format", "json_name"),
    [
        ("cat.v2_0", "frames", "cat.v2_0.json"),
        ("cat.v2_0.mp4", "mp4", "cat.v2_0.json"),
        ("cat_0.gif", "gif", "cat_0.json"),
    ],
)
def test_the_command_that_proves_a_clip_names_its_json(
    output: str, format: VideoFormat, json_name: str
) -> None:
    console, heard = Console(), io.StringIO()
    console.err = RichConsole(file=heard, width=80)
    print_clips(console, Path("out"), [], [{"output": output, "format": format, "exact": True}], [])
    assert f"svdpp verify out/{json_name}\n" in heard.getvalue()
