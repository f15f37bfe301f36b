"""Command lines that are refused before any work, each with one sentence and an exit code."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest

from svdpp.cli.option_names import option_names
from tests.support.pictures import png
from tests.support.shell import PHOTO, assert_error, svdpp_here

_DEMO = "--model demo --device cpu"
PHOTO_ = shlex.quote(PHOTO)

PLAN = [
    ("--split fair", "invalid value for '--split': 'fair' is not one of 'uniform'"),
    ("--layout auto --decoders 2", "--layout auto chooses --decoders: leave it out"),
    ("--compare --split balanced", "--compare shows all layouts: leave out --split"),
    ("--cfg-parallel 3", "'--cfg-parallel': '3' is not one of 'auto', '1', '2'"),
    ("--decode-ranks 3 --frames 8 --decode-chunk-size 4", "needs 3 chunks of frames, but a clip "),
    ("--costs svd-xt", "--costs 'svd-xt' is neither a file nor a preset"),
    ("--layout auto --device-memory 0", "must be 1 or 4 finite numbers above 0, got '0'"),
    ("--device-memory 9", "has an effect only with --layout auto or --compare"),
    ("--compare --world 0", "--world must be 1 to 65536, got 0"),
    ("--clips 100000000", "--clips must be 1 to 100000, got 100000000"),
    ("--world 4096 --clips 9999 --split alternating", "replicas of 4096 are too many to forecast"),
    ("--world 7 --steps 25", "the nearest step counts that can are 21 and 28"),
    ("--transfer-seconds nan", "--transfer-seconds must be a number from 0 to 1e+09, got nan"),
    ("--share-experts", "--share-experts is for models with two experts"),
    ("--expert-boundary 28", "--expert-boundary must be 1 or more and less than the number of"),
    ("--hosts 2x4 --expert-boundary 5", "cannot be split evenly over 8 stages"),
    ("--world four", "'--gpus': must be a valid integer"),
]

# tests/test_config.py tests the range of each number.
RUN = [
    ("--dtype int8", "'--dtype': 'int8' is not one of 'fp32'"),
    ("--amp", "tool of training, where a GradScaler scales the loss"),
    ("--dtype amp", "tool of training, where a GradScaler scales the loss"),
    ("--gpus=5 --steps 9", "or use --gpus 3, or use --split alternating"),
    ("-o a.avi", "unsupported output format: -o a.avi (supported: .mp4, .gif, .webp)"),
    ("-o a.mp4 --format gif", "unsupported output format: -o a.mp4 (supported: .gif)"),
    ("-o a.mp4 --seeds 1-2", "would both get the name 'a'"),
    ("--seed -1", "--seed must be 0 to 9223372036854775807, got -1"),
    ("--seeds 5-1", "--seeds 5-1: the range is empty\nhint: write 1-5"),
    ("--seed 1 --seeds 2", "--seed and --seeds contradict each other"),
    ("--overwrite --skip-existing", "--overwrite and --skip-existing contradict"),
    ("--model dummy", "the dummy model makes no video files"),
    ("--prompts two.txt", "model 'demo' takes no prompt"),
    ("--max-megapixels 60", "--max-megapixels must be 1 to 50, got 60"),
    ("--trace photo.jpg", "--trace must end in .json, got 'photo.jpg'"),
]

# Only refusals that `run` does not have.
SIMULATE = [
    ("--frames 4", "--frames has no effect on the dummy model"),
    ("--latent-shape 1 4 0 8 8", "latent shape 1 4 0 8 8 needs 5 positive"),
]
VERIFY = [
    (f"--model dummy {PHOTO_}", "the dummy model takes no images"),
    ("a.json b.jpg", "'a.json' is a finished clip, but 'b.jpg' is not"),
    ("a.json b.json --gpus 2 --fps 7", "and not with --fps, --gpus"),
    ("a.json --share-experts", "and not with --share-experts"),
]
TRACE = "--latent-shape 1 4 2 8 8 --trace file/t.json"
OTHERS = [
    (f"run nope.png {_DEMO}", 7, "'nope.png' does not exist"),
    (f"verify nope.png {_DEMO}", 7, "'nope.png' does not exist"),
    (f"run '' {_DEMO}", 7, "the name of an input is empty"),
    (f"run folder {_DEMO}", 7, "'folder' is a folder without images"),
    (
        f"run big.png {_DEMO}",
        7,
        "the limit is 24 million\nhint: make it smaller, or raise --max-megapixels",
    ),
    *(
        (f"run {PHOTO_} {_DEMO} --out there --format {kind}", 2, "1 output exists already, the ")
        for kind in ("mp4", "frames")
    ),
    ("verify run.json", 7, "run.json' is a run's manifest or table of clips, not"),
    *(
        (f"run {PHOTO_} {_DEMO} --out {out}", 8, repr(out))
        for out in ("file", "file/below", "/proc/svdpp", "/proc/1/svdpp")
    ),
    *(
        (f"{command} --log-file file/log", 8, "cannot write the log 'file/log'")
        for command in (f"run {PHOTO_} {_DEMO}", "simulate", f"verify {_DEMO}")
    ),
    (f"simulate {TRACE}", 8, "a folder above it, is a file"),
    (f"profile {_DEMO} --out folder", 8, "'folder'"),
    (
        f"run {PHOTO_}",
        2,
        "on a CPU\nhint: use --device cpu to run the model anyway, or use the small --model demo "
        "or demo-text",
    ),
    (f"profile {_DEMO} --repeats 0", 2, "--repeats must be 1 or more, got 0"),
]
BENCH = [
    ("", 2, "one configuration, got none\nhint: try: svdpp bench smoke"),
    ("smoke --comapre a", 2, "no such option: --comapre\nhint: use --SECTION.FIELD=VALUE"),
    ("smoke --pipeline.world=3", 2, "4 steps"),
    ("smoke --precision=amp", 2, "tool of training, where a GradScaler scales the loss"),
    ("smoke --model.name=/absent", 5, "/absent"),
    ("smoke --workload.images=[/absent.jpg]", 7, "/absent.jpg"),
    ("smoke --results /dev/null", 8, "/dev/null"),
    ("smoke --compare a b", 2, "and no configuration"),
    ("--compare /absent/a /absent/b", 7, "/absent/a/summary.json"),
]
REFUSED = [
    *((f"plan {options}", 2, words) for options, words in PLAN),
    *((f"run {PHOTO_} {_DEMO} {options}", 2, words) for options, words in RUN),
    *((f"simulate {options}", 2, words) for options, words in SIMULATE),
    *((f"verify {options}", 2, words) for options, words in VERIFY),
    *((f"bench {options}", code, words) for options, code, words in BENCH),
    *OTHERS,
]


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Create the files that the refused command lines name, in an empty working folder."""
    monkeypatch.chdir(tmp_path)
    Path("file").write_bytes(b"mine")
    Path("folder").mkdir()
    Path("there/rocket_0").mkdir(parents=True)
    for name in ("rocket_0/mine.png", "rocket_0.mp4"):
        Path("there", name).write_bytes(b"mine")
    Path("two.txt").write_text("a sea\na wave\n")
    Path("run.json").write_text("{}")
    Path("big.png").write_bytes(png(6000, 4001, 1, 0, bytes(751 * 4001)))


