"""World of a launcher from its variables; GPUs in CUDA's order, read without CUDA; backends."""

from __future__ import annotations

import threading
from contextlib import nullcontext
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist

from svdpp.errors import RequestError
from svdpp.launch import gpus, process_group
from svdpp.launch.process_group import (
    check_devices,
    choose_backend,
    choose_interface,
    destroy,
    device_of_rank,
)
from svdpp.launch.world import World, find_world, is_secondary_rank, store_address

TORCHRUN = {
    **{"RANK": "5", "LOCAL_RANK": "1", "WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "4"},
    **{"GROUP_RANK": "1", "TORCHELASTIC_RESTART_COUNT": "2"},
    "TORCHELASTIC_USE_AGENT_STORE": "True",
}
SLURM = {
    **{"SLURM_STEP_ID": "0", "SLURM_PROCID": "5", "SLURM_LOCALID": "1", "SLURM_NTASKS": "7"},
    **{"SLURM_NODEID": "1", "SLURM_STEP_TASKS_PER_NODE": "4,3", "SLURM_JOB_ID": "123"},
    "SLURM_STEP_NUM_NODES": "2",
    **{"SLURM_STEP_NODELIST": "gpu[07-09,12],login1", "SLURM_JOB_NODELIST": "other1"},
}


def test_world_of_torchrun() -> None:
    world = find_world(TORCHRUN)
    assert world == World(
        **{"rank": 5, "local_rank": 1, "size": 8, "local_size": 4, "host": 1, "num_hosts": 2},
        launcher="torchrun",
        restarts=2,
    )
    assert (is_secondary_rank(world), world.spans_hosts, world.on_first_host) == (True, True, False)
    assert world.ranks_per_host == 4


def test_the_three_required_variables_mean_one_host_that_owns_its_store() -> None:
    world = find_world({"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2"})
    assert world is not None
    assert (world.local_size, world.spans_hosts, world.owns_store) == (2, False, True)
    assert not is_secondary_rank(world)


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
    """All tasks find the same answer to whether all hosts have equally many ranks.

    With 4, 3 and 2 tasks, the second host has a third of the ranks, and could wrongly conclude that
    hosts are equal.
    """
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
        dict.fromkeys(SLURM),
        {"SLURM_STEP_ID": None},  # in a batch script, where sbatch sets SLURM_PROCID too
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
        {"RANK": "0", "WORLD_SIZE": "2"},
        {"RANK": "2", "LOCAL_RANK": "0", "WORLD_SIZE": "2"},
        {"RANK": "x", "LOCAL_RANK": "0", "WORLD_SIZE": "2"},
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


# --- GPUs -----------------------------------------------------------------------------------------

UUIDS = ["GPU-aa11", "GPU-ab22", "GPU-cc33", "GPU-dd44"]
EQUAL = ["A100"] * 4
MIXED = ["A100", "H100", "A100", "A100"]


@pytest.mark.parametrize(
    ("visible", "order"),
    [
        (None, [0, 1, 2, 3]),
        ("2,0", [2, 0]),
        ("GPU-cc33,GPU-aa", [2, 0]),
        ("1, 3", [1, 3]),
        ("", []),
        ("0,9,1", [0]),
        ("GPU-a,0", []),  # ambiguous, because two UUIDs have this prefix
        ("1,1,2", [1]),
    ],
)
def test_visible_gpus_are_in_cudas_order(visible: str | None, order: list[int]) -> None:
    environment = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    assert gpus.visible_order(UUIDS, EQUAL, environment) == order


def test_mixed_gpus_need_an_explicit_order() -> None:
    with pytest.raises(RequestError, match="CUDA's order is unknown") as caught:
        gpus.visible_order(UUIDS, MIXED, {})
    assert caught.value.hint == "export CUDA_DEVICE_ORDER=PCI_BUS_ID"
    by_bus = {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
    assert gpus.visible_order(UUIDS, MIXED, by_bus) == [0, 1, 2, 3]
    by_uuid = {"CUDA_VISIBLE_DEVICES": "GPU-ab22,GPU-aa11"}
    assert gpus.visible_order(UUIDS, MIXED, by_uuid) == [1, 0]


def test_mig_slices_are_refused_by_name() -> None:
    with pytest.raises(RequestError, match="MIG slice 'MIG-1'"):
        gpus.visible_order(UUIDS, EQUAL, {"CUDA_VISIBLE_DEVICES": "MIG-1"})


def test_free_memory_follows_cudas_numbering(monkeypatch: pytest.MonkeyPatch) -> None:
    nvml = Mock()
    nvml.nvmlDeviceGetCount.return_value = 4
    nvml.nvmlDeviceGetHandleByIndex = int
    nvml.nvmlDeviceGetUUID = UUIDS.__getitem__
    nvml.nvmlDeviceGetCudaComputeCapability.return_value = (8, 0)
    nvml.nvmlDeviceGetMemoryInfo = lambda index: Mock(total=100, free=10 + index)
    monkeypatch.setattr(gpus, "open_nvml", lambda: nullcontext(nvml))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-cc,GPU-aa")
    assert [gpu.uuid for gpu in gpus.visible_gpus()] == ["GPU-cc33", "GPU-aa11"]
    assert [gpus.free_bytes(f"cuda:{index}") for index in (0, 1)] == [12, 10]
    with pytest.raises(RequestError, match="but the number of GPUs found is 2"):
        gpus.free_bytes("cuda:2")


@pytest.mark.parametrize(
    ("device", "world_size", "chosen", "backend"),
    [
        ("cpu", 4, "", "gloo"),
        ("cuda", 4, "", "nccl"),
        ("cuda:0", 4, "", "gloo"),
        ("cuda", 4, "gloo", "gloo"),
        ("cuda:0", 1, "nccl", "nccl"),
        *((device, 2, "nccl", None) for device in ("cpu", "cuda:0")),
        ("cuda", 2, "ucc", None),
    ],
)
def test_the_backend_follows_the_device_or_is_refused(
    device: str, world_size: int, chosen: str, backend: str | None
) -> None:
    with nullcontext() if backend else pytest.raises(RequestError, match="PIPELINE_BACKEND"):
        assert choose_backend(device, world_size, {"PIPELINE_BACKEND": chosen}) == backend


@pytest.mark.parametrize(("visible", "own"), [(4, "cuda:3"), (1, "cuda:0")])
def test_ranks_use_the_gpu_of_their_local_rank_or_the_only_one_they_see(
    monkeypatch: pytest.MonkeyPatch, visible: int, own: str
) -> None:
    """A rank uses the GPU of its local rank, or cuda:0 if it sees only one GPU.

    With --gpus-per-task=1, Slurm shows each task only its own GPU.
    """
    monkeypatch.setattr(torch.cuda, "device_count", lambda: visible)
    fourth = World(rank=3, local_rank=3, size=4, local_size=4)
    devices = [device_of_rank(device, fourth) for device in ("cuda", "cuda:0", "cpu")]
    assert devices == [own, "cuda:0", "cpu"]
    check_devices("cuda", 4, launched=True)


def test_too_few_gpus_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    check_devices("cuda", 2)
    check_devices("cuda:1", 7)
    check_devices("cpu", 99)
    with pytest.raises(RequestError, match="3 CUDA devices requested, 2 found"):
        check_devices("cuda", 3)
    with pytest.raises(RequestError, match="device cuda:2 requested, 2 found"):
        check_devices("cuda:2", 1)


def test_leaving_has_a_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    """The end of the process group has a deadline, because ncclCommDestroy may wait forever."""
    never = threading.Event()
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "destroy_process_group", never.wait)
    destroy(0.05)
    assert not never.is_set()
    never.set()


@pytest.mark.parametrize(
    ("peer", "given"), [("10.0.0.1", {"GLOO_SOCKET_IFNAME": "lo"}), ("127.0.0.1", {})]
)
def test_gloo_and_nccl_use_the_interface_that_is_chosen_or_leads_to_the_store(
    peer: str, given: dict[str, str]
) -> None:
    environment = dict(given)
    assert choose_interface(peer, spans_hosts=False, environment=environment) == "127.0.0.1"
    assert environment == {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}
    with pytest.raises(RequestError, match="GLOO_SOCKET_IFNAME names 'none0'"):
        choose_interface(peer, spans_hosts=False, environment={"GLOO_SOCKET_IFNAME": "none0"})


def test_a_name_that_leads_to_loopback_is_refused_between_hosts_but_nodes_of_one_machine_are_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A host name that resolves to a loopback address is refused between hosts.

    Debian resolves a host's own name to 127.0.1.1. An explicit loopback address is allowed, because
    two agents can run on one machine.
    """
    for peer in ("127.0.0.1", "localhost"):
        assert choose_interface(peer, spans_hosts=True, environment={}) in ("127.0.0.1", "::1")
    monkeypatch.setattr(process_group, "_address_towards", lambda _: "127.0.1.1")
    with pytest.raises(RequestError, match=r"127\.0\.1\.1, which other hosts cannot reach"):
        choose_interface("node1", spans_hosts=True, environment={})
    with pytest.raises(RequestError, match="which other hosts cannot reach"):
        choose_interface("node1", spans_hosts=True, environment={"GLOO_SOCKET_IFNAME": "lo"})
