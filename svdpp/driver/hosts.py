"""Owns what rank 0 asks of the other hosts before the work begins: what lies in their folders."""

from __future__ import annotations

import contextlib
import json
import secrets
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

from pydantic import BaseModel, ConfigDict, Field

from svdpp.config import DraftConfig, OutputConfig
from svdpp.driver.existing_outputs import taken_places
from svdpp.driver.jobs import ClipPlan, OutputPolicy, finished_clip
from svdpp.errors import InputError, RequestError, SvdppError, error_from_dict, error_to_dict
from svdpp.media import output_files
from svdpp.worker import latent_checkpoints


class Others(Protocol):
    """The ranks on other hosts, before the work begins; a `Pipeline` knows them."""

    def ask(self, question: bytes) -> Mapping[str, bytes]:
        """Puts a question to one rank of each; the answers, by host."""

    def dismiss(self, error: BaseException | None = None) -> None:
        """Sends them away, and says why."""


class Question(BaseModel):
    """Which clips are to be made, and what lies in the folder of hand-overs."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    metadata: tuple[dict[str, Any], ...]
    probe: str | None = None
    """Name of a file that rank 0 has put into its folder of hand-overs."""


class Answer(BaseModel):
    """What one host finds in its own folders."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    existing: tuple[str, ...] = ()
    """Outputs of the clips asked for that are there, finished or not; accepted drafts as well."""
    finished: dict[str, dict[str, Any]] = Field(default_factory=dict)
    """By output, the metadata of those that are whole and as asked for."""
    sees_probe: bool = True
    error: dict[str, Any] | None = None
    """What is wrong there; see `error_to_dict`."""


def answer(question: bytes, policy: OutputPolicy, draft: DraftConfig | None) -> bytes:
    """What this host finds, in the folders that its own command names, or what kept it from it."""
    try:
        found = _look(Question.model_validate(json.loads(question)), policy, draft)
    except Exception as error:
        found = Answer(error=error_to_dict(error))
    return _to_bytes(found)


def _look(question: Question, policy: OutputPolicy, draft: DraftConfig | None) -> Answer:
    output_files.check_writable(policy.folder)
    outputs = {metadata["output"]: metadata for metadata in question.metadata}
    existing, finished = [], {}
    for name in outputs:  # an accepted draft has another name
        output = OutputConfig(path=str(policy.folder / name), format=policy.format, crf=policy.crf)
        existing += [path.name for path in taken_places(output, draft)[:1]]
        if (metadata := finished_clip(output, outputs[name], draft, policy)) is not None:
            finished[name] = metadata
    folder, probe = policy.latents_folder, question.probe
    sees = probe is None or (folder is not None and (folder / probe).exists())
    return Answer(existing=tuple(existing), finished=finished, sees_probe=sees)


def without_those_elsewhere(clips: ClipPlan, policy: OutputPolicy, others: Others) -> ClipPlan:
    """`clips` without those that another host holds finished, as `resume` has it.

    Where something stands against the run, the others are sent away.

    Raises:
        RequestError: an output is there on another host and nothing says what to do with it, or
            the folder of hand-overs is not one for all hosts.
        SvdppError: what is wrong with another host's folders.
    """
    try:
        with _probe_in(policy.latents_folder) as probe:
            asked = Question(metadata=tuple(clips.metadata), probe=probe)
            answers = {
                host: Answer.model_validate(json.loads(text))
                for host, text in others.ask(_to_bytes(asked)).items()
            }
        for host, said in answers.items():
            _check(host, said, policy)
    except SvdppError as error:
        others.dismiss(error)
        raise
    finished = {
        name: {**metadata, "host": metadata.get("host", host)}
        for host, said in answers.items()
        for name, metadata in said.finished.items()
    }
    both = list(zip(clips.metadata, clips.requests, strict=True))
    left = [pair for pair in both if pair[0]["output"] not in finished]
    for metadata, request in both:
        folder, key = policy.latents_folder, request.latents_key
        if metadata["output"] in finished and folder is not None and key is not None:
            latent_checkpoints.prune(folder, key)  # of a run that ended before it heard of the clip
    return replace(
        clips,
        metadata=[metadata for metadata, _ in left],
        requests=[request for _, request in left],
        skipped=[*clips.skipped, *finished.values()],
    )


def _to_bytes(message: BaseModel) -> bytes:
    """As JSON in ASCII: names of files need not be UTF-8, see `messages`."""
    return json.dumps(message.model_dump(mode="json")).encode()


def _check(host: str, said: Answer, policy: OutputPolicy) -> None:
    if said.error is not None:
        error = error_from_dict(said.error)
        error.message = f"on {host}: {error.message}"
        raise error
    if said.existing and not (policy.overwrite or policy.keeps_finished):
        count = (
            "1 output exists" if len(said.existing) == 1 else f"{len(said.existing)} outputs exist"
        )
        raise RequestError(
            f"{count} already on {host}, the first is {said.existing[0]!r}",
            "--resume keeps what is finished, --overwrite replaces it",
        )
    if not said.sees_probe:
        raise RequestError(
            f"the --latents-dir of {host} is not the folder that rank 0's host has: another "
            "host may have to go on with a clip",
            "give every host a folder that they share",
        )


@contextlib.contextmanager
def _probe_in(folder: Path | None) -> Any:
    """The name of a file in `folder` for as long as the block lasts; None without a folder."""
    if folder is None:
        yield None
        return
    probe = folder / f".svdpp-probe-{secrets.token_hex(8)}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe.touch()
    except OSError as error:
        raise InputError(f"{str(folder)!r} takes no file: {output_files.reason(error)}") from error
    try:
        yield probe.name
    finally:
        probe.unlink(missing_ok=True)
