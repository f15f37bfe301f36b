"""The charter: one test for each promise that no change may weaken, shown from outside.

The number in a test's name is the number of its row; `docs/architecture.md` lists the rows. Tests
that need several processes run in CI (`slow`), the others in `make test`.
"""

from __future__ import annotations

import ast
import csv
import dataclasses
import importlib
import inspect
import json
import math
import os
import re
import signal
import tomllib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import cache, partial
from importlib.metadata import entry_points
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pydantic
import pytest
import torch
import yaml
from typer.testing import CliRunner

import svdpp
from svdpp import errors
from svdpp.bench.config import BenchConfig, read_config
from svdpp.bench.targets import METRICS, SPEEDUPS, check_met, outcomes
from svdpp.cli.app import COMMANDS, EPILOG, app, load_command
from svdpp.cli.console import Console
from svdpp.cli.options.pipeline import PipelineOptions
from svdpp.cli.progress import Progress
from svdpp.config import (
    SAMPLING_CLASSES,
    ClipRequest,
    LatentSpec,
    ModelConfig,
    OutputConfig,
    ParallelConfig,
    PipelineConfig,
    SvdSampling,
)
from svdpp.config.families.registry import FAMILY_SPECS
from svdpp.diagnostics.run_metrics import collect_run_metrics, metrics_of_pipeline
from svdpp.diagnostics.utilisation import PEAKS, speed_of_run
from svdpp.driver.trace import Trace
from svdpp.errors import SvdppError
from svdpp.launch.process_group import choose_backend, device_of_rank
from svdpp.launch.world import World
from svdpp.models.base import DTYPES
from svdpp.models.checkpoint import find_checkpoint
from svdpp.models.dummy import DummyUNet
from svdpp.plan.actions import Action
from svdpp.plan.costs import CostModel
from svdpp.plan.roles import Roles
from svdpp.worker.messages import ActionDone, Heartbeat, Joined, RankStats, StepDone
from svdpp.worker.rank import RankSetup
from svdpp.worker.stats import read_gpu
from tests.support.damage import Damage
from tests.support.details import numbers_not_in_details
from tests.support.dummies import SHAPE, hashes, pids, plain_hashes
from tests.support.dummies import config as dummy
from tests.support.http_server import DEMO, HttpServer, wait
from tests.support.made_up_runs import EVEN, leave, replayed
from tests.support.shell import ROOT, Answer, parsed, python, svdpp_alone, svdpp_here

#: Options for small latents of the dummy model, whose step then takes a millisecond.
SMALL = ("--latent-shape", "1", "4", "2", "8", "8", "--threads", "1")
#: Options with which `svdpp run` only prints a plan, on a CPU and without weights.
DEMO_RUN = ("--model", "demo", "--device", "cpu", "--steps", "28", "--dry-run")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
PHOTOS = ROOT / "svdpp/assets/photos"
SHELL = "tests/support/shell.py"


def torchrun(*arguments: str, temp: Path, cwd: Path | None = None) -> Answer:
    """Run `torchrun -m svdpp ...` with two processes; torchrun leaves a folder in `temp`."""
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")
    return python(*launcher, "-m", "svdpp", *arguments, cwd=cwd, env={"TMPDIR": str(temp)})


@cache
def sources() -> dict[str, ast.Module]:
    """Return the syntax tree of each module of the package, by its path below the root."""
    files = (ROOT / "svdpp").rglob("*.py")
    return {str(f.relative_to(ROOT)): ast.parse(f.read_text()) for f in files}


@cache
def nodes(tree: ast.AST) -> list[ast.AST]:
    """Return all nodes of a syntax tree."""
    return list(ast.walk(tree))


@cache
def imported(tree: ast.Module) -> set[str]:
    """Return the full names that a module imports."""
    names: set[str] = set()
    for node in nodes(tree):
        if isinstance(node, ast.Import):
            names |= {each.name for each in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {node.module, *(f"{node.module}.{each.name}" for each in node.names)}
    return names


@cache
def called(tree: ast.AST) -> list[tuple[str, ast.Call]]:
    """Return each call with its dotted name, such as `dist.send`."""
    calls = (node for node in nodes(tree) if isinstance(node, ast.Call))
    named = [node for node in calls if isinstance(node.func, ast.Name | ast.Attribute)]
    return [(_dotted(node.func) or ast.unparse(node.func), node) for node in named]


@cache
def attributes() -> set[str]:
    """Return the dotted names of all attributes in the package, such as `torch.cuda.amp`."""
    found = (node for tree in sources().values() for node in nodes(tree))
    return set(filter(None, (_dotted(node) for node in found if isinstance(node, ast.Attribute))))


def _dotted(node: ast.AST) -> str:
    """Return the dotted name of an expression; empty if it is more than names and dots."""
    if isinstance(node, ast.Name):
        return node.id
    before = _dotted(node.value) if isinstance(node, ast.Attribute) else ""
    return f"{before}.{node.attr}" if before and isinstance(node, ast.Attribute) else ""


def error_types() -> list[type[SvdppError]]:
    """Return all classes of errors."""
    found = [each for each in vars(errors).values() if isinstance(each, type)]
    return [each for each in found if issubclass(each, SvdppError)]


def public(tree: ast.AST) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef]:
    """Yield the public functions, methods and classes; not functions inside of functions."""
    for node in ast.iter_child_nodes(tree):
        is_definition = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
        if is_definition and not node.name.startswith("_"):
            yield node
            if isinstance(node, ast.ClassDef):
                yield from public(node)


# --- Shape ----------------------------------------------------------------------------------------


FRAMEWORKS = {
    *("click", "rich_click", "asyncclick", "argparse", "optparse", "getopt", "docopt", "fire"),
    *("cyclopts", "cleo", "cliff", "clize", "plumbum", "tyro", "jsonargparse", "absl"),
}


def test_01_the_command_line_is_typers() -> None:
    (script,) = entry_points(group="console_scripts", name="svdpp")
    assert script.value == "svdpp.__main__:main"
    assert PROJECT["project"]["scripts"] == {"svdpp": "svdpp.__main__:main"}
    names = {name for tree in sources().values() for name in imported(tree)}
    others = {name for name in names if name.partition(".")[0] in FRAMEWORKS}
    assert not others, "another command-line framework"
    used = {name for name in names | attributes() if name.startswith("typer.")}
    assert used >= {"typer.Typer", "typer.Option", "typer.Argument"}
    private = {name for name in used if any(part.startswith("_") for part in name.split("."))}
    assert not private, "private names of Typer"
    answer = CliRunner().invoke(app, ["--version"])
    assert (answer.exit_code, answer.output) == (0, f"svdpp {svdpp.__version__}\n")


def test_01_commands_share_option_groups() -> None:
    for command in ("run", "simulate", "verify", "plan", "serve"):
        module = importlib.import_module(f"svdpp.cli.{command}")
        classes = [each for each in vars(module).values() if isinstance(each, type)]
        # Groups that the module only imports do not count.
        own = [each for each in classes if each.__module__ == module.__name__]
        shared = [each for each in own if issubclass(each, PipelineOptions)]
        assert shared, f"svdpp {command} declares the options of a pipeline itself"
    assert "typer.testing.CliRunner" in imported(ast.parse((ROOT / SHELL).read_text()))


def test_02_packages_and_folders() -> None:
    project = PROJECT["project"]
    required = {re.split(r"[<>=\[~! ]", each)[0] for each in project["dependencies"]}
    assert required >= {"torch", "diffusers", "typer", "rich", "loguru", "imageio-ffmpeg"}
    assert any(each.startswith("pytest>") for each in project["optional-dependencies"]["test"])
    top = ("svdpp", "tests", "docs", "pyproject.toml", "CHANGELOG.md", "README.md", ".github")
    missing = [each for each in top if not (ROOT / each).exists()]
    assert not missing
    assert svdpp_alone("--version").out == f"svdpp {svdpp.__version__}\n"


