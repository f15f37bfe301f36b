"""Job, which is one requested clip, and the tables of the queue's database."""

from __future__ import annotations

import functools
import hashlib
import json
import secrets
from dataclasses import asdict, dataclass, field, fields
from enum import StrEnum
from pathlib import Path
from typing import Any, Literal

from svdpp.config import Lora, SamplingConfig, sampling_from
from svdpp.config.limits import LARGE_MEGAPIXELS
from svdpp.errors import OutputError, RequestError

#: Names of the folders for uploads, clips and latent checkpoints in the data folder.
UPLOADS_FOLDER, CLIPS_FOLDER, LATENTS_FOLDER = "photos", "clips", "latents"

EngineState = Literal["starting", "ready", "restarting", "closing"]
VerificationStatus = Literal["none", "running", "equal", "different", "failed"]


class JobState(StrEnum):
    """State of a job, from queued to one of the final states."""

    QUEUED = "queued"
    IN_PROGRESS = "in_progress"
    COMPLETED = "completed"
    FAILED = "failed"
    CANCELLED = "cancelled"

    @property
    def is_final(self) -> bool:
        """Whether a job in this state has ended, so that its state never changes again."""
        return self not in (JobState.QUEUED, JobState.IN_PROGRESS)


class UnreadableJobError(OutputError):
    """Error for a job's row that this svdpp cannot read, because a newer svdpp has written it.

    The error's details have the job's `id`.
    """


@dataclass(frozen=True, kw_only=True)
class Job:
    """Requested clip and its state. Times are unix seconds by the queue's clock.

    Args:
        model: Name of the model that makes the clip, as clients know it.
        weights: Fingerprint or commit of the model's weights; empty if they never change.
        loras: LoRAs that the request adds, each with the name that clients know and the hash of its
            file. The column `sampling` stores them, so a server with an older svdpp cannot read the
            row, and leaves the job to newer servers.
        sampling: Sampling parameters after all defaults are resolved.
        input_file: Name of the image's file in the folder of uploads; empty for text-to-video.
        input_name: File name from the client, for display only.
        input_pixels: Width times height of the image; 0 without an image.
        remarks: Sentences for the owner about changes to the image or video, such as stretching.
        further_inputs: SHA-256 of each input file other than the main image or video, by the field
            of the request, such as `last_image` or `control_video`. Reference images have the
            names `reference_1`, `reference_2` and so on.
        server: Id of the server that has claimed or ended the job; None: no server has.
        fencing_token: Number of times that servers have claimed the job; always 0 in a queue that
            is not shared.
        step: Number of finished denoising steps in the last report of the job's server.
        attempts: Number of failed attempts. An attempt fails if ranks die while they make the clip.
        remove_requested: Whether the owner removed the job while ranks worked on it. Such a job is
            hidden from clients, and removed once it has ended.
        eta_seconds: ETA in the response to the request, in seconds after `created_at`.
        error: Error that made the job fail, as `errors.error_to_dict` returns it; None: the job has
            not failed.
        verification: Result of the verification, which makes the clip again on one device and
            compares the two; `failed`: the comparison was not possible.
        callback_url: URL that gets a webhook once the job is completed or failed; None: no webhook.
        callback_due: Time of the next attempt to send the webhook; None once the webhook is
            delivered or given up.
        callback_error: Error of the last attempt to send the webhook; None: no attempt has ended,
            or the webhook was delivered.
        batch_id: Id of the batch that the job belongs to; None: it belongs to no batch.
        custom_id: Name that the client gave to the batch's line.
        batch_line: Index of the line in its batch, from 0.
    """

    id: str
    owner: str = ""
    model: str = ""
    weights: str = ""
    seed: int
    sampling: SamplingConfig
    loras: tuple[Lora, ...] = ()
    input_file: str = ""
    input_name: str = ""
    input_sha256: str = ""
    input_pixels: int = 0
    remarks: list[str] = field(default_factory=list)
    further_inputs: dict[str, str] = field(default_factory=dict)
    prompt: str | None = None
    negative_prompt: str | None = None
    created_at: float
    priority: int = 0
    idempotency_key: str | None = None
    state: JobState = JobState.QUEUED
    server: str | None = None
    fencing_token: int = 0
    step: int = 0
    started_at: float | None = None
    finished_at: float | None = None
    attempts: int = 0
    cancel_requested: bool = False
    remove_requested: bool = False
    eta_seconds: float | None = None
    error: dict[str, Any] | None = None
    metadata: dict[str, Any] = field(default_factory=dict)
    verification: VerificationStatus = "none"
    verification_reason: str | None = None
    callback_url: str | None = None
    callback_due: float | None = 0.0
    callback_attempts: int = 0
    callback_error: str | None = None
    batch_id: str | None = None
    custom_id: str | None = None
    batch_line: int | None = None

    @property
    def model_key(self) -> str:
        """Identity of the job's model and weights. Only servers with the same key make the job."""
        return self.weights or self.model

    @property
    def has_large_image(self) -> bool:
        """Whether the image is so large that other jobs go first while the image is prepared."""
        return self.input_pixels > LARGE_MEGAPIXELS * 10**6

    def clip_path(self, folder: Path) -> Path:
        """Return the path, in a data folder, of the mp4 for the job's present claim.

        Each claim of a job writes a separate file. The file is complete before the job is set to
        completed. The clip's metadata is beside the mp4, with the suffix `.json`.
        """
        name = f"{self.id}-{self.fencing_token}.mp4" if self.fencing_token else f"{self.id}.mp4"
        return folder / CLIPS_FOLDER / name

    def input_path(self, folder: Path) -> Path | None:
        """Return the path of the job's image in a data folder; None for text-to-video.

        The file may be missing.
        """
        return folder / UPLOADS_FOLDER / self.input_file if self.input_file else None

    def further_paths(self, folder: Path) -> dict[str, Path]:
        """Return the paths of the job's further input files in a data folder, by field."""
        return {name: folder / UPLOADS_FOLDER / f"{self.id}.{name}" for name in self.further_inputs}

    def upload_paths(self, folder: Path) -> list[Path]:
        """Return the paths of all input files of the job in a data folder."""
        image = self.input_path(folder)
        return [*([image] if image else []), *self.further_paths(folder).values()]


