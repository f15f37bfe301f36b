"""The charter: one test for each promise that no change may weaken, shown from outside.

The number in a test's name is the number of its row; `docs/architecture.md` lists the rows. Tests
that need several processes run in CI (`slow`), the others in `make test`.
"""

from __future__ import annotations

import ast
import csv
import dataclasses
import importlib
import json
import math
import os
import re
import signal
import tomllib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from importlib.metadata import entry_points
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

import svdpp
from svdpp import errors
from svdpp.cli.app import app
from svdpp.config import ClipRequest, LatentSpec, ModelConfig, PipelineConfig
from svdpp.diagnostics.run_metrics import metrics_of_pipeline
from svdpp.errors import SvdppError
from svdpp.models.dummy import DummyUNet
from tests.support.damage import Damage
from tests.support.details import numbers_not_in_details
from tests.support.dummies import SHAPE, pids
from tests.support.dummies import config as dummy
from tests.support.http_server import DEMO, HttpServer, wait
from tests.support.shell import ROOT, Answer, python, svdpp_alone, svdpp_here

COMMANDS = ("run", "verify", "simulate", "plan", "profile", "bench", "serve", "models", "report")
#: A dummy model whose step takes a millisecond.
SMALL = ("--latent-shape", "1", "4", "2", "8", "8", "--threads", "1")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
PHOTOS = ROOT / "svdpp/assets/photos"


def torchrun(*arguments: str, temp: Path, cwd: Path | None = None) -> Answer:
    """Run `torchrun -m svdpp ...` with two processes; torchrun leaves a folder in `temp`."""
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")
    return python(*launcher, "-m", "svdpp", *arguments, cwd=cwd, env={"TMPDIR": str(temp)})


@cache
def sources() -> dict[str, ast.Module]:
    """Return the syntax tree of each module of the package, by its path below the root."""
    files = (ROOT / "svdpp").rglob("*.py")
    return {str(f.relative_to(ROOT)): ast.parse(f.read_text()) for f in files}