@pytest.mark.slow
def test_02_torchrun_starts_the_same_commands(tmp_path: Path) -> None:
    options = ("--steps", "4", "--clips", "2", *SMALL, "--json")
    answer = torchrun("simulate", *options, temp=tmp_path)
    assert answer.code == 0, answer.err
    assert json.loads(answer.out)["world_size"] == 2, "rank 0 alone prints the result"


def test_03_plan_prints_the_step_ranges() -> None:
    answer = svdpp_here("plan", "--gpus", "7", "--steps", "28")
    assert answer.code == 0, answer.err
    for rank in range(7):
        assert re.search(rf"{rank}\W+{rank * 4}\W+{rank * 4 + 4}\b", answer.out), answer.out


def test_03_options_as_typed() -> None:
    run = parsed("svdpp run --gpus 7 input.png")["options"]
    assert (run.world, run.inputs) == (7, ["input.png"])
    assert parsed("svdpp simulate --world 4")["options"].world == 4
    assert (parsed("svdpp verify")["options"].atol, parsed("svdpp verify")["options"].rtol) == (
        0,
        0,
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("command", "words"),
    [
        (("simulate", "--world", "4"), "rank 3 |"),
        (("verify",), "bitwise equal: 2 clips"),
        (("run", "--gpus", "7", "input.png", *DEMO_RUN), "1 clip of "),
    ],
)
def test_03_commands_work_as_typed(
    command: tuple[str, ...], words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Commands work as typed. Here `run` only prints a plan, with CPU ranks for its seven GPUs."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "input.png").symlink_to(PHOTOS / "rocket.jpg")
    answer = svdpp_here(*command)
    assert answer.code == 0, answer.err
    assert words in answer.out, answer.out


VERIFY = (
    *("verify", "--model", "dummy", "--world", "2", "--steps", "4", "--clips", "2"),
    *("--device", "cpu", *SMALL, "--json"),
)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("tolerance", "code", "verdict"),
    [
        ((), 3, "different"),
        (("--atol", "1e-3"), 0, "within tolerance"),
        (("--rtol", "1e-3"), 0, "within tolerance"),
        (("--atol", "1e-30"), 3, "different"),
    ],
)
def test_03_verify_compares_bitwise_or_within_a_tolerance(
    monkeypatch: pytest.MonkeyPatch, tolerance: tuple[str, ...], code: int, verdict: str
) -> None:
    """`verify` notices a difference in one bit, unless it is within the tolerance.

    One element of a latent that rank 0 sends is replaced by the next larger number.
    """
    planted = partial(svdpp.verify, fault=Damage("ulp", 0, 1))
    monkeypatch.setattr("svdpp.verification.verify.verify", planted)
    answer = svdpp_here(*VERIFY, *tolerance)
    assert answer.code == code, answer
    found = json.loads(answer.out.partition("\n}\n")[0] + "}")
    assert found["verdict"] == verdict


@pytest.mark.slow
def test_03_verify_needs_no_tolerance_if_no_bit_differs() -> None:
    answer = svdpp_here(*VERIFY, "--atol", "1e-3", "--rtol", "1e-3")
    assert answer.code == 0, answer.err
    assert json.loads(answer.out)["verdict"] == "bitwise equal"


@pytest.mark.slow
def test_03_ranks_are_started_by_torch_multiprocessing() -> None:
    starters = [n for n, t in sources().items() if "torch.multiprocessing" in imported(t)]
    assert [name.split("/")[1] for name in starters] == ["launch"] * len(starters) != []
    plain = {n for n, t in sources().items() if "multiprocessing.get_context" in imported(t)}
    assert not plain, "ranks are started by torch's contexts alone"
    answer = svdpp_here(
        "simulate", "--world", "4", "--clips", "2", "--steps", "4", *SMALL, "--json"
    )
    assert answer.code == 0, answer.err
    assert [each["steps_done"] for each in json.loads(answer.out)["ranks"]] == [2, 2, 2, 2]


def test_04_public_names() -> None:
    names = ("Pipeline", "PipelineConfig", "PipelineStage", "LatentSpec", "StepRange", "verify")
    assert all(getattr(svdpp, name).__name__ == name for name in names)
    types = {
        n for n, v in vars(errors).items() if isinstance(v, type) and issubclass(v, SvdppError)
    }
    assert types <= set(svdpp.__all__)
    assert all(getattr(svdpp, name) is getattr(errors, name) for name in types)


# --- The pipeline ---------------------------------------------------------------------------------


@pytest.mark.parametrize(("steps", "world_size"), [(28, 7), (25, 5), (4, 1), (6, 6)])
def test_05_steps_are_divided_equally(steps: int, world_size: int) -> None:
    answer = svdpp_here("plan", "--gpus", str(world_size), "--steps", str(steps), "--json")
    each = steps // world_size
    ranges = [
        (rank["rank"], rank["start"], rank["end"]) for rank in json.loads(answer.out)["ranks"]
    ]
    assert ranges == [(r, r * each, (r + 1) * each) for r in range(world_size)]


def test_05_steps_that_cannot_be_divided_are_refused_with_their_numbers() -> None:
    answer = svdpp_here("plan", "--gpus", "7", "--steps", "25", "--json")
    assert answer.code == 2, answer
    error = errors.error_from_dict(json.loads(answer.out)["error"])
    assert type(error) is errors.RequestError
    assert all(number in error.message for number in ("25", "7"))
    assert not numbers_not_in_details(error)
    assert svdpp_here("plan", "--gpus", "7", "--steps", "25", "--split", "balanced").code == 0


COLLECTIVES = {
    *("broadcast", "all_reduce", "reduce", "all_gather", "gather", "scatter", "reduce_scatter"),
    *("all_to_all", "all_to_all_single", "all_gather_object", "broadcast_object_list"),
    *("all_gather_into_tensor", "reduce_scatter_tensor", "gather_object", "scatter_object_list"),
    *("allreduce", "allgather", "alltoall", "_functional_collectives"),
}


def test_06_latents_go_point_to_point() -> None:
    users = {name for name, tree in sources().items() if "torch.distributed" in imported(tree)}
    calls = {
        (name, function.rpartition(".")[2]): node.lineno
        for name in users
        for function, node in called(sources()[name])
        if function.startswith(("dist.", "torch.distributed."))
    }
    functions = {function for _, function in calls}
    assert functions & {"isend", "send", "batch_isend_irecv"}
    assert functions & {"irecv", "recv", "batch_isend_irecv"}
    # A collective may also be a method of a group, or be imported by its name.
    by_any_name = {f.rpartition(".")[2] for name in users for f, _ in called(sources()[name])}
    by_any_name |= {n.rpartition(".")[2] for name in users for n in imported(sources()[name])}
    assert not by_any_name & COLLECTIVES, "a collective"
    for (name, function), line in calls.items():
        if "barrier" in function:
            above = (ROOT / name).read_text().splitlines()[max(0, line - 4) : line]
            assert any("#" in each for each in above), f"{name}:{line}: a barrier without a reason"


@pytest.mark.slow
def test_06_each_rank_is_a_process() -> None:
    with svdpp.Pipeline(dummy(3, steps=6)) as pipeline:
        processes = {*pids(pipeline), os.getpid()}
        pipeline.run([ClipRequest(seed=0)])
    assert len(processes) == 4


def test_07_backends_and_the_variables_of_torchrun() -> None:
    def refused(*options: str, **env: str) -> str:
        answer = svdpp_here("simulate", "--device", "cpu", *options, env=env)
        assert answer.code == 2, answer
        return answer.err

    assert "nccl" in refused("--world", "2", PIPELINE_BACKEND="nccl")
    assert "PIPELINE_BACKEND" in refused("--world", "2", PIPELINE_BACKEND="mpi")
    launched = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "3"}
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    assert "3" in refused("--world", "2", **launched, **address)
    assert "rank 3 of 3" in refused(WORLD_SIZE="3", RANK="3", LOCAL_RANK="0", **address)
    assert "local rank 5 of 3" in refused(WORLD_SIZE="3", RANK="0", LOCAL_RANK="5", **address)


