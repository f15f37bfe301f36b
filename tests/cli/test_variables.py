"""Variables that set defaults of options: precedence, where they are shown, refused values."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from svdpp.cli.serve import serve
from tests.cli.shell import assert_error, svdpp_here


def _plan(*options: str, **env: str) -> dict[str, Any]:
    answer = svdpp_here("plan", "--json", *options, env=env)
    assert answer.code == 0, answer
    result: dict[str, Any] = json.loads(answer.out)
    return result


def test_an_option_before_a_variable_before_what_is_built_in() -> None:
    assert _plan()["world_size"] == 4
    assert _plan(SVDPP_WORLD="7")["world_size"] == _plan(SVDPP_GPUS="7")["world_size"] == 7
    assert _plan("--gpus", "14", SVDPP_WORLD="7")["world_size"] == 14
    assert _plan("--world", "14", SVDPP_GPUS="7")["world_size"] == 14
    assert "layouts" in _plan(SVDPP_COMPARE="1")
    assert "layouts" not in _plan(SVDPP_COMPARE="off")
    assert "layouts" not in _plan(SVDPP_COMPARE="")  # as if it was not set


def test_options_without_an_effect_may_be_set_for_other_commands() -> None:
    assert _plan(SVDPP_MODEL="demo", SVDPP_FRAMES="4", SVDPP_RESUME="1")["world_size"] == 4


def test_env_shows_what_is_set_and_what_is_misspelt() -> None:
    variables = {"SVDPP_MODEL": "demo", "SVDPP_FRAM": "2", "SVDPP_QUEUE": "postgresql://a:b@c/d"}
    answer = svdpp_here("env", "--json", env=variables)
    assert json.loads(answer.out)["defaults"] == [
        {"variable": "SVDPP_FRAM", "value": "2", "option": "none has this name"},
        {"variable": "SVDPP_MODEL", "value": "demo", "option": "--model"},
        {"variable": "SVDPP_QUEUE", "value": "postgresql://***@c/d", "option": "--queue"},
    ]
    shown = svdpp_here("env", env=variables).out
    assert re.search(r"\nSVDPP_MODEL +demo +--model *\n", shown)
    assert "a:b@" not in shown


@pytest.mark.parametrize(
    ("variable", "value", "sentence", "sets"),
    [
        ("SVDPP_GPUS", "2.5", "--gpus/--world '2.5' is not a valid integer", "--gpus"),
        ("SVDPP_QUIET", "x", "--quiet 'x' is not a valid boolean", "--quiet"),
        ("SVDPP_SPLIT", "fair", "--split 'fair' is not one of", "--split"),
        ("SVDPP_STEPS", "0", "--steps must be 1 to 1000, got 0", "--steps"),
    ],
)
def test_an_error_names_the_variable(variable: str, value: str, sentence: str, sets: str) -> None:
    env = {variable: value}
    assert_error(svdpp_here("plan", env=env), 2, sentence, f"{variable} sets {sets}\n")
    assert_error(svdpp_here("plan", "--json", env=env), 2, sentence)


def test_what_the_command_line_says_is_not_blamed_on_a_variable() -> None:
    env = {"SVDPP_SPLIT": "alternating"}
    answer = svdpp_here("plan", "--layout", "auto", env=env)
    assert_error(answer, 2, "leave out --split", "SVDPP_SPLIT sets --split")
    given = svdpp_here("plan", "--layout", "auto", "--split", "balanced", env=env)
    assert "SVDPP_SPLIT" not in given.err


def test_kubernetes_sets_no_port() -> None:
    """It sets SVDPP_PORT=tcp://... for a service of that name."""
    (port,) = (option for option in serve.params if option.name == "port")
    assert not port.envvar
