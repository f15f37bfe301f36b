"""Reading what a bench has left: its rounds, summary and environment."""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, Field, ValidationError

from svdpp.bench.names import (
    DATA_PARALLEL,
    ENVIRONMENT,
    FIGURES,
    ONE_DEVICE,
    OPTIONAL_FIGURES,
    PIPELINE,
    SUMMARY,
)
from svdpp.bench.targets import Verdict
from svdpp.errors import InputError, describe_fault
from svdpp.plan.small_file import read_small_file

_MAX_BYTES = 2**28


def read_rounds(path: Path) -> tuple[dict[str, list[dict[str, Any]]], str]:
    """The rounds of each case, and what ended the bench; empty if nothing did."""
    rounds: defaultdict[str, list[dict[str, Any]]] = defaultdict(list)
    error = ""
    if not path.exists():  # none was measured, or the bench is of an earlier version
        return {}, ""
    for line in read_small_file(path, "bench's rounds", _MAX_BYTES).splitlines():
        try:
            record = json.loads(line)
            if "error" in record:
                error = str(record["error"]["message"])
            elif record["case"] in (PIPELINE, DATA_PARALLEL, ONE_DEVICE):
                rounds[record["case"]].append(record)
        except ValueError:
            break  # the last line of a bench that was killed
        except (KeyError, TypeError, RecursionError) as problem:
            raise InputError(f"{str(path)!r} is not the rounds of a bench") from problem
    return dict(rounds), error


_Positive = Annotated[float, Field(gt=0)]


class _Rank(BaseModel):
    rank: int
    tflops: float | None = None
    mfu: float | None = None


class _Round(BaseModel):
    round: int
    steady_clips_per_minute: _Positive
    first_clip_seconds: _Positive
    step_p50_seconds: _Positive
    tflops: _Positive | None = None
    ranks: list[_Rank]


def _with_all_figures(over_rounds: dict[str, float | None]) -> dict[str, float | None]:
    for name in set(FIGURES) - set(OPTIONAL_FIGURES):
        if over_rounds and over_rounds.get(name) is None:
            raise ValueError(f"{name} is missing")
    return {**dict.fromkeys(FIGURES), **over_rounds}


class _Case(BaseModel):
    layout: str
    error: str | None
    rounds: list[_Round]
    over_rounds: Annotated[dict[str, float | None], AfterValidator(_with_all_figures)] = {}
    """Missing in `schema_version` 1."""


class _Speedup(BaseModel):
    rounds: Annotated[list[_Positive], Field(min_length=1)]
    over_rounds: _Positive | None = None


class _Outcome(BaseModel):
    target: str
    value: float | None
    low: float | None
    high: float | None
    verdict: Verdict


def _with_a_pipeline(cases: dict[str, _Case]) -> dict[str, _Case]:
    """Checks that the pipeline has a round; the other cases may be too large for the devices."""
    if PIPELINE not in cases or not cases[PIPELINE].rounds:
        raise ValueError("no round of the pipeline")
    return cases


class Summary(BaseModel):
    """What a report shows and a comparison uses of `summary.json`.

    Figures that the bench has not measured are None.
    """

    schema_version: Literal[1, 2]
    run_id: str
    config_sha256: str
    config: dict[str, Any]
    cases: Annotated[dict[str, _Case], AfterValidator(_with_a_pipeline)]
    speedups: dict[str, _Speedup]
    same_bits: bool
    latents_sha256: list[str]
    targets: dict[str, _Outcome] = {}


def read_summary(folder: Path) -> Summary:
    """The summary of the bench in `folder`."""
    path = folder / SUMMARY
    try:
        return Summary.model_validate(_read(path))
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        what = f"{str(path)!r} is not a bench's summary: {where} {describe_fault(first)}"
        raise InputError(what) from error


def read_machine(folder: Path) -> dict[str, Any]:
    """Libraries and hardware; without svdpp and its commit, which a comparison may be about."""
    path = folder / ENVIRONMENT
    facts = _read(path)
    try:
        versions = {k: v for k, v in facts["versions"].items() if k != "svdpp"}
        host = {name: facts["host"][name] for name in ("cpu", "cpu_capability", "usable_cores")}
        return {"versions": versions, "host": host, "gpus": facts["devices"]["gpus"]}
    except (KeyError, TypeError, AttributeError) as error:
        raise InputError(f"{str(path)!r} is not a bench's environment") from error


def _read(path: Path) -> Any:
    try:
        return json.loads(path.read_bytes())
    except OSError as error:
        raise InputError(
            f"{str(path)!r} cannot be read: {error.strerror}",
            "--compare takes the folders of two finished benches, results/EXPERIMENT/RUN",
        ) from error
    except (ValueError, RecursionError) as error:
        raise InputError(f"{str(path)!r} is not JSON: {error}") from error