@pytest.mark.parametrize(
    ("device", "wanted", "backend"),
    [
        *(("cuda", "", "nccl"), ("cpu", "", "gloo"), ("cuda:0", "", "gloo")),
        *(("cuda", "gloo", "gloo"), ("cuda", "nccl", "nccl")),
    ],
)
def test_07_the_backend_suits_the_devices(device: str, wanted: str, backend: str) -> None:
    assert choose_backend(device, 4, {"PIPELINE_BACKEND": wanted}) == backend


def test_07_rank_r_is_on_cuda_r(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    worlds = [World(rank=r, local_rank=r, size=4, local_size=4) for r in range(4)]
    devices = ["cuda:0", "cuda:1", "cuda:2", "cuda:3"]
    assert [device_of_rank("cuda", world) for world in worlds] == devices
    assert {device_of_rank("cuda:0", world) for world in worlds} == {"cuda:0"}
    assert {device_of_rank("cpu", world) for world in worlds} == {"cpu"}


FORBIDDEN = (
    *("torch.optim", "torch.cuda.amp", "torch.amp", "torch.distributed.fsdp", "triton"),
    *("torch.distributed.tensor", "torch.utils.cpp_extension", "torch.utils.data", "torch.library"),
    *("torch.autocast", "torch.compile", "torch.distributed.pipelining", "deepspeed", "cupy"),
)
FORBIDDEN_METHODS = {
    *("backward", "zero_grad", "GradScaler", "enable_context_parallel_inference"),
    *("fully_shard", "quantize_dynamic", "load_inline"),
}


def test_08_no_training_no_sharding_no_kernels() -> None:
    names = {name for tree in sources().values() for name in imported(tree)} | attributes()
    assert not [name for name in names if name.startswith(FORBIDDEN)]
    calls = {f.rpartition(".")[2] for tree in sources().values() for f, _ in called(tree)}
    assert not calls & FORBIDDEN_METHODS
    kernels = [f for end in ("cu", "cuh", "cpp", "c", "so") for f in ROOT.glob(f"svdpp/**/*.{end}")]
    assert not kernels, "code of our own for devices"
    # Latents are sent as they are: a rank or a link compresses nothing.
    for name in sources():
        if name.startswith(("svdpp/comm/", "svdpp/worker/")):
            short = {f for f, _ in called(sources()[name]) if f.rpartition(".")[2] == "compress"}
            assert not short, name


@pytest.mark.slow
def test_08_each_rank_holds_the_full_denoiser() -> None:
    answer = svdpp_here("plan", "--gpus", "4", "--steps", "28", "--memory", "--json")
    assert answer.code == 0, answer.err
    ranks = json.loads(answer.out)["ranks"]
    weights = {rank["rank"]: rank["peak_gib"] for rank in ranks}
    # 1.52 G parameters in fp16 are 2.84 GiB, which no rank can be below.
    assert all(gib > 2.84 for gib in weights.values()), weights


def test_09_a_dummy_conv3d_model_runs_without_weights() -> None:
    model = DummyUNet(channels=4, num_steps=4)
    assert any(isinstance(each, torch.nn.Conv3d) for each in model.modules())
    latent = torch.zeros(1, 4, 2, 8, 8)
    stepped = model(latent, step=0)
    assert (stepped.shape, stepped.dtype) == (latent.shape, latent.dtype)
    assert not torch.equal(stepped, latent)
    assert LatentSpec(shape=tuple(latent.shape)).dtype == "fp32"


def test_09_real_models_are_those_of_diffusers() -> None:
    own = {
        node.name
        for tree in sources().values()
        for node in nodes(tree)
        if isinstance(node, ast.ClassDef)
        and any(_dotted(base).endswith(("Module", "ModelMixin")) for base in node.bases)
    }
    assert own == {"DummyUNet"}, "networks of our own"
    spec = find_spec("diffusers")
    assert spec is not None
    assert spec.origin is not None
    offered = Path(spec.origin).read_text()
    for family, facts in FAMILY_SPECS.items():
        pipelines = filter(None, (facts.text_pipeline, facts.image_pipeline))
        assert all(f'"{name}"' in offered for name in pipelines), family


@pytest.mark.slow
def test_10_many_clips_fill_the_pipeline(tmp_path: Path) -> None:
    """Rank 1 ends no step of clip 0 before rank 0 has ended a step of clip 1.

    If the clips were made one after the other, rank 1 would wait forever.
    """
    begun = tmp_path / "begun"

    def watch(rank: int, event: object) -> None:
        if rank == 0 and isinstance(event, StepDone) and event.clip == 1:
            begun.touch()

    waits = Damage("hang", 1, 0, until=str(begun))
    pipeline = svdpp.Pipeline(dummy(timeout_seconds=20.0), fault=waits)
    pipeline.observe(watch)
    with pipeline:
        assert len(pipeline.run([ClipRequest(seed=seed) for seed in range(4)])) == 4


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "words", "details"),
    [
        (
            *("width", "latents: sent 1x4x2x8x7 fp32, expected 1x4x2x8x8 fp32"),
            {"sent_shape": [1, 4, 2, 8, 7], "expected_shape": [1, 4, 2, 8, 8]},
        ),
        (
            *("dtype", "latents: sent 1x4x2x8x8 bf16, expected 1x4x2x8x8 fp32"),
            {"sent_dtype": "bf16", "expected_dtype": "fp32"},
        ),
        (
            *("missing", "tensors: sent 0, expected at least 1: latents is missing"),
            {"sent_tensors": 0, "expected_tensors": 1, "missing": ["latents"]},
        ),
        (
            *("extra", "tensors: sent 2, expected 1: extra is not expected"),
            {"sent_tensors": 2, "expected_tensors": 1, "extra": ["extra"]},
        ),
        ("clip", "clip: sent 2, expected 1", {"sent_clip": 2, "expected_clip": 1}),
        ("swapped", "clip: sent 2, expected 1", {"sent_clip": 2, "expected_clip": 1}),
        ("step", "next step: sent 3, expected 2", {"sent_next_step": 3, "expected_next_step": 2}),
        (
            *("bytes", "bytes of the payload: sent 2044, expected 2048"),
            {"sent_bytes": 2044, "expected_bytes": 2048},
        ),
        ("payload", "crc32 of the payload: sent ", {}),
    ],
)
def test_11_a_mismatch_of_send_and_receive_is_named(
    kind: str, words: str, details: dict[str, Any]
) -> None:
    config = dummy(checksum=kind == "payload")
    pipeline = svdpp.Pipeline(config, fault=Damage("packet", 0, 1, field=kind))
    with pytest.raises(errors.MismatchError) as caught, pipeline:
        pipeline.run([ClipRequest(seed=seed) for seed in range(3)])
    error = caught.value
    assert error.exit_code == 6
    assert error.message.startswith("rank 0 ")
    assert words in error.message
    ends = {"clip": 1, "step": 2, "from_rank": 0, "to_rank": 1}
    assert {**ends, **details}.items() <= error.details.items(), error.details


@pytest.mark.slow
@pytest.mark.timing
@pytest.mark.timeout(120)
def test_12_a_rank_that_stops_is_named() -> None:
    """The error names the stopped rank 1, although ranks 0 and 2 notice the stop first.

    Rank 0 cannot send, and rank 2 receives nothing.
    """
    with (
        pytest.raises(errors.RankError, match=r"^rank 1 ") as caught,
        svdpp.Pipeline(dummy(3, steps=6, timeout_seconds=4.0)) as pipeline,
    ):
        pipeline.run([ClipRequest(seed=0)])
        os.kill(pids(pipeline)[1], signal.SIGSTOP)
        pipeline.run([ClipRequest(seed=seed) for seed in range(3)])
    assert caught.value.exit_code == 6
    assert "has sent no heartbeat for " in caught.value.message


