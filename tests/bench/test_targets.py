"""Performance targets of a benchmark, counts of FLOPs, and CSV files."""

from __future__ import annotations

import csv
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from svdpp.bench.config import BenchConfig, Measure, Model, Ranks, read_config
from svdpp.bench.results import SPANS, TABLE, Results
from svdpp.bench.runner import Bench
from svdpp.bench.targets import (
    METRICS,
    ONE_DEVICE,
    PIPELINE,
    SPEEDUPS,
    Bound,
    Outcome,
    check_met,
    outcomes,
)
from svdpp.config import ModelConfig, PipelineConfig, SvdSampling
from svdpp.diagnostics.utilisation import (
    PEAKS,
    count_flops,
    peak_tflops,
    speed_of_rank,
    speed_of_run,
    speeds_of,
)
from svdpp.driver.resolve import resolve_config
from svdpp.errors import RequestError, TargetMissedError
from svdpp.plan.costs import PartFlops
from tests.support.made_up_runs import (
    EVEN,
    bench_of,
    config_of,
    replayed,
    round_of,
    with_rank,
)


def _write_dummy_results(folder: Path, *overrides: str) -> tuple[Path, dict[str, Any], Bench]:
    """Write results of a benchmark whose clips take 2 s in the pipeline and 4 s in diffusers.

    Return the folder, the summary and the benchmark.
    """
    one = bench_of("dummy", *overrides)
    kept = Results(folder, one)
    for number in range(2):
        for case, seconds in ((PIPELINE, 2.0), (ONE_DEVICE, 4.0)):
            one.rounds.append(round_of(case, number, seconds=seconds))
            kept.add(one.rounds[-1])
    return kept.folder, kept.finish(), one


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("targets.buble.max=0.2", "targets: no metric 'buble'"),
        ("targets.one_gpu.bubble.max=0.2", "targets: no metric 'one_gpu.bubble'"),
        ("targets.bubble={}", "targets.bubble is refused: needs min, max or both"),
        ("targets.bubble.most=1", "no field 'targets.bubble.most'"),
        ("targets.bubble={min: 2, max: 1}", "min 2 is above max 1"),
        ("targets.bubble.max=fast", "targets.bubble.max must be a valid number, "),
        ("targets.bubble.max=.nan", "targets.bubble.max must be a finite number"),
        ("measure.peak_tflops=0", "measure.peak_tflops must be above 0.0, got 0"),
    ],
)
def test_a_target_that_cannot_be_is_refused(override: str, words: str) -> None:
    with pytest.raises(RequestError) as caught:
        read_config("smoke", [override])
    assert words in caught.value.message


def test_every_figure_of_a_summary_is_a_target_by_its_name(tmp_path: Path) -> None:
    names = [*METRICS, *(f"diffusers.{name}" for name in METRICS), "speedup_over_diffusers"]
    overrides = [f"targets.{name}.max=1e9" for name in names]
    _, found, _ = _write_dummy_results(tmp_path, *overrides)

    assert tuple(found["cases"][PIPELINE]["over_rounds"]) == METRICS
    assert [each["name"] for each in found["targets"]] == names
    measured = {each["name"]: each["measured"] for each in found["targets"]}
    assert measured["makespan_seconds"] == 2.0
    assert measured["diffusers.makespan_seconds"] == 4.0
    assert measured["speedup_over_diffusers"] == pytest.approx(2.0)
    on_a_cpu = {"peak_allocated_gib", "utilisation"}
    unmeasured = {name.rpartition(".")[2] for name in names if measured[name] is None}
    assert unmeasured == on_a_cpu
    assert {each["met"] for each in found["targets"] if each["measured"] is None} == {False}


def test_a_missed_target_is_named_with_bound_and_figure(tmp_path: Path) -> None:
    bounds = (
        "makespan_seconds.max=1.5",
        "speedup_over_diffusers.min=1.5",
        "clips={min: 1, max: 1}",
    )
    _, found, one = _write_dummy_results(tmp_path, *(f"targets.{bound}" for bound in bounds))
    rows = outcomes(one.bench_config.targets, found)
    assert rows[:2] == [
        Outcome("makespan_seconds", "<= 1.5", 2.0, met=False),
        Outcome("speedup_over_diffusers", ">= 1.5", pytest.approx(2.0), met=True),
    ]
    assert (rows[2].bound, rows[2].met) == (">= 1, <= 1", True)
    with pytest.raises(TargetMissedError) as caught:
        check_met(rows)
    assert caught.value.message == "1 of 3 targets missed: makespan_seconds is 2, target <= 1.5"
    assert caught.value.exit_code == 10
    assert caught.value.details["missed"] == [rows[0]._asdict()]
    check_met(rows[1:])


