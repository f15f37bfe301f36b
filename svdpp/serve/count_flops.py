"""The process that counts a clip's FLOPs: `count_flops PARENT_PID`, JSON in and out."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import asdict

from svdpp.config import ModelConfig, sampling_from
from svdpp.launch import environment
from svdpp.launch.process_lifetime import end_with_parent

_NICE = 19


def main() -> None:
    """Reads model and sampling from stdin, and prints the FLOPs of the model's parts."""
    end_with_parent(int(sys.argv[1]))
    os.nice(_NICE)
    environment.collect_rarely()
    asked = json.load(sys.stdin)
    # Imported late: torch takes seconds, and by then the process has its low priority.
    from svdpp.diagnostics.utilisation import count_flops

    flops = count_flops(ModelConfig(**asked["model"]), sampling_from(asked["sampling"]))
    sys.stdout.write(f"\n{json.dumps(asdict(flops))}\n")


if __name__ == "__main__":
    main()
