"""Hints name options of the command, and following them helps."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest

from svdpp.config.files import read_costs
from tests.cli.shell import DEMO, PHOTO, TINY, assert_error, svdpp_here

pytestmark = pytest.mark.usefixtures("elsewhere")


# Placeholders for a value that only the user knows.
_VALUES = {"SECONDS": "0.01", "FILE": "costs.json"}


def hinted(error: str) -> list[list[str]]:
    """The options that a hint names, each with its value, if any."""
    hint = error.partition("\nhint: ")[2]
    found = re.findall(
        r"(--[a-z][a-z-]*)(?: (\d[\w.:]*(?:,\d+)*|auto|alternating|balanced|demo|cpu|[A-Z]+\b))?",
        hint,
    )
    return [[name, _VALUES.get(value, value)] if value else [name] for name, value in found]


def with_option(arguments: list[str], option: list[str]) -> list[str]:
    """`arguments` with one option, which replaces an earlier value."""
    if option[0] in arguments and len(option) > 1:
        at = arguments.index(option[0])
        arguments = arguments[:at] + arguments[at + 2 :]
    return [*arguments, *option]


FOLLOWED = [
    "plan --hosts 2x4",
    "plan --hosts 2x2",
    "plan --hosts 3x3 --steps 25",
    "plan --world 7 --steps 25",
    "plan --world 29",
    "plan --world 9 --replicas 2",
    "plan --replicas 3",
    "plan --costs two.json",
    "plan --device-memory 9",
    "simulate --world 3",
    f"run {shlex.quote(PHOTO)} --model demo --device cpu --world 5 --dry-run",
    f"run {shlex.quote(PHOTO)} --model Demo --device cpu --dry-run",
    f"run {shlex.quote(PHOTO)} --dry-run --frames 2 --height 64 --width 64",
]


@pytest.mark.long
@pytest.mark.usefixtures("without_memory", "without_ranks")
@pytest.mark.parametrize("line", FOLLOWED)
def test_each_option_that_a_hint_names_leads_on(line: str) -> None:
    """The option is accepted, and the command works or fails for another reason."""
    Path("two.json").write_text(json.dumps({"schema_version": 1, "step_seconds": [1.0, 2.0]}))
    arguments = shlex.split(line)
    refused = svdpp_here(*arguments)

    assert refused.code in (2, 5), refused
    options = hinted(refused.err)
    assert options, refused.err
    for option in options:
        answer = svdpp_here(*with_option(arguments, option))
        assert "no such option" not in answer.err, (option, answer.err)
        assert "must be a" not in answer.err, (option, answer.err)
        assert answer.err.splitlines()[:1] != refused.err.splitlines()[:1], (option, answer.err)


@pytest.mark.parametrize("name", ["--gpus 5", "--gpus=5", "--world 5"])
def test_errors_name_an_option_as_it_was_typed(name: str) -> None:
    other = "--world" if name.startswith("--gpus") else "--gpus"
    answer = svdpp_here("plan", *name.split(), "--steps", "9", "--json")

    assert_error(answer, 2, f"or {name[:-2]} 3, or --split alternating")
    assert other not in answer.err + answer.out


def test_a_launched_run_names_no_other_number_of_ranks() -> None:
    env = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "3"}
    answer = svdpp_here("run", PHOTO, *DEMO, "--steps", "28", env=env)

    assert_error(
        answer, 2, "28 steps cannot be split evenly over 3", "use --steps 27 or --steps 30"
    )
    assert "--world" not in answer.err


NASTY = "$(touch x); 'a' b.jpg"


def test_suggested_commands_quote_what_the_user_has_named() -> None:
    Path("in").mkdir()
    for folder in ("in", "."):
        Path(folder, NASTY).write_bytes(Path(PHOTO).read_bytes())
    answer = svdpp_here("run", NASTY, f"in/{NASTY}", *DEMO, *TINY, "-o", "$(touch x)/{name}.mp4")
    assert answer.code == 2
    (_, option, value, *_) = shlex.split(answer.err.splitlines()[-1])
    assert (option, value) == ("--out", "$(touch x)/{name}_{index}.mp4")


@pytest.mark.processes
def test_what_profile_and_run_suggest_next() -> None:
    costs = "my costs.json"
    profiled = svdpp_here(
        *("profile", "--model", "dummy", "--latent-shape", "1", "4", "2", "8", "8"),
        *("--device", "cpu", "--world", "1", "--repeats", "1", "--out", costs, "--json"),
    )
    assert profiled.code == 0, profiled
    measured = read_costs(costs)
    assert measured.to_json() == json.loads(profiled.out)
    assert (measured.decode_seconds, measured.transfer_seconds) == (0, 0)
    assert (measured.denoise_weights_gib, measured.decode_weights_gib) == (0, None)
    line = profiled.err.splitlines()[-1]
    assert line == "next: svdpp plan --world 1 --costs 'my costs.json' --compare"
    assert svdpp_here(*shlex.split(line)[2:]).code == 0
    again = svdpp_here("profile", "--model", "dummy", "--device", "cpu", "--out", costs)
    assert_error(again, 2, "'my costs.json' exists already", "--overwrite replaces it")

    Path(NASTY).write_bytes(Path(PHOTO).read_bytes())
    made = svdpp_here("run", NASTY, *DEMO, *TINY, "--fit", "crop")
    assert made.code == 0, made
    line = made.err.splitlines()[-1]
    assert shlex.split(line.removeprefix("to prove one: ")) == [
        *("svdpp", "verify", "out/$(touch x); 'a' b_0.mp4"),
    ]
    assert not Path("x").exists()