#: Columns whose names differ from the fields of `Job`. Columns are never renamed, because servers
#: of two versions may share a database.
_COLUMN_NAMES = {
    "input_file": "photo",
    "input_name": "photo_name",
    "input_sha256": "photo_sha256",
    "input_pixels": "photo_pixels",
    "further_inputs": "videos",
    "fencing_token": "token",
    "cancel_requested": "cancel_asked",
    "remove_requested": "remove_asked",
    "eta_seconds": "promised_seconds",
    "verification": "proof",
    "verification_reason": "proof_reason",
}
_JSON_FIELDS = ("error", "metadata", "further_inputs", "remarks")
#: Fields of `Job` that have a column of their own. `loras` is stored in the column `sampling`.
_FIELDS = tuple(field.name for field in fields(Job) if field.name != "loras")
#: Names of the columns of a job's row, in the order of `_FIELDS`.
COLUMNS = tuple(_COLUMN_NAMES.get(name, name) for name in _FIELDS)


def column_of(field_name: str) -> str:
    """Return the name of the database column that stores a field of `Job`."""
    return _COLUMN_NAMES.get(field_name, field_name)


def job_to_row(job: Job) -> dict[str, Any]:
    """Return the values of a job's database row, by the name of the column."""
    values = {name: getattr(job, name) for name in _FIELDS}
    values |= {name: to_json_column(values[name]) for name in _JSON_FIELDS}
    sampling = asdict(job.sampling)
    # earlier versions of svdpp cannot read these parameters, so unset parameters are left out
    for name in ("has_last_image", "num_references"):
        if not getattr(job.sampling, name):
            sampling.pop(name, None)
    if job.loras:
        sampling["loras"] = list(map(asdict, job.loras))
    values |= {"sampling": json.dumps(sampling), "state": str(job.state)}
    return {column_of(name): value for name, value in values.items()}


def job_from_row(row: tuple[Any, ...]) -> Job:
    """Return the job in a database row with the columns `COLUMNS`.

    Raises:
        UnreadableJobError: A newer svdpp has written the row.
    """
    values = dict(zip(_FIELDS, row, strict=True))
    try:
        values |= {name: _from_json_column(values[name]) for name in _JSON_FIELDS}
        values["loras"] = _loras_of(values["sampling"])
        values["sampling"] = parse_sampling(values["sampling"])
        values["state"] = JobState(values["state"])
    except (ValueError, TypeError, LookupError) as error:
        raise UnreadableJobError(
            f"this svdpp cannot read {values['id']}: {error}",
            "a newer svdpp has stored the job: upgrade this server",
            details={"id": values["id"], "reason": str(error)},
        ) from error
    values |= {name: bool(values[name]) for name in ("cancel_requested", "remove_requested")}
    return Job(**values)


