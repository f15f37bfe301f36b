"""Default start steps of a draft, and draft profiles."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from svdpp.errors import InputError, RequestError
from svdpp.plan.draft import DraftPlan
from svdpp.plan.draft_starts import (
    DraftProfile,
    MeasuredStartSteps,
    best_trades,
    candidates,
    default_start_steps,
    most_ranks,
    parse_start_steps,
)


@pytest.mark.parametrize("world_size", range(2, 9))
def test_default_drafts_come_after_half_the_rounds(world_size: int) -> None:
    for num_steps in [*range(4, 81), 1000]:
        if world_size > most_ranks(num_steps):
            continue
        draft_plan = DraftPlan(
            num_steps=num_steps, start_steps=default_start_steps(num_steps, world_size)
        )
        assert draft_plan.world_size == world_size
        assert draft_plan.rounds(world_size - 1) == num_steps // 2 + 1


@pytest.mark.parametrize(("num_steps", "world_size"), [(28, 1), (14, 9), (3, 2), (12, 8)])
def test_counts_without_default_starts(num_steps: int, world_size: int) -> None:
    with pytest.raises(RequestError, match="has no default start steps"):
        default_start_steps(num_steps, world_size)


@pytest.mark.parametrize(
    ("num_steps", "world_size", "start_steps"),
    [
        (4, 2, (0, 2)),
        (4, 3, (0, 2, 3)),
        (12, 4, (0, 4, 6, 8)),
        (14, 4, (0, 5, 7, 9)),
        (50, 4, (0, 13, 20, 27)),
        (100, 4, (0, 24, 38, 52)),
    ],
)
def test_gaps_are_scaled_where_they_were_not_measured(
    num_steps: int, world_size: int, start_steps: tuple[int, ...]
) -> None:
    assert default_start_steps(num_steps, world_size) == start_steps


@pytest.mark.parametrize(("num_steps", "ranks"), [(2, 2), (4, 3), (12, 7), (14, 8), (50, 8)])
def test_more_ranks_would_have_no_step_to_start_from(num_steps: int, ranks: int) -> None:
    assert most_ranks(num_steps) == ranks


def test_candidates_are_waves_around_half_the_rounds() -> None:
    assert list(candidates(28, 2)) == [(0, 16), (0, 14), (0, 11)]
    for start_steps in candidates(28, 5):
        draft_plan = DraftPlan(num_steps=28, start_steps=start_steps)
        assert draft_plan.rounds(4) in (13, 15, 18)


def _measured(
    start_steps: tuple[int, ...], rounds: int, psnr_db: float | None
) -> MeasuredStartSteps:
    return MeasuredStartSteps(start_steps=start_steps, rounds=rounds, psnr_db=psnr_db, max_levels=3)


def test_only_trades_that_nothing_beats_are_kept() -> None:
    soon = _measured((0, 5), 5, 40.0)
    near = _measured((0, 3), 7, 60.0)
    equal = _measured((0, 1), 9, None)
    beaten = [_measured((0, 4), 7, 50.0), _measured((0, 2), 8, 60.0), _measured((0, 6), 5, 39.0)]
    other = _measured((0, 4, 5), 9, 30.0)  # for another number of ranks

    assert best_trades([other, *beaten, near, equal, soon]) == (soon, near, equal, other)


def _profile() -> DraftProfile:
    choices = (_measured((0, 6), 5, 41.5), _measured((0, 5), 6, None), _measured((0, 3, 8), 4, 20))
    return DraftProfile(
        model="demo", num_steps=8, photographs=("a.jpg",), source="a test", choices=choices
    )


def test_a_profile_is_read_as_it_was_written(tmp_path: Path) -> None:
    path = tmp_path / "draft.json"
    path.write_text(json.dumps(_profile().to_json()))

    assert DraftProfile.load(path) == _profile()
    # The highest PSNR within half the rounds, else the fewest rounds.
    assert parse_start_steps(str(path), 8, 2) == (0, 6)
    assert parse_start_steps(str(path), 8, 3) == (0, 3, 8)
    assert parse_start_steps(str(path), 8, None) == (0, 3, 8)


@pytest.mark.parametrize(("num_steps", "world_size"), [(28, 2), (8, 4)])
def test_a_profile_of_other_counts(num_steps: int, world_size: int) -> None:
    with pytest.raises(RequestError, match="is for 8 steps and 2, 3 ranks"):
        _profile().best(num_steps, world_size)


@pytest.mark.parametrize(
    "text",
    ["", "{}", "[]", "3", "not json", '{"schema_version": 2}', "[" * 100_000],
)
def test_a_file_that_is_no_profile(tmp_path: Path, text: str) -> None:
    path = tmp_path / "draft.json"
    path.write_text(text)
    with pytest.raises(InputError, match="is not a draft profile"):
        DraftProfile.load(path)


def test_a_profile_without_choices(tmp_path: Path) -> None:
    path = tmp_path / "draft.json"
    path.write_text(json.dumps({**_profile().to_json(), "choices": []}))
    with pytest.raises(InputError, match="it has no choices"):
        parse_start_steps(str(path), 8, None)


def test_a_profile_with_a_choice_of_other_fields(tmp_path: Path) -> None:
    content = _profile().to_json()
    content["choices"][0]["speed"] = 2
    path = tmp_path / "draft.json"
    path.write_text(json.dumps(content))
    with pytest.raises(InputError, match="keys of a choice are max_levels"):
        DraftProfile.load(path)


@pytest.mark.parametrize("text", ["", "0;14", "0,-3", "0,a", "starts.txt", "0,,3"])
def test_text_that_is_no_starts(text: str) -> None:
    with pytest.raises(RequestError, match="must be steps or the path of a draft profile"):
        parse_start_steps(text, 28, 2)


def test_a_profile_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="cannot be read"):
        parse_start_steps(str(tmp_path / "none.json"), 28, 2)