@pytest.mark.slow
@pytest.mark.timing
@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    ("place", "deadline", "words"),
    [
        ("step", {"timeout_seconds": 3.0}, "has made no progress for "),
        ("start", {"start_timeout_seconds": 12.0}, "never started within 12 s"),
        ("load", {"start_timeout_seconds": 12.0}, "did not get ready within 12 s"),
    ],
)
def test_12_each_wait_has_a_deadline(place: str, deadline: dict[str, float], words: str) -> None:
    hangs = Damage("hang", 1, 0, place=place)
    with (
        pytest.raises(errors.RankError, match=r"^rank 1 ") as caught,
        svdpp.Pipeline(dummy(3, steps=6, **deadline), fault=hangs) as pipeline,
    ):
        pipeline.run([ClipRequest(seed=seed) for seed in range(3)])
    assert words in caught.value.message
    assert caught.value.details["timeout_seconds"] == next(iter(deadline.values()))


@pytest.mark.slow
def test_13_logs_of_each_rank() -> None:
    options = ("simulate", "--world", "2", "--clips", "1", "--steps", "4", *SMALL)
    log = svdpp_here(*options, "-v").err
    assert "rank 0 ready: steps 0 to 2" in log
    assert "rank 1 ready: steps 2 to 4" in log
    assert re.search(r"rank 0 send clip 0 at step 2 to rank 1: \d+ bytes in \d\.\d+ s", log), log
    assert re.search(r"rank 1 recv clip 0 at step 2 from rank 0: \d+ bytes in \d\.\d+ s", log), log
    assert "clip 0 step" not in log, "-v shows no steps"
    finer = svdpp_here(*options, "-vv").err
    steps = re.findall(r"rank (\d) clip 0 step (\d): \d+\.\d+ s", finer)
    assert steps == [("0", "0"), ("0", "1"), ("1", "2"), ("1", "3")], finer
    assert "recv clip 0" in finer
    silent = svdpp_here(*options).err
    assert "recv clip 0" not in silent


RUN = ("run", str(PHOTOS / "rocket.jpg"), *DEMO_RUN)


@pytest.mark.slow
@pytest.mark.parametrize(
    "dtype", ["fp16", *(pytest.param(name, marks=pytest.mark.full) for name in ("fp32", "bf16"))]
)
def test_14_memory_precision_and_layout_of_memory(dtype: str) -> None:
    answer = svdpp_here(*RUN, "--dtype", dtype, "--memory-opt", "--channels-last")
    assert answer.code == 0, answer.err


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["fp32", "fp16", "bf16"])
def test_14_the_options_reach_the_weights_of_a_rank(dtype: str) -> None:
    def denoiser(*options: str) -> torch.nn.Module:
        line = " ".join(("svdpp run x.jpg --model demo --dtype", dtype, *options))
        model = parsed(line)["options"].model_config("cpu")
        checkpoint = find_checkpoint(model)
        from svdpp.models.engine.load import load_pipeline  # imports diffusers, which takes seconds

        place = {"sampling": SvdSampling(), "roles": Roles(denoise=True), "device": "cpu"}
        unet: torch.nn.Module = load_pipeline(checkpoint, model, **place).unet
        return unet

    def formats(unet: torch.nn.Module) -> set[bool]:
        layers = (each for each in unet.modules() if isinstance(each, torch.nn.Conv2d))
        weights = [each.weight for each in layers if each.weight.shape[2] > 1]
        return {each.is_contiguous(memory_format=torch.channels_last) for each in weights}

    def chunks(unet: torch.nn.Module) -> set[int | None]:
        return {each._chunk_size for each in unet.modules() if hasattr(each, "_chunk_size")}

    plain, changed = denoiser(), denoiser("--memory-opt", "--channels-last")
    assert {each.dtype for each in changed.parameters()} == {DTYPES[dtype]}
    assert (formats(plain), formats(changed)) == ({False}, {True}), "--channels-last"
    assert (chunks(plain), chunks(changed)) == ({None}, {1}), "--memory-opt"


@pytest.mark.parametrize("option", [("--amp",), ("--dtype", "amp")])
def test_14_amp_is_refused_with_its_reason(option: tuple[str, ...]) -> None:
    answer = svdpp_here(*RUN, *option)
    assert answer.code == 2
    assert "GradScaler" in answer.err


def test_14_amp_is_refused_in_benchmarks_and_in_python() -> None:
    answer = svdpp_here("bench", "smoke", "--precision=amp")
    assert answer.code == 2
    assert "GradScaler" in answer.err
    with pytest.raises(errors.RequestError, match="GradScaler"):
        ModelConfig(dtype="amp")  # type: ignore[arg-type]


# --- Proof, speed and machines --------------------------------------------------------------------


@pytest.mark.slow
def test_15_a_planted_difference_is_found_and_named() -> None:
    requests = [ClipRequest(seed=seed) for seed in range(2)]
    verdict = svdpp.verify(dummy(), requests, fault=Damage("ulp", 0, 1))
    first = verdict.first_difference
    assert first is not None
    assert (verdict.bitwise, first.clip, first.step, first.rank) == (False, 1, 2, 0)
    assert svdpp.verify(dummy(), requests).bitwise
    tolerant = svdpp.verify(dummy(), requests, fault=Damage("ulp", 0, 1), atol=1e-3)
    assert (tolerant.bitwise, tolerant.equal) == (False, True)
    assert "within tolerance" in tolerant.verdict
    assert not svdpp.verify(dummy(), requests, fault=Damage("skip", 0, 1), atol=1e-3).equal


BENCH = (
    *("bench", "smoke", "--workload.clips=2", "--workload.steps=2", "--workload.frames=2"),
    *("--workload.height=32", "--workload.width=32", "--measure.repeats=1"),
)


@pytest.mark.slow
def test_16_a_benchmark_under_torchrun_writes_its_results(tmp_path: Path) -> None:
    (tmp_path / "temp").mkdir()
    answer = torchrun(*BENCH, temp=tmp_path / "temp", cwd=tmp_path)
    assert answer.code == 0, answer.err
    (folder,) = (tmp_path / "results/smoke").iterdir()
    files = {each.name for each in folder.iterdir()}
    assert files >= {"env.json", "summary.json", "summary.csv", "rounds.jsonl", "spans.jsonl"}
    assert "profile.json" not in files, "no trace unless it is asked for"
    summary = json.loads((folder / "summary.json").read_text())
    assert re.fullmatch(r"[0-9a-f]{64}", summary["config_sha256"])
    assert (summary["config"]["workload"]["clips"], summary["run_id"]) == (2, folder.name)
    rows = list(csv.reader((folder / "summary.csv").open()))
    assert len(rows) > 1
    assert {len(row) for row in rows} == {len(rows[0])}
    assert {"steady_clips_per_minute", "step_p50_seconds", "bubble", "tflops"} <= set(rows[0])
    rounds, spans = (
        [json.loads(line) for line in (folder / name).read_text().splitlines()]
        for name in ("rounds.jsonl", "spans.jsonl")
    )
    assert [each["case"] for each in rounds] == ["pipeline", "data parallel", "diffusers"]
    ours = {(span["kind"], span["rank"]) for span in spans if span["case"] == "pipeline"}
    assert ours >= {("step", 0), ("step", 1), ("send", 0), ("recv", 1)}, ours
    environment = json.loads((folder / "env.json").read_text())
    assert environment["versions"].keys() >= {"svdpp", "python", "torch", "diffusers"}
    assert environment["devices"].keys() >= {"gpus", "clocks", "topology"}
    if (ROOT / ".git").exists():
        assert re.fullmatch(r"[0-9a-f]{40}", environment["git"]["sha"])


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("--pipeline.world=many", "pipeline.world must be a whole number"),
        ("--pipeline.worlds=2", "no field 'pipeline.worlds'"),
        ("--measure.repeats=0", "measure.repeats"),
    ],
)
def test_16_a_configuration_is_checked(override: str, words: str) -> None:
    answer = svdpp_here("bench", "smoke", override)
    assert answer.code == 2
    assert words in answer.err
    assert issubclass(BenchConfig, pydantic.BaseModel)


