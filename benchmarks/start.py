"""Compare the time of short commands in this checkout with their time in another one.

    python -m benchmarks.start OTHER_CHECKOUT [--rounds 5]

The other checkout, such as one of an earlier commit, needs its own `.venv`. The commands of both
checkouts run in turn, on the CPU, and make almost nothing, so that their start takes most of the
time. A first round, which compiles bytecode, does not count.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

from benchmarks.options import parser_of

_HERE = Path(__file__).resolve().parents[1]
_DEMO = ("--model", "demo", "--device", "cpu", "--height", "32", "--width", "32", "--frames", "2")
_SMALL = ("--steps", "2", "--threads", "1")
_LATENT = ("--latent-shape", "1", "4", "2", "8", "8", "--clips", "1", "--world", "2")


def _commands(out: Path) -> Mapping[str, tuple[str, ...]]:
    clip, photo = out / "rocket_0.mp4", _HERE / "svdpp/assets/photos/rocket.jpg"
    run = ("run", str(photo), *_DEMO, *_SMALL, "--out", str(out), "--overwrite")
    return {
        "svdpp --version": ("--version",),
        "svdpp plan": ("plan", "--gpus", "7", "--steps", "28"),
        "svdpp simulate": ("simulate", *_LATENT, *_SMALL),
        "svdpp run": run,
        "svdpp verify CLIP": ("verify", str(clip)),
        "svdpp verify": ("verify", *_DEMO, *_SMALL),
    }


def _seconds(checkout: Path, command: tuple[str, ...]) -> float:
    begun = time.perf_counter()
    subprocess.run(
        [checkout / ".venv/bin/python", "-m", "svdpp", *command],
        cwd=checkout,
        env={**os.environ, "PYTHONPATH": str(checkout)},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        check=True,
    )
    return time.perf_counter() - begun


def main() -> None:
    """Run all commands in both checkouts in turn, and print medians and their ratio."""
    parser = parser_of(__doc__)
    parser.add_argument("other", type=lambda text: Path(text).resolve())
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        print(f"{'':18} {'here':>7} {'other':>7} {'ratio':>6}")
        for name in _commands(Path()):
            times: dict[Path, list[float]] = {_HERE: [], options.other: []}
            for round in range(options.rounds + 1):
                for number, (checkout, found) in enumerate(times.items()):
                    commands = _commands(Path(folder) / str(number))
                    seconds = _seconds(checkout, commands[name])
                    if round:
                        found.append(seconds)
            here, other = (statistics.median(each) for each in times.values())
            print(f"{name:18} {here:6.2f}s {other:6.2f}s {here / other:6.2f}")


if __name__ == "__main__":
    main()
