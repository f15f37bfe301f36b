"""`svdpp plan`: the table, the picture, the forecast, and what it refuses."""

from __future__ import annotations

import json
import re

import pytest

from tests.cli.shell import Answer, assert_error, svdpp_here


def strict_json(text: str) -> dict:  # type: ignore[type-arg]
    """As RFC 8259 has it: Python alone would read NaN and Infinity."""

    def refuse(word: str) -> None:
        raise AssertionError(f"{word} is no JSON")

    return json.loads(text, parse_constant=refuse)


def test_json_is_that_of_the_issue() -> None:
    answer = svdpp_here("plan", "--steps", "28", "--world", "7", "--json")

    assert (answer.code, answer.err) == (0, "")
    plan = strict_json(answer.out)
    assert plan == {
        "schema_version": 1,
        "num_steps": 28,
        "world_size": 7,
        "split": "uniform",
        "unit": "step",
        "ranks": [{"rank": rank, "start": 4 * rank, "end": 4 * rank + 4} for rank in range(7)],
        "forecast": {
            "clips": 14,
            "makespan_seconds": (14 + 7 - 1) * 4,
            "first_clip_seconds": 28,
            "cadence_seconds": 4,
            "bubble": pytest.approx(6 / 20),
            "data_parallel": {
                "makespan_seconds": 56,
                "first_clip_seconds": 28,
                # Two waves of seven: those of the second are 28 after those of the first.
                "cadence_seconds": 28 / 7,
            },
        },
    }


def test_json_with_costs() -> None:
    answer = svdpp_here(
        *("plan", "--world", "4", "--clips", "6", "--json"),
        *("--step-seconds", "0.5", "--encode-seconds", "1", "--decode-seconds", "2"),
        *("--hop-seconds", "0.25"),
    )

    plan = strict_json(answer.out)
    assert plan["unit"] == "second"
    first = 1 + 28 * 0.5 + 2 + 3 * 0.25
    assert plan["forecast"] == {
        "clips": 6,
        "makespan_seconds": first + 5 * (7 * 0.5 + 2),
        "first_clip_seconds": first,
        "cadence_seconds": 7 * 0.5 + 2,
        "bubble": pytest.approx(1 - 6 * 17 / (4 * (first + 5 * 5.5))),
        "data_parallel": {
            "makespan_seconds": 2 * 17,
            "first_clip_seconds": 17,
            # Whole waves of four: the two clips of the second one are no faster for being two.
            "cadence_seconds": 17 / 4,
        },
    }


def test_text_says_what_the_json_says() -> None:
    answer = svdpp_here("plan", "--world", "4")
    lines = answer.out.splitlines()

    assert answer.code == 0
    assert lines[0].split() == ["rank", "start", "end", "steps", "sigma"]
    assert [line.split() for line in lines[1:5]] == [
        ["0", "0", "7", "7", "700", "->", "125.8"],
        ["1", "7", "14", "7", "125.8", "->", "12.9"],
        ["2", "14", "21", "7", "12.9", "->", "0.4308"],
        ["3", "21", "28", "7", "0.4308", "->", "0"],
    ]
    assert [line[:8] for line in lines[6:10]] == [f"rank {rank} |" for rank in range(4)]
    words = " ".join(" ".join(lines[10:]).split())
    assert "8 clips on 4 ranks: 77 steps" in words
    assert "first clip after 28 steps" in words
    assert "one every 7 steps; bubble 27%" in words
    assert "data parallel on the same 4 devices: 56 steps" in words
    assert "in units of one step, decoding not counted" in answer.err


def test_with_costs_times_are_seconds() -> None:
    answer = svdpp_here("plan", "--world", "4", "--step-seconds", "0.5")

    assert "8 clips on 4 ranks: 38.5 seconds" in answer.out
    assert answer.err == ""


@pytest.mark.parametrize(
    "options",
    [
        ("--world", "1"),
        ("--world", "4"),
        ("--world", "28", "--clips", "60"),
        ("--world", "100", "--steps", "1000"),
        ("--world", "7", "--step-seconds", "1.2345678", "--decode-seconds", "4"),
    ],
    ids=" ".join,
)
@pytest.mark.parametrize("width", [80, 120])
def test_what_is_printed_fits_the_terminal(options: tuple[str, ...], width: int) -> None:
    answer = svdpp_here("plan", *options, env={"COLUMNS": str(width)})

    assert answer.code == 0
    assert [line for line in answer.out.splitlines() if len(line) > width] == []


