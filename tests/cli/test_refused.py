"""Wrong requests: each command line is refused with exit code 2 and a sentence, before any work."""

from __future__ import annotations

import os
import shlex

import pytest

from tests.cli.shell import PHOTO, assert_error, svdpp_here

_DEMO = "--model demo --device cpu"

PLAN = [
    ("--split fair", "--split 'fair' is not one of 'uniform', 'balanced'"),
    ("--layout best", "--layout 'best' is not one of 'auto', 'pipeline'"),
    ("--layout auto --decoders 2", "--layout auto chooses the layout: leave out --decoders"),
    ("--compare --split balanced", "--compare shows all layouts: leave out --split"),
    ("--compare --layout auto", "--compare shows all layouts: leave out --layout"),
    ("--cfg-parallel 3", "--cfg-parallel '3' is not one of 'auto', '1', '2'"),
    ("--decode-ranks 3 --frames 8 --decode-chunk-size 4", "needs as many chunks of frames, and a "),
    ("--costs svd-xt", "--costs 'svd-xt' is neither a file nor a preset"),
    ("--layout auto --device-memory 0", "--device-memory must be finite numbers above 0, got '0'"),
    ("--layout auto --device-memory 79,79,47", "names 3 devices, but there are 4 ranks"),
    ("--device-memory 9", "has an effect only with --layout auto or --compare"),
    ("--compare --world 0", "--world must be 1 to 65536, got 0"),
    ("--clips 100000000", "--clips 100000000 is not in the range 1<=x<=100000"),
    ("--world 100000", "--world must be 1 to 65536, got 100000"),
    ("--world 4096 --clips 9999 --split alternating", "replicas of 4096 are too many to forecast"),
    ("--world 7 --steps 25", "the nearest step counts that can are 21 and 28"),
    ("--steps 0", "--steps must be 1 to 1000, got 0"),
    ("--step-seconds 0", "--step-seconds must be above 0"),
    ("--transfer-seconds nan", "--transfer-seconds must be a finite number"),
    ("--share-experts", "--share-experts is for models with two experts"),
    ("--expert-boundary 28", "--expert-boundary must be 1 or more and less than the number of"),
    ("--memory --expert-boundary 9", "leave out --expert-boundary"),
    ("--hosts 2x4 --expert-boundary 5", "cannot be split evenly over 8 stages"),
    ("--world four", "--world 'four' is not a valid integer"),
    ("--world", "--world"),
    ("--step-seconds soon", "--step-seconds 'soon' is not a valid float"),
    ("--bogus", "no such option: --bogus"),
]

# tests/test_config.py has the range of each number.
RUN = [
    ("--decode-chunk-size two", "--decode-chunk-size 'two' is not a valid integer"),
    ("--dtype int8", "--dtype 'int8' is not one of 'fp32'"),
    ("--gpus 0", "--gpus must be 1 to 65536, got 0"),
    ("--timeout 0", "--timeout must be above 0 and at most 604800 s, got 0.0"),
    ("--seed -1", "--seed -1 is not in the range 0<=x<="),
    ("--device tpu", "--device must be cpu, cuda or cuda:N, got 'tpu'"),
    ("--seed 1 --seeds 2", "--seed and --seeds contradict each other"),
    ("--overwrite --skip-existing", "--overwrite and --skip-existing contradict"),
    ("--seeds 1,a", "--seeds takes numbers and ranges such as 1-8 or 1,3,5-7, got '1,a'"),
    ("--model dummy", "the dummy model makes no video files"),
    ("--model ''", "--model is empty"),
    ("--trace photo.jpg", "--trace must end in .json, got 'photo.jpg'"),
    ("--profile photo.jpg", "--profile must end in .json, got 'photo.jpg'"),
]

# What these commands have of their own; the rest is that of `run`.
SIMULATE = [
    ("--clips 0", "--clips 0 is not in the range 1<=x<=100000"),
    ("--frames 4", "--frames has no effect on the dummy model"),
    ("--latent-shape 1 4 0 8 8", "latent shape 1 4 0 8 8 needs 5 positive"),
]
VERIFY = [
    ("--fps 0", "--fps must be 1 to 240 frames a second, got 0"),
    ("--tolerance -1", "--tolerance must be 0 or more, got -1.0"),
    ("--tolerance nan", "--tolerance must be 0 or more, got nan"),
    (f"--model dummy {shlex.quote(PHOTO)}", "the dummy model takes no images"),
    ("a.json b.jpg", "'a.json' is a finished clip, 'b.jpg' is not"),
    ("a.json b.json --gpus 2 --fps 7", ": --gpus, --fps;"),
    ("a.json --share-experts", "finished clip: --share-experts;"),
]
REFUSED = [
    *((f"plan {options}", words) for options, words in PLAN),
    *((f"run {shlex.quote(PHOTO)} {_DEMO} {options}", words) for options, words in RUN),
    *((f"simulate {options}", words) for options, words in SIMULATE),
    *((f"verify {options}", words) for options, words in VERIFY),
]


@pytest.mark.usefixtures("elsewhere", "without_ranks")
@pytest.mark.parametrize(
    ("line", "words"), REFUSED, ids=[line.replace(PHOTO, "PHOTO") for line, _ in REFUSED]
)
def test_refused(line: str, words: str) -> None:
    command = shlex.split(line)
    if command[0] == "verify" and ".json" not in line and "dummy" not in line:
        command += shlex.split(_DEMO)
    assert_error(svdpp_here(*command), 2, words)
    as_json = svdpp_here(*command, "--json")
    assert_error(as_json, 2, words)
    assert "error" in as_json.out
    assert os.listdir() == []


TORCHRUN = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2"}
RUN_DEMO = f"run {shlex.quote(PHOTO)} {_DEMO}"


@pytest.mark.parametrize(
    ("line", "env", "words"),
    [
        (f"{RUN_DEMO} --world 4", TORCHRUN, "--world 4 disagrees with torchrun's"),
        ("verify --world 4", TORCHRUN, "--world 4 disagrees with torchrun's"),
        ("verify", TORCHRUN, "MASTER_ADDR is not set"),
        (f"{RUN_DEMO} --dry-run", TORCHRUN, "--dry-run starts no ranks"),
        (RUN_DEMO, {"RANK": "0"}, "incomplete torchrun environment"),
        (RUN_DEMO, {**TORCHRUN, "RANK": "2"}, "invalid torchrun environment"),
        (RUN_DEMO, {"PIPELINE_BACKEND": "nccl"}, "PIPELINE_BACKEND=nccl"),
    ],
    ids=str,
)
def test_worlds_of_torchrun(line: str, env: dict[str, str], words: str) -> None:
    assert_error(svdpp_here(*shlex.split(line), env=env), 2, words)