def to_json_column(value: dict[str, Any] | list[Any] | None) -> str | None:
    """Return a dictionary or list as JSON text for a database column; None stays None."""
    return None if value is None else json.dumps(value, default=str)


def _from_json_column(text: str | None) -> Any:
    """Parse the JSON text of a database column; NaN and infinity become None."""
    return None if text is None else json.loads(text, parse_constant=lambda _: None)


# results are cached, because most jobs of a queue have the same parameters
@functools.lru_cache(maxsize=256)
def parse_sampling(text: str) -> SamplingConfig:
    """Parse a job's sampling parameters from the JSON text of the database column `sampling`.

    Args:
        text: JSON text from the column.

    Raises:
        RequestError: A newer svdpp has written the parameters.
    """
    values = json.loads(text)
    values.pop("loras", None)
    return sampling_from(values)


@functools.lru_cache(maxsize=256)
def _loras_of(text: str) -> tuple[Lora, ...]:
    """Parse a job's LoRAs from the JSON text of the database column `sampling`."""
    return tuple(Lora(**values) for values in json.loads(text).get("loras", ()))


def is_sampling_readable(text: str) -> bool:
    """Whether this svdpp can read the JSON text of the database column `sampling`."""
    try:
        parse_sampling(text)
        _loras_of(text)
    except (ValueError, TypeError, LookupError):
        return False
    return True


def new_id() -> str:
    """Return a random id for a new job, which nobody can guess."""
    return f"video_{secrets.token_hex(16)}"


def seed_of(requested: int | None, owner: str, idempotency_key: str | None) -> int:
    """Return the requested seed; if none, one from the idempotency key, or else a random one.

    If the request has an idempotency key, the 32-bit seed is derived from owner and key, so that a
    repeated request gets the same seed. Otherwise the seed is random.

    Args:
        requested: Seed in the request; None: the request has no seed.
        owner: Name of the API key.
        idempotency_key: Idempotency key of the request; None: the request has no key.
    """
    if requested is None and idempotency_key is not None:
        digest = hashlib.sha256(f"{owner}\0{idempotency_key}".encode()).digest()
        return int.from_bytes(digest[:4])
    return secrets.randbits(32) if requested is None else requested


# --- database tables ------------------------------------------------------------------------------

#: Version of the database tables.
VERSION = 12

