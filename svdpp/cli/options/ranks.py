"""Owns the options about ranks: how many, on which devices, and how long they may take."""

import os
from dataclasses import dataclass
from typing import Annotated

from svdpp.cli.options.declare import DIAGNOSTICS, LAYOUT, RECOVERY, flag, option
from svdpp.config import DEMO_MODEL, DUMMY_MODEL
from svdpp.errors import RequestError
from svdpp.launch.gpus import visible_gpus
from svdpp.launch.world import find_world

#: The device where the user names none.
AUTO_DEVICE = "auto"


@dataclass(frozen=True, kw_only=True)
class RankOptions:
    """How many ranks there are, and what each of them may use."""

    world: Annotated[
        int | None,
        option(
            *("--gpus", "--world"),
            panel=LAYOUT,
            metavar="W",
            help="Number of ranks, one on each GPU. The uniform split takes numbers that divide "
            "the steps.",
        ),
    ] = None
    device: Annotated[
        str,
        option(
            "--device",
            panel=LAYOUT,
            metavar="auto|cuda|cpu|cuda:N",
            choices=("auto", "cuda", "cpu", "cuda:0"),
            help="cuda: rank r on GPU r, over NCCL. cpu, or one GPU shared by all ranks such as "
            "cuda:0: over gloo. auto: GPUs if there are any; else the CPU, for demo and dummy.",
        ),
    ] = AUTO_DEVICE
    threads: Annotated[
        int | None,
        option(
            "--threads",
            panel=LAYOUT,
            metavar="T",
            help="CPU threads of each rank, 1 to 16 for each core. Bits depend on it.",
            default="the cores shared among the ranks; on CUDA 1",
        ),
    ] = None
    timeout: Annotated[
        float,
        option(
            "--timeout",
            panel=RECOVERY,
            metavar="SECONDS",
            help="End the run when a rank makes no progress for this long.",
        ),
    ] = 600.0
    start_timeout: Annotated[
        float,
        option(
            "--start-timeout",
            panel=RECOVERY,
            metavar="SECONDS",
            help="End the run when ranks are not ready after this long.",
        ),
    ] = 600.0
    checksum: Annotated[
        bool,
        flag(
            "--checksum",
            panel=DIAGNOSTICS,
            help="Send a crc32 with each packet and compare it on arrival.",
        ),
    ] = False

    allow_mixed_devices: Annotated[
        bool,
        flag(
            "--allow-mixed-devices",
            panel=LAYOUT,
            help="Accept ranks on different GPUs or library versions. Bits may differ between "
            "them, so no clip is called exact.",
        ),
    ] = False

    def device_for(self, model: str) -> str:
        """The device by name, with `auto` decided. Imports torch if there are GPUs.

        Raises:
            RequestError: there is no GPU, and `model` is too large to take the CPU unasked.
        """
        if self.device != AUTO_DEVICE:
            return self.device
        if visible_gpus():
            import torch

            if torch.cuda.is_available():  # a build of torch for the CPU cannot use them
                return "cuda"
        if model in (DEMO_MODEL, DUMMY_MODEL):
            return "cpu"
        raise RequestError(
            "there is no GPU, and this model takes minutes for each step on a CPU",
            "--device cpu runs it there all the same; --model demo is small enough for a CPU",
            details={"asked": AUTO_DEVICE, "found": 0},
        )

    def threads_on(self, device: str, world_size: int) -> int:
        """Threads of each rank: as asked for, else the cores that this process may use, shared.

        1 on CUDA, where the CPU only resizes the image: bits then do not depend on the world.
        """
        if self.threads is not None:
            return self.threads
        if device.startswith("cuda"):
            return 1
        launched = find_world()
        sharing = world_size if launched is None else launched.local_size
        return max(1, len(os.sched_getaffinity(0)) // max(sharing, 1))