def test_16_a_configuration_is_yaml_and_has_a_hash(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text("workload:\n  clips: 3\n")
    config = read_config(str(path), ["measure.repeats=2"])
    assert (config.experiment, config.workload.clips, config.measure.repeats) == ("mine", 3, 2)
    assert config.sha256 == read_config(str(path), ["measure.repeats=2"]).sha256
    assert config.sha256 != read_config(str(path), ["measure.repeats=3"]).sha256


TARGETS = (
    *("steady_clips_per_minute", "speedup_over_diffusers", "speedup_over_data_parallel"),
    *("step_p50_seconds", "bubble", "tflops", "utilisation"),
)


@pytest.mark.parametrize("name", TARGETS)
def test_17_any_figure_has_bounds(name: str) -> None:
    of_case = {"over_rounds": dict.fromkeys(METRICS, 2.0)}
    speedups = {case: {"over_rounds": 2.0} for case in SPEEDUPS.values()}
    summary = {"cases": {"pipeline": of_case}, "speedups": speedups}
    for bound, is_met in (("min=2", True), ("max=2", True), ("min=2.1", False), ("max=1.9", False)):
        (outcome,) = outcomes(read_config("smoke", [f"targets.{name}.{bound}"]).targets, summary)
        assert (outcome.measured, outcome.met) == (2.0, is_met), bound
    with pytest.raises(errors.TargetMissedError, match=f"{name} is 2, target <= 1.9"):
        check_met([outcome])


@pytest.mark.slow
def test_17_a_missed_target_has_its_own_exit_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    bounds = dict.fromkeys(TARGETS, "min=0") | {"steady_clips_per_minute": "min=1e9"}
    targets = [f"--targets.{name}.{bound}" for name, bound in bounds.items()]
    answer = svdpp_here(*BENCH, *targets, "--profile=true", "--measure.peak_tflops=1")
    assert answer.code == errors.TargetMissedError.exit_code == 10, answer
    assert "steady_clips_per_minute is " in answer.err
    (folder,) = (tmp_path / "results/smoke").iterdir()
    assert (folder / "profile.json").exists(), "torch's trace of rank 0"
    table = json.loads((folder / "summary.json").read_text())["targets"]
    met = {each["name"]: each["met"] for each in table}
    assert met == {name: name != "steady_clips_per_minute" for name in TARGETS}
    assert all(each["measured"] > 0 for each in table if each["name"] != "bubble"), table


@pytest.mark.slow
def test_18_each_rank_is_monitored() -> None:
    requests = [ClipRequest(seed=seed) for seed in range(2)]
    with svdpp.Pipeline(dummy()) as pipeline:
        pipeline.run(requests)
    figures = metrics_of_pipeline(pipeline, requests)
    assert figures is not None
    moved = 2 * 4 * math.prod(SHAPE)  # two fp32 latents
    sender, receiver = figures.ranks
    assert (sender.sent_bytes, sender.received_bytes) == (moved, 0)
    assert (receiver.sent_bytes, receiver.received_bytes) == (0, moved)
    for rank in figures.ranks:
        assert (rank.resident_bytes or 0) > 2**20
        assert (rank.peak_bytes or 0) > 2**20
        assert rank.compute > 0
        assert rank.step.count == 4, "two steps of each clip"
    assert receiver.wait > 0, "rank 1 waits for its first clip"
    assert receiver.transfer > 0, "and while the clip arrives"
    shown = figures.to_json()["ranks"][0]
    assert shown.keys() >= {"compute", "wait", "transfer", "sent_bytes", "resident_bytes"}
    assert shown.keys() >= {"gpu_load", "gpu_watts", "gpu_memory_bytes"}


@pytest.mark.slow
def test_18_the_state_of_each_rank_is_told_while_it_works() -> None:
    """Each step of rank 0 sleeps for 0.8 s, and heartbeats come every second."""
    model = ModelConfig(name="dummy", dummy_latent_shape=SHAPE, dummy_sleeps=True)
    config = dummy(model=model, costs=CostModel(step_seconds=0.8))
    told: list[tuple[int, Heartbeat]] = []
    pipeline = svdpp.Pipeline(config)
    pipeline.observe(lambda r, event: told.append((r, event)) if type(event) is Heartbeat else None)
    with pipeline:
        pipeline.run([ClipRequest(seed=0)])
    works = {(rank, beat.step) for rank, beat in told if beat.action is not None and beat.step >= 0}
    assert {rank for rank, _ in works} == {0, 1}, told
    assert works <= {(0, 0), (0, 1), (1, 2), (1, 3)}, works
    assert any(rank == 1 and beat.waiting for rank, beat in told), "rank 1 waits for rank 0"
    assert {(beat.memory_bytes or 0) > 2**20 for _, beat in told if beat.action} == {True}


def test_18_the_display_shows_state_and_step_of_each_rank() -> None:
    schedule = dummy().layout.schedule(1)
    display = Progress(Console(quiet=True), "run", schedule, labels=["a.jpg seed 0"])
    display(0, Joined(device="cpu", load_seconds=1.0))
    display(0, StepDone(clip=0, step=1, seconds=0.25))
    display(1, Heartbeat(action=Action.parse("DENOISE c0 2:4"), step=2, waiting=True))
    states = [task.fields["state"] for task in display.tasks]
    assert states == ["a.jpg seed 0, step 2, 0.25 s/step", "a.jpg seed 0, waiting"]


class _Nvml:
    """Stand-in for NVML: load, memory and power of a GPU, by the names of pynvml."""

    NVMLError = RuntimeError

    def __getattr__(self, name: str) -> Any:
        values = {
            "nvmlDeviceGetUtilizationRates": SimpleNamespace(gpu=37),
            "nvmlDeviceGetMemoryInfo": SimpleNamespace(used=5 * 2**30),
            "nvmlDeviceGetPowerUsage": 412_500,
        }
        return lambda _: values[name]


def test_18_load_power_and_memory_of_gpus_are_figures() -> None:
    sample = RankStats(sent_bytes=1, received_bytes=2, resident_bytes=3, **read_gpu(_Nvml(), None))
    trace = Trace(2)
    done = ActionDone.model_validate(
        {"action": "DENOISE c0 0:2", "start": 0.0, "end": 1.0, "waited": 0.0}
    )
    for event in (sample, done):
        trace(0, event)
    figures = collect_run_metrics(trace, dummy())
    assert figures is not None
    rank = figures.ranks[0]
    assert (rank.gpu_load, rank.gpu_watts, rank.gpu_memory_bytes) == (0.37, 412.5, 5 * 2**30)


@pytest.mark.slow
def test_18_report_says_what_limits_a_run_and_its_speed(tmp_path: Path) -> None:
    """Rank 1 decodes for longer than it denoises."""
    run = replayed(dataclasses.replace(EVEN, decode_seconds=1.0))
    answer = svdpp_here("report", str(leave(tmp_path, run)), "--peak-tflops", "0.001")
    assert answer.code == 0, answer.err
    assert "What limits it\n  rank 1: its decodes take 67% of its work" in answer.out
    assert re.search(
        r"speed of each rank, including waits: \S+ TFLOP/s \(\d+% of its peak\)", answer.out
    )
    assert "TFLOP/s" in answer.out
    assert "of peak" in answer.out


@pytest.mark.slow
def test_19_a_service_takes_concurrent_requests_and_verifies_when_idle(tmp_path: Path) -> None:
    small = ("--frames", "2", "--height", "64", "--width", "64", "--verify-when-idle")
    with HttpServer(tmp_path / "data", *DEMO, *small) as server:
        server.wait_ready()
        with ThreadPoolExecutor(3) as threads:
            answers = list(threads.map(lambda seed: server.request(seed=seed), range(3)))
        assert [answer.status_code for answer in answers] == [202] * 3, answers[0].text
        ids = [answer.json()["id"] for answer in answers]
        assert len(set(ids)) == 3

        def states() -> list[tuple[str, str]]:
            return [(v["status"], v["proof"]) for v in map(server.video, ids)]

        wait(lambda: ("completed", "equal") in states(), lambda: f"{states()} {server.err}")
        assert {status for status, _ in states()} == {"completed"}, "verified while it was busy"


def test_20_cases_empty_single_maximum(tmp_path: Path) -> None:
    empty = svdpp_here("run", str(tmp_path), "--model", "demo", "--device", "cpu")
    assert (empty.code, "Traceback" in empty.err) == (7, False), empty
    assert svdpp_here("plan", "--gpus", "1", "--steps", "1", "--clips", "1").code == 0
    assert svdpp_here("plan", "--gpus", "2", "--steps", "1000").code == 0
    too_many = svdpp_here("plan", "--gpus", "2", "--steps", "1002", "--json")
    error = errors.error_from_dict(json.loads(too_many.out)["error"])
    assert all(number in error.message for number in ("1000", "1002"))
    assert not numbers_not_in_details(error)


@pytest.mark.slow
def test_20_case_concurrent() -> None:
    """Four threads share a pipeline; each gets the clips that it would get alone."""
    expected = plain_hashes(4, *range(8))
    with svdpp.Pipeline(dummy()) as pipeline, ThreadPoolExecutor(4) as threads:
        made = threads.map(lambda s: pipeline.run([ClipRequest(seed=s)])[0], range(8))
        assert hashes(made) == expected


@pytest.mark.slow
def test_20_out_of_memory_says_requested_and_free() -> None:
    with (
        pytest.raises(errors.OutOfMemoryError) as caught,
        svdpp.Pipeline(dummy(), fault=_AllocateTooMuch()) as pipeline,
    ):
        pipeline.run([ClipRequest(seed=0)])
    details = caught.value.details
    assert details["requested_bytes"] == _AllocateTooMuch.num_bytes
    assert 0 < details["free_bytes"] < details["requested_bytes"]
    assert (details["device"], details["rank"]) == ("cpu", 1)


def test_20_numbers_of_a_gpu_out_of_memory_are_read_from_torchs_text() -> None:
    """The message has the words of c10/cuda/CUDACachingAllocator.cpp."""
    error = torch.OutOfMemoryError(
        "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 1 has a total capacity of 79.11 GiB "
        "of which 1.50 GiB is free."
    )
    found = {"requested_bytes": 2 * 2**30, "free_bytes": 3 * 2**29, "device": "cuda:1"}
    assert errors.memory_details(error) == found


@dataclasses.dataclass(frozen=True)
class _AllocateTooMuch:
    """Fault: rank 1 requests more memory than any machine has, at its first step."""

    num_bytes = 2**50

    def __call__(self, rank: int) -> None:
        if rank == 1:
            DummyUNet.forward = lambda *_: torch.empty(self.num_bytes, dtype=torch.uint8)  # type: ignore[method-assign]


# --- Code -----------------------------------------------------------------------------------------


def test_21_python_style_types_and_imports() -> None:
    assert PROJECT["project"]["requires-python"] == ">=3.11"
    ruff, lint = PROJECT["tool"]["ruff"], PROJECT["tool"]["ruff"]["lint"]
    rules = ("E", "W", "F", "I", "B", "C4", "UP", "ARG", "SIM")
    assert set(rules) <= set(lint["select"])
    assert not [each for each in lint["ignore"] if each.startswith(rules)]
    in_package = [
        (where, each)
        for where, codes in lint["per-file-ignores"].items()
        for each in codes
        if each.startswith(rules)
    ]
    assert in_package == [("svdpp/config/__init__.py", "F401")]
    assert (ruff["line-length"], ruff["target-version"]) == (100, "py311")
    assert "exclude" not in ruff
    assert ruff.get("format", {}).get("quote-style", "double") == "double"
    mypy = PROJECT["tool"]["mypy"]
    assert mypy["strict"] is True
    assert (mypy["packages"], mypy["python_version"]) == (["svdpp"], "3.11")
    weaker = {key for each in (mypy, *mypy["overrides"]) for key in each} & {
        *("ignore_errors", "exclude", "allow_untyped_defs", "disallow_untyped_defs"),
    }
    assert not weaker
    layers = PROJECT["tool"]["importlinter"]["contracts"][0]
    assert (layers["type"], layers["exhaustive"]) == ("layers", True)
    assert not [key for key in layers if key == "ignore_imports"]


def test_21_hooks_and_continuous_integration() -> None:
    (local,) = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"]
    entries = {hook["id"]: hook["entry"] for hook in local["hooks"]}
    assert "ruff check --fix --exit-non-zero-on-fix" in entries["ruff-check"]
    assert "ruff format" in entries["ruff-format"]
    for each in ("trailing-whitespace", "end-of-file-fixer", "check-yaml", "check-toml"):
        assert each in entries
    assert (entries["mypy"], entries["import-linter"]) == tuple(
        f"make --no-print-directory {target}" for target in ("types", "imports")
    )
    assert "-m pytest" in entries["pytest"]
    tested = [word for word in entries["pytest"].split() if word.startswith("tests/")]
    assert tested
    assert not [word for word in tested if not (ROOT / word).exists()]
    # Each hook runs what the first one installs, so that all hooks pass in a clean clone.
    assert next(iter(entries.values())).endswith("make --no-print-directory .venv/.installed")
    parts = re.search(r"^DEFAULT_PARTS=\((.*)\)", (ROOT / ".ci/run").read_text(), re.M)
    assert parts is not None
    assert parts[1].split() == ["pre-commit", "docs", "test", "test-ci", "test-torchao"]
    workflow = yaml.safe_load((ROOT / ".github/workflows/ci.yml").read_text())
    checks = workflow["jobs"]["checks"]
    assert checks["strategy"]["matrix"]["python"][0] == "3.11"
    runs = [step["run"] for step in checks["steps"] if "run" in step]
    assert runs == [f"bash .ci/run {part}" for part in parts[1].split()]
    makefile = (ROOT / "Makefile").read_text()
    assert re.search(r"^pre-commit:.*\n\t\$\(BIN\)/pre-commit run --all-files", makefile, re.M)


#: Types that do not say what a value is. A parameter of such a type must be described.
_PLAIN = re.compile(r"\b(str|int|float|bool|bytes|Any|object|Callable|Mapping|dict|list|tuple)\b")
#: Names that say enough together with the docstring's first sentence.
_TELLING = {
    *("path", "id", "job_id", "part", "name", "data", "device", "index", "value", "key", "kind"),
    "url",
}
#: Decorators of functions that need no sections: the docstring of a command or an HTTP route is its
#: help text, and an overload is only a declaration.
_HELP = re.compile(r"\.(command|get|post|delete|callback)\(|overload")


def test_22_docstrings_say_what_is_taken_returned_and_raised() -> None:
    lint = PROJECT["tool"]["ruff"]["lint"]
    assert "D" in lint["select"]
    ignored = [each for each in lint["ignore"] if each.startswith("D")]
    assert ignored == ["D105", "D107", "D403"]
    assert not [where for where in lint["per-file-ignores"] if where.startswith("svdpp/**")]
    assert lint["pydocstyle"]["convention"] == "google"
    silent = []
    for name, tree in sources().items():
        for node in public(tree):
            if not isinstance(node, ast.ClassDef):
                silent += [f"{name}:{node.lineno} {node.name}: {what}" for what in _untold(node)]
    assert not silent, "\n".join(silent)


def _untold(function: ast.FunctionDef | ast.AsyncFunctionDef) -> Iterator[str]:
    """Yield what a public function's docstring should say and does not."""
    text, signature = ast.get_docstring(function) or "", function.args
    if any(_HELP.search(ast.unparse(each)) for each in function.decorator_list):
        return
    if raised := {each for each in _raised(function) if each not in text.partition("Raises:")[2]}:
        yield f"raises {', '.join(sorted(raised))}, which is not in Raises:"
    arguments = (*signature.posonlyargs, *signature.args, *signature.kwonlyargs)
    types = {
        each.arg: ast.unparse(each.annotation)
        for each in arguments
        if each.annotation is not None and each.arg not in ("self", "cls", "_")
    }
    returned = "" if function.returns is None else ast.unparse(function.returns)
    if re.search(r"[Ss]ee (`|the base)", text):
        return
    # Tensors that a Callable takes or returns do not count.
    tensors = [each for each in (*types.values(), returned) if re.search(r"^[^C]*\bTensor\b", each)]
    if tensors and not re.search(r"(?i)shape|\([A-Z0-9]+(, \w+)+\)", text):
        yield "takes or returns a tensor, without the tensor's shape"
    if re.search(r"^Args:$", text, re.M):
        return  # ruff's D417 checks that the section has all of them
    words = text.lower().replace("_", " ")
    unknown = [
        name
        for name, annotation in types.items()
        if _PLAIN.search(annotation)
        and name not in _TELLING
        and not all(part[:5] in words for part in name.lower().split("_"))
    ]
    if unknown or len(types) > 2:
        yield f"takes {', '.join(unknown or types)}, without Args:"


def test_22_the_python_api_describes_each_parameter() -> None:
    """The Python API describes each parameter, even if the name and type tell enough.

    In the whole package, most functions describe their parameters.
    """
    undescribed = []
    for name, function in _api():
        text, names = inspect.getdoc(function) or "", {*inspect.signature(function).parameters}
        described = set(re.findall(r"^    (\w+): ", text.partition("\nArgs:\n")[2], re.M))
        if missing := names - described - {"self", "cls"}:
            undescribed.append(f"{name}: {', '.join(sorted(missing))}")
    assert not undescribed, "parameters that are not in Args:"
    takes = [
        node
        for tree in sources().values()
        for node in public(tree)
        if not isinstance(node, ast.ClassDef)
        and {each.arg for each in (*node.args.args, *node.args.kwonlyargs)} - {"self", "cls", "_"}
    ]
    has = [each for each in takes if "\nArgs:\n" in (ast.get_docstring(each) or "")]
    assert 0.6 * len(takes) > 500, "functions with parameters"
    assert len(has) > 0.6 * len(takes), f"{len(has)} of {len(takes)} functions have Args:"


def _api() -> Iterator[tuple[str, Callable[..., object]]]:
    """Yield the public functions of `import svdpp`, and public methods of its classes, by name."""
    for name in set(svdpp.__all__) - {"__version__"}:
        public_object = getattr(svdpp, name)
        if not isinstance(public_object, type):
            yield name, public_object
            continue
        for method in dir(public_object):
            value = getattr(public_object, method)
            is_method = inspect.isfunction(value) or inspect.ismethod(value)
            if is_method and not method.startswith("_") and value.__module__.startswith("svdpp"):
                yield f"{name}.{method}", value


def test_22_formulas_have_sources() -> None:
    assert all(peak.source for peak in PEAKS), "the data sheet of each device's peak"
    assert "arXiv:2204.02311" in (speed_of_run.__doc__ or "")
    assert "torch.testing.assert_close" in (svdpp.verify.__doc__ or "")


def _raised(function: ast.AST) -> set[str]:
    """Return the names of this program's errors that a function raises itself."""
    raised = {
        ast.unparse(node.exc.func).rpartition(".")[2]
        for node in nodes(function)
        if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call)
    }
    return raised & _known_errors()


