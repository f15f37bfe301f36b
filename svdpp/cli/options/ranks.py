"""The options for ranks: number, devices, threads, timeouts."""

import os
from dataclasses import dataclass

from svdpp.cli.options.declare import DIAGNOSTICS, LAYOUT, RECOVERY, setting, switch
from svdpp.config import DEMO_MODEL, DUMMY_MODEL
from svdpp.errors import RequestError
from svdpp.launch.gpus import visible_gpus

#: The default device.
AUTO_DEVICE = "auto"


@dataclass(frozen=True, kw_only=True)
class RankOptions:
    """The number of ranks, and what each may use."""

    world: int | None = setting(
        LAYOUT,
        "W",
        "Number of ranks, one on each GPU. With the uniform split it must divide the steps.",
        "--gpus",
        "--world",
    )
    device: str = setting(
        LAYOUT,
        "auto|cuda|cpu|cuda:N",
        "cuda: rank r on GPU r, over NCCL. cpu or cuda:N: all ranks share that device, "
        "over gloo. auto: GPUs if there are any, else the CPU for demo and dummy.",
        default=AUTO_DEVICE,
        choices=("auto", "cuda", "cpu", "cuda:0"),
    )
    threads: int | None = setting(
        LAYOUT,
        "T",
        "CPU threads of each rank, at most 16 per core. Bits depend on this number.",
        shown="cores divided by ranks; on CUDA 1",
    )
    timeout: float = setting(
        RECOVERY, "SECONDS", "End the run if a rank makes no progress for this long.", default=600.0
    )
    start_timeout: float = setting(
        RECOVERY,
        "SECONDS",
        "End the run if the ranks are not ready after this long.",
        default=600.0,
    )
    checksum: bool = switch(DIAGNOSTICS, "Send a crc32 with each packet and compare it on arrival.")

    allow_mixed_devices: bool = switch(
        LAYOUT,
        "Accept ranks on different GPUs or library versions. Their bits may differ, so "
        "clips are not marked as exact.",
    )

    def device_for(self, model: str) -> str:
        """The name of the device, where `auto` is decided. Imports torch if there are GPUs."""
        if self.device != AUTO_DEVICE:
            return self.device
        if visible_gpus():
            import torch

            if torch.cuda.is_available():  # False for a CPU build of torch
                return "cuda"
        if model.lower() in (DEMO_MODEL, DUMMY_MODEL):  # "Demo" is refused with a better hint
            return "cpu"
        raise RequestError(
            "there is no GPU, and this model takes minutes for each step on a CPU",
            "--device cpu runs it there anyway; --model demo is small enough for a CPU",
            details={"asked": AUTO_DEVICE, "found": 0},
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