# `jobs.seq` orders jobs by the time of request. `jobs.due` orders the waiting jobs of one owner.
# `owners.turn` orders the owners: the next job is from the owner with the lowest value. `jobs.turn`
# keeps the value that `owners.turn` had before the job was claimed, so that a requeue can restore
# it. `jobs.lease_until` is NULL if the queue is not shared. `jobs.lost` counts claims that expired
# because no server renewed them.
_SCHEMA = f"""
CREATE TABLE jobs (
    seq {{serial}},
    id TEXT NOT NULL UNIQUE,
    owner TEXT NOT NULL,
    model TEXT NOT NULL,
    weights TEXT NOT NULL,
    seed BIGINT NOT NULL,
    sampling TEXT NOT NULL,
    photo TEXT NOT NULL,
    photo_name TEXT NOT NULL,
    photo_sha256 TEXT NOT NULL,
    photo_pixels BIGINT NOT NULL,
    videos TEXT NOT NULL,
    prompt TEXT,
    negative_prompt TEXT,
    created_at DOUBLE PRECISION NOT NULL,
    priority INTEGER NOT NULL,
    idempotency_key TEXT,
    due DOUBLE PRECISION NOT NULL,
    state TEXT NOT NULL CHECK (state IN ({", ".join(repr(str(state)) for state in JobState)})),
    server TEXT,
    token BIGINT NOT NULL,
    lease_until DOUBLE PRECISION,
    lost INTEGER NOT NULL DEFAULT 0,
    turn BIGINT NOT NULL DEFAULT 0,
    step INTEGER NOT NULL,
    started_at DOUBLE PRECISION,
    finished_at DOUBLE PRECISION,
    attempts INTEGER NOT NULL,
    cancel_asked BOOLEAN NOT NULL,
    promised_seconds DOUBLE PRECISION,
    error TEXT,
    metadata TEXT NOT NULL,
    proof TEXT NOT NULL,
    proof_reason TEXT,
    callback_url TEXT,
    callback_due DOUBLE PRECISION,
    callback_attempts INTEGER NOT NULL,
    callback_error TEXT
);
CREATE TABLE owners (owner TEXT PRIMARY KEY, turn BIGINT NOT NULL);
CREATE TABLE servers (id TEXT PRIMARY KEY, about TEXT NOT NULL, seen_at DOUBLE PRECISION NOT NULL);
CREATE UNIQUE INDEX jobs_idempotency ON jobs (owner, idempotency_key)
    WHERE idempotency_key IS NOT NULL;
CREATE INDEX jobs_owner ON jobs (owner);
CREATE INDEX jobs_state ON jobs (state);
CREATE INDEX jobs_owner_state ON jobs (owner, state);
CREATE INDEX jobs_waiting ON jobs (owner, due) WHERE state = 'queued';
CREATE INDEX jobs_of_kind ON jobs (coalesce(nullif(weights, ''), model), owner, due, seq)
    WHERE state = 'queued';
CREATE INDEX jobs_callbacks ON jobs (callback_due) WHERE callback_url IS NOT NULL;
"""
#: Indexes that a server creates at its start if they are missing. A new index does not change the
#: version of the tables, because older servers work without the index. An idle server often repeats
#: queries that would scan all rows without these indexes.
INDEXES: dict[str, str] = {
    "jobs_to_prove": "jobs (seq) WHERE proof = 'running'",
    "jobs_unproved": "jobs (state, proof, seq)",
}
# SQL statements that upgrade the tables to each version from the version before. They only add
# tables, indexes, and columns with defaults. So servers of the version before continue to work
# while other servers are upgraded.
_ADDED: dict[int, str] = {
    9: """
ALTER TABLE jobs ADD COLUMN remove_asked BOOLEAN NOT NULL DEFAULT false;
CREATE INDEX jobs_to_remove ON jobs (id) WHERE remove_asked;
""",
    10: "ALTER TABLE jobs ADD COLUMN remarks TEXT NOT NULL DEFAULT '[]';\n",
    # Tables and columns for batches. The values of `batches.state` are those of `BatchState`.
    11: """
ALTER TABLE jobs ADD COLUMN batch_id TEXT;
ALTER TABLE jobs ADD COLUMN custom_id TEXT;
ALTER TABLE jobs ADD COLUMN batch_line INTEGER;
CREATE UNIQUE INDEX jobs_of_batch ON jobs (batch_id, batch_line) WHERE batch_id IS NOT NULL;
CREATE TABLE batches (
    id TEXT PRIMARY KEY,
    owner TEXT NOT NULL,
    model_key TEXT NOT NULL,
    state TEXT NOT NULL,
    created_at DOUBLE PRECISION NOT NULL,
    stored_at DOUBLE PRECISION,
    failed_at DOUBLE PRECISION,
    cancelled_at DOUBLE PRECISION,
    input_file TEXT NOT NULL,
    input_sha256 TEXT NOT NULL,
    total INTEGER NOT NULL,
    stored INTEGER NOT NULL,
    completion_window TEXT NOT NULL,
    metadata TEXT NOT NULL,
    errors TEXT NOT NULL,
    idempotency_key TEXT
);
CREATE UNIQUE INDEX batches_idempotency ON batches (owner, idempotency_key)
    WHERE idempotency_key IS NOT NULL;
CREATE INDEX batches_owner ON batches (owner, created_at);
CREATE INDEX batches_state ON batches (state);
CREATE TABLE batch_files (
    id TEXT PRIMARY KEY,
    owner TEXT NOT NULL,
    name TEXT NOT NULL,
    bytes BIGINT NOT NULL,
    sha256 TEXT NOT NULL,
    created_at DOUBLE PRECISION NOT NULL
);
CREATE INDEX batch_files_owner ON batch_files (owner);
""",
    12: "ALTER TABLE batches ADD COLUMN loras TEXT NOT NULL DEFAULT '{}';\n",
}


def upgrade(version: int, serial: str) -> str:
    """Return the SQL statements that create the queue's tables, or upgrade older ones.

    Args:
        version: Present version of the tables; 0: no tables exist.
        serial: SQL type of an auto-increment key in the database.

    Raises:
        RequestError: This svdpp does not know the present version of the tables.
    """
    if version not in (0, *(number - 1 for number in _ADDED), VERSION):
        raise RequestError(
            f"the queue has version {version}, and this svdpp reads version {VERSION}",
            "use the version of svdpp that wrote the queue, or name another `data` or `queue`",
            details={"version": version, "supported_version": VERSION},
        )
    added = [text for number, text in sorted(_ADDED.items()) if number > version]
    return "".join([*([] if version else [_SCHEMA.format(serial=serial)]), *added])
