"""Owns `svdpp profile`: measures, on the devices at hand, the costs that a plan is made with."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from svdpp.cli import options
from svdpp.cli.console import Console
from svdpp.cli.draft_choice import DraftChoice
from svdpp.cli.profile_draft import profile_draft
from svdpp.config import DEFAULT_MODEL, DEFAULT_NUM_STEPS, ModelConfig
from svdpp.errors import RequestError
from svdpp.redaction import redact

if TYPE_CHECKING:
    from svdpp.diagnostics.cost_profile import Profile
    from svdpp.plan.costs import Costs


def profile(
    inputs: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[PHOTO...]",
            help="With --draft: what to measure on. Default: the photographs that come with svdpp.",
        ),
    ] = None,
    world: options.World = None,
    out: Annotated[
        Path | None,
        typer.Option(
            "--out",
            "-o",
            metavar="FILE",
            help="Where the result goes. Default: costs.json; with --draft draft.json.",
        ),
    ] = None,
    draft: Annotated[
        bool,
        typer.Option(
            "--draft",
            help="Measure not costs but how far drafts of 2 to W ranks are from the exact clip, by "
            "their starts, and keep the best trade-offs, for --draft-starts.",
            rich_help_panel=options.DRAFT_PANEL,
        ),
    ] = False,
    start_steps: Annotated[
        str | None,
        typer.Option(
            metavar="LIST",
            help="With --draft: measure these starts alone, such as 0,8,12,17. Default: all that "
            "are worth it.",
            rich_help_panel=options.DRAFT_PANEL,
        ),
    ] = None,
    steps: Annotated[
        int,
        typer.Option(
            metavar="N",
            help="With --draft: denoising steps of each clip; distances are of this number.",
            rich_help_panel=options.DRAFT_PANEL,
        ),
    ] = DEFAULT_NUM_STEPS,
    seed: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            help="With --draft: of every clip. Default: 0.",
            rich_help_panel=options.DRAFT_PANEL,
        ),
    ] = None,
    repeats: Annotated[
        int,
        typer.Option(
            metavar="N",
            help="Clips measured after those that warm up, 1 or more; medians are taken.",
        ),
    ] = 3,
    model: options.Model = DEFAULT_MODEL,
    revision: options.Revision = None,
    variant: options.Variant = None,
    local_files_only: options.LocalFilesOnly = False,
    device: Annotated[
        str,
        typer.Option(
            metavar="cuda|cpu|cuda:N", help="As for run: what is measured is what run would use."
        ),
    ] = "cuda",
    dtype: options.Dtype = None,
    height: options.Height = None,
    width: options.Width = None,
    frames: options.NumFrames = None,
    decode_chunk_size: options.NumDecodedAtOnce = None,
    memory_opt: options.MemoryOpt = False,
    latent_shape: Annotated[
        tuple[int, int, int, int, int],
        typer.Option(
            metavar="B C F H W", help="Latent of the dummy model: five sizes, each 1 or more."
        ),
    ] = (1, 4, 14, 64, 64),
    threads: options.Threads = None,
    timeout: options.Timeout = 600.0,
    start_timeout: options.StartTimeout = 600.0,
    as_json: options.AsJson = False,
    quiet: options.Quiet = False,
    debug: options.Debug = False,  # noqa: ARG001  read by the guard around every command
) -> None:
    """Measure encode, step, decode, transfer and write, and each part's memory; write them as
    costs.

    All ranks are at work at once, as they are in a run: on the CPU they share its cores, so the
    costs hold for this number of ranks and threads. Plans take them by --costs.
    """
    from svdpp.cli import launched, log, request
    from svdpp.media import output_files

    DraftChoice(draft=draft, start_steps=start_steps)
    if inputs and not draft:
        raise RequestError("photographs are what drafts are measured on", "add --draft")
    if draft and request.joined_world(None) is not None:
        raise RequestError(
            "profile --draft walks drafts in processes of its own, on one host",
            "start it by itself; --draft-starts takes its file under a launcher too",
        )
    if repeats < 1:
        raise RequestError(f"--repeats must be 1 or more, got {repeats}")
    from svdpp.diagnostics.cost_profile import measured_config
    from svdpp.diagnostics.cost_profile import profile as measure
    from svdpp.driver.pipeline import Pipeline

    world_size = request.joined_world(world)
    if world_size is None and draft:
        world_size = request.default_draft_world(device, steps)
    elif world_size is None:
        world_size = request.default_world(device, DEFAULT_NUM_STEPS, on_cpu=2)
    config = request.pipeline_config(
        model=ModelConfig(
            name=model,
            revision=revision,
            variant=variant,
            local_files_only=local_files_only,
            dtype=request.parse_dtype(dtype, device),
            memory_opt=memory_opt,
            dummy_latent_shape=latent_shape,
        ),
        sampling=request.sampling_config(
            model,
            steps if draft else world_size,
            memory_opt=memory_opt,
            height=height,
            width=width,
            num_frames=frames,
            decode_chunk_size=decode_chunk_size,
        ),
        device=device,
        threads=threads,
        timeout=timeout,
        start_timeout=start_timeout,
        # Dithered cuts take any W and N; for a draft no layout is run.
        plan={"world_size": world_size, **({"split": "dithered"} if draft else {})},
    )
    console = Console(as_json=as_json, quiet=quiet)
    if request.is_joined_member():
        log.open_log(verbosity=0, log_file=None)
        launched.serve(Pipeline(measured_config(config)), console)
        return
    if draft:
        seed = request.parse_seeds(seed, None)[0]
        path = Path("draft.json") if out is None else out
        profile_draft(console, config, inputs or [], path, seed=seed, start_steps=start_steps)
        return
    out = Path("costs.json") if out is None else out
    output_files.check_free(str(out))
    output_files.check_writable(out.absolute().parent)
    profiled = measure(config, repeats=repeats, talk=console.info)
    costs = profiled.costs(redact(shlex.join(["svdpp", *sys.argv[1:]])))
    output_files.write_json(out, costs.to_json())
    if as_json:
        console.json(costs.to_json())
    else:
        _print(console, profiled, costs)
    console.info(f"next: svdpp plan --costs {shlex.quote(str(out))} --compare")


def _print(console: Console, profiled: Profile, costs: Costs) -> None:
    console.result(f"{costs.name}, on {costs.device}")
    console.result()
    seconds = {
        "encode": profiled.encode_seconds,
        "denoise": None,
        "decode": profiled.decode_seconds,
        "write": profiled.write_seconds,
    }
    rows = [
        (
            "step" if part == "denoise" else part,
            _ms(profiled.step_seconds if part == "denoise" else [seconds[part] or 0.0]),
            _gib(profiled.weight_bytes.get(part)),
            _gib(profiled.work_bytes.get(part)),
        )
        for part in seconds
        if part == "denoise" or seconds[part]
    ]
    console.table(("part", "ms", "weights GiB", "work GiB"), rows)
    for transfer in profiled.transfers:
        console.result(
            f"transfer {transfer.source} -> {transfer.target}: "
            f"{transfer.latency_seconds * 1000:.2f} ms and "
            f"{transfer.bytes_per_second / 1e9:.2f} GB/s"
        )
    between = costs.inter_host_transfer_seconds
    if between is not None:
        console.result(
            f"a packet's transfer between hosts: {between * 1000:.2f} ms, within one: "
            f"{costs.transfer_seconds * 1000:.2f} ms"
        )
    if profiled.transfers:
        console.result(f"a clip's packet: {profiled.packet_bytes / 1e6:.2f} MB")
    if profiled.config.device == "cpu":
        console.info("work on the CPU is growth of the resident set, what malloc keeps included")


def _ms(seconds: list[float]) -> str:
    """One time, or that of each rank."""
    return " ".join(f"{each * 1000:.1f}" for each in seconds)


def _gib(num_bytes: int | None) -> str:
    return "-" if num_bytes is None else f"{num_bytes / 2**30:.3f}"
