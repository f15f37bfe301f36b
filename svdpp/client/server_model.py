"""Client's description of the model that a server runs: default parameters, checks, requests."""

from __future__ import annotations

import base64
import functools
import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from svdpp.config import SAMPLING_CLASSES, SamplingConfig
from svdpp.config.limits import require
from svdpp.config.pipeline import REFERENCES
from svdpp.config.sampling import params_by_field
from svdpp.driver.job_lines import LineDefaults
from svdpp.driver.run_job import RunJob
from svdpp.errors import InputError, RequestError, ServerError, nearest
from svdpp.media.images import MediaFile

_IMAGE_FIELD = "input_reference"
# Bytes reserved in each line of a batch for everything except files: prompts, parameters, names.
_LINE_OVERHEAD_BYTES = 256 * 2**10


@dataclass(frozen=True)
class ServerModel:
    """Client's view of a server's model: limits, defaults, and checks of jobs.

    The values come from the JSON of `/v1/models`.
    """

    description: Mapping[str, Any]

    @property
    def name(self) -> str:
        """Id of the model that the server runs."""
        return str(self.description["id"])

    @property
    def max_batch_bytes(self) -> int:
        """Maximum bytes of the lines of one batch that the server accepts."""
        return int(self.description["limits"]["max_batch_bytes"])

    @property
    def max_batch_lines(self) -> int:
        """Maximum number of lines of one batch that the server accepts."""
        return int(self.description["limits"]["max_batch_lines"])

    def defaults(self, values: Mapping[str, Any], **more: Any) -> LineDefaults:
        """Return the defaults for fields that lines of the jobs file leave out.

        Args:
            values: Sampling parameters from the command line's options, by name.
            more: Further fields of `LineDefaults`. `max_pixels` must be among them; a smaller limit
                of the server replaces it.

        Raises:
            RequestError: A parameter is not for the model's family, or out of range.
        """
        inputs = self.description["inputs"]
        most = int(self.description["limits"]["max_megapixels"]) * 10**6
        return LineDefaults(
            model=self.name,
            sampling=self._sampling(values),
            image_use=inputs[_IMAGE_FIELD],
            prompt_use=inputs["prompt"],
            last_image_use=inputs.get("last_image", "refused"),
            max_pixels=min(most, more.pop("max_pixels")),
            **more,
        )

    def _sampling(self, values: Mapping[str, Any]) -> SamplingConfig:
        """Return the sampling parameters with the server's defaults, replaced by `values`."""
        kind: Any = SAMPLING_CLASSES[self.description["family"]]
        known = {each.name for each in fields(kind)}
        for name in values:
            require(name in known, f"`{name}` is not for the server's model {self.name}")
        defaults = self.description["defaults"]
        given = {
            param.name: defaults[field]
            for field, param in params_by_field(kind).items()
            if field in defaults
        }
        width, height = map(int, defaults["size"].split("x"))
        given |= {"width": width, "height": height, "fit": defaults.get("fit", "stretch")}
        sampling: SamplingConfig = kind(**given)
        return replace(sampling, **values)

    def check(self, job: RunJob) -> None:
        """Raise a `RequestError` if the server does not accept a job's size, files or LoRAs.

        Args:
            job: Job of a line.

        Raises:
            RequestError: The server does not offer the size or a LoRA, or the files are too large.
        """
        assert job.sampling is not None
        size, sizes = f"{job.sampling.width}x{job.sampling.height}", self.description["sizes"]
        if size not in sizes:
            raise RequestError(
                f"the server makes clips of {', '.join(sizes)}, not of {size}",
                "choose one of these sizes, or ask the server's operator to add the size",
                details={"field": "width", "size": size, "sizes": list(sizes)},
            )
        self._check_loras(job)
        files = [*(file for _, file in _files(job)), *job.made_from.references]
        limit = int(self.description["limits"]["max_line_bytes"]) - _LINE_OVERHEAD_BYTES
        num_bytes = sum(-(-file.path.stat().st_size // 3) * 4 for file in files)
        if num_bytes > limit:
            most = limit * 3 // 4
            raise RequestError(
                f"the clip's input files have {num_bytes * 3 // 4} bytes, but the server takes at "
                f"most {most}",
                "save the image as JPEG, or make it smaller",
                details={"bytes": num_bytes * 3 // 4, "highest": most},
            )

    def _check_loras(self, job: RunJob) -> None:
        """Raise a `RequestError` if the server lacks a job's LoRA, or has another file for it."""
        listed = {each["name"]: each["sha256"] for each in self.description.get("loras", ())}
        for lora in job.made_from.loras:
            name, path = Path(lora.name).stem, Path(lora.name)
            if name not in listed:
                known = ", ".join(listed) or "none"
                hint = nearest(name, listed, f"the server has {known}")
                wrong = f"`loras`: the server has no {name!r}"
                raise RequestError(wrong, hint, details={"field": "loras", "known": [*listed]})
            if path.is_file() and _sha256_of(path) != listed[name]:
                raise RequestError(
                    f"`loras`: {str(path)!r} is not the same file as {name!r} at the server",
                    "to use the server's file, give the LoRA's name without a folder",
                    details={"field": "loras", "path": str(path)},
                )

    def body(self, job: RunJob) -> dict[str, Any]:
        """Return the JSON body of the request for a job: all parameters, and files in base64.

        Args:
            job: Job that `check` has accepted.

        Raises:
            InputError: A file cannot be read, or has changed since it was checked.
        """
        sampling, made_from = job.sampling, job.made_from
        assert sampling is not None
        known = self.description["fields"]
        values = {
            field: getattr(sampling, param.name)
            for field, param in params_by_field(type(sampling)).items()
        }
        values |= {"size": f"{sampling.width}x{sampling.height}", "fit": sampling.fit}
        body = {
            name: value for name, value in values.items() if name in known and value is not None
        }
        body["seed"] = job.seed
        if self.description["inputs"]["prompt"] != "refused":
            prompts = {"prompt": made_from.prompt, "negative_prompt": made_from.negative_prompt}
            body |= {name: text for name, text in prompts.items() if text is not None}
        if made_from.loras:
            body["lora"] = [
                {"name": Path(lora.name).stem, "scale": lora.weight}
                | ({"expert": lora.expert} if lora.expert else {})
                for lora in made_from.loras
            ]
        if made_from.media_file is None:
            body.pop("fit", None)
        if made_from.references:
            body[REFERENCES] = [_encode_base64(file) for file in made_from.references]
        return body | {name: _encode_base64(file) for name, file in _files(job)}


def server_model(answer: Mapping[str, Any]) -> ServerModel:
    """Return the model in a server's response to `/v1/models`.

    Args:
        answer: JSON of the response.

    Raises:
        ServerError: The server accepts no batches, or this version of svdpp does not know the
            family of the server's model.
    """
    try:
        (model,) = answer["data"]
        assert {"max_batch_bytes", "max_batch_lines", "max_line_bytes"} <= model["limits"].keys()
        assert model["family"] in SAMPLING_CLASSES
    except (KeyError, TypeError, ValueError, AttributeError, AssertionError) as error:
        raise ServerError(
            "the server accepts no batches, or runs a family that this svdpp does not know",
            "use the same version of svdpp for client and server",
        ) from error
    return ServerModel(model)


def _files(job: RunJob) -> list[tuple[str, MediaFile]]:
    """Return the input files of a job, except references, each with the name of its field."""
    made_from = job.made_from
    files = [(_IMAGE_FIELD, made_from.media_file), ("last_image", made_from.last_image)]
    return [(name, file) for name, file in files if file is not None] + [*made_from.videos]


@functools.lru_cache(maxsize=256)
def _sha256_of(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _encode_base64(file: MediaFile) -> str:
    """Return the content of an input file in base64; raise an `InputError` if the file has changed.

    Raises:
        InputError: The file cannot be read, or has changed since its SHA-256 was computed.
    """
    try:
        content = file.path.read_bytes()
    except OSError as error:
        raise InputError(
            f"{str(file.path)!r} cannot be read: {error.strerror}", details={"path": str(file.path)}
        ) from error
    if hashlib.sha256(content).hexdigest() != file.sha256:
        raise InputError(
            f"{str(file.path)!r} has changed since it was checked",
            "run the command again",
            details={"path": str(file.path)},
        )
    return base64.b64encode(content).decode()