def imported(tree: ast.Module) -> set[str]:
    """Return the full names that a module imports."""
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {each.name for each in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {node.module, *(f"{node.module}.{each.name}" for each in node.names)}
    return names


def called(tree: ast.AST) -> Iterator[tuple[str, ast.Call]]:
    """Yield each call with its dotted name, such as `dist.send`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name | ast.Attribute):
            yield ast.unparse(node.func), node


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


def test_01_the_command_line_is_typers() -> None:
    (script,) = entry_points(group="console_scripts", name="svdpp")
    assert script.value == "svdpp.__main__:main"
    names = {name for tree in sources().values() for name in imported(tree)}
    assert "typer" in names
    private = [
        n for n in names if n.startswith("typer.") and any(p[0] == "_" for p in n.split("."))
    ]
    assert not private
    other = {"click", "argparse", "optparse", "getopt", "docopt", "fire"}
    assert not {name.partition(".")[0] for name in names} & other
    answer = CliRunner().invoke(app, ["--version"])
    assert (answer.exit_code, answer.output) == (0, f"svdpp {svdpp.__version__}\n")


def test_02_packages_and_folders() -> None:
    project = PROJECT["project"]
    required = {re.split(r"[<>=\[~! ]", each)[0] for each in project["dependencies"]}
    assert required >= {"torch", "diffusers", "typer", "rich", "loguru", "imageio-ffmpeg"}
    assert any(each.startswith("pytest>") for each in project["optional-dependencies"]["test"])
    top = ("svdpp", "tests", "docs", "pyproject.toml", "CHANGELOG.md", "README.md", ".github")
    assert all((ROOT / each).exists() for each in top)
    assert svdpp_alone("--version").out == f"svdpp {svdpp.__version__}\n"


@pytest.mark.slow
def test_02_torchrun_starts_the_same_commands(tmp_path: Path) -> None:
    options = ("--steps", "4", "--clips", "2", *SMALL, "--json")
    answer = torchrun("simulate", *options, temp=tmp_path)
    assert answer.code == 0, answer.err
    assert json.loads(answer.out)["world_size"] == 2, "rank 0 alone prints the result"


def test_03_plan_prints_the_step_ranges() -> None:
    assert "0" in (answer := svdpp_here("plan", "--gpus", "7", "--steps", "28")).out
    assert answer.code == 0
    for rank in range(7):
        assert re.search(rf"{rank}\W+{rank * 4}\W+{rank * 4 + 4}\b", answer.out), answer.out


@pytest.mark.slow
def test_03_verify_compares_bitwise_or_within_a_tolerance() -> None:
    """`verify --model dummy`; the commands as typed in the charter are in the README's test."""
    options = (
        "verify",
        "--model",
        "dummy",
        "--world",
        "2",
        "--steps",
        "4",
        "--device",
        "cpu",
        *SMALL,
    )
    bitwise = svdpp_here(*options)
    assert bitwise.code == 0, bitwise.err
    assert "bitwise equal" in bitwise.out
    tolerant = svdpp_here(*options, "--atol", "1e-3", "--rtol", "1e-3", "--json")
    assert tolerant.code == 0, tolerant.err
    assert json.loads(tolerant.out)["verdict"] == "bitwise equal", "no difference is needed to pass"


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
    error = errors.error_from_dict(json.loads(answer.out)["error"])
    assert (answer.code, type(error)) == (2, errors.RequestError)
    assert all(number in error.message for number in ("25", "7"))
    assert not numbers_not_in_details(error)
    assert svdpp_here("plan", "--gpus", "7", "--steps", "25", "--split", "balanced").code == 0


COLLECTIVES = {
    *("broadcast", "all_reduce", "reduce", "all_gather", "gather", "scatter", "reduce_scatter"),
    *("all_to_all", "all_to_all_single", "all_gather_object", "broadcast_object_list"),
    *("all_gather_into_tensor", "reduce_scatter_tensor", "gather_object", "scatter_object_list"),
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
    assert not functions & COLLECTIVES
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


def test_08_no_training_no_sharding_no_kernels() -> None:
    names = {name for tree in sources().values() for name in imported(tree)}
    forbidden = (
        *("torch.optim", "torch.cuda.amp", "torch.amp", "torch.distributed.fsdp", "triton"),
        *("torch.distributed.tensor", "torch.utils.cpp_extension", "torch.utils.data"),
    )
    assert not [name for name in names if name.startswith(forbidden)]
    calls = {f.rpartition(".")[2] for tree in sources().values() for f, _ in called(tree)}
    assert not calls & {"backward", "zero_grad", "GradScaler", "enable_context_parallel_inference"}


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


@pytest.mark.slow
def test_10_many_clips_fill_the_pipeline() -> None:
    """Rank 0 begins a later clip before rank 1 has ended an earlier one."""
    with svdpp.Pipeline(dummy()) as pipeline:
        pipeline.run([ClipRequest(seed=seed) for seed in range(4)])
        steps = pipeline.trace.steps
    first = {step.clip: step.start for step in reversed(steps) if step.rank == 0}
    last = {step.clip: step.end for step in steps if step.rank == 1}
    assert all(first[clip + 1] < last[clip] for clip in range(3)), (first, last)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("width", "latents: sent 1x4x2x8x7 fp32, expected 1x4x2x8x8 fp32"),
        ("dtype", "latents: sent 1x4x2x8x8 bf16, expected 1x4x2x8x8 fp32"),
        ("missing", "is missing"),
        ("swapped", "clip: sent 2, expected 1"),
        ("step", "next step: sent"),
    ],
)
def test_11_a_mismatch_of_send_and_receive_is_named(kind: str, words: str) -> None:
    pipeline = svdpp.Pipeline(dummy(), fault=Damage("packet", 0, 1, field=kind))
    with pytest.raises(errors.TransportError) as caught, pipeline:
        pipeline.run([ClipRequest(seed=seed) for seed in range(3)])
    error = caught.value
    assert error.exit_code == 6
    assert error.message.startswith("rank 0 ")
    assert words in error.message
    assert {"clip": 1, "step": 2, "from_rank": 0, "to_rank": 1}.items() <= error.details.items()


@pytest.mark.slow
@pytest.mark.timing
def test_12_a_rank_that_stops_is_named() -> None:
    with (
        pytest.raises(errors.RankError, match="rank 1") as caught,
        svdpp.Pipeline(dummy(3, steps=6, timeout_seconds=4.0)) as pipeline,
    ):
        pipeline.run([ClipRequest(seed=0)])
        os.kill(pids(pipeline)[1], signal.SIGSTOP)
        pipeline.run([ClipRequest(seed=seed) for seed in range(3)])
    assert caught.value.exit_code == 6


@pytest.mark.slow
def test_13_logs_of_each_rank() -> None:
    options = ("simulate", "--world", "2", "--clips", "1", "--steps", "4", *SMALL)
    log = svdpp_here(*options, "-v").err
    assert "rank 0 ready: steps 0 to 2" in log
    assert "rank 1 ready: steps 2 to 4" in log
    assert "rank 0 send clip 0" in log
    assert "rank 1 recv clip 0" in log
    assert "clip 0 step 1:" not in log
    assert "rank 1 clip 0 step 3:" in svdpp_here(*options, "-vv").err