def _modification_times() -> dict[Path, int]:
    """Return the modification time of each file in the working folder, and 0 for each folder.

    A folder's own time is ignored, because it changes when a lock file is created and removed.
    """
    return {path: path.is_file() and path.stat().st_mtime_ns for path in Path().rglob("*")}


@pytest.mark.usefixtures("files")
@pytest.mark.parametrize(
    ("line", "code", "words"),
    REFUSED,
    ids=[f"{code}: {line.replace(PHOTO, 'PHOTO')}: {words}" for line, code, words in REFUSED],
)
def test_refused(line: str, code: int, words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("svdpp.driver.pipeline.Pipeline.__enter__", None)  # no ranks can start
    command, before = shlex.split(line), _modification_times()
    assert_error(svdpp_here(*command), code, words)
    as_json = svdpp_here(*command, "--json")
    assert_error(as_json, code, words)
    field = json.loads(as_json.out)["error"]["field"]
    assert field is None or field in option_names() or command[0] == "bench", field
    assert _modification_times() == before


@pytest.mark.parametrize(
    ("line", "words", "hint"),
    [
        (
            "run --json --seed",
            "option '--seed' requires an argument",
            "svdpp run --help shows",
        ),
        ("plan --wrold 3", "no such option: --wrold", "did you mean --world?"),
        ("run --sedes 3", "no such option: --sedes", "did you mean --seeds?"),
        ("run --qqq", "no such option: --qqq", "svdpp run --help shows"),
        ("run -x", "no such option: -x", ""),
        ("plann", "no such command 'plann'. Did you mean 'plan'?", "svdpp --help shows its"),
        ("report", "missing argument 'FOLDER'", "svdpp report --help shows its usage"),
    ],
)
def test_wrong_usage_is_one_sentence_and_a_suggestion(line: str, words: str, hint: str) -> None:
    assert_error(svdpp_here(*line.split()), 2, words, f"\nhint: {hint}")
    as_json = svdpp_here(line.split()[0], "--json", *line.split()[1:])
    assert_error(as_json, 2)
    assert "error" in as_json.out


@pytest.mark.parametrize(
    "line",
    [
        "serve --queue ''",
        "serve --data ''",
        "serve --queue postgresql:// --files ''",
        "serve --api-key-file ''",
        "run --model ''",
        "run --out ''",
        "run --log-file ''",
        "run --device ''",
        "plan --costs ''",
        "bench --compare a ''",
        "report ''",
    ],
)
def test_an_empty_value_is_refused(line: str) -> None:
    """An empty value is refused. A shell passes one if a variable is not set."""
    assert_error(svdpp_here(*shlex.split(line)), 2, "empty")


TORCHRUN = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2"}
RUN_DEMO = f"run {PHOTO_} {_DEMO}"


@pytest.mark.parametrize(
    ("line", "env", "words"),
    [
        (f"{RUN_DEMO} --world 4", TORCHRUN, "--world 4 disagrees with the launcher's"),
        ("verify --world 4", TORCHRUN, "--world 4 disagrees with the launcher's"),
        ("verify", TORCHRUN, "MASTER_ADDR is not set"),
        (f"{RUN_DEMO} --layout auto", TORCHRUN, "under a launcher only rank 0 knows it"),
        (f"{RUN_DEMO} --dry-run", TORCHRUN, "--dry-run starts no ranks"),
        (RUN_DEMO, {"RANK": "0"}, "invalid torchrun environment"),
        (RUN_DEMO, {**TORCHRUN, "RANK": "2"}, "invalid torchrun environment"),
        (RUN_DEMO, {"PIPELINE_BACKEND": "nccl"}, "PIPELINE_BACKEND=nccl"),
    ],
    ids=str,
)
def test_worlds_of_torchrun(line: str, env: dict[str, str], words: str) -> None:
    assert_error(svdpp_here(*shlex.split(line), env=env), 2, words)
