"""The world in a launcher's environment variables; incomplete or invalid ones are errors."""

from __future__ import annotations

import pytest

from svdpp.errors import RequestError
from svdpp.launch.world import World, find_world, is_member, store_address, was_launched

TORCHRUN = {
    **{"RANK": "5", "LOCAL_RANK": "1", "WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "4"},
    **{
        "GROUP_RANK": "1",
        "TORCHELASTIC_RESTART_COUNT": "2",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    },
}
SLURM = {
    **{"SLURM_STEP_ID": "0", "SLURM_PROCID": "5", "SLURM_LOCALID": "1", "SLURM_NTASKS": "7"},
    **{"SLURM_NODEID": "1", "SLURM_STEP_TASKS_PER_NODE": "4,3", "SLURM_JOB_ID": "123"},
    "SLURM_STEP_NUM_NODES": "2",
    **{"SLURM_STEP_NODELIST": "gpu[07-09,12],login1", "SLURM_JOB_NODELIST": "other1"},
}


def test_there_is_no_world_without_variables() -> None:
    assert find_world({}) is None
    assert not was_launched()


def test_world_of_torchrun() -> None:
    world = find_world(TORCHRUN)
    assert world == World(
        **{"rank": 5, "local_rank": 1, "size": 8, "local_size": 4, "host": 1, "num_hosts": 2},
        launcher="torchrun",
        restarts=2,
    )
    assert (is_member(world), world.spans_hosts, world.on_first_host) == (True, True, False)
    assert world.ranks_per_host == 4


def test_the_three_required_variables_mean_one_host_that_owns_its_store() -> None:
    world = find_world({"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2"})
    assert world is not None
    assert (world.local_size, world.spans_hosts, world.owns_store) == (2, False, True)
    assert not is_member(world)


def test_world_of_slurm() -> None:
    world = find_world(SLURM)
    assert world == World(
        **{"rank": 5, "local_rank": 1, "size": 7, "local_size": 3, "host": 1, "num_hosts": 2},
        is_even=False,
        launcher="slurm",
        owns_store=True,
    )
    assert world.ranks_per_host is None, "one host has 4, the other 3"


@pytest.mark.parametrize(
    ("tasks", "per_host"), [("4,3,2", None), ("3(x3)", 3), ("3(x2),3", 3), ("3,3,3", 3)]
)
def test_all_tasks_agree_on_whether_hosts_have_equal_numbers(
    tasks: str, per_host: int | None
) -> None:
    """With 4, 3 and 2 tasks, the second host has a third of all ranks, as if all were equal."""
    step = {**SLURM, "SLURM_NTASKS": "9", "SLURM_STEP_NUM_NODES": "3", "SLURM_LOCALID": "0"}
    for host in range(3):
        world = find_world({**step, "SLURM_NODEID": str(host), "SLURM_STEP_TASKS_PER_NODE": tasks})
        assert world is not None
        assert world.ranks_per_host == per_host


def test_torchrun_takes_precedence_inside_srun() -> None:
    assert find_world({**SLURM, **TORCHRUN}) == find_world(TORCHRUN)


@pytest.mark.parametrize(
    "changes",
    [
        {"SLURM_STEP_ID": None},  # a batch script: sbatch also sets SLURM_PROCID
        {"SLURM_NTASKS": None},
        {"SLURM_PROCID": "0", "SLURM_NTASKS": "1"},
    ],
)
def test_outside_srun_and_alone_in_it_a_command_starts_its_own_ranks(
    changes: dict[str, str | None],
) -> None:
    step = {name: value for name, value in {**SLURM, **changes}.items() if value is not None}
    assert find_world(step) is None


@pytest.mark.parametrize(
    "environment",
    [
        {"RANK": "0"},
        {"RANK": "0", "WORLD_SIZE": "2"},
        {"RANK": "2", "LOCAL_RANK": "0", "WORLD_SIZE": "2"},
        {"RANK": "x", "LOCAL_RANK": "0", "WORLD_SIZE": "2"},
        {"RANK": "-1", "LOCAL_RANK": "0", "WORLD_SIZE": "2"},
        {**TORCHRUN, "LOCAL_RANK": "4"},
        {**TORCHRUN, "LOCAL_WORLD_SIZE": "9"},
        {**SLURM, "SLURM_PROCID": "7"},
        {**SLURM, "SLURM_LOCALID": ""},
        {name: value for name, value in SLURM.items() if name != "SLURM_LOCALID"},
    ],
)
def test_incomplete_or_invalid_variables_are_refused(environment: dict[str, str]) -> None:
    with pytest.raises(RequestError):
        find_world(environment)


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({"MASTER_ADDR": "a", "MASTER_PORT": "1234"}, ("a", 1234)),
        ({**SLURM, "MASTER_ADDR": "a"}, ("a", 29_500 + 123)),
        (SLURM, ("gpu07", 29_500 + 123)),
        ({**SLURM, "SLURM_STEP_NODELIST": "n1,n2"}, ("n1", 29_500 + 123)),
        ({"SLURM_JOB_NODELIST": "n[3,5-6]", "SLURM_JOB_ID": "20001"}, ("n3", 29_501)),
        ({"SLURM_JOB_NODELIST": "n7"}, ("n7", 29_500)),
    ],
)
def test_store_address(environment: dict[str, str], expected: tuple[str, int]) -> None:
    assert store_address(environment) == expected


@pytest.mark.parametrize(
    "environment",
    [{}, {"MASTER_ADDR": "a", "MASTER_PORT": "x"}, {"MASTER_ADDR": "a", "MASTER_PORT": "0"}],
)
def test_a_missing_or_invalid_store_address_is_refused(environment: dict[str, str]) -> None:
    with pytest.raises(RequestError, match="MASTER_"):
        store_address(environment)
