"""Commands on all GPUs, with a rank on each GPU, or three ranks on a single GPU."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from svdpp.launch import gpus
from tests.gpu.machine import PHOTOS, Machine, Report, python, svdpp
from tests.support.http_server import HttpServer, wait

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def _launched(
    machine: Machine,
    folder: Path,
    *command: str,
    ranks: int | None = None,
    setting: str = "",
    code: int = 0,
    **variables: str,
) -> str:
    """Run a command of svdpp under torchrun, and return its stdout, or stderr after an error.

    `setting` is a shell assignment that each rank evaluates, such as `A=$LOCAL_RANK`.
    """
    program = f'{setting} exec {sys.executable} -m svdpp "$@"'
    return python(
        *("-m", "torch.distributed.run", "--standalone", "--log-dir", str(folder)),
        *("--nproc-per-node", str(ranks or machine.everywhere[0])),
        *("--no-python", "bash", "-c", program, "bash", *command),
        code=code,
        **variables,
    )


def test_env_names_each_gpu(machine: Machine) -> None:
    gpus = json.loads(svdpp("env", "--json"))["devices"]["gpus"]
    assert len(gpus) == machine.num_gpus


@pytest.mark.full  # tests/cli/test_tools.py tests this on the CPU
def test_doctor_finds_nothing_wrong(machine: Machine, tmp_path: Path) -> None:
    svdpp("doctor", *machine.options, "--out", str(tmp_path))


def test_run_makes_clips_and_verify_proves_one(machine: Machine, tmp_path: Path) -> None:
    how = (*machine.steps, "--split", "alternating", "--decode-chunk-size", "2")
    svdpp("run", PHOTOS[0], *machine.options, *how, "--out", str(tmp_path))
    (clip,) = tmp_path.glob("astronaut_0*.json")
    assert json.loads(svdpp("verify", str(clip), "--json"))["equal"] is True
    record = json.loads(clip.read_text())
    assert record["exact"] is True
    assert record["decode_chunk_size"] == 2
    if not machine.is_rehearsal:
        assert {"gpu", "cudnn", "driver", "matmul_tf32"} <= record["conditions"].keys()


@pytest.mark.full
def test_profile_measures_costs_that_a_plan_takes(machine: Machine, tmp_path: Path) -> None:
    costs, ranks = tmp_path / "costs.json", str(machine.everywhere[0])
    svdpp("profile", *machine.options, "--repeats", "1", "--out", str(costs))
    svdpp("plan", "--gpus", ranks, *machine.steps, "--split", "alternating", "--costs", str(costs))


def test_simulate_rehearses_on_all_gpus(machine: Machine) -> None:
    world_size, device = machine.everywhere
    ranks = () if device == "cuda" else ("--gpus", str(world_size))
    how = ("--device", device, *ranks, *machine.steps, "--clips", "3", "--json")
    found = json.loads(svdpp("simulate", *how))["ranks"]
    expected = [f"cuda:{r}" for r in range(world_size)] if device == "cuda" else [device] * 3
    assert [rank["device"] for rank in found] == expected


@pytest.mark.no_rehearsal  # on the CPU tests/cli/test_tools.py does the same
def test_bench_smoke_is_bitwise(machine: Machine, tmp_path: Path) -> None:
    world_size, device = machine.everywhere
    svdpp(
        *("bench", "smoke", "--results", str(tmp_path), "--quiet"),
        *(f"--pipeline.device={device}", f"--pipeline.world={world_size}"),
        *("--workload.clips=2", "--workload.frames=2", f"--workload.steps={world_size}"),
        *("--measure.repeats=1", "--measure.warmups=0", f"--precision={machine.dtype}"),
    )
    assert list(tmp_path.rglob("*.json"))


@pytest.mark.no_rehearsal  # on the CPU tests/serve/test_server.py does the same
def test_serve_makes_a_clip_and_proves_it(machine: Machine, tmp_path: Path) -> None:
    pytest.importorskip("fastapi")
    with HttpServer(tmp_path / "data", *machine.options, *machine.steps) as server:
        server.wait_ready()
        (clip,) = server.add()
        server.wait_for(clip, "completed")
        server.client.post(f"/v1/videos/{clip}/verify").raise_for_status()
        wait(lambda: server.video(clip)["proof"] not in ("none", "running"))
        assert server.video(clip)["proof"] == "equal"


@pytest.mark.full  # `test_end_to_end` tests this on the CPU
def test_torchrun_starts_ranks_that_prove_their_clips(machine: Machine, tmp_path: Path) -> None:
    asked = ("verify", PHOTOS[0], *machine.options, *machine.steps, "--json")
    said = _launched(machine, tmp_path / "log", *asked)
    assert json.loads(said)["bitwise"] is True


@pytest.mark.no_rehearsal
def test_two_ranks_on_one_gpu_are_refused_under_nccl(machine: Machine, tmp_path: Path) -> None:
    said = _launched(
        *(machine, tmp_path / "log", "simulate", "--device", "cuda", "--gpus", "2", "--steps", "4"),
        CUDA_VISIBLE_DEVICES=gpus.visible_gpus()[0].uuid,
        ranks=2,
        code=1,
    )
    assert "ranks 0 and 1 have the same GPU" in said


@pytest.mark.no_rehearsal
@pytest.mark.parametrize("allowed", [False, True], ids=["refused", "unproven"])
def test_ranks_that_differ_are_refused_or_leave_clips_unproven(
    machine: Machine, tmp_path: Path, allowed: bool
) -> None:
    """Different GPUs are refused; if the difference is allowed, the clips count as unproven.

    If all GPUs are of one kind, the ranks have different settings of torch instead.
    """
    kinds = len({gpu.name for gpu in gpus.visible_gpus()})
    setting = "" if kinds > 1 else "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE=$LOCAL_RANK"
    options = [*machine.options[:-1], "2", "--steps", "2"]
    said = _launched(
        *(machine, tmp_path / "log", "run", PHOTOS[0], *options, "--out", str(tmp_path / "out")),
        *(["--allow-mixed-devices"] if allowed else []),
        setting=setting,
        CUDA_DEVICE_ORDER="PCI_BUS_ID",
        ranks=2,
        code=0 if allowed else 1,
    )
    if allowed:
        (clip,) = (tmp_path / "out").glob("astronaut_0*.json")
        assert json.loads(clip.read_text())["exact"] == "unproven"
    else:
        assert "the clips may have other bits" in said


@pytest.mark.no_rehearsal
@pytest.mark.parametrize("kind", ["reversed", "the last"])
def test_each_rank_has_a_context_on_its_own_gpu_and_the_parent_none(
    report: Report, kind: str
) -> None:
    """Each rank has a CUDA context only on its own GPU, and the parent has none.

    CUDA_VISIBLE_DEVICES has all GPUs in reverse order, or only the last one.
    """
    uuids = [gpu.uuid for gpu in gpus.visible_gpus()]
    order = uuids[::-1] if kind == "reversed" else uuids[-1:]
    printed = python(
        *("-m", "tests.gpu.contexts", "cuda", str(len(order))),
        CUDA_VISIBLE_DEVICES=",".join(order),
        CUDA_DEVICE_ORDER="PCI_BUS_ID",
    )
    found = json.loads(printed)
    if not any(found["ranks"]):
        pytest.skip("NVML names no processes here, as in some containers")
    report.add(
        f"GPUs of each rank's process, {kind}", **{str(r): g for r, g in enumerate(found["ranks"])}
    )
    assert found == {"ranks": [[uuid] for uuid in order], "parent": []}
