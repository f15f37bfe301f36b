"""Owns reading what a bench has left for its report: rounds, and what is shown of its summary."""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, Field, ValidationError

from svdpp.bench.names import DATA_PARALLEL, FIGURES, ONE_DEVICE, OPTIONAL_FIGURES, PIPELINE
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


class _Rank(BaseModel):
    rank: int
    tflops: float | None = None
    mfu: float | None = None


class _Round(BaseModel):
    round: int
    steady_clips_per_minute: float
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
    over_rounds: Annotated[dict[str, float | None], AfterValidator(_with_all_figures)]


class _Speedup(BaseModel):
    rounds: Annotated[list[Annotated[float, Field(gt=0)]], Field(min_length=1)]
    over_rounds: Annotated[float, Field(gt=0)]


class _Outcome(BaseModel):
    target: str
    value: float | None
    low: float | None
    high: float | None
    verdict: Verdict


class _Summary(BaseModel):
    """What is shown of a summary."""

    cases: dict[str, _Case]
    speedups: dict[str, _Speedup]
    same_bits: bool
    targets: dict[str, _Outcome] = {}


def read_summary(path: Path) -> dict[str, Any]:
    """What is shown of a summary; figures that the bench has not measured are None."""
    data = read_small_file(path, "bench's summary", _MAX_BYTES)
    try:
        return _Summary.model_validate(json.loads(data)).model_dump()
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise InputError(
            f"{str(path)!r} is not a bench's summary: {where} {describe_fault(first)}"
        ) from error
    except (ValueError, RecursionError) as error:
        raise InputError(f"{str(path)!r} is not a bench's summary: {error}") from error