def test_the_picture_uses_a_wider_terminal() -> None:
    narrow, wide = (
        svdpp_here("plan", "--world", "4", env={"COLUMNS": str(width)}).out for width in (80, 120)
    )

    def rank_0(text: str) -> str:
        return next(line for line in text.splitlines() if line.startswith("rank 0 |"))

    assert len(rank_0(narrow)) < 80 < len(rank_0(wide)) <= 120
    assert re.fullmatch(r"rank 0 \|0{7}1{7}.*\.{21}\|", rank_0(wide))


@pytest.mark.parametrize("width", ["1", "10", "30"])
def test_a_terminal_too_narrow_is_no_error(width: str) -> None:
    assert svdpp_here("plan", env={"COLUMNS": width}).code == 0


def test_quiet_keeps_the_result_and_nothing_else() -> None:
    talking, quiet = svdpp_here("plan"), svdpp_here("plan", "-q")

    assert (quiet.code, quiet.out, quiet.err) == (0, talking.out, "")
    assert talking.err != ""


def test_gpus_and_total_steps_are_other_names() -> None:
    one = svdpp_here("plan", "--gpus", "5", "--total-steps", "25", "--json")

    assert one == svdpp_here("plan", "--world", "5", "--steps", "25", "--json")
    assert one.code == 0


REFUSED = [
    (
        ("--world", "7", "--steps", "25"),
        "25 steps cannot be split evenly over 7 ranks; the nearest step counts that can are 21 "
        "and 28",
    ),
    (("--world", "29"), "29 ranks are more than 28 steps"),
    (("--world", "0"), "the number of ranks must be 1 or more, got 0"),
    (("--world", "-1"), "the number of ranks must be 1 or more, got -1"),
    (("--steps", "0"), "the number of steps must be 1 or more, got 0"),
    (("--steps", "-28"), "the number of steps must be 1 or more, got -28"),
    (("--clips", "0"), "--clips must be 1 or more, got 0"),
    (("--clips", "-1"), "--clips must be 1 or more, got -1"),
    (("--step-seconds", "0"), "--step-seconds must be above 0"),
    (("--step-seconds", "-1"), "--step-seconds must be a finite number, 0 or more, got -1.0"),
    (("--step-seconds", "nan"), "--step-seconds must be a finite number"),
    (("--decode-seconds", "inf"), "--decode-seconds must be a finite number"),
    (("--encode-seconds", "-0.1"), "--encode-seconds must be a finite number"),
    (("--hop-seconds", "-1"), "--hop-seconds must be a finite number"),
]


@pytest.mark.parametrize(("options", "words"), REFUSED, ids=str)
@pytest.mark.parametrize("more", [(), ("--json",), ("-q",)], ids=str)
def test_refused(options: tuple[str, ...], words: str, more: tuple[str, ...]) -> None:
    assert_error(svdpp_here("plan", *options, *more), 2, words)


def usage_error(answer: Answer) -> bool:
    return answer.code == 2 and answer.out == "" and "Traceback" not in answer.err


@pytest.mark.parametrize(
    ("options", "word"),
    [
        (("--world", "four"), "--world"),
        (("--world", "4.5"), "--world"),
        (("--world",), "--world"),
        (("--step-seconds", "soon"), "--step-seconds"),
        (("--bogus",), "--bogus"),
        (("extra",), "extra"),
    ],
    ids=str,
)
def test_what_typer_refuses_is_a_wrong_request_too(options: tuple[str, ...], word: str) -> None:
    answer = svdpp_here("plan", *options)

    assert usage_error(answer)
    assert word in answer.err


@pytest.mark.parametrize(
    "options",
    [
        ("--step-seconds", "1e308"),
        ("--step-seconds", "1e-310", "--decode-seconds", "1"),
        ("--decode-seconds", "1e308"),
    ],
    ids=" ".join,
)
@pytest.mark.parametrize("more", [(), ("--json",)], ids=str)
def test_costs_out_of_this_world(options: tuple[str, ...], more: tuple[str, ...]) -> None:
    """Refused or answered with numbers; no crash, no Infinity in the JSON."""
    answer = svdpp_here("plan", *options, *more)

    assert answer.code in (0, 2), answer.err
    if answer.code == 0 and more:
        strict_json(answer.out)
