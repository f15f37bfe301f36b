"""`svdpp run --jobs FILE --server URL`: the clips of a jobs file, made by a server."""

from __future__ import annotations

import os
import shlex
from collections.abc import Sequence
from dataclasses import MISSING, asdict, dataclass, fields
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from svdpp.cli.clip_results import print_clips, raise_failed
from svdpp.cli.console import Console
from svdpp.cli.options.declare import LAYOUT, RECOVERY, option
from svdpp.cli.options.files import InputOptions, LogOptions, OutputOptions, PromptOptions
from svdpp.cli.options.model import parse_params
from svdpp.cli.options.pipeline import PipelineOptions
from svdpp.config import DEFAULT_MODEL, OPTION_PARAMS, SamplingConfig
from svdpp.config.limits import require
from svdpp.errors import (
    InputError,
    Interrupted,
    RequestError,
    SvdppError,
    error_from_dict,
    pluralize,
)
from svdpp.launch.world import World

if TYPE_CHECKING:
    from svdpp.client.batch_run import BatchRun, ServerClip, ServerState
    from svdpp.client.connection import ServerConnection
    from svdpp.client.server_model import ServerModel
    from svdpp.driver.clip_names import NameTemplate
    from svdpp.driver.job_lines import JobLineReader
    from svdpp.driver.manifest import RunManifest
    from svdpp.driver.output_policy import OutputPolicy

_MAX_PATIENCE_SECONDS = 30 * 86400.0
# Options that are allowed with `--server`, because they have the same effect as in a local run, or
# no effect.
_TAKEN = frozenset(
    {"steps", "num_frames", "height", "width", "fit", "fps", "param", "seed", "negative_prompt"}
    | {"last_image", "reference", "video", "max_megapixels"}
    | {"jobs", "keep_going", "out", "name", "resume"}
    | {"overwrite", "dry_run", "server", "server_timeout", "model", "device"}
    | {*OPTION_PARAMS} - {"decode_chunk_size"}
)


@dataclass(frozen=True, kw_only=True)
class ServerRunOptions(PipelineOptions, InputOptions, PromptOptions, OutputOptions):
    """Options of `svdpp run`, with a check of what is allowed for a run at a server."""

    server: Annotated[
        str | None,
        option(
            panel=LAYOUT,
            metavar="URL",
            help="Have svdpp serve at this URL make the clips of --jobs, and download them. Its "
            "API key is in the variable SVDPP_API_KEY.",
        ),
    ] = None
    server_timeout: Annotated[
        float,
        option(
            panel=RECOVERY,
            metavar="SECONDS",
            help="Wait this long for a --server that does not answer, such as one that restarts.",
        ),
    ] = 3600.0

    def template(self, sampling: SamplingConfig) -> NameTemplate | None:
        """Return the template of the clips' names; None: names follow from the inputs.

        Args:
            sampling: Sampling parameters of these options, which names can contain.

        Raises:
            RequestError: `--name` is not a valid template.
        """
        from svdpp.driver.clip_names import NameTemplate

        return None if self.name is None else NameTemplate(self.name, sampling)

    def check_server(self, launched: World | None) -> None:
        """Raise a `RequestError` if a given option is not allowed in a run at a server.

        Args:
            launched: Rank and world size from the launcher (torchrun or srun); None: no launcher
                started this process.

        Raises:
            RequestError: An option is only for ranks of this machine, or there is no jobs file.
        """
        require(launched is None, "--server starts no ranks", "start it without torchrun or srun")
        missing = "--server needs --jobs FILE, which lists the clips"
        require(self.jobs is not None, missing, "write one clip in each line")
        for each in fields(self):
            value, name = getattr(self, each.name), each.name
            is_given = value != each.default
            # Only the field `parallel` has no default value: it is a mapping of the layout options
            # that the user gave. If it is not empty, the error names the first of these options.
            if each.default is MISSING:
                is_given, name = bool(value), next(iter(value), name)
            wrong = f"`{name}` is only for a run on this machine, not for a run at a server"
            is_taken = each.name in _TAKEN or not is_given
            require(is_taken, wrong, "leave it out, or leave out --server")
        is_in_range = 0 < self.server_timeout <= _MAX_PATIENCE_SECONDS
        wrong = f"`server_timeout` must be above 0 and at most {_MAX_PATIENCE_SECONDS:.0f}"
        require(is_in_range, wrong, value=self.server_timeout, highest=_MAX_PATIENCE_SECONDS)

    def server_sampling(self, family: str) -> dict[str, Any]:
        """Return the sampling parameters that are given on the command line, by name.

        Args:
            family: Family of the server's model.

        Raises:
            RequestError: A value of `--param` is wrong.
        """
        values = {**vars(self), "num_inference_steps": self.steps}
        given = {name: values[name] for name in OPTION_PARAMS if values[name] is not None}
        if self.fit != "stretch":
            given["fit"] = self.fit
        return given | parse_params(self.param or (), family)


