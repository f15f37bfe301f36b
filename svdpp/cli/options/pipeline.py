"""The options of a pipeline: its model and sampler, its ranks, and how they share the work."""

import os
from dataclasses import dataclass
from typing import Any, Literal

from svdpp.cli.options.declare import DIAGNOSTICS, LAYOUT, RECOVERY
from svdpp.cli.options.model import ModelOptions
from svdpp.config import DEMO_MODEL, DUMMY_MODEL
from svdpp.config.files import find_costs
from svdpp.errors import RequestError
from svdpp.plan.costs import PRESETS, Costs
from svdpp.plan.layout import Split

#: The options that the choice of a layout replaces.
OF_LAYOUT = ("layout", "split", "replicas", "decoders", "cfg_parallel", "decode_ranks")
#: The default costs; a layout depends mainly on the ratio of a decode to a step.
ASSUMED_COSTS = "svd-xt-a100"


@dataclass(frozen=True, kw_only=True)
class PipelineOptions(ModelOptions):
    """The options that together give one configuration; None stands for the default."""

    world: int | None = LAYOUT.setting(
        "W",
        "Number of ranks, one on each GPU. With the uniform split it must divide the steps.",
        "--gpus",
        "--world",
        shown="all GPUs, if they divide the steps; on the CPU 2",
    )
    device: str = LAYOUT.setting(
        "auto|cuda|cpu|cuda:N",
        "cuda: rank r on GPU r, over NCCL. cpu or cuda:N: all ranks share that device, "
        "over gloo. auto: GPUs if there are any, else the CPU; verify and doctor use it for any "
        "model, others for demo and dummy.",
        default="auto",
    )
    threads: int | None = LAYOUT.setting(
        "T",
        "CPU threads of each rank, at most 16 per core. Bits depend on this number.",
        shown="cores divided by ranks; on CUDA 1",
    )
    timeout: float = RECOVERY.setting(
        "SECONDS", "End the run if a rank makes no progress for this long.", default=600.0
    )
    start_timeout: float = RECOVERY.setting(
        "SECONDS", "End the run if ranks are not ready after this long.", default=600.0
    )
    checksum: bool = DIAGNOSTICS.switch("Send a crc32 with each packet and compare it on arrival.")
    allow_mixed_devices: bool = LAYOUT.switch(
        "Accept ranks on different GPUs or library versions. Their bits may differ, so "
        "clips are not marked as exact."
    )
    layout: Literal["auto", "pipeline", "data-parallel"] | None = LAYOUT.setting(
        "",
        "How ranks share the work. pipeline: each does some steps of all clips; "
        "data-parallel: each makes whole clips; auto: best forecast, with pairs or without.",
        shown="pipeline",
    )
    split: Split | None = LAYOUT.setting(
        "",
        "How a pipeline divides the steps. uniform: equally; balanced: so that the "
        "slowest rank is as fast as possible; alternating: differently from clip to clip, "
        "so that all ranks have the same work on average.",
        shown="uniform",
    )
    replicas: int | None = LAYOUT.setting(
        "R", "Independent pipelines of W/R ranks; R divides W.", shown="1"
    )
    decoders: int | None = LAYOUT.setting(
        "K", "Ranks at the end of each pipeline that decode clips in turn.", shown="1"
    )
    cfg_parallel: Literal["auto", "1", "2"] | None = LAYOUT.setting(
        "",
        "Ranks that do each step of a clip together. 2: pairs of ranks, each for one branch of "
        "the guidance; a clip takes about half as long. auto: by forecast, if the bits are equal.",
        shown="1; with --layout auto auto",
    )
    decode_ranks: int | None = LAYOUT.setting(
        "N",
        "Ranks that decode each clip of SVD together, each some chunks of --decode-chunk-size "
        "frames.",
        shown="both ranks of a pair, if there are several chunks, else 1",
    )
    costs: str | None = LAYOUT.setting(
        "FILE|PRESET",
        "Costs for splits and forecasts: a file that svdpp profile wrote, the run.json of "
        f"an earlier run, or published costs: {', '.join(PRESETS)}.",
        shown=ASSUMED_COSTS,
    )
    share_experts: bool = LAYOUT.switch(
        "Let one rank hold both experts, so that the steps can be cut anywhere."
    )

    def __post_init__(self) -> None:
        if self.layout in ("auto", "data-parallel"):
            for name in self.refined:
                raise RequestError(f"--layout {self.layout} chooses the layout: leave out --{name}")
        if self.chooses and self.decode_ranks is not None:
            raise RequestError("auto chooses the layout: leave out --decode-ranks")

    @property
    def refined(self) -> dict[str, Any]:
        """The given refinements as fields of a `PipelineConfig`."""
        named = {"split": self.split, "replicas": self.replicas, "decoders": self.decoders}
        return {name: value for name, value in named.items() if value is not None}

    @property
    def pair_size(self) -> int:
        """Ranks that do each step together; 1 where that is left to `auto`."""
        return 2 if self.cfg_parallel == "2" else 1

    @property
    def chooses(self) -> bool:
        """Whether the forecast decides something."""
        return "auto" in (self.layout, self.cfg_parallel)

    @property
    def fixed(self) -> dict[str, Any] | None:
        """The layout as fields, without the number of ranks of a unit; None: `auto` chooses it."""
        if self.layout == "auto":
            return None
        return {} if self.layout == "data-parallel" else {"replicas": 1, **self.refined}

    @property
    def must_divide(self) -> bool:
        """Whether the number of ranks must divide the steps."""
        is_pipeline = self.layout in (None, "pipeline") and self.replicas is None
        return is_pipeline and self.split in (None, "uniform")

    def layout_fields(self, world_size: int) -> dict[str, Any]:
        """The layout as fields of a `PipelineConfig`, unless `auto` chooses it."""
        given = {**self.refined}
        if self.layout == "data-parallel":
            given["replicas"] = max(1, world_size // self.pair_size)
        if self.cfg_parallel is not None:
            given["cfg_parallel"] = self.pair_size
        if self.decode_ranks is not None:
            given["decode_ranks"] = self.decode_ranks
        return given

    def assumed_costs(self, *, decodes: bool = True, family: str = "svd") -> Costs:
        """The costs of `--costs`, or else published ones of SVD.

        Without `--costs`, for other families and for clips that are not decoded, a step costs 1 and
        all else 0.
        """
        if self.costs is None and not (decodes and family == "svd"):
            return Costs()
        return find_costs(self.costs or ASSUMED_COSTS)

    def device_name(self, *, any_on_cpu: bool = False) -> str:
        """The name of the device, where `auto` is decided. Imports torch if there are GPUs.

        With `any_on_cpu` it may be the CPU for every model.
        """
        if self.device != "auto":
            return self.device
        from svdpp.launch.gpus import visible_gpus

        if visible_gpus():
            import torch

            if torch.cuda.is_available():  # False for a CPU build of torch
                return "cuda"
        # "Demo" is refused with a better hint.
        if any_on_cpu or self.model.lower() in (DEMO_MODEL, DUMMY_MODEL):
            return "cpu"
        raise RequestError(
            "there is no GPU, and this model takes minutes for each step on a CPU",
            "--device cpu runs it there anyway; --model demo is small enough for a CPU",
            details={"asked": "auto", "found": 0},
        )

    def threads_on(self, device: str, num_local: int) -> int:
        """Threads of each of this machine's `num_local` ranks; by default they share its cores.

        The default is 1 on CUDA, where the CPU only resizes the image: bits then do not depend on
        the number of ranks.
        """
        if self.threads is not None:
            return self.threads
        if device.startswith("cuda"):
            return 1
        return max(1, len(os.sched_getaffinity(0)) // max(num_local, 1))