RUN = ("run", str(PHOTOS / "rocket.jpg"), "--model", "demo", "--device", "cpu", "--dry-run")


@pytest.mark.slow
@pytest.mark.parametrize(
    "dtype", ["fp16", *(pytest.param(name, marks=pytest.mark.full) for name in ("fp32", "bf16"))]
)
def test_14_memory_precision_and_layout_of_memory(dtype: str) -> None:
    answer = svdpp_here(*RUN, "--dtype", dtype, "--memory-opt", "--channels-last")
    assert answer.code == 0, answer.err


@pytest.mark.parametrize("option", [("--amp",), ("--dtype", "amp")])
def test_14_amp_is_refused_with_its_reason(option: tuple[str, ...]) -> None:
    answer = svdpp_here(*RUN, *option)
    assert answer.code == 2
    assert "GradScaler" in answer.err


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
    summary = json.loads((folder / "summary.json").read_text())
    assert re.fullmatch(r"[0-9a-f]{64}", summary["config_sha256"])
    rows = list(csv.reader((folder / "summary.csv").open()))
    assert len(rows) > 1
    assert {len(row) for row in rows} == {len(rows[0])}
    for name in ("rounds.jsonl", "spans.jsonl"):
        assert [json.loads(line) for line in (folder / name).read_text().splitlines()]
    environment = json.loads((folder / "env.json").read_text())
    assert environment.keys() >= {"versions", "git"}, environment.keys()


def test_16_a_configuration_is_checked() -> None:
    answer = svdpp_here("bench", "smoke", "--pipeline.world=many")
    assert answer.code == 2
    assert "pipeline.world must be a whole number" in answer.err


@pytest.mark.slow
def test_17_a_missed_target_has_its_own_exit_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    targets = ("--targets.steady_clips_per_minute.min=1e9", "--targets.bubble.max=1")
    answer = svdpp_here(*BENCH, *targets, "--profile=true")
    assert answer.code == errors.TargetMissedError.exit_code == 10, answer
    assert "steady_clips_per_minute" in answer.err
    (folder,) = (tmp_path / "results/smoke").iterdir()
    assert (folder / "profile.json").exists(), "torch's trace of rank 0"
    table = json.loads((folder / "summary.json").read_text())["targets"]
    assert {each["name"]: each["met"] for each in table} == {
        "steady_clips_per_minute": False,
        "bubble": True,
    }


@pytest.mark.slow
def test_18_each_rank_is_monitored() -> None:
    requests = [ClipRequest(seed=seed) for seed in range(2)]
    with svdpp.Pipeline(dummy()) as pipeline:
        pipeline.run(requests)
    figures = metrics_of_pipeline(pipeline, requests)
    assert figures is not None
    ranks = figures.to_json()["ranks"]
    moved = 2 * 4 * math.prod(SHAPE)  # two fp32 latents
    assert [(rank["sent_bytes"], rank["received_bytes"]) for rank in ranks] == [
        (moved, 0),
        (0, moved),
    ]
    assert all(rank["resident_bytes"] > 2**20 for rank in ranks)
    assert all(rank["compute"] > 0 <= rank["wait"] for rank in ranks)
    assert ranks[0].keys() >= {"transfer", "gpu_load", "gpu_watts", "gpu_memory_bytes"}


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


@dataclasses.dataclass(frozen=True)
class _AllocateTooMuch:
    """Asks in rank 1, at its first step, for more memory than any machine has."""

    num_bytes = 2**50

    def __call__(self, rank: int) -> None:
        if rank == 1:
            DummyUNet.forward = lambda *_: torch.empty(self.num_bytes, dtype=torch.uint8)  # type: ignore[method-assign]


# --- Code -----------------------------------------------------------------------------------------


def test_21_python_style_types_imports_and_hooks() -> None:
    assert PROJECT["project"]["requires-python"] == ">=3.11"
    ruff = PROJECT["tool"]["ruff"]
    rules = {"E", "W", "F", "I", "B", "C4", "UP", "ARG", "SIM"}
    assert rules <= set(ruff["lint"]["select"])
    assert not rules & set(ruff["lint"].get("ignore", ()))
    assert ruff["line-length"] == 100
    assert ruff.get("format", {}).get("quote-style", "double") == "double"
    assert PROJECT["tool"]["mypy"]["strict"] is True
    assert PROJECT["tool"]["importlinter"]["contracts"][0]["exhaustive"] is True
    hooks = (ROOT / ".pre-commit-config.yaml").read_text()
    assert "ruff check --fix --exit-non-zero-on-fix" in hooks
    for each in ("trailing-whitespace", "end-of-file-fixer", "check-yaml", "id: pytest"):
        assert each in hooks
    assert re.search(r"^DEFAULT_PARTS=\(.*\bpre-commit\b", (ROOT / ".ci/run").read_text(), re.M)


