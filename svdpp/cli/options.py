"""Owns the options that commands share: name, help, unit and range, once; and what was given."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

_MODEL = "Model"
_SAMPLING = "Sampling"
_RANKS = "Ranks"
_OUTPUTS = "Outputs"
_COSTS = "Costs"
#: Heading of what is about drafts.
DRAFT_PANEL = "One clip sooner"
_OUTPUT = "Output"

World = Annotated[
    int | None,
    typer.Option(
        "--world",
        "--gpus",
        metavar="W",
        help="Number of ranks, 1 or more; with the uniform split it must divide the steps. "
        "Default: 4 to plan and simulate; to run and verify as many GPUs as may be, or 2 CPU "
        "ranks.",
        rich_help_panel=_RANKS,
    ),
]
Steps = Annotated[
    int,
    typer.Option(
        "--steps",
        "--total-steps",
        metavar="N",
        help="Denoising steps of each clip, 1 or more; with the uniform split a multiple of the "
        "number of ranks.",
        rich_help_panel=_SAMPLING,
    ),
]
SplitOption = Annotated[
    str | None,
    typer.Option(
        "--split",
        metavar="uniform|balanced|dithered",
        help="Where clips are cut: into equal ranges; into whole ranges that make the slowest rank "
        "fastest; or for each clip anew, so that all ranks have the same work. Default: uniform.",
        rich_help_panel=_RANKS,
    ),
]
Replicas = Annotated[
    int | None,
    typer.Option(
        "--replicas",
        metavar="R",
        help="Independent replicas of W/R ranks, a divisor of W; W is data parallel. Default: 1.",
        rich_help_panel=_RANKS,
    ),
]
Decoders = Annotated[
    int | None,
    typer.Option(
        "--decoders",
        metavar="K",
        help="Ranks at the end of each replica that take turns to finish and decode clips, 1 to "
        "W/R. Default: 1.",
        rich_help_panel=_RANKS,
    ),
]
LayoutOption = Annotated[
    str | None,
    typer.Option(
        "--layout",
        metavar="auto",
        help="auto: split, replicas and decoders by forecast, and why. Default: as they are given.",
        rich_help_panel=_RANKS,
    ),
]
Draft = Annotated[
    bool,
    typer.Option(
        "--draft",
        help="All ranks work on one clip at a time: an approximation of it comes after about half "
        "the steps, the exact clip when it always would.",
        rich_help_panel=DRAFT_PANEL,
    ),
]
Starts = Annotated[
    str | None,
    typer.Option(
        "--draft-starts",
        metavar="LIST|FILE",
        help="The step at which each rank of a draft starts, rising from 0, such as 0,8,12,17; or "
        "a file that svdpp profile --draft wrote. Default: as measured on the demo model, for 2 to "
        "8 ranks and 14 to 50 steps.",
        rich_help_panel=DRAFT_PANEL,
    ),
]
CostsOption = Annotated[
    str | None,
    typer.Option(
        "--costs",
        metavar="FILE|PRESET",
        help="Costs that splits and forecasts go by: a costs.json, or the published svd-xt-a100, "
        "svd-xt-a100-pcie or svd-xt-h100-pcie. Default: to run and verify svd-xt-a100; else a step "
        "is 1 and all else 0.",
        rich_help_panel=_COSTS,
    ),
]
StepSeconds = Annotated[
    float | None,
    typer.Option(
        metavar="SECONDS",
        help="Time of one step, above 0. Default: that of --costs, else 1, as the unit of all "
        "other times.",
        rich_help_panel=_COSTS,
    ),
]
EncodeSeconds = Annotated[
    float | None,
    typer.Option(
        metavar="SECONDS",
        help="Time of one clip's encode, 0 or more. Default: that of --costs, else 0.",
        rich_help_panel=_COSTS,
    ),
]
DecodeSeconds = Annotated[
    float | None,
    typer.Option(
        metavar="SECONDS",
        help="Time of one clip's decode, 0 or more. Default: that of --costs, else 0.",
        rich_help_panel=_COSTS,
    ),
]
TransferSeconds = Annotated[
    float | None,
    typer.Option(
        metavar="SECONDS",
        help="Latency of one hand-over, 0 or more. Default: that of --costs, else 0.",
        rich_help_panel=_COSTS,
    ),
]
InterHostTransferSeconds = Annotated[
    float | None,
    typer.Option(
        "--inter-host-transfer-seconds",
        metavar="SECONDS",
        help="Latency of one hand-over to a rank on another host, 0 or more. Default: that of "
        "--costs; where they do not tell it, a plan that needs it is refused.",
        rich_help_panel=_COSTS,
    ),
]
Threads = Annotated[
    int | None,
    typer.Option(
        "--threads",
        metavar="T",
        help="CPU intra-op threads of each rank, 1 to 16 for each core; bits depend on it. "
        "Default: cores // ranks, at least 1; on CUDA 1.",
        rich_help_panel=_RANKS,
    ),
]
Checksum = Annotated[
    bool,
    typer.Option(
        "--checksum",
        help="Send a crc32 of each packet with it, and compare it where it arrives.",
        rich_help_panel=_RANKS,
    ),
]
Timeout = Annotated[
    float,
    typer.Option(
        metavar="SECONDS",
        help="End the run when a rank makes no progress for this long, above 0.",
        rich_help_panel=_RANKS,
    ),
]
StartTimeout = Annotated[
    float,
    typer.Option(
        metavar="SECONDS",
        help="End the run when ranks are not ready after this long, above 0.",
        rich_help_panel=_RANKS,
    ),
]
Model = Annotated[
    str,
    typer.Option(
        metavar="MODEL",
        help="A hub id, a local diffusers folder, or 'demo': a small built-in stand-in for trying "
        "the tool, not Stable Video Diffusion.",
        rich_help_panel=_MODEL,
    ),
]
Revision = Annotated[
    str | None,
    typer.Option(
        metavar="REV",
        help="Branch, tag or commit of a hub model. Default: its main branch.",
        rich_help_panel=_MODEL,
    ),
]
Variant = Annotated[
    str | None,
    typer.Option(
        metavar="NAME",
        help="Variant of the weight files, such as fp16. Default: none.",
        rich_help_panel=_MODEL,
    ),
]
LocalFilesOnly = Annotated[
    bool,
    typer.Option(
        "--local-files-only",
        help="Never download; use what the hub cache holds.",
        rich_help_panel=_MODEL,
    ),
]
Dtype = Annotated[
    str | None,
    typer.Option(
        metavar="fp32|fp16|bf16",
        help="Precision of weights and latents. Default: fp16 on CUDA, fp32 on the CPU.",
        rich_help_panel=_MODEL,
    ),
]
MemoryOpt = Annotated[
    bool,
    typer.Option(
        "--memory-opt",
        help="Less memory, slower: feed-forward chunking, and 2 frames a decode chunk.",
        rich_help_panel=_MODEL,
    ),
]
Height = Annotated[
    int | None,
    typer.Option(
        metavar="PIXELS",
        help="Frame height, a multiple of 8. Default: 576 (demo: 128).",
        rich_help_panel=_SAMPLING,
    ),
]
Width = Annotated[
    int | None,
    typer.Option(
        metavar="PIXELS",
        help="Frame width, a multiple of 8. Default: 1024 (demo: 128).",
        rich_help_panel=_SAMPLING,
    ),
]
NumFrames = Annotated[
    int | None,
    typer.Option(
        "--frames",
        metavar="F",
        help="Frames of the clip, 1 or more. Default: the model's own, 14 or 25.",
        rich_help_panel=_SAMPLING,
    ),
]
Fps = Annotated[
    int | None,
    typer.Option(
        metavar="FPS",
        help="Frames a second, 1 to 240; the model is told fps - 1. Default: 7.",
        rich_help_panel=_SAMPLING,
    ),
]
MotionBucketId = Annotated[
    int | None,
    typer.Option(
        metavar="N",
        help="Amount of motion, 0 to 1023. Default: 127 (demo: 40).",
        rich_help_panel=_SAMPLING,
    ),
]
NoiseAugStrength = Annotated[
    float | None,
    typer.Option(
        metavar="X",
        help="Noise added to the image, 0 or more. Default: 0.02.",
        rich_help_panel=_SAMPLING,
    ),
]
MinGuidanceScale = Annotated[
    float | None,
    typer.Option(
        metavar="X",
        help="Guidance of the first frame, 0 or more. Default: 1.0.",
        rich_help_panel=_SAMPLING,
    ),
]
MaxGuidanceScale = Annotated[
    float | None,
    typer.Option(
        metavar="X",
        help="Guidance of the last frame, 0 or more; 1 or less: none. Default: 3.0 (demo: 1.1).",
        rich_help_panel=_SAMPLING,
    ),
]
DecodeChunkSize = Annotated[
    str | None,
    typer.Option(
        metavar="F|auto",
        help="Frames decoded at a time, 1 or more; bits depend on it. auto: as many as fit, "
        "measured before the run. Default: all frames.",
        rich_help_panel=_SAMPLING,
    ),
]
NumDecodedAtOnce = Annotated[
    int | None,
    typer.Option(
        "--decode-chunk-size",
        metavar="F",
        help="Frames decoded at a time, 1 or more; memory depends on it. Default: all frames.",
        rich_help_panel=_SAMPLING,
    ),
]
FitOption = Annotated[
    str,
    typer.Option(
        "--fit",
        metavar="crop|pad|stretch",
        help="How an image of another aspect ratio is fitted; diffusers stretches.",
        rich_help_panel=_SAMPLING,
    ),
]
Seed = Annotated[
    int | None,
    typer.Option(
        metavar="N",
        help="Seed of every clip, 0 to 2^63 - 1. Default: 0.",
        rich_help_panel=_SAMPLING,
    ),
]
Trace = Annotated[
    Path | None,
    typer.Option(
        "--trace",
        metavar="FILE.json",
        help="Write every action, step and transfer in Chrome's trace format, for ui.perfetto.dev. "
        "Default: none.",
        rich_help_panel=_OUTPUTS,
    ),
]
Timeline = Annotated[
    Path | None,
    typer.Option(
        "--timeline",
        metavar="FILE.svg|png",
        help="Draw ranks and time, measured and forecast; needs matplotlib. Default: none.",
        rich_help_panel=_OUTPUTS,
    ),
]
Profile = Annotated[
    Path | None,
    typer.Option(
        "--profile",
        metavar="FILE.json",
        help="Look at one clip on rank 0 with torch.profiler, which slows it down, and write every "
        "kernel in Chrome's trace format. Default: none.",
        rich_help_panel=_OUTPUTS,
    ),
]
AsJson = Annotated[
    bool,
    typer.Option("--json", help="Print the result as JSON.", rich_help_panel=_OUTPUT),
]
Verbose = Annotated[
    int,
    typer.Option(
        "--verbose",
        "-v",
        count=True,
        metavar="",
        show_default=False,
        help="Log ranks, transfers and clips to stderr; -vv: every step as well.",
        rich_help_panel=_OUTPUT,
    ),
]
Quiet = Annotated[
    bool,
    typer.Option("--quiet", "-q", help="No progress, no remarks.", rich_help_panel=_OUTPUT),
]
Debug = Annotated[
    bool,
    typer.Option("--debug", help="Show tracebacks with errors.", rich_help_panel=_OUTPUT),
]
LogFile = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        help="Also write the log, steps included, to this file as JSON lines. Default: none.",
        rich_help_panel=_OUTPUT,
    ),
]


def is_given(context: typer.Context, name: str) -> bool:
    """Whether the command's parameter `name` was given, rather than left to its default."""
    source = context.get_parameter_source(name)
    return source is not None and source.name not in ("DEFAULT", "DEFAULT_MAP")
