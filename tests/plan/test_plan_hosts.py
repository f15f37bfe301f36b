"""Replicas stay on one host if possible, and transfers between hosts have their own cost."""

from __future__ import annotations

from dataclasses import replace

import pytest

from svdpp.errors import RequestError
from svdpp.plan.actions import Kind
from svdpp.plan.costs import Costs
from svdpp.plan.experts import assign_replicas
from svdpp.plan.forecast import replay, summarise
from svdpp.plan.large_forecast import forecast_layout
from svdpp.plan.layout import Layout

COSTS = Costs(
    decode_seconds=2.0,
    transfer_seconds=0.25,
    ranks_per_host=4,
    inter_host_transfer_seconds=3.0,
    packet_bytes=8.0,
    inter_host_bytes_per_second=4.0,
)


@pytest.mark.parametrize(
    ("world_size", "replica_size", "ranks_per_host", "replica_ranks"),
    [
        (8, 4, None, [(0, 1, 2, 3), (4, 5, 6, 7)]),
        (8, 4, 4, [(0, 1, 2, 3), (4, 5, 6, 7)]),
        (8, 8, 4, [tuple(range(8))]),
        (8, 2, 4, [(0, 1), (2, 3), (4, 5), (6, 7)]),
        # In rank order, two of these four replicas would be on two hosts each.
        (12, 3, 4, [(0, 1, 2), (3, 7, 11), (4, 5, 6), (8, 9, 10)]),
        (12, 6, 4, [(0, 1, 2, 3, 4, 5), (6, 7, 8, 9, 10, 11)]),
    ],
)
def test_replicas_keep_to_a_host_where_they_can(
    world_size: int,
    replica_size: int,
    ranks_per_host: int | None,
    replica_ranks: list[tuple[int, ...]],
) -> None:
    assert list(assign_replicas(world_size, replica_size, ranks_per_host)) == replica_ranks


def test_every_rank_is_in_one_replica_whatever_the_hosts() -> None:
    for hosts in range(1, 7):
        for per_host in range(1, 7):
            world = hosts * per_host
            for size in range(1, world + 1):
                if world % size == 0:
                    replica_ranks = assign_replicas(world, size, per_host)
                    assert sorted(rank for replica in replica_ranks for rank in replica) == [
                        *range(world)
                    ]
                    assert {len(replica) for replica in replica_ranks} == {size}


def test_a_hop_between_hosts_is_told_from_one_within() -> None:
    assert COSTS.transfer(0, 3) == 0.25
    assert COSTS.transfer(3, 4) == 3.0 + 8.0 / 4.0
    assert [COSTS.host_of(rank) for rank in (0, 3, 4, 11)] == [0, 0, 1, 2]
    assert replace(COSTS, ranks_per_host=None).transfer(3, 4) == 0.25


def test_a_hop_between_hosts_that_nobody_measured_is_no_guess() -> None:
    unknown = replace(COSTS, inter_host_transfer_seconds=None)
    layout = Layout(num_steps=16, world_size=8, costs=unknown)
    with pytest.raises(RequestError, match=r"between hosts \(rank 3 to rank 4\)") as error:
        forecast_layout(layout, 4)
    assert "--inter-host-transfer-seconds SECONDS" in error.value.hint
    assert forecast_layout(replace(layout, replicas=2), 4).clips == 4, "these need none"


@pytest.mark.parametrize(
    ("world_size", "replicas", "per_host"),
    [(8, 1, 4), (8, 2, 4), (12, 4, 4), (12, 2, 4), (6, 2, 2)],
)
def test_the_recurrence_counts_hosts_as_the_replay_does(
    world_size: int, replicas: int, per_host: int
) -> None:
    costs = replace(COSTS, ranks_per_host=per_host)
    layout = Layout(
        num_steps=24, world_size=world_size, replicas=replicas, split="alternating", costs=costs
    )
    schedule = layout.schedule(13)
    replayed = summarise(replay(schedule, costs), world_size)
    assert forecast_layout(layout, 13).makespan == pytest.approx(replayed.makespan)
    assert forecast_layout(layout, 13).seconds_per_clip == pytest.approx(replayed.seconds_per_clip)


def test_one_slow_hop_delays_each_clip_once() -> None:
    layout = Layout(num_steps=16, world_size=8, costs=COSTS)
    here = replace(layout, costs=replace(COSTS, ranks_per_host=None))
    later = forecast_layout(layout, 1).makespan - forecast_layout(here, 1).makespan
    assert later == pytest.approx(COSTS.transfer(3, 4) - COSTS.transfer(0, 1))


def test_lists_follow_the_replicas() -> None:
    layout = Layout(num_steps=24, world_size=12, replicas=4, costs=COSTS)
    schedule = layout.schedule(8)
    sends = {
        (rank, action.peer)
        for rank, actions in enumerate(schedule)
        for action in actions
        if action.kind is Kind.SEND
    }
    assert sends == set(layout.links)
    assert {(rank, peer) for rank, peer in sends if COSTS.host_of(rank) != COSTS.host_of(peer)} == {
        (3, 7),
        (7, 11),
    }
    assert [share.rank for share in layout.all_shares] == [*range(12)]


def test_a_slow_card_gets_fewer_steps() -> None:
    """One of eight GPUs at half speed does about half the steps of the others."""
    costs = replace(COSTS, decode_seconds=0.0, step_seconds=(1.0,) * 5 + (2.0,) + (1.0,) * 2)
    for split in ("balanced", "alternating"):
        shares = Layout(num_steps=60, world_size=8, split=split, costs=costs).all_shares
        assert shares[5].mean_steps == pytest.approx(4, abs=0.1), split
        assert shares[0].mean_steps == pytest.approx(8, abs=0.1), split


@pytest.mark.parametrize("value", [0, 1.5, -1, "4", True])
def test_ranks_per_host_is_a_whole_number(value: object) -> None:
    with pytest.raises(RequestError, match="ranks_per_host"):
        Costs.from_json({"schema_version": 1, "step_seconds": 1.0, "ranks_per_host": value}, "c")


def test_hosts_must_divide_the_world() -> None:
    with pytest.raises(RequestError, match="6 ranks cannot form hosts of 4 ranks each"):
        Layout(num_steps=12, world_size=6, costs=COSTS)
    assert Costs.from_json(COSTS.to_json(), "c") == COSTS