@cache
def _known_errors() -> set[str]:
    """Return the names of this program's errors."""
    return {each.__name__ for each in error_types()}


def test_23_errors_are_typed_and_nothing_is_swallowed_or_printed() -> None:
    types = error_types()
    wrong = (errors.RequestError, errors.ModelError, errors.InputError)
    for each in types:
        if each is not SvdppError:
            kind = ValueError if each in wrong else RuntimeError
            assert issubclass(each, kind), each
            other = {ValueError: RuntimeError, RuntimeError: ValueError}[kind]
            assert not issubclass(each, other), each
    own = {each: each.exit_code for each in types if "exit_code" in vars(each)}
    assert sorted(own.values()) == list(range(1, len(own) + 1)), "one exit code each"
    listed = dict(
        re.findall(r"(\d+) ([^;]+)", " ".join(EPILOG.partition("Exit codes:")[2].split()))
    )
    for each, code in own.items():
        assert str(code) in listed, f"{each.__name__} {code} is not in the help"
    error = errors.RankError("rank 3 failed", details={"rank": 3})
    assert errors.error_from_dict(errors.error_to_dict(error)).details == {"rank": 3}
    for name, tree in sources().items():
        bare = [n for n in nodes(tree) if isinstance(n, ast.ExceptHandler) and n.type is None]
        assert not bare, name
        prints = [node for function, node in called(tree) if function == "print"]
        assert not prints or name == "svdpp/cli/console.py", name
        assert not [f for f, _ in called(tree) if f in ("eval", "exec")], name


