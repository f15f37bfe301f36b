"""Defaults of the user: their precedence, where they are shown, and refused values."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from tests.cli.shell import Answer, assert_error, svdpp_here

pytestmark = pytest.mark.usefixtures("elsewhere")


def _write(text: str, name: str = "svdpp.toml") -> None:
    Path(name).write_text(text, encoding="utf-8")


def _plan(*options: str, env: dict[str, str] | None = None) -> dict[str, Any]:
    answer = svdpp_here("plan", "--json", *options, env=env)
    assert answer.code == 0, answer
    result: dict[str, Any] = json.loads(answer.out)
    return result


def test_an_option_before_a_variable_before_the_file_before_what_is_built_in() -> None:
    assert _plan()["world_size"] == 4
    _write("gpus = 2\nsplit = 'balanced'\n")
    assert (_plan()["world_size"], _plan()["split"]) == (2, "balanced")
    in_variable = {"SVDPP_WORLD": "7"}
    assert (_plan(env=in_variable)["world_size"], _plan(env=in_variable)["split"]) == (
        7,
        "balanced",
    )
    assert _plan("--gpus", "14", env=in_variable)["world_size"] == 14


def test_a_project_file_is_read_where_there_is_no_file_of_its_own() -> None:
    _write("[project]\nname = 'x'\n[tool.svdpp]\nworld = 2\nquiet = true\n", "pyproject.toml")
    quiet = svdpp_here("plan", "--json")
    assert (json.loads(quiet.out)["world_size"], quiet.err) == (2, "")
    _write("world = 7\n")
    assert _plan()["world_size"] == 7
    assert svdpp_here("plan").err != ""


def test_a_variable_switches_off_what_the_file_switches_on() -> None:
    _write("compare = true\n")
    assert "layouts" in _plan()
    assert "layouts" not in _plan(env={"SVDPP_COMPARE": "off"})
    assert "layouts" in _plan(env={"SVDPP_COMPARE": ""})  # as if it was not set


def test_env_shows_what_is_set_and_where() -> None:
    _write("frames = 14\nmemory-opt = true\n")
    answer = svdpp_here("env", "--json", env={"SVDPP_MODEL": "demo"})
    assert json.loads(answer.out)["defaults"] == [
        {"option": "--frames", "value": "14", "source": "svdpp.toml"},
        {"option": "--memory-opt", "value": True, "source": "svdpp.toml"},
        {"option": "--model", "value": "demo", "source": "SVDPP_MODEL"},
    ]
    assert re.search(r"\n--frames +14 +svdpp.toml\n", svdpp_here("env").out)


REFUSED = [
    ("fram = 2", "svdpp.toml sets 'fram', which is not an option", "did you mean frames?"),
    ("tolerance = 2", "svdpp.toml sets 'tolerance', which is not an option", ""),
    ("zzz = 2", "svdpp.toml sets 'zzz', which is not an option", "--help-all lists the options"),
    ("gpus = true", "--gpus/--world 'True' is not a valid integer", ""),
    ("quiet = 'x'", "--quiet 'x' is not a valid boolean", ""),
    ("[run]\nmodel = 'demo'", "svdpp.toml sets 'run', which is not an option", ""),
    (
        "gpus = 2.5",
        "'2.5' is not a valid integer",
        "svdpp.toml sets --gpus",
    ),
    (
        "split = 'fair'",
        "--split 'fair' is not one of",
        "svdpp.toml sets --split",
    ),
]


@pytest.mark.parametrize(("text", "sentence", "hint"), REFUSED, ids=[case[0] for case in REFUSED])
def test_refused(text: str, sentence: str, hint: str) -> None:
    _write(text)
    assert_error(svdpp_here("plan"), 2, sentence, hint)
    assert_error(svdpp_here("plan", "--json"), 2, sentence)


def test_a_file_that_is_no_toml() -> None:
    _write("gpus")
    assert_error(svdpp_here("plan"), 7, "'svdpp.toml' is not TOML")
    assert svdpp_here("--help").code == 0


@pytest.mark.parametrize(
    ("name", "answer"),
    [("SVDPP_FRAM", 2), ("SVDPP_SERVICE_HOST", 0), ("SVDPP_PORT_80_TCP", 0), ("XSVDPP_FRAM", 0)],
)
def test_variables_that_name_no_option(name: str, answer: int) -> None:
    """Kubernetes sets such variables for a service of that name."""
    found = svdpp_here("plan", env={name: "2"})
    assert found.code == answer
    if answer:
        assert_error(found, 2, f"{name} does not name an option", "did you mean frames?")


def test_what_the_command_line_says_is_not_blamed_on_the_file() -> None:
    _write("split = 'alternating'")
    sentence: Answer = svdpp_here("plan", "--layout", "auto")
    assert_error(sentence, 2, "leave out --split", "svdpp.toml sets --split")
    given = svdpp_here("plan", "--layout", "auto", "--split", "balanced")
    assert "svdpp.toml" not in given.err


def test_options_without_an_effect_may_be_set_for_other_commands() -> None:
    _write("model = 'demo'\nframes = 4\ndevice = 'cpu'\nresume = true\n")
    assert _plan()["world_size"] == 4
