"""Facts about a machine (`env`), failed checks of `doctor`, and measured costs."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from svdpp import ParallelConfig, __version__
from svdpp.config import ModelConfig, PipelineConfig, SvdSampling
from svdpp.diagnostics import attention_trial, machine
from svdpp.diagnostics.machine import cpu_model, environment, median_costs
from svdpp.driver.trace import Trace
from svdpp.errors import RequestError, error_to_dict
from svdpp.launch import gpus
from svdpp.launch.gpus import available_bytes
from svdpp.launch.world import World
from svdpp.verification.result import CheckLocation, VerificationResult, compare_tensors
from svdpp.worker.messages import ActionDone, StepDone, TransferDone
from tests.support.made_up_runs import config_of


def test_no_secret_and_no_home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("TMPDIR", str(tmp_path / "scratch"))
    monkeypatch.setenv("HF_TOKEN", "hf_" + "a" * 34)
    monkeypatch.setenv("NCCL_AUTH_SECRET", "shibboleth")
    monkeypatch.setenv("OMP_NUM_THREADS", "3")

    facts = environment()
    text = json.dumps(facts)

    assert str(tmp_path) not in text
    assert "a" * 34 not in text
    assert "shibboleth" not in text
    assert facts["variables"]["TMPDIR"] == "~/scratch"
    assert facts["variables"]["OMP_NUM_THREADS"] == "3"
    assert "HF_TOKEN" not in facts["variables"]


def test_versions_and_host() -> None:
    facts = environment()
    assert facts["schema_version"] == 1
    versions = facts["versions"]
    assert (versions["svdpp"], versions["torch"]) == (__version__, torch.__version__)
    assert facts["host"]["cpu"] == cpu_model() != ""
    assert 0 < available_bytes() <= facts["host"]["memory_bytes"]
    assert facts["ffmpeg"]["version"]


def test_commit_and_state_are_those_of_a_checkout_alone(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(machine.svdpp, "__file__", str(tmp_path / "svdpp" / "__init__.py"))
    assert machine.environment()["git"] is None
    (tmp_path / ".git").mkdir()  # an empty folder is no git repository
    assert machine.environment()["git"] is None


def test_a_difference_fails_the_cut_test(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one, other = torch.zeros(1, 1, 4, 2, 2), torch.ones(1, 1, 4, 2, 2)
    result = VerificationResult((compare_tensors("latent", one, other, CheckLocation(0, 1, 0)),))
    monkeypatch.setattr(machine, "verify", lambda *_: result)
    names = ("devices", "cut test")
    monkeypatch.setattr(machine, "_CHECKS", {name: machine._CHECKS[name] for name in names})
    config = PipelineConfig(world_size=1, model=ModelConfig(name="demo"))
    *_, check = machine.run_checks(config, tmp_path)
    assert (check.verdict, check.exit_code) == ("failed", 3)
    assert check.detail.startswith(
        "the demo clip has other bits than the clip of diffusers: clip 0, the latent"
    )


@pytest.mark.parametrize("chosen", [None, "sage"])
def test_a_backend_that_does_not_repeat_fails_only_a_run_that_uses_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, chosen: str | None
) -> None:
    first = {"fp32": ["a", "a"], "bf16": ["b", "b"]}
    refused = {"fp32": error_to_dict(RequestError("no fp32")), "bf16": ["c", "c"]}
    never = {name: error_to_dict(RequestError("never")) for name in first}
    processes = [
        {"native": first, "_native_cudnn": never, "_native_flash": refused, "sage": first},
        {"native": first, "_native_cudnn": never, "_native_flash": refused}
        | {"sage": {"fp32": ["a", "a"], "bf16": ["b", "d"]}},
    ]
    monkeypatch.setattr(attention_trial, "_run_processes", lambda _: processes)
    names = ("devices", "attention")
    monkeypatch.setattr(machine, "_CHECKS", {name: machine._CHECKS[name] for name in names})
    model = ModelConfig(name="any", attention_backend=chosen)
    config = PipelineConfig(world_size=1, model=model)
    _, native, flash, sage = machine.run_checks(config, tmp_path)
    repeats = "gives equal bits for equal inputs, also in another process"
    assert (native.name, native.verdict) == ("attention native", "ok")
    assert native.detail == f"{repeats} (fp32 and bf16)"
    assert (flash.name, flash.detail) == ("attention _native_flash", f"{repeats} (bf16)")
    assert sage.detail == "gives different bits for equal inputs in bf16"
    expected = ("differs", 0) if chosen is None else ("failed", 3)
    assert (sage.verdict, sage.exit_code) == expected


def test_a_chosen_backend_that_does_not_run_in_its_dtype_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = {"flash": {"fp32": error_to_dict(RequestError("no fp32", "try")), "bf16": ["c"]}}
    monkeypatch.setattr(attention_trial, "_run_processes", lambda _: [found, found])
    names = ("devices", "attention")
    monkeypatch.setattr(machine, "_CHECKS", {name: machine._CHECKS[name] for name in names})
    model = ModelConfig(name="any", attention_backend="flash")
    _, flash = machine.run_checks(PipelineConfig(world_size=1, model=model), tmp_path)
    assert (flash.verdict, flash.exit_code) == ("failed", 2)
    assert (flash.detail, flash.fix) == ("no fp32", "try")


# --- measured costs, as in a bench and in `svdpp profile` -----------------------------------------

TWO_HOSTS = World(rank=0, local_rank=0, size=4, local_size=2, num_hosts=2, launcher="torchrun")


def _config(world_size: int, device: str = "cpu") -> PipelineConfig:
    sampling = SvdSampling(num_inference_steps=world_size, num_frames=2)
    return replace(config_of(), world_size=world_size, sampling=sampling, device=device)


def _add_clip(
    trace: Trace,
    step_seconds: Mapping[int, float],
    transfers: Mapping[tuple[int, int], float],
    *,
    clip: int = 0,
    encode_seconds: float = 0.25,
) -> Trace:
    """Add a clip to the trace in which each rank does one step; return the trace."""
    encode = ActionDone(action=f"ENCODE c{clip} @0", start=0.0, end=encode_seconds, waited=0.0)
    trace(0, encode)
    for rank, seconds in step_seconds.items():
        trace(rank, StepDone(clip=clip, step=rank, seconds=seconds))
        action = f"DENOISE c{clip} {rank}:{rank + 1}"
        trace(rank, ActionDone(action=action, start=1.0, end=1 + seconds, waited=0.0))
    for (source, target), seconds in transfers.items():
        about = {"clip": clip, "next_step": 1, "num_bytes": 77, "end": 9.0}
        trace(target, TransferDone(direction="recv", peer=source, seconds=seconds, **about))
        trace(source, TransferDone(direction="send", peer=target, seconds=5.0, **about))
    return trace


@pytest.mark.parametrize(
    ("device", "steps", "costs"),
    [
        ("cuda", (1.0, 1.05, 1.02), 1.02),  # equal GPUs get one number
        ("cuda", (1.0, 2.0, 1.0), (1.0, 2.0, 1.0)),
        ("cpu", (1.0, 2.0, 1.1), 1.1),  # ranks share a CPU, so differences are noise
    ],
)
def test_ranks_are_told_apart_where_gpus_differ(
    device: str, steps: tuple[float, ...], costs: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpus, "visible_gpus", list)
    trace = _add_clip(Trace(3), dict(enumerate(steps)), {})
    found = median_costs(_config(3, device), None, [trace], source="")
    assert found.step_seconds == pytest.approx(costs)


def test_the_first_clip_warms_up_and_does_not_count() -> None:
    trace = Trace(2, first_clip=1)
    for clip, transfer in enumerate((1.0, 0.1, 0.1)):
        took = 10.0 - clip
        _add_clip(trace, {1: took}, {(0, 1): transfer}, clip=clip, encode_seconds=took)
    costs = median_costs(_config(2), None, [trace], source="a test")
    assert (costs.step_seconds, costs.encode_seconds) == (8.5, 8.5)
    assert costs.transfer_seconds == pytest.approx(0.1)
    assert (costs.name, costs.source) == ("dummy fp32, 2 frames of 1024x576", "a test")


def test_ranks_and_transfers_of_several_hosts_are_told_apart() -> None:
    steps = {0: 1.0, 1: 1.0, 2: 3.0, 3: 3.0}
    trace = _add_clip(Trace(4), steps, {(0, 1): 0.1, (1, 2): 0.5, (2, 3): 0.1})
    costs = median_costs(_config(4), TWO_HOSTS, [trace], source="")
    assert costs.step_seconds == (1.0, 1.0, 3.0, 3.0)
    assert costs.ranks_per_host == 2
    assert (costs.transfer_seconds, costs.inter_host_transfer_seconds) == pytest.approx((0.1, 0.5))


def test_a_step_of_a_pair_and_a_part_of_a_decode_count_as_whole_ones() -> None:
    config = replace(_config(2), parallel=ParallelConfig(cfg_parallel_size=2))
    trace = _add_clip(Trace(2), {0: 1.0, 1: 1.0}, {(0, 1): 0.1})
    trace(1, ActionDone(action="DECODE c0 @2 8:16/16", start=5.0, end=6.0, waited=0.0))
    costs = median_costs(config, None, [trace], source="")
    assert (costs.step_seconds, costs.decode_seconds) == (pytest.approx(1.8), 2.0)