def test_23_the_numbers_of_sentences_are_in_details() -> None:
    """The numbers in the messages of all errors in the source are in `details`.

    tests/conftest.py checks each error that a test raises.
    """
    found = [
        f"{name}:{node.lineno} {ast.unparse(number)} is not in details"
        for name, tree in sources().items()
        for function in nodes(tree)
        if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef)
        for called_as, node in called(function)
        for number in _numbers_without_details(called_as, node, function)
    ]
    assert not found, "\n".join(sorted(set(found)))
    answer = svdpp_here("run", "x.jpg", *DEMO_RUN, "--frames", "2000", "--json")
    error = errors.error_from_dict(json.loads(answer.out)["error"])
    assert "2000" in error.message
    assert not numbers_not_in_details(error)


#: Expressions that count as numbers, by the name of a function, a constant or a variable.
_NUMBER = re.compile(
    r"^(len|sum|max|min|format_gib)\(|(^|\.)(MAX|MIN)_|(^|[._])(rank|size|num|count|number|steps?"
    r"|bytes|seconds|clip|low|high|limit|code|port|width|height|frames|world_size)($|[._ ])"
)


def _numbers_without_details(
    called_as: str, call: ast.Call, function: ast.AST
) -> Iterator[ast.expr]:
    """Yield the numbers in a new error's message for which `details` has no entry."""
    error, given = called_as.rpartition(".")[2], call.keywords
    if error in _known_errors() and call.args:
        message = call.args[0]
        details = [each.value for each in given if each.arg in ("details", None)]
    elif error == "require" and len(call.args) > 1:
        message = call.args[1]
        details = [each.value for each in given if each.arg != "hint"]
    else:
        return
    local = dict[str, set[str]]()
    for node in nodes(function):
        targets = node.targets if isinstance(node, ast.Assign) else ()
        targets = [node.target] if isinstance(node, ast.AnnAssign | ast.NamedExpr) else targets
        for name in (each for target in targets for each in nodes(target)):
            if isinstance(name, ast.Name) and (value := getattr(node, "value", None)) is not None:
                local.setdefault(name.id, set()).update(_names_in(value))

    def with_locals(expression: ast.AST) -> set[str]:
        names = _names_in(expression)
        return names.union(*(local.get(each, set()) for each in names))

    known = set[str]().union(*map(with_locals, details))
    for part in nodes(message):
        if isinstance(part, ast.FormattedValue) and part.conversion != ord("r"):
            is_number = part.format_spec is not None or _NUMBER.search(ast.unparse(part.value))
            if is_number and not with_locals(part.value) & known:
                yield part.value


def _names_in(expression: ast.AST) -> set[str]:
    """Return the names of variables and attributes in an expression."""
    parts = nodes(expression)
    names = {each.id for each in parts if isinstance(each, ast.Name)}
    return names | {each.attr for each in parts if isinstance(each, ast.Attribute)}


