"""What rank 0 asks the other hosts before the work begins: the outputs in their folders."""

from __future__ import annotations

import contextlib
import json
import secrets
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

from pydantic import BaseModel, ConfigDict, Field

from svdpp.config import OutputConfig
from svdpp.driver.existing_outputs import taken_places
from svdpp.driver.jobs import ClipPlan, OutputPolicy, finished_clip
from svdpp.errors import InputError, RequestError, SvdppError, error_from_dict, error_to_dict
from svdpp.media import output_files
from svdpp.worker import latent_checkpoints


class Others(Protocol):
    """The ranks on other hosts, before the work begins; `Pipeline` implements it."""

    def ask(self, question: bytes) -> Mapping[str, bytes]:
        """Asks one rank of each other host; returns the answers, by host."""

    def dismiss(self, error: BaseException | None = None) -> None:
        """Ends them because of `error`."""


class Question(BaseModel):
    """The clips to be made, and a file in the folder of latent checkpoints."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    metadata: tuple[dict[str, Any], ...]
    probe: str | None = None
    """Name of a file that rank 0 has written to its folder of latent checkpoints."""


class Answer(BaseModel):
    """What one host finds in its folders."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    existing: tuple[str, ...] = ()
    """Existing outputs of the requested clips, finished or not."""
    finished: dict[str, dict[str, Any]] = Field(default_factory=dict)
    """By output, the metadata of those that are complete and as requested."""
    sees_probe: bool = True
    error: dict[str, Any] | None = None
    """What is wrong on that host; see `error_to_dict`."""


def answer(question: bytes, policy: OutputPolicy) -> bytes:
    """What this host finds in the folders that its command names, or the error that prevents it."""
    try:
        found = _answer(Question.model_validate(json.loads(question)), policy)
    except Exception as error:
        found = Answer(error=error_to_dict(error))
    return _to_bytes(found)


def _answer(question: Question, policy: OutputPolicy) -> Answer:
    output_files.check_writable(policy.folder)
    outputs = {metadata["output"]: metadata for metadata in question.metadata}
    existing, finished = [], {}
    for name in outputs:
        output = OutputConfig(path=str(policy.folder / name), format=policy.format, crf=policy.crf)
        existing += [path.name for path in taken_places(output)[:1]]
        if (metadata := finished_clip(output, outputs[name], policy)) is not None:
            finished[name] = metadata
    folder, probe = policy.latents_folder, question.probe
    sees = probe is None or (folder is not None and (folder / probe).exists())
    return Answer(existing=tuple(existing), finished=finished, sees_probe=sees)


def without_those_elsewhere(clips: ClipPlan, policy: OutputPolicy, others: Others) -> ClipPlan:
    """`clips` without those that are finished on another host and that `resume` keeps.

    If the run cannot begin, this function dismisses the other hosts' ranks.

    Raises:
        RequestError: an output exists on another host, and neither `overwrite` nor `resume` is
            set; or the hosts do not share the folder of latent checkpoints.
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
            latent_checkpoints.prune(folder, key)  # of a run killed before it removed them
    return replace(
        clips,
        metadata=[metadata for metadata, _ in left],
        requests=[request for _, request in left],
        skipped=[*clips.skipped, *finished.values()],
    )


def _to_bytes(message: BaseModel) -> bytes:
    """The message as JSON in ASCII; see `worker.messages`."""
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
            f"the --latents-dir of {host} is not the folder of rank 0's host, but any host may "
            "have to resume a clip",
            "give every host one shared folder",
        )


@contextlib.contextmanager
def _probe_in(folder: Path | None) -> Any:
    """Creates a file in `folder` for the block and yields its name; None without a folder."""
    if folder is None:
        yield None
        return
    probe = folder / f".svdpp-probe-{secrets.token_hex(8)}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe.touch()
    except OSError as error:
        reason = output_files.reason(error)
        raise InputError(f"{str(folder)!r} cannot be written: {reason}") from error
    try:
        yield probe.name
    finally:
        probe.unlink(missing_ok=True)