def run_at_server(
    console: Console, launched: World | None, options: ServerRunOptions, log: LogOptions
) -> None:
    """Have a server make the clips of a jobs file, and download them.

    Args:
        console: Console of the command.
        launched: Rank and world size from the launcher (torchrun or srun); None: no launcher
            started this process.
        options: Options of the run.
        log: Options of the log.

    Raises:
        SvdppError: A line is wrong, a clip failed, or the server cannot be used.
    """
    from svdpp.client.connection import KEY_VARIABLE, connected
    from svdpp.client.server_model import server_model
    from svdpp.media.output_files import lock_folder

    options.check_server(launched)
    policy = options.policy(is_restarted=False, replaces_changed=True)
    require(
        policy.encoding.format == "mp4", "`format`: a server makes only mp4 files", "leave it out"
    )
    wrong = "`out` names a file, and --jobs makes a folder of clips"
    require(not policy.single_clip, wrong, "name a folder")
    log.open(console, None)
    assert options.server is not None
    patience = options.server_timeout
    key = os.environ.get(KEY_VARIABLE) or None
    with connected(options.server, key, patience, console.info) as connection:
        model = server_model(connection.get("/v1/models"))
        is_other = options.model != DEFAULT_MODEL and Path(options.model).name != model.name
        wrong = f"`model`: the server runs {model.name}, not {options.model}"
        require(not is_other, wrong, "leave it out", model=model.name)
        command = _ServerRun.create(console, options, policy, connection, model)
        if options.dry_run:
            command.show_plan()
            return
        with lock_folder(policy.folder):
            command.execute()


