"""The checks at the end of the soak: rows, files and latents."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import sys
import tempfile
import time
from collections import Counter
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from svdpp.config import ClipRequest, ModelConfig, PipelineConfig, SamplingConfig, SvdSampling
from svdpp.driver.pipeline import Pipeline
from svdpp.media.video import file_sha256
from svdpp.serve.queue import JobQueue
from svdpp.serve.store import remove_leftovers
from tests.soak.serve_clients import Request, photos
from tests.soak.serve_server import FaultyServer

_SHOWN = 20


@dataclass(frozen=True)
class Row:
    """A job as the queue's file has it."""

    id: str
    key: str
    state: str
    photo: str
    finished_at: float | None
    attempts: int
    token: int
    error: dict[str, Any] | None
    metadata: dict[str, Any]

    @property
    def clip(self) -> str:
        """The name of its file."""
        return f"{self.id}-{self.token}.mp4" if self.token else f"{self.id}.mp4"


def rows_of(database: Any) -> list[Row]:
    """All jobs of a connection to a database, which is closed; read without the server's code."""
    names = "id, idempotency_key, state, photo, finished_at, attempts, token, error, metadata"
    with closing(database):
        found = database.execute(f"SELECT {names} FROM jobs").fetchall()
    return [
        Row(*row[:7], json.loads(row[7] or "null"), json.loads(row[8] or "{}")) for row in found
    ]


def summary(
    asked: list[Request],
    rows: list[Row],
    data: Path,
    servers: list[FaultyServer],
    wrong: dict[str, list[str]],
    begun: float,
    **figures: Any,
) -> dict[str, Any]:
    """What a soak prints; `wrong` and `figures` are of this one alone."""
    clips, num_compared = wrong_clips(asked, data, rows)
    tallies = [server.tally for server in servers]
    wrong = {
        "jobs": wrong_rows(asked, rows),
        "failures": unexplained_failures(rows),
        "clips": clips,
        "orphans": [orphan for tally in tallies for orphan in tally.orphans],
        "not_ready": [text for tally in tallies for text in tally.unready],
        "unasked_ends": [end for tally in tallies for end in tally.unasked],
        **wrong,
    }
    return {
        "jobs": len(asked),
        "ended": dict(Counter(request.status or "open" for request in asked)),
        "server_starts": sum(tally.starts for tally in tallies),
        "client_retries": sum(request.retries for request in asked),
        "clips_compared": num_compared,
        "clips_resumed": sum(row.metadata.get("resumed_from_step", 0) > 0 for row in rows),
        **figures,
        "minutes": round((time.monotonic() - begun) / 60, 1),
        "load": [round(load, 1) for load in os.getloadavg()],
        "wrong": {name: found[:_SHOWN] for name, found in wrong.items() if found},
        "passed": not any(wrong.values()),
    }


def exit_code(summary: dict[str, Any], folder: Path) -> int:
    """Prints the summary; removes the folder if nothing is wrong."""
    print(json.dumps(summary))
    if summary["passed"]:
        shutil.rmtree(folder)
    else:
        print(f"its files: {folder}", file=sys.stderr)
    return int(not summary["passed"])


def wrong_rows(asked: list[Request], rows: list[Row]) -> list[str]:
    """What is wrong with the jobs: lost, doubled, ended twice, or not as their client saw them."""
    wrong = [f"{row.id}: not ended" for row in rows if row.finished_at is None]
    keys = Counter(row.key for row in rows)
    wrong += [f"{key}: {number} jobs" for key, number in keys.items() if number > 1]
    by_id = {row.id: row for row in rows}
    for request in asked:
        row = by_id.pop(request.id, None)
        wrong += [f"{request.key}: {problem}" for problem in request.problems]
        if request.status == "deleted":
            if row is not None:
                wrong.append(f"{request.key}: deleted, and there again")
        elif not request.status:
            wrong.append(f"{request.key}: its client saw no end")
        elif row is None:
            wrong.append(f"{request.key}: lost")
        elif row.state != request.status:
            wrong.append(f"{request.key}: {request.status}, later {row.state}")
        elif request.completed_at not in (None, int(row.finished_at or 0)):
            wrong.append(f"{request.key}: ended twice")
    return wrong + [f"{id}: no client asked for it" for id in by_id]


