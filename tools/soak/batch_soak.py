"""Soak test of batches: make the clips of a jobs file by `svdpp run` and by a server, kill both
repeatedly, and compare the clips.

    python -m tools.soak.batch_soak [--jobs 200] [--faults 20] [--kills 2] [--seed 0]

The model is a tiny Wan that takes a prompt with or without an image. The jobs have three sizes, and
some use one of two LoRAs. Some lines of the file have faults. A first run must reject the file with
an error that names every fault. A second run, with `--keep-going`, makes the clips of the valid
lines; it is killed several times and resumed. `svdpp verify` compares every clip with diffusers.
Then a third run sends the same file to a server (`--server`) that is killed several times, and the
clips of the server are compared with those of the second run. The summary is one line of JSON on
stdout; the exit code is 1 if anything is wrong.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
from PIL import Image

from benchmarks.options import options
from tests.support.builders import save_tiny_lora
from tests.support.ports import free_port
from tests.support.processes import MARK, marked
from tests.support.tiny_families import save_tiny

_SIZES = ((64, 64), (96, 64), (64, 96))
_WORDS = ("a red ball", "waves at night", "ein Vogel", "雪の山", "smoke")
_STEPS = 4
_SAMPLING = ("--steps", str(_STEPS), "--frames", "5", "--width", "64", "--height", "64")
_DEFAULTS = ("--device", "cpu", "--threads", "1", *_SAMPLING)
_FAULTY: tuple[dict[str, Any], ...] = (
    {"prompt": "a", "sede": 3},
    {"prompt": "a", "steps": "many"},
    {"prompt": "a", "steps": 0},
    {"prompt": "a", "seed": -1},
    {"prompt": "a", "width": 50},
    {"prompt": "a", "frames": 6},
    {"prompt": "a", "fps": True},
    {"prompt": ""},
    {"image": "no-such.png", "prompt": "a"},
    {"image": "notes.txt", "prompt": "a"},
    {"prompt": "a", "lora": "no-such.safetensors"},
    {"prompt": "a", "out": "../escape"},
    {"prompt": "a", "guidance_scale": -3},
    {"prompt": "a", "size": "64by64"},
    {"prompt": 7},
    {"prompt": "a", "fit": "squeeze"},
    {"prompt": "a", "negative_prompt": ["b"]},
    {"prompt": "a", "num_frames": 9, "frames": 5},
    {"prompt": "a", "height": 10**9},
)


class Problems(list[str]):
    """List of problems that the soak test of batches has detected, each in words."""

    def check(self, is_right: bool, text: str) -> None:
        """Print the problem `text`, and add it to the list, if `is_right` is false."""
        if not is_right:
            print(f"WRONG: {text}", file=sys.stderr, flush=True)
            self.append(text)


def main() -> int:
    """Run the soak test of batches; return its exit code."""
    asked = options(__doc__, jobs=200, faults=20, kills=2, seed=0)
    folder = Path(tempfile.mkdtemp(prefix="soak-batch-"))
    found = soak(folder, asked.jobs, asked.faults, asked.kills, random.Random(asked.seed))
    print(json.dumps(found))
    if found["wrong"]:
        print(f"its files: {folder}", file=sys.stderr)
        return 1
    shutil.rmtree(folder)
    return 0


def soak(folder: Path, jobs: int, faults: int, kills: int, chance: random.Random) -> dict[str, Any]:
    """Run the soak test of batches in `folder`, and return its summary."""
    begun, wrong = time.monotonic(), Problems()
    model = save_tiny("wan", folder / "model", image=True, expand_timesteps=True)
    (folder / "loras").mkdir()
    for seed, name in enumerate(("ink", "oil")):
        save_tiny_lora(model, folder / "loras" / f"{name}.safetensors", seed=seed)
    lines = list(make_lines(folder, jobs - faults, chance))
    for index in range(faults):
        lines.insert(chance.randrange(len(lines)), dict(_FAULTY[index % len(_FAULTY)]))
    jobs_file = folder / "jobs.jsonl"
    jobs_file.write_text("".join(f"{json.dumps(line, ensure_ascii=False)}\n" for line in lines))
    base = ["run", "--jobs", str(jobs_file), "--model", str(model), *_DEFAULTS]

    started = time.monotonic()
    refused = run_svdpp([*base, "--world", "2", "--out", str(folder / "none"), "--json"], folder)
    refused_seconds = time.monotonic() - started
    wrong.check(
        refused.returncode in (2, 4), f"jobs file with faults: exit code {refused.returncode}"
    )
    named = len(_named_lines(refused.stdout + refused.stderr))
    wrong.check(named == faults, f"{named} of {faults} faulty lines are named")
    wrong.check(
        not list((folder / "none").glob("*.mp4")), "clips were made from a jobs file with faults"
    )

    made, run_kills = folder / "made", 0
    command = [*base, "--world", "2", "--out", str(made), "--keep-going", "--resume"]
    command += ["--latents-dir", str(folder / "latents")]
    for attempt in range(kills + 1):
        number = run_and_kill(command, folder, made, attempt < kills, jobs - faults, chance)
        run_kills += number < 0
    names = sorted(path.name for path in made.glob("*.mp4"))
    wrong.check(len(names) == jobs - faults, f"{len(names)} clips of {jobs - faults}")
    wrong.check(not list((folder / "latents").glob("*")), "latent checkpoints are left")
    wrong.extend(f"process {pid} is left" for pid in marked(folder.name))

    proof = run_svdpp(["verify", str(made), "--json"], folder)
    wrong.check(
        proof.returncode == 0, f"verify: exit code {proof.returncode}: {proof.stderr[-500:]}"
    )
    proven = proof.stdout.count('"bitwise equal"')

    served, server_kills = folder / "served", 0
    with Server(folder, model) as server:
        # The options for device, threads and LoRA folder are left out, because they belong to the
        # server.
        command = ["run", "--jobs", str(jobs_file), "--model", str(model), *_SAMPLING]
        command += ["--server", server.url, "--out", str(served), "--keep-going", "--resume"]
        process = start(command, folder)
        for _ in range(kills):
            wait_for_clips(process, served, chance.randint(5, 40))
            server.kill()
            server_kills += 1
        process.wait()
    names_served = sorted(path.name for path in served.glob("*.mp4"))
    wrong.check(
        names_served == names,
        f"the server made {len(names_served)} clips, not the {len(names)} of the run",
    )
    for name in {*names} & {*names_served}:
        ours, theirs = metadata(made / name), metadata(served / name)
        for field in ("latents_sha256", "frames_sha256", "seed", "prompt"):
            wrong.check(
                ours[field] == theirs[field], f"{name}: the clip of the server has another {field}"
            )
    return {
        "jobs": jobs,
        "faulty": named,
        "seconds_to_refuse": round(refused_seconds, 1),
        "made": len(names),
        "run_kills": run_kills,
        "resumed": sum(metadata(made / name)["resumed_from_step"] > 0 for name in names),
        "proven": proven,
        "by_server": len(names_served),
        "server_kills": server_kills,
        "minutes": round((time.monotonic() - begun) / 60, 1),
        "wrong": list(wrong)[:20],
    }


def make_lines(folder: Path, count: int, chance: random.Random) -> Iterator[dict[str, Any]]:
    """Yield the fields of `count` random lines of a jobs file, and save the images they name."""
    (folder / "notes.txt").write_text("no image\n")
    for index in range(6):
        image = Image.effect_noise((70 + 20 * index, 80), 60).convert("RGB")
        image.save(folder / f"photo {index}.png")
    for index in range(count):
        line: dict[str, Any] = {"prompt": chance.choice(_WORDS), "seed": index}
        if index % 3:
            line["image"] = f"photo {chance.randrange(6)}.png"
        if index % 2:
            line["width"], line["height"] = chance.choice(_SIZES)
        if index % 5 == 0:
            line["lora"] = {
                "name": f"loras/{chance.choice(('ink', 'oil'))}.safetensors",
                "scale": 0.8,
            }
        if index % 7 == 0:
            line["steps"] = chance.randint(2, _STEPS)
        if index % 11 == 0:
            line["guidance_scale"] = 1.0
        yield line


def _named_lines(text: str) -> set[int]:
    """Return the line numbers of a jobs file that an error message in JSON names."""
    error, _ = json.JSONDecoder().raw_decode(text[text.index("{") :])
    error = error.get("error", error)
    return {entry["line"] for entry in error["details"]["errors"]}


# --- processes -----------------------------------------------------------------------------------


def run_svdpp(arguments: list[str], folder: Path) -> subprocess.CompletedProcess[str]:
    """Run a command of svdpp, wait until it has ended, and return its exit code and output."""
    process = start(arguments, folder, capture=True)
    out, err = process.communicate()
    return subprocess.CompletedProcess(arguments, process.returncode, out, err)


def start(arguments: list[str], folder: Path, *, capture: bool = False) -> subprocess.Popen[str]:
    """Start a command of svdpp in a new process group.

    With `capture`, the command's output goes to pipes, otherwise to a log file.
    """
    log = None if capture else (folder / "log.txt").open("a")
    pipe = subprocess.PIPE if capture else log
    return subprocess.Popen(
        [sys.executable, "-m", "svdpp", *arguments],
        stdout=pipe,
        stderr=pipe,
        text=True,
        env={**os.environ, MARK: folder.name},
        start_new_session=True,
    )


def run_and_kill(
    command: list[str], folder: Path, made: Path, kills: bool, count: int, chance: random.Random
) -> int:
    """Start `svdpp run`, and return its exit code. If `kills` is true, kill it after some clips."""
    process = start(command, folder)
    if kills:
        wait_for_clips(process, made, chance.randint(10, max(10, count // 3)))
        process.send_signal(signal.SIGKILL)
    code = process.wait()
    deadline = time.monotonic() + 30.0
    while marked(folder.name) and time.monotonic() < deadline:
        time.sleep(0.2)
    return code


def wait_for_clips(process: subprocess.Popen[str], folder: Path, count: int) -> None:
    """Wait until a running process has written `count` more clips into a folder, or has ended."""
    before = len(list(folder.glob("*.mp4")))
    while process.poll() is None and len(list(folder.glob("*.mp4"))) < before + count:
        time.sleep(0.1)


def metadata(clip: Path) -> dict[str, Any]:
    """Return a clip's metadata: the content of the JSON file beside it."""
    found: dict[str, Any] = json.loads(clip.with_name(f"{clip.name}.json").read_text())
    return found


class Server:
    """Process of `svdpp serve` on a free port, which can be killed and started again."""

    def __init__(self, folder: Path, model: Path) -> None:
        port = free_port()
        self.url = f"http://127.0.0.1:{port}"
        sizes = ",".join(f"{width}x{height}" for width, height in _SIZES)
        self._folder = folder
        self._command = ["serve", "--model", str(model), *_DEFAULTS, "--world", "2"]
        self._command += ["--data", str(folder / "data"), "--port", str(port), "--sizes", sizes]
        self._command += ["--lora-dir", str(folder / "loras")]
        self._start()

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.send_signal(signal.SIGTERM)
        self._process.wait()

    def _start(self) -> None:
        self._process = start(self._command, self._folder)
        while self._process.poll() is None:
            try:
                if httpx.get(f"{self.url}/ready", trust_env=False).status_code == 200:
                    return
            except httpx.TransportError:
                time.sleep(0.2)
        raise RuntimeError(f"the server ended: {(self._folder / 'log.txt').read_text()[-2000:]}")

    def kill(self) -> None:
        """Kill the process of `svdpp serve`, and start it again."""
        self._process.kill()
        self._process.wait()
        self._start()


if __name__ == "__main__":
    sys.exit(main())
