"""What rank 0 asks the other hosts before the work begins: the outputs in their folders."""

from __future__ import annotations

import contextlib
import json
import secrets
from dataclasses import replace
from pathlib import Path
from typing import Any

from svdpp.config import OutputConfig
from svdpp.driver.existing_outputs import taken_places
from svdpp.driver.jobs import ClipPlan, OutputPolicy, finished_clip
from svdpp.driver.ranks import PipelineRanks
from svdpp.errors import InputError, RequestError, SvdppError, error_from_dict, error_to_dict
from svdpp.media import output_files
from svdpp.worker import latent_checkpoints


def answer(question: bytes, policy: OutputPolicy) -> bytes:
    """What this host finds in the folders that its command names, or the error that prevents it."""
    try:
        said = _answer(json.loads(question), policy)
    except Exception as error:
        said = {"error": error_to_dict(error)}
    return json.dumps(said).encode()


def _answer(question: dict[str, Any], policy: OutputPolicy) -> dict[str, Any]:
    output_files.check_writable(policy.folder)
    existing, finished = [], {}
    for metadata in question["clips"]:
        path = policy.folder / metadata["output"]
        output = OutputConfig(path=str(path), format=policy.format, crf=policy.crf)
        existing += [path.name for path in taken_places(output)[:1]]
        if (made := finished_clip(output, metadata, policy)) is not None:
            finished[metadata["output"]] = made
    folder, probe = policy.latents_folder, question["probe"]
    sees = probe is None or (folder is not None and (folder / probe).exists())
    return {"existing": existing, "finished": finished, "sees_probe": sees}


def without_those_elsewhere(
    clips: ClipPlan, policy: OutputPolicy, ranks: PipelineRanks
) -> ClipPlan:
    """`clips` without those that are finished on another host and that `resume` keeps.

    If the run cannot begin, this function dismisses the other hosts' ranks.
    """
    try:
        with _probe_in(policy.latents_folder) as probe:
            question = json.dumps({"clips": clips.metadata, "probe": probe}).encode()
            answers = {host: json.loads(text) for host, text in ranks.ask(question).items()}
        for host, said in answers.items():
            _check(host, said, policy)
    except SvdppError as error:
        ranks.dismiss(error)
        raise
    finished = {
        name: {**metadata, "host": metadata.get("host", host)}
        for host, said in answers.items()
        for name, metadata in said["finished"].items()
    }
    left = replace(clips, metadata=[], requests=[], skipped=[*clips.skipped, *finished.values()])
    for metadata, request in zip(clips.metadata, clips.requests, strict=True):
        if metadata["output"] not in finished:
            left.metadata.append(metadata)
            left.requests.append(request)
        elif policy.latents_folder is not None and request.latents_key is not None:
            # of a run killed before it removed them
            latent_checkpoints.prune(policy.latents_folder, request.latents_key)
    return left


def _check(host: str, said: dict[str, Any], policy: OutputPolicy) -> None:
    if "error" in said:
        error = error_from_dict(said["error"])
        error.message = f"on {host}: {error.message}"
        raise error
    existing = said["existing"]
    if existing and not (policy.overwrite or policy.keeps_finished):
        count = "1 output exists" if len(existing) == 1 else f"{len(existing)} outputs exist"
        raise RequestError(
            f"{count} already on {host}, the first is {existing[0]!r}",
            "--resume keeps what is finished, --overwrite replaces it",
        )
    if not said["sees_probe"]:
        raise RequestError(
            f"the --latents-dir of {host} is not the folder of rank 0's host, but any host may "
            "have to resume a clip",
            "give every host one shared folder",
        )


@contextlib.contextmanager
def _probe_in(folder: Path | None) -> Any:
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