def unexplained_failures(rows: list[Row]) -> list[str]:
    """Failed jobs during which ranks have not died twice."""
    return [
        f"{row.key}: {row.error}"
        for row in rows
        if row.state == "failed"
        and "died 2 times during this clip" not in str((row.error or {}).get("message"))
    ]


def remove_leftovers_now(data: Path, url: str | None = None) -> None:
    """What servers remove in an hour."""
    with closing(JobQueue(data, url=url)) as queue:
        remove_leftovers(queue, remove_leftovers(queue, set()))


def wrong_files(data: Path, rows: list[Row], own: set[str], *temporary: Path) -> list[str]:
    """Files without a job, and jobs without their files; `own` are those of the queue."""
    expected = own | {f"photos/{row.photo}" for row in rows}
    for row in rows:
        if row.state == "completed":
            expected |= {f"clips/{row.clip}", f"clips/{row.clip}.json"}
    found = {str(path.relative_to(data)) for path in data.rglob("*") if not path.is_dir()}
    left = [f"left: {name}" for name in sorted(found - expected)]
    left += [f"missing: {name}" for name in sorted(expected - found)]
    return left + [f"temporary: {path}" for folder in temporary for path in folder.iterdir()]


def wrong_clips(asked: list[Request], data: Path, rows: list[Row]) -> tuple[list[str], int]:
    """Completed clips that are not what was asked for, bit by bit; and how many were compared."""
    by_id = {request.id: request for request in asked}
    done = [row for row in rows if row.state == "completed"]
    expected = _reference([by_id[row.id] for row in done])
    wrong = []
    for row in done:
        request, path = by_id[row.id], data / "clips" / row.clip
        if row.metadata["latents_sha256"] != expected[_kind(request)]:
            wrong.append(f"{request.key}: wrong latents")
        if row.metadata["file_sha256"] != file_sha256(path):
            wrong.append(f"{request.key}: wrong mp4")
        if row.metadata != json.loads(path.with_suffix(".mp4.json").read_bytes()):
            wrong.append(f"{request.key}: the row differs from the JSON of the clip")
    return wrong, len(done)


def _kind(request: Request) -> tuple[int, ...]:
    return request.photo, *request.form.values()


def _reference(asked: list[Request]) -> dict[tuple[int, ...], str]:
    """The latents of each kind of request, by a plain pipeline of one rank without faults."""
    kinds = {_kind(request): request for request in asked}
    config = PipelineConfig(
        world_size=1, model=ModelConfig(name="demo"), sampling=_sampling(8, 2), num_threads=1
    )
    with tempfile.TemporaryDirectory(prefix="soak-reference-") as name:
        paths = [Path(name) / f"{index}.png" for index in range(2)]
        for path, content in zip(paths, photos(), strict=True):
            path.write_bytes(content)
        requests = [
            ClipRequest(
                seed=request.form["seed"],
                image=str(paths[request.photo]),
                image_sha256=hashlib.sha256(paths[request.photo].read_bytes()).hexdigest(),
                sampling=_sampling(request.form["steps"], request.form["frames"]),
            )
            for request in kinds.values()
        ]
        with Pipeline(config) as pipeline:
            results = pipeline.run(requests)
    hashes = [result.metadata["latents_sha256"] for result in results]
    return dict(zip(kinds, hashes, strict=True))


def _sampling(steps: int, frames: int) -> SamplingConfig:
    return SvdSampling(
        num_inference_steps=steps,
        num_frames=frames,
        width=64,
        height=64,
        decode_chunk_size=2,
        max_guidance_scale=1.1,
        motion_bucket_id=40,
    )