def test_24_configurations_are_frozen_dataclasses_with_defaults() -> None:
    modules = [name.removesuffix(".py").replace("/", ".") for name in sources()]
    classes = {
        each
        for name in modules
        if name.startswith("svdpp.config.") and not name.endswith("__init__")
        for each in vars(importlib.import_module(name)).values()
        if isinstance(each, type) and dataclasses.is_dataclass(each)
    }
    assert classes >= {PipelineConfig, ModelConfig, ParallelConfig, OutputConfig, ClipRequest}
    assert classes >= {*SAMPLING_CLASSES.values(), LatentSpec}
    thawed = [each for each in (*classes, RankSetup) if not each.__dataclass_params__.frozen]  # type: ignore[attr-defined]
    assert not thawed
    needed = {
        f"{each.__name__}.{field.name}"
        for each in (PipelineConfig, ModelConfig, ParallelConfig, *SAMPLING_CLASSES.values())
        for field in dataclasses.fields(each)
        if field.default is field.default_factory is dataclasses.MISSING
    }
    assert needed == {"PipelineConfig.world_size"}, "fields without a default"
    with pytest.raises(dataclasses.FrozenInstanceError):
        dummy().world_size = 3  # type: ignore[misc]


def test_24_options_reach_ranks_through_configurations_alone() -> None:
    fields = {field.name for field in dataclasses.fields(RankSetup)}
    paths = {"tensor_folder", "latents_folder", "profile_path"}
    assert fields == {"config", "checkpoint", "weights", "fault", *paths}
    # A process could also get settings from its environment, or from modules of the command line.
    reads = {
        name
        for name, tree in sources().items()
        if name.startswith(("svdpp/worker/", "svdpp/comm/", "svdpp/models/", "svdpp/plan/"))
        for node in nodes(tree)
        if _dotted(node) in ("os.environ", "os.getenv", "sys.argv")
    }
    assert reads == {
        "svdpp/worker/device.py",  # sets cuBLAS's variable for `deterministic`
        "svdpp/models/hashes.py",  # the folder of a cache
        "svdpp/models/gguf_files.py",  # refuses a variable of diffusers
    }
    for name, tree in sources().items():
        if name.startswith(("svdpp/worker/", "svdpp/comm/", "svdpp/models/")):
            assert not [each for each in imported(tree) if each.startswith("svdpp.cli")], name


def test_25_pinned_buffers_and_side_streams() -> None:
    """Pinned buffers and side streams are used.

    tests/gpu/test_gpu_streams.py shows what they do on a GPU.
    """
    tree = sources()["svdpp/comm/streams.py"]
    (side,) = (n for n in tree.body if isinstance(n, ast.ClassDef) and n.name == "SideStream")
    methods = {each.name: each for each in side.body if isinstance(each, ast.FunctionDef)}
    used = {name: dict(called(method)) for name, method in methods.items()}
    assert "torch.cuda.Stream" in used["__init__"], "a stream of its own"
    assert "torch.cuda.stream" in used["stream_context"], "work is queued on that stream"
    (pinned,) = (
        key for key in used["host_buffer"]["torch.empty"].keywords if key.arg == "pin_memory"
    )
    assert ast.unparse(pinned.value) == "self._stream is not None"
    assert "self.host_buffer" in used["to_host"]
    for name, copy in (("to_host", "host.copy_"), ("to_device", "tensor.copy_")):
        assert "self.stream_context" in used[name], f"{name} copies on the side stream"
        assert [key.arg for key in used[name][copy].keywords] == ["non_blocking"], name
    users = {
        name
        for name, tree in sources().items()
        for f, _ in called(tree)
        if f.endswith("SideStream")
    }
    assert users >= {"svdpp/comm/transport.py", "svdpp/worker/background.py"}, users
    links = dict(called(sources()["svdpp/comm/transport.py"]))
    assert {"link.stream.to_host", "stream.to_device", "stream.host_buffer"} <= links.keys()


def test_25_seeds_are_fixed_and_nothing_that_the_program_is_for_is_mocked() -> None:
    drawn, mocked = [], []
    for file in (ROOT / "tests").rglob("*.py"):
        text, name = file.read_text(), str(file.relative_to(ROOT / "tests"))
        if not re.search(r"\bmock\b|\brand", text):
            continue
        tree = ast.parse(text)
        if imported(tree) & {"unittest.mock", "mock"}:
            mocked.append(name)
        is_seeded = re.search(r"manual_seed\(|fork_rng|random\.seed\(", text) is not None
        for function, call in called(tree):
            draws = function in ("np.random.default_rng", "random.Random") and not call.args
            draws |= _DRAWS.fullmatch(function) is not None and not is_seeded
            if draws and not [each for each in call.keywords if each.arg == "generator"]:
                drawn.append(f"{name}:{call.lineno} {function}")
    # One test shows that draws from torch's global generator are refused.
    drawn = [each for each in drawn if not each.startswith("models/test_engine.py")]
    assert not drawn, "numbers that differ from run to run"
    # Clips, proofs, models, videos, commands, faults and the pipeline are tested for real. The
    # folders below have mocks only of other things: a clock, a socket, a driver, a rank's parent.
    assert {name.split("/")[0] for name in mocked} <= {"driver", "gpu", "launch", "serve", "worker"}
    assert set(mocked) <= {
        *("driver/test_supervisor.py", "gpu/test_gpu_streams.py", "launch/test_rendezvous.py"),
        *("launch/test_world.py", "serve/test_middleware.py", "serve/test_queue_faults.py"),
        *("serve/test_shared_queue.py", "worker/test_background.py", "worker/test_stage.py"),
        "worker/test_host_copies.py",
    }


#: Functions that draw from a global generator.
_DRAWS = re.compile(
    r"torch\.(randn?|randint|randperm|rand_like|randn_like)"
    r"|np\.random\.(?!default_rng|Generator)\w+|random\.(random|randint|choices?|shuffle|sample)"
)

#: Headings that the pages must have, by page.
SECTIONS = {
    "architecture": (
        *("The charter", "Packages", "The way of a packet", "A failure: a rank is killed"),
        *("Contracts between processes", "Choices that are not obvious"),
    ),
    "benchmarks": ("Forecast", "Against a plain script", "Bench", "Verification"),
    "observing": ("Bench", "Targets", "Bytes, memory, load and power"),
    "cli": ("Exit codes",),
}


def test_26_documentation() -> None:
    changes = (ROOT / "CHANGELOG.md").read_text()
    assert "## [Unreleased]" in changes
    assert re.search(r"^## \[?\d+\.\d+\.\d+", changes, re.M), "the changes of a release"
    for page in ("architecture", "benchmarks", "cli", "verification", "serving", "models"):
        assert (ROOT / f"docs/{page}.md").stat().st_size > 1000, page
    for page, sections in SECTIONS.items():
        text = (ROOT / f"docs/{page}.md").read_text()
        found = dict(re.findall(r"^#+ (.*)\n((?:(?!#).*\n?)*)", text, re.M))
        short = [each for each in sections if len(found.get(each, "").split()) < 40]
        assert not short, f"docs/{page}.md has nothing on {short}"


@pytest.mark.parametrize("command", COMMANDS)
def test_26_each_command_has_its_page(command: str) -> None:
    reference = (ROOT / "docs/cli.md").read_text()
    _, _, section = reference.partition(f"\n## `svdpp {command}`\n")
    section = section.partition("\n## ")[0]
    assert f"$ svdpp {command} [OPTIONS]" in section
    assert re.search(rf"^svdpp {command}\b", section, re.M), "an example"
    options = {name for one in load_command(command).params for name in one.opts if "--" in name}
    assert not [name for name in options if name not in section]


def test_every_row_has_a_test() -> None:
    rows = {int(found[1]) for name in globals() if (found := re.match(r"test_(\d\d)_", name))}
    assert rows == set(range(1, 27))