def test_a_figure_of_no_round_is_a_missed_target() -> None:
    summary = {"cases": {PIPELINE: {"over_rounds": {"tflops": None}}}, "speedups": {}}
    rows = outcomes({name: Bound(min=0) for name in ("tflops", *SPEEDUPS)}, summary)
    assert [(row.measured, row.met) for row in rows] == [(None, False)] * 3
    with pytest.raises(TargetMissedError, match="tflops is not measured, target >= 0;"):
        check_met(rows)


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("targets.peak_allocated_gib.max=1", "only peak_reserved_gib"),
        ("targets.utilisation.min=0.1", "no peak is known"),
    ],
)
def test_what_will_not_be_measured_is_refused_before_the_measurement(
    override: str, words: str
) -> None:
    one = Bench(
        read_config("smoke", ["model.name=dummy", override]), replace(config_of(), device="cpu")
    )
    with pytest.raises(RequestError, match=words):
        one.check_targets()


def test_the_flops_are_those_of_the_models_real_calls(tmp_path: Path) -> None:
    """The FLOPs of a clip are those of the dummy model's two steps.

    A step has two 3x3x3 convolutions, from 4 to 16 channels and back, on 14x64x64 positions.
    """
    folder, found, _ = _write_dummy_results(tmp_path, "measure.peak_tflops=0.01")
    step = 2 * 2 * 27 * 4 * 16 * 14 * 64 * 64
    assert found["flops"] == {"encode": 0, "step": step, "decode": 0}
    metrics = found["cases"][PIPELINE]["over_rounds"]
    assert metrics["tflops"] == pytest.approx(2 * step / 2.0 / 1e12, rel=1e-4)
    assert metrics["utilisation"] == pytest.approx(metrics["tflops"] / 0.01, rel=1e-4)
    assert (
        found["config_sha256"] == json.loads((folder / "summary.json").read_text())["config_sha256"]
    )


def test_the_hash_is_that_of_what_is_measured(tmp_path: Path) -> None:
    point = read_config("smoke", [])
    assert point.sha256 == read_config("smoke", ["experiment=b", "targets.tflops.min=1"]).sha256
    assert point.sha256 != read_config("smoke", ["workload.clips=7"]).sha256
    file = tmp_path / "again.yaml"
    file.write_text(point.to_yaml())
    assert read_config(str(file), []).sha256 == point.sha256


def test_spans_and_table_hold_every_round(tmp_path: Path) -> None:
    folder, found, one = _write_dummy_results(tmp_path)
    spans = [json.loads(line) for line in (folder / SPANS).read_text().splitlines()]
    first = [span for span in spans if (span["case"], span["round"]) == (PIPELINE, 0)]
    assert [(span["kind"], span.get("step"), span["start"], span["end"]) for span in first] == [
        ("encode", None, 0.0, 0.0),
        ("denoise", 0, 0.0, 2.0),
        ("step", 0, 0.0, 1.0),
        ("step", 1, 1.0, 2.0),
        ("decode", None, 2.0, 2.0),
    ]
    assert len(spans) == 4 * len(first)
    with (folder / TABLE).open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [(row["case"], row["round"]) for row in rows] == [
        *((PIPELINE, each) for each in ("0", "1", "all")),
        *((ONE_DEVICE, each) for each in ("0", "1", "all")),
    ]
    assert float(rows[2]["makespan_seconds"]) == pytest.approx(2.0)
    assert rows[0]["peak_allocated_gib"] == ""
    assert set(rows[0]) == {"case", "round", *found["cases"][PIPELINE]["over_rounds"]}
    assert one.bench_config.sha256 == found["config_sha256"]


def test_the_documentation_names_every_field_and_every_peak() -> None:
    """The docs have every field of a benchmark's configuration and every published peak."""
    root = Path(__file__).resolve().parents[2]
    page = (root / "docs/observing.md").read_text()
    for section in (Model, Ranks, Measure):
        missing = {name for name in section.model_fields if f"`{name}`" not in page}
        assert not missing
    assert all(f"| `{name}` |" in page for name in BenchConfig.model_fields)
    table = (root / "docs/benchmarks.md").read_text()
    for peak in PEAKS:
        half = f"{peak.half:g}" + (" (fp16)" if not peak.has_bf16 else "")
        assert f"| {half} | {peak.single:g} |" in table, peak.pattern


@pytest.mark.parametrize(
    ("name", "dtype", "peak"),
    [
        ("NVIDIA H200", "bf16", 989.5),
        ("NVIDIA A100-SXM4-80GB", "fp32", 156),
        ("Tesla T4", "fp16", 65),
        ("Tesla T4", "bf16", None),
        ("NVIDIA L4", "fp16", 121),
        ("NVIDIA H200 NVL", "fp16", None),  # not the same card as the H200
        ("", "fp32", None),
    ],
)
def test_published_peaks(name: str, dtype: str, peak: float | None) -> None:
    assert peak_tflops(name, dtype) == peak