def test_22_docstrings_say_what_is_taken_returned_and_raised() -> None:
    lint = PROJECT["tool"]["ruff"]["lint"]
    assert "D" in lint["select"]
    assert "D417" not in lint["ignore"]
    assert lint["pydocstyle"]["convention"] == "google"
    sections = dict.fromkeys(("Args:", "Returns:", "Raises:"), 0)
    silent = []
    for name, tree in sources().items():
        for node in public(tree):
            text = ast.get_docstring(node) or ""
            for each in sections:
                sections[each] += bool(re.search(rf"^{each}$", text, re.M))
            raised = set() if isinstance(node, ast.ClassDef) else _raised(node)
            if raised and not all(error in text.partition("Raises:")[2] for error in raised):
                silent.append(f"{name}:{node.lineno} {node.name} raises {', '.join(raised)}")
    assert not silent, "\n".join(silent)
    assert all(count >= 100 for count in sections.values()), sections


def _raised(function: ast.AST) -> set[str]:
    """Return the names of this program's errors that a function raises itself."""
    known = {
        n for n, v in vars(errors).items() if isinstance(v, type) and issubclass(v, SvdppError)
    }
    raised = {
        ast.unparse(node.exc.func).rpartition(".")[2]
        for node in ast.walk(function)
        if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call)
    }
    return raised & known


def test_23_errors_are_typed_and_nothing_is_swallowed_or_printed() -> None:
    types = error_types()
    wrong = (errors.RequestError, errors.ModelError, errors.InputError)
    for each in types:
        if each is not SvdppError:
            kind = ValueError if each in wrong else RuntimeError
            assert issubclass(each, kind), each
    own = {each: each.exit_code for each in types if "exit_code" in vars(each)}
    assert len(set(own.values())) == len(own), "one exit code each"
    error = errors.RankError("rank 3 failed", details={"rank": 3})
    assert errors.error_from_dict(errors.error_to_dict(error)).details == {"rank": 3}
    for name, tree in sources().items():
        bare = [n for n in ast.walk(tree) if isinstance(n, ast.ExceptHandler) and n.type is None]
        assert not bare, name
        prints = [node for function, node in called(tree) if function == "print"]
        assert not prints or name == "svdpp/cli/console.py", name
        assert not [f for f, _ in called(tree) if f in ("eval", "exec")], name


def test_24_configurations_are_frozen_dataclasses_with_defaults() -> None:
    config = importlib.import_module("svdpp.config")
    classes = [
        each
        for name in ("pipeline", "sampling")
        for each in vars(importlib.import_module(f"svdpp.config.{name}")).values()
        if isinstance(each, type) and dataclasses.is_dataclass(each) and "Config" in each.__name__
    ]
    assert config.PipelineConfig in classes
    for each in classes:
        assert each.__dataclass_params__.frozen, each
    with pytest.raises(dataclasses.FrozenInstanceError):
        dummy().world_size = 3  # type: ignore[misc]
    assert PipelineConfig(world_size=1) == PipelineConfig(world_size=1, model=ModelConfig())


def test_25_pinned_buffers_side_streams_and_no_mocks() -> None:
    calls = {
        (name, function.rpartition(".")[2])
        for name, tree in sources().items()
        for function, _ in called(tree)
        if name.startswith(("svdpp/comm", "svdpp/worker", "svdpp/models"))
    }
    functions = {function for _, function in calls}
    assert functions & {"Stream", "stream"}
    source = "".join((ROOT / name).read_text() for name in sources() if "/comm/" in name)
    assert "pin_memory=" in source
    # Clips, proofs, models, videos, commands and faults are tested for real.
    for folder in ("verification", "models", "media", "cli", "faults", "bench", "soak"):
        for file in (ROOT / "tests" / folder).rglob("*.py"):
            assert not imported(ast.parse(file.read_text())) & {"unittest.mock", "mock"}, file


def test_26_documentation() -> None:
    assert "## [Unreleased]" in (ROOT / "CHANGELOG.md").read_text()
    for page in ("architecture", "benchmarks", "cli", "verification", "serving", "models"):
        assert (ROOT / f"docs/{page}.md").stat().st_size > 1000
    reference = (ROOT / "docs/cli.md").read_text()
    assert all(re.search(rf"^#+ `?svdpp {name}", reference, re.M) for name in COMMANDS)


def test_every_row_has_a_test() -> None:
    rows = {int(found[1]) for name in globals() if (found := re.match(r"test_(\d\d)_", name))}
    assert rows == set(range(1, 27))
