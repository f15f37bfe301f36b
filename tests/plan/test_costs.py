"""Cost model: refused values, costs files, memory by roles, and published presets."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from svdpp.config.cost_files import find_costs, read_costs
from svdpp.errors import InputError, RequestError
from svdpp.plan.costs import PRESETS, CostModel, MemoryEstimate, PartMemory
from svdpp.plan.roles import Roles
from tests.support.plans import memory

MEASURED = CostModel(
    step_seconds=(1.5, 2.0),
    encode_seconds=0.25,
    decode_seconds=(4.0, 5.0),
    transfer_seconds=0.5,
    **memory((1.5, 3.0, 0.25), (1.0, 6.0, 8.0)),
    name="demo",
    source="measured",
    device="2 cores",
)

HOSTS = CostModel(transfer_seconds=0.25, ranks_per_host=4, inter_host_transfer_seconds=3.0)


def test_a_transfer_between_hosts_has_its_own_time() -> None:
    assert MEASURED.transfer(0, 1) == 0.5
    assert (HOSTS.transfer(0, 3), HOSTS.transfer(3, 4)) == (0.25, 3.0)
    assert [HOSTS.host_of(rank) for rank in (0, 3, 4, 11)] == [0, 0, 1, 2]


def test_an_estimate_becomes_costs_with_the_same_peaks() -> None:
    gib = 2**30
    sizes = (1, 10), (2, 30), (4, 20)
    parts = MemoryEstimate(*(PartMemory(held * gib, work * gib) for held, work in sizes))
    costs = CostModel(**parts.as_costs())  # type: ignore[arg-type]
    for roles, peak in (
        (Roles(encode=True, denoise=True), 33),
        (Roles(denoise=True, experts=frozenset({0, 1})), 34),
        (Roles(decode=True), 24),
        (Roles(), 0),
    ):
        assert costs.peak_gib(roles) == parts.of_rank(roles).peak_bytes / gib == peak
    assert CostModel().peak_gib(Roles(denoise=True)) is None


# --- costs files --------------------------------------------------------------------------------


@pytest.mark.parametrize("costs", [CostModel(), MEASURED, HOSTS, *PRESETS.values()], ids=str)
def test_the_file_both_ways(costs: CostModel, tmp_path: Path) -> None:
    path = tmp_path / "costs.json"
    path.write_text(json.dumps(costs.to_json(), allow_nan=False), encoding="utf-8")

    assert read_costs(path) == costs
    assert find_costs(str(path)) == costs


def test_a_step_alone_is_enough() -> None:
    assert CostModel.from_json({"schema_version": 1, "step_seconds": 2}, "f") == CostModel(
        step_seconds=2
    )


GOOD = {"schema_version": 1, "step_seconds": 1.0}
REFUSED: list[tuple[Any, str]] = [
    ([], "f: costs must be a JSON object, got list"),
    ({}, "f: schema_version must be 1, got None"),
    ({**GOOD, "schema_version": 2}, "f: schema_version must be 1, got 2"),
    ({"schema_version": 1}, "f: step_seconds is missing"),
    ({**GOOD, "warp": 1}, "f: unknown key 'warp'"),
]


@pytest.mark.parametrize(("content", "words"), REFUSED, ids=str)
def test_files_that_hold_no_costs(content: Any, words: str) -> None:
    with pytest.raises(RequestError) as caught:
        CostModel.from_json(content, "f")

    assert caught.value.message.startswith(words)


NO_NUMBERS = (-1.0, -1e-9, math.inf, -math.inf, math.nan, "1", True, 10**400, (1.0, -1.0), (1, [2]))
FAULTS: list[tuple[str, Any, str]] = [
    *(("step_seconds", value, "must be a number from 0 to") for value in NO_NUMBERS),
    *(
        (name, -1.0, "must be a number from 0 to")
        for name in ("encode_seconds", "decode_seconds", "encode_weights_gib", "decode_work_gib")
    ),
    ("step_seconds", None, "must be"),
    ("step_seconds", 0, "must be above 0"),
    ("step_seconds", (), "must have a number for each rank"),
    ("step_seconds", (0.0, 1.0), "must be above 0"),
    ("transfer_seconds", (1, 1), "must be a number from 0 to"),
    ("decode_seconds", 1e300, "must be a number from 0 to 1e+09"),
    *(("device", value, f"must be a string, got {value}") for value in (3, None)),
    *(("ranks_per_host", value, "must be") for value in (0, 1.5, -1, "4", True)),
]


@pytest.mark.parametrize(("name", "value", "words"), FAULTS, ids=str)
def test_a_wrong_value_is_named_as_an_option_and_in_a_file(
    name: str, value: Any, words: str
) -> None:
    with pytest.raises(RequestError) as caught:
        CostModel(**{name: value})
    assert caught.value.message.startswith(f"`{name}` {words}")
    in_file = [*value] if isinstance(value, tuple) else value
    with pytest.raises(RequestError) as caught:
        CostModel.from_json({**GOOD, name: in_file}, "f")
    assert caught.value.message.startswith(f"f: {name} {words}")


def test_files_that_are_no_costs(tmp_path: Path) -> None:
    path = tmp_path / "costs.json"
    for text in ("", "{", "\x00", "{'a': 1}", "9" * 5000, "[" * 100_000):
        path.write_text(text, encoding="utf-8")
        with pytest.raises(InputError, match="is not JSON"):
            read_costs(path)
    with pytest.raises(InputError, match="cannot be read"):
        find_costs(str(tmp_path))
    with pytest.raises(InputError, match="costs file '/dev/zero' is not a regular file"):
        read_costs("/dev/zero")


@pytest.mark.parametrize(
    ("name", "whole"),
    [("svd-xt-a100", 32.16641), ("svd-xt-a100-pcie", 35.25838), ("svd-xt-h100-pcie", 22.64473)],
)
def test_the_published_parts_add_up_to_the_published_whole(name: str, whole: float) -> None:
    """The published times of encode, steps and decode add up to the published end-to-end time.

    The end-to-end time includes some milliseconds of other work.
    """
    costs = find_costs(name)
    parts = costs.encode_on(0) + 25 * costs.step_on(0) + costs.decode_on(0)
    assert parts <= whole
    assert parts == pytest.approx(whole, rel=0.002)
