"""Costs: refused values, the costs file written and read, and the published presets."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from svdpp.config.limits import find_costs, read_costs
from svdpp.errors import InputError, RequestError
from svdpp.plan.actions import Action, Kind
from svdpp.plan.costs import PRESETS, Costs, MemoryEstimate, PartMemory
from svdpp.plan.layout import Roles
from tests.plan.plans import memory

MEASURED = Costs(
    step_seconds=(1.5, 2.0),
    encode_seconds=0.25,
    decode_seconds=(4.0, 5.0),
    transfer_seconds=0.5,
    **memory((1.5, 3.0, 0.25), (1.0, 6.0, 8.0)),
    name="demo",
    source="measured",
    device="2 cores",
)

HOSTS = Costs(transfer_seconds=0.25, ranks_per_host=4, inter_host_transfer_seconds=3.0)


def test_what_an_action_takes_on_each_rank() -> None:
    assert [MEASURED.of(Action(Kind.DENOISE, 0, 2, 5), rank) for rank in (0, 1)] == [4.5, 6.0]
    assert [MEASURED.of(Action.at(Kind.ENCODE, 0, 0), rank) for rank in (0, 1)] == [0.25, 0.25]
    assert [MEASURED.of(Action.at(Kind.DECODE, 0, 5), rank) for rank in (0, 1)] == [4.0, 5.0]
    for kind in (Kind.SEND, Kind.FINISH):
        assert MEASURED.of(Action.at(kind, 0, 5), 0) == 0


def test_a_transfer_between_hosts_has_its_own_time() -> None:
    assert MEASURED.transfer(0, 1) == 0.5
    assert (HOSTS.transfer(0, 3), HOSTS.transfer(3, 4)) == (0.25, 3.0)
    assert [HOSTS.host_of(rank) for rank in (0, 3, 4, 11)] == [0, 0, 1, 2]


def test_an_estimate_becomes_costs_with_the_same_peaks() -> None:
    gib = 2**30
    parts = MemoryEstimate(
        encode=PartMemory(gib, 10 * gib),
        denoise=PartMemory(2 * gib, 30 * gib),
        decode=PartMemory(4 * gib, 20 * gib),
    )
    costs = Costs(**parts.as_costs())  # type: ignore[arg-type]
    for roles, peak in (
        (Roles(encode=True, denoise=True), 33),
        (Roles(denoise=True, experts=frozenset({0, 1})), 34),
        (Roles(decode=True), 24),
        (Roles(), 0),
    ):
        assert costs.peak_gib(roles) == parts.of_rank(roles).peak_bytes / gib == peak
    less = Costs(**replace(parts, encode=None).as_costs())  # type: ignore[arg-type]
    assert less.peak_gib(Roles(encode=True)) is None


# --- the file -----------------------------------------------------------------------------------


@pytest.mark.parametrize("costs", [Costs(), MEASURED, HOSTS, *PRESETS.values()], ids=str)
def test_the_file_both_ways(costs: Costs, tmp_path: Path) -> None:
    path = tmp_path / "costs.json"
    path.write_text(json.dumps(costs.to_json(), allow_nan=False), encoding="utf-8")

    assert read_costs(path) == costs
    assert find_costs(str(path)) == costs


def test_a_step_alone_is_enough_and_fields_of_earlier_versions_are_passed_over() -> None:
    old = {"write_seconds": 0.5, "packet_bytes": 9, "transfer_bytes_per_second": None}
    assert Costs.from_json({"schema_version": 1, "step_seconds": 2, **old}, "f") == Costs(
        step_seconds=2
    )


GOOD = {"schema_version": 1, "step_seconds": 1.0}
REFUSED: list[tuple[Any, str]] = [
    ([], "f: costs are a JSON object, not list"),
    ({}, "f: schema_version must be 1, got None"),
    ({**GOOD, "schema_version": 2}, "f: schema_version must be 1, got 2"),
    ({**GOOD, "schema_version": "1"}, "f: schema_version must be 1, got '1'"),
    ({"schema_version": 1}, "f: step_seconds is missing"),
    ({**GOOD, "warp": 1}, "f: unknown key 'warp'"),
    ({**GOOD, "transfer_bytes_per_second": 1}, "f: unknown key 'transfer_bytes_per_second'"),
]


@pytest.mark.parametrize(("content", "words"), REFUSED, ids=str)
def test_files_that_hold_no_costs(content: Any, words: str) -> None:
    with pytest.raises(RequestError) as caught:
        Costs.from_json(content, "f")

    assert caught.value.message.startswith(words)


NUMBERS = [
    *("step_seconds", "encode_seconds", "decode_seconds", "transfer_seconds"),
    *("encode_weights_gib", "decode_work_gib"),
]
FAULTS: list[tuple[str, Any, str]] = [
    *(
        (name, value, "must be a number from 0 to")
        for name in NUMBERS
        for value in (-1.0, -1e-9, math.inf, -math.inf, math.nan, "1", True, 10**400)
    ),
    *(("step_seconds", value, "must be") for value in ((1.0, -1.0), (1, [2]), None, 0)),
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
        Costs(**{name: value})
    assert caught.value.message.startswith(f"--{name.replace('_', '-')} {words}")
    in_file = [*value] if isinstance(value, tuple) else value
    with pytest.raises(RequestError) as caught:
        Costs.from_json({**GOOD, name: in_file}, "f")
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
    with (tmp_path / "large.json").open("wb") as file:
        file.truncate(2**26 + 1)  # a hole, which takes no space
    with pytest.raises(InputError, match="is larger than 67108864 bytes"):
        read_costs(tmp_path / "large.json")


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=3),
)


@given(st.dictionaries(st.sampled_from([*NUMBERS, "name", "bogus"]), json_values, max_size=3))
def test_any_content_is_costs_or_refused(content: dict[str, Any]) -> None:
    try:
        costs = Costs.from_json({**GOOD, **content}, "f")
    except RequestError:
        return
    assert Costs.from_json(json.loads(json.dumps(costs.to_json(), allow_nan=False)), "f") == costs


# --- presets ------------------------------------------------------------------------------------


def test_the_published_parts_add_up_to_the_published_whole() -> None:
    """The end-to-end times of the table include some ms of other work."""
    published = {
        "svd-xt-a100": 32.16641,
        "svd-xt-a100-pcie": 35.25838,
        "svd-xt-h100-pcie": 22.64473,
    }
    for name, whole in published.items():
        costs = PRESETS[name]
        assert costs is find_costs(name)
        parts = costs.encode_on(0) + 25 * costs.step_on(0) + costs.decode_on(0)
        assert parts <= whole
        assert parts == pytest.approx(whole, rel=0.002)