def test_speeds_of_ranks_are_those_of_their_own_work() -> None:
    """The speed of a rank counts only its own work and time; the speed of the run includes waits.

    Rank 0 encodes and does steps. Rank 1 does steps and decodes half of the frames.
    """
    metrics = replayed(replace(EVEN, decode_seconds=0.5), clips=4)
    metrics = with_rank(metrics, 1, decode_fraction=0.5)
    flops = PartFlops(encode=10**9, step=10**10, decode=4 * 10**9)
    first = 4 * 1e9 + 20 * 1e10
    last = 20 * 1e10 + 4 * 0.5 * 4e9
    assert [
        speed_of_rank(metrics, rank, flops, 2.0).tflops * rank.compute for rank in metrics.ranks
    ] == pytest.approx([first / 1e12, last / 1e12])
    run = speed_of_run(metrics, flops, [2.0, 4.0])
    assert run.tflops == pytest.approx((first + last) / 1e12 / metrics.makespan / 2)
    assert run.utilisation == pytest.approx(run.tflops / 3.0)
    assert speed_of_run(metrics, flops, [2.0, None]).utilisation is None
    paired = replace(metrics, cfg_parallel=2)
    assert speed_of_run(paired, PartFlops(0, 10**10, 0), []).tflops == pytest.approx(
        speed_of_run(metrics, PartFlops(0, 5 * 10**9, 0), []).tflops
    )


def test_the_report_counts_the_flops_of_the_runs_model() -> None:
    model = {"name": "dummy", "dtype": "fp32", "dummy_latent_shape": [1, 4, 2, 8, 8]}
    sampling = {"family": "svd", "num_inference_steps": 10}
    metrics = replace(replayed(), model=model, sampling=sampling)
    speeds = speeds_of(metrics)
    step = 2 * 2 * 27 * 4 * 16 * 2 * 8 * 8
    assert speeds.run is not None
    assert speeds.run.tflops == pytest.approx(400 * step / 1e12 / metrics.makespan / 2)
    assert (speeds.run.utilisation, speeds.note, len(speeds.ranks)) == (None, "", 2)
    gpu = with_rank(metrics, 0, device_name="Some GPU")
    assert "the peak of Some GPU is unknown" in speeds_of(gpu).note
    assert speeds_of(gpu, 1.0).note == ""


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model": {}}, "an earlier version made them"),
        ({"model": {"name": "nowhere/at-all", "dtype": "fp32"}}, "no TFLOP/s: "),
        ({"model": {"name": "dummy", "weight": 1}}, "no TFLOP/s: "),
        ({"sampling": {"family": "svd", "num_inference_steps": 0}}, "no TFLOP/s: "),
    ],
)
def test_a_report_without_the_model_says_why(changes: dict[str, Any], words: str) -> None:
    speeds = speeds_of(replace(replayed(), **changes))
    assert words in speeds.note
    assert speeds.run is None


@pytest.mark.slow
def test_counted_flops_are_those_of_real_calls_with_weights() -> None:
    """The FLOPs of the demo's step equal those that torch counts in a real call of its UNet."""
    from svdpp.models.engine import load  # imports diffusers, which takes seconds
    from svdpp.models.memory import CPU_ATTENTION

    sampling = SvdSampling(num_inference_steps=4, height=64, width=64, num_frames=4)
    config = PipelineConfig(
        world_size=1, model=ModelConfig(name="demo"), sampling=sampling, device="cpu"
    )
    _, checkpoint = resolve_config(config, weights="none")
    assert checkpoint is not None
    unet = load.build_module(
        load.component_class("unet", dict(checkpoint.classes)["unet"]), checkpoint.folder / "unet"
    ).eval()
    # The axes are: guidance branches, frames, channels of latents and image latents, H/8, W/8.
    latents = torch.zeros(2, 4, 8, 8, 8)
    embeddings = torch.zeros(2, 1, unet.config.cross_attention_dim)
    with torch.no_grad(), FlopCounterMode(display=False, custom_mapping=CPU_ATTENTION) as counter:
        unet(latents, 1.0, embeddings, torch.zeros(2, 3))
    assert count_flops(config).step == counter.get_total_flops()


@pytest.mark.slow
@pytest.mark.full
def test_a_count_of_flops_changes_nothing_that_the_threads_of_a_process_share(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A count of FLOPs changes no setting of torch that other threads share.

    Under torchrun, rank 0 computes in a thread of the process that counts.
    """

    def refuse(*_: object) -> None:
        raise AssertionError("rank 0 would compute other bits")

    sampling = SvdSampling(num_inference_steps=4, height=32, width=32, num_frames=2)
    config = PipelineConfig(
        world_size=1, model=ModelConfig(name="demo"), sampling=sampling, device="cpu"
    )
    launched = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2"}
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
    with monkeypatch.context() as patch:
        for name, value in (launched | address).items():
            patch.setenv(name, value)
        patch.setattr(torch, "set_default_dtype", refuse)
        counted = count_flops(config)
    assert counted == count_flops(config)
