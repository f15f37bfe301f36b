"""Collects the wheels that the GPU tests need on a machine with torch and without a network.

python -m tests.gpu.offline_bundle --python 3.12 bundle                      all but torch's own
python -m tests.gpu.offline_bundle --python 3.12 --only diffusers,loguru bundle

The versions are those of constraints.txt, unless a name says its own (imageio-ffmpeg==0.6.0 is half
as large). On the other machine, with this tree and the folder:
make test-gpu PYTHON=python3 BUNDLE=bundle
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

from packaging.markers import default_environment
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

CONSTRAINTS = Path(__file__).resolve().parents[2] / "constraints.txt"
PLATFORMS = ("manylinux_2_28_x86_64", "manylinux_2_17_x86_64", "manylinux2014_x86_64")


def main() -> None:
    """Downloads the wheels and prints how large they are."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--python", default="3.12", help="version on the other machine")
    parser.add_argument("--only", help="names, where it has all others already")
    options = parser.parse_args()
    pins = _pins()
    wanted = sorted(_closure("svdpp", {"test"}) - _closure("torch", set()) - {"svdpp", "torch"})
    names = options.only.split(",") if options.only else wanted
    options.folder.mkdir(parents=True, exist_ok=True)
    subprocess.run(
        [
            *(sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"),
            *("--only-binary=:all:", "--python-version", options.python),
            *(option for each in PLATFORMS for option in ("--platform", each)),
            *("--dest", str(options.folder)),
            *(name if "==" in name else pins[canonicalize_name(name)] for name in names),
        ],
        check=True,
    )
    wheels = list(options.folder.glob("*.whl"))
    size = sum(wheel.stat().st_size for wheel in wheels)
    print(f"{len(wheels)} wheels, {size / 2**20:.0f} MiB, in {options.folder}")


def _pins() -> dict[str, str]:
    lines = CONSTRAINTS.read_text().splitlines()
    found = (re.fullmatch(r"([\w.-]+)==([\w.!+-]+)", line) for line in lines)
    return {canonicalize_name(match[1]): match[0] for match in found if match}


def _closure(name: str, extras: set[str]) -> set[str]:
    """The distribution `name` and all that it needs, as installed here."""
    found: set[str] = set()
    waiting = [(name, extras)]
    while waiting:
        current, wanted = waiting.pop()
        if canonicalize_name(current) not in found:
            found.add(canonicalize_name(current))
            waiting += _needs(current, wanted)
    return found


def _needs(name: str, extras: set[str]) -> Iterator[tuple[str, set[str]]]:
    try:
        lines = metadata.requires(name) or []
    except metadata.PackageNotFoundError:
        return
    for requirement in map(Requirement, lines):
        environments = [{**default_environment(), "extra": each} for each in (extras or {""})]
        marker = requirement.marker
        if marker is None or any(marker.evaluate(each) for each in environments):
            yield requirement.name, set(requirement.extras)


if __name__ == "__main__":
    main()