@dataclass(frozen=True, kw_only=True)
class _ServerRun:
    """Run of a jobs file at a server, after all lines were read and checked."""

    console: Console
    options: ServerRunOptions
    policy: OutputPolicy
    connection: ServerConnection
    model: ServerModel
    reader: JobLineReader
    clips: list[ServerClip]
    input_errors: list[SvdppError]
    """Errors of lines for which no clip is made."""

    @classmethod
    def create(
        cls,
        console: Console,
        options: ServerRunOptions,
        policy: OutputPolicy,
        connection: ServerConnection,
        model: ServerModel,
    ) -> _ServerRun:
        """Read and check the lines of the jobs file, and return the run at the server.

        Raises:
            InputError: The file or an image cannot be read.
            RequestError: A line is wrong, or an output file exists.
        """
        from svdpp.client.batch_run import server_clips
        from svdpp.driver.job_files import read_job_file
        from svdpp.driver.job_lines import JobLineReader, raise_line_errors
        from svdpp.driver.jobs import check_and_name_jobs, check_outputs

        assert options.jobs is not None
        last_image = options.last_image
        defaults = model.defaults(
            options.server_sampling(model.description["family"]),
            seed=options.seed or 0,
            negative_prompt=options.negative_prompt,
            last_image=None if last_image is None else str(last_image),
            references=options.reference_paths,
            videos=options.video_paths,
            format="mp4",
            max_pixels=options.max_megapixels * 10**6,
        )
        reader = JobLineReader(defaults, read_job_file(options.jobs))
        found, errors = reader.read(reader.file.lines())
        jobs = []
        for job in found:
            try:
                model.check(job)
            except RequestError as error:
                errors.append(reader.line_error(job.line or 0, error))
            else:
                jobs.append(job)
        if not (options.keep_going and jobs):
            hint = "use --keep-going to make the other clips" if jobs else ""
            raise_line_errors(errors, reader.file, len(jobs), hint)
        if not jobs:
            raise InputError(f"{reader.file.name} has no lines", "write one clip in each line")
        named = check_and_name_jobs(jobs, policy, options.template(defaults.sampling))
        check_outputs(named, policy)
        return cls(
            console=console,
            options=options,
            policy=policy,
            connection=connection,
            model=model,
            reader=reader,
            clips=server_clips(named),
            input_errors=errors,
        )

    def show_plan(self) -> None:
        """Print the clips that would be requested from the server."""
        for error in self.input_errors:
            self.console.info(error.message)
        noun = pluralize(len(self.clips), "clip")
        self.console.result(f"{noun} with {self.model.name} at {self.connection.url}")
        rows = []
        for clip in self.clips:
            sampling = clip.job.sampling
            assert sampling is not None
            size = f"{sampling.width}x{sampling.height}"
            rows.append(
                {
                    "output": clip.output,
                    "line": clip.job.line,
                    "seed": clip.job.seed,
                    "size": size,
                    "frames": sampling.frames,
                    "steps": sampling.num_inference_steps,
                }
            )
        self.console.report(
            {
                "schema_version": 1,
                "folder": str(self.policy.folder),
                "server": self.connection.url,
                "model": self.model.name,
                "clips": rows,
            }
        )

    def execute(self) -> None:
        """Request the missing clips from the server, download finished clips, and print all clips.

        Raises:
            SvdppError: A clip failed or was refused; the error with the highest exit code.
        """
        from svdpp.client.batch_run import STATE_FILE, BatchRun, is_intact, read_state
        from svdpp.driver.clip_metadata import parse_clip_json
        from svdpp.driver.clip_table import read_done

        console, folder = self.console, self.policy.folder
        keeps = self.policy.keeps_finished
        done = read_done(self.policy.clip_table) if keeps else {}
        finished = [clip for clip in self.clips if is_intact(folder, clip, done)]
        kept = {clip.name for clip in finished}
        wanted = [clip for clip in self.clips if clip.name not in kept]
        before = {clip.name: parse_clip_json(folder / f"{clip.output}.json") for clip in finished}
        earlier: ServerState | None = read_state(folder / STATE_FILE) if keeps else None
        run = BatchRun(self.connection, self.model, self.reader, folder, wanted, console.info)
        made: dict[str, dict[str, Any]] = {}
        failed: list[dict[str, Any]] = [
            {"output": None, "error": console.error_record(error)} for error in self.input_errors
        ]
        if wanted:
            self._make(run, earlier, wanted, before, made, failed)
        else:
            with self._manifest(before):
                pass
        skipped = [before[clip.name] for clip in finished]
        new = [made[clip.name] for clip in wanted if clip.name in made]
        print_clips(console, folder, skipped, new, failed)
        raise_failed(failed, len(skipped) + len(new) + len(failed))

    def _make(
        self,
        run: BatchRun,
        earlier: ServerState | None,
        wanted: Sequence[ServerClip],
        before: dict[str, dict[str, Any]],
        made: dict[str, dict[str, Any]],
        failed: list[dict[str, Any]],
    ) -> None:
        """Request clips from the server, and download them.

        Args:
            run: Run at the server, which has sent no batch yet.
            earlier: State of an earlier run, whose batches are continued; None: there is none.
            wanted: Clips to make.
            before: Metadata of the clips that were finished before this command, by name.
            made: Dict to which the metadata of each downloaded clip is added, by name.
            failed: List to which an entry with `output` and `error` is added for each failed clip.
        """
        from svdpp.cli.progress import ServerProgress
        from svdpp.client.batch_run import Watchers
        from svdpp.worker.messages import ClipDone, ClipFailed

        index_of = {clip.name: index for index, clip in enumerate(wanted)}
        progress = ServerProgress(self.console, "run", [clip.name for clip in wanted])
        manifest = self._manifest(before)

        def on_done(clip: ServerClip, metadata: dict[str, Any]) -> None:
            made[clip.name] = metadata
            event = ClipDone(clip=index_of[clip.name], metadata=metadata)
            for observer in (progress, manifest):
                observer(0, event)

        def on_failed(clip: ServerClip, error: dict[str, Any]) -> None:
            record = self.console.error_record(error_from_dict(error))
            failed.append({"output": clip.output, "error": record})
            event = ClipFailed(clip=index_of[clip.name], error=error)
            for observer in (progress, manifest):
                observer(0, event)

        with progress, manifest:
            try:
                if earlier is not None:
                    run.adopt(earlier)
                run.submit()
                run.follow(
                    Watchers(
                        on_started=progress.begin,
                        on_eta=progress.set_eta,
                        on_done=on_done,
                        on_failed=on_failed,
                    )
                )
            except (Interrupted, SvdppError) as error:
                error.hint = "; ".join(
                    filter(None, [error.hint, self._advice_to_continue(run, len(made))])
                )
                raise
        self.console.info(progress.summary_line)

    def _advice_to_continue(self, run: BatchRun, num_made: int) -> str:
        """Return advice on how to go on if the command ends before all clips are downloaded."""
        if not run.batch_ids:
            return ""
        finished = f"{num_made} of {pluralize(len(self.clips), 'clip')} downloaded"
        path = f"/v1/batches/{run.batch_ids[-1]}/cancel"
        cancel = f"curl -X POST {shlex.quote(self.connection.url + path)}"
        go_on = "run the same command with --resume to continue"
        return f"{finished}, and the server continues; {go_on}; to cancel, run {cancel}"

    def _manifest(self, before: dict[str, dict[str, Any]]) -> RunManifest:
        """Return the `RunManifest`, which writes `run.json` and the table of the run's clips.

        Args:
            before: Metadata of the clips that were finished before this command, by name.
        """
        from svdpp.driver.clip_table import ClipTable
        from svdpp.driver.manifest import RunManifest

        table = ClipTable(self.policy.clip_table)
        names = ("output", "input", "seed", "parameters_sha256")
        rows, entries, indices = [], [], []
        finished = []
        for index, clip in enumerate(self.clips):
            metadata = before.get(clip.name)
            if metadata is not None:
                finished.append({**{name: metadata[name] for name in names}, "state": "done"})
                rows.append(table.row_of_clip(index, clip.job, metadata, "done"))
                continue
            metadata = _known_metadata(clip)
            entries.append({name: metadata[name] for name in names if name in metadata})
            indices.append(index)
            rows.append(table.row_of_clip(index, clip.job, metadata, "pending"))
        for error in self.input_errors:
            record = self.console.error_record(error)
            finished.append({"output": None, "error": record, "state": "failed"})
            rows.append(table.row_of_error(record, error.details.get("line")))
        table.fill(rows)
        about = {
            "started_at": datetime.now(UTC).isoformat(timespec="seconds"),
            "model": self.model.name,
            "server": self.connection.url,
        }
        return RunManifest(self.policy.manifest, about, entries, finished, table, indices)


def _known_metadata(clip: ServerClip) -> dict[str, Any]:
    """Return the metadata of a clip that are known before the server has made the clip."""
    job, sampling = clip.job, clip.job.sampling
    assert sampling is not None
    file = job.made_from.media_file
    return {
        **asdict(sampling),
        "family": sampling.family,
        "output": clip.output,
        "input": None if file is None else file.path.name,
        "input_sha256": None if file is None else file.sha256,
        "prompt": job.made_from.prompt,
        "negative_prompt": job.made_from.negative_prompt,
        "seed": job.seed,
    }
