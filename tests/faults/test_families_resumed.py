"""Every family: a rank is killed in the middle of a clip, and `--resume` completes the clip."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path

import pytest

from svdpp.config import OPTION_PARAMS
from svdpp.config.families.registry import FAMILY_SPECS
from tests.faults.conftest import StartCommand
from tests.support.clip_inputs import Inputs, create_inputs
from tests.support.dummies import HANG_SECONDS
from tests.support.family_case import Case
from tests.support.processes import ranks_below, wait_until
from tests.support.range_checks import PROMPT
from tests.support.shell import svdpp_here
from tests.support.tiny_families import CASES, FIRST, save_tiny

pytestmark = [pytest.mark.slow, pytest.mark.full]

#: Rank that is killed: the last one, after its first step.
_RANK = 1


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Inputs:
    """Images and videos of noise, as inputs of the test cases' clips."""
    return create_inputs(tmp_path_factory.mktemp("inputs"))


def _command(case: Case, model: Path, inputs: Inputs) -> list[str]:
    """Return the arguments of `svdpp run` that make a case's clip on two ranks."""
    given = inputs.of(case)
    options = [("--model", str(model)), ("--family", case.family), ("--seed", "3")]
    if FAMILY_SPECS[case.family].takes_prompt:
        options.append(("--prompt", PROMPT))
    if case.negative is not None:
        options.append(("--negative-prompt", case.negative))
    steps = case.sampling.get("num_inference_steps", 4)
    values = {**case.values, "num_inference_steps": steps * (1 + steps % 2)}  # an even number
    for name, value in values.items():
        if name in OPTION_PARAMS:
            options.append((OPTION_PARAMS[name].option, str(value)))
        elif value is not None:
            options.append(("--param", f"{name}={value}"))
    if given.get("last_image"):
        options.append(("--last-image", given["last_image"]))
    options += [("--reference", path) for path in given.get("references", ())]
    options += [("--video", f"{name}={path}") for name, path in given.get("videos", {}).items()]
    options += [("--world", "2"), ("--threads", "1"), ("--device", "cpu")]
    first = [given["image"]] if "image" in given else []
    return ["run", *first, *(word for option in options for word in option)]


@pytest.mark.parametrize("family", FAMILY_SPECS)
def test_a_clip_goes_on_after_a_rank_was_killed(
    start: StartCommand, inputs: Inputs, tmp_path: Path, family: str
) -> None:
    case = CASES[FIRST[family]]
    model = save_tiny(family, tmp_path / "model", image=case.image, **case.changes)
    out, saved = tmp_path / "out", tmp_path / "saved"
    asked = [*_command(case, model, inputs), "--out", str(out), "--latents-dir", str(saved)]
    last = int(asked[asked.index("--steps") + 1]) - 1
    stop = {"kind": "hang", "rank": _RANK, "clip": 0, "place": f"step{last}"}

    command = start(*asked, "--quiet", plan={"stop": stop})
    command.event(kind="Heartbeat", rank=_RANK, step=last)
    (checkpoint,) = wait_until(
        lambda: [*saved.glob("*_step*.safetensors")], HANG_SECONDS, "no latent checkpoint"
    )
    os.kill(ranks_below(command.home)[_RANK], signal.SIGKILL)
    assert command.end(time.monotonic(), 10) == 6
    assert "was killed by SIGKILL" in command.errors
    assert not [*out.glob("*.mp4")]
    step = int(checkpoint.stem.rpartition("_step")[2])
    assert 0 < step <= last

    resumed = svdpp_here(*asked, "--resume")
    assert resumed.code == 0, resumed.err
    (record,) = json.loads((out / "run.json").read_text())["clips"]
    assert (record["state"], record["from_step"]) == ("done", step)
    assert not [*saved.iterdir()]
    (clip,) = out.glob("*.mp4")
    verified = svdpp_here("verify", "--json", str(clip))
    assert verified.code == 0, verified
    checks = {check["what"]: check["equal"] for check in json.loads(verified.out)["checks"]}
    assert {"latent", "frames", "file"} <= checks.keys() <= {"latent", "frames", "audio", "file"}
    assert all(checks.values()), checks
