"""`svdpp verify CLIP...` finds every change of a clip, and reports what it has checked."""

from __future__ import annotations

import contextlib
import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from svdpp.config.limits import max_threads
from svdpp.verification import clip_proof
from tests.cli.shell import DEMO, PHOTO, TINY, assert_error, svdpp_here

pytestmark = pytest.mark.processes


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a photograph and, in `out`, three clips: two videos, one of frames."""
    folder = tmp_path_factory.mktemp("made")
    shutil.copy(PHOTO, folder / "rocket.jpg")
    run = ("run", "rocket.jpg", *DEMO, *TINY, "--world", "1", "-q")
    for more in (("--seeds", "0-1"), ("--format", "frames")):
        with contextlib.chdir(folder):
            answer = svdpp_here(*run, *more)
        assert answer.code == 0, answer
    return folder


@pytest.fixture
def out(made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of that folder for a test to change, in the working folder."""
    shutil.copytree(made, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    return tmp_path / "out"


@pytest.fixture
def no_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    def run_reference(*_: object, **__: object) -> None:
        raise AssertionError("it was taken for a clip's metadata")

    monkeypatch.setattr(clip_proof, "run_reference", run_reference)


def _edit(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def test_an_approximation_of_an_earlier_svdpp_is_refused_in_a_sentence(out: Path) -> None:
    _edit(out / "rocket_0.mp4.json", exact=False, draft={"rank": 1, "rounds": 2})
    answer = svdpp_here("verify", "out/rocket_0.mp4")
    assert_error(
        answer, 2, "an approximation that an earlier svdpp made", "svdpp run makes the exact"
    )


def test_a_clip_is_not_recomputed_under_other_threads(out: Path) -> None:
    answer = svdpp_here("verify", str(out / "rocket_0.mp4"), "--threads", "2")
    assert_error(answer, 2, "no effect on a finished clip: --threads", "leave that out")


def test_every_harm_to_a_clip_is_named(out: Path) -> None:
    """One folder with a clip for each change, one command, one process that recomputes."""
    for name in ("deleted", "junk", "edited"):
        for end in (".mp4", ".mp4.json"):
            shutil.copy(out / f"rocket_0{end}", out / f"{name}{end}")
    (out / "deleted.mp4").unlink()
    with (out / "junk.mp4").open("ab") as file:
        file.write(b"junk")
    _edit(out / "edited.mp4.json", latents_sha256="0" * 64)

    answer = svdpp_here("verify", "out", "--json", "-q")
    assert answer.code == 3
    proofs = json.loads(answer.out)
    assert (proofs["schema_version"], proofs["equal"]) == (2, False)
    verdicts = {
        Path(proof["clip"]).name: {check["what"]: check["equal"] for check in proof["checks"]}
        for proof in proofs["clips"]
    }
    whole = {"latent": True, "frames": True, "file": True}
    bad_file = {**whole, "file": False}
    assert verdicts == {
        "rocket_0": whole,
        "rocket_0.mp4": whole,
        "rocket_1.mp4": whole,
        "deleted.mp4": bad_file,
        "junk.mp4": bad_file,
        "edited.mp4": {"latent": False, "frames": True, "file": False},
    }
    details = {Path(proof["clip"]).name: proof["checks"][2]["detail"] for proof in proofs["clips"]}
    assert details["deleted.mp4"] == "there is no 'deleted.mp4'"
    assert "changed or replaced" in details["junk.mp4"]
    assert "the metadata inside says latents_sha256" in details["edited.mp4"]
    assert "3 of 6 clips differ: 'deleted.mp4' is not as recorded: file (there is no" in answer.err


def test_one_clip_in_words(out: Path) -> None:
    answer = svdpp_here("verify", "out/rocket_0", "-q")
    assert answer.code == 0, answer
    lines = answer.out.splitlines()
    assert [line.split()[:2] for line in lines[:3]] == [
        [what, "equal"] for what in ("latent", "frames", "file")
    ]
    assert lines[2].endswith("lossless: its pixels are the recorded frames, bit for bit")
    assert lines[3] == "bitwise equal: out/rocket_0"
    (out / "rocket_1.mp4").unlink()
    gone = svdpp_here("verify", "out/rocket_1.mp4", "-q")
    assert gone.code == 3
    assert "file   MISSING" in gone.out
    assert "DIFFERENT" not in gone.out
    said = "'rocket_1.mp4' is not as recorded: file (there is no 'rocket_1.mp4')"
    assert gone.err == f"error: {said}\n"


def test_several_clips_are_loaded_once(out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One line for each clip; one process for each configuration; other files are skipped."""
    run, computed = clip_proof.run_reference, []

    def run_reference(config: Any, requests: list[Any], **more: Any) -> object:
        computed.append(len(requests))
        return run(config, requests, **more)

    monkeypatch.setattr(clip_proof, "run_reference", run_reference)
    _edit(out / "rocket_1.mp4.json", input="gone.jpg", input_sha256="0" * 64)
    paths = [*sorted(Path("out").glob("*.mp4")), *sorted(Path("out").glob("*.json"))]
    answer = svdpp_here("verify", *map(str, paths))
    assert (answer.code, computed) == (7, [2])
    lines = answer.out.splitlines()
    assert lines[0] == "bitwise equal: out/rocket_0"
    assert lines[1] == "bitwise equal: out/rocket_0.mp4"
    assert lines[2].startswith("not verified: out/rocket_1.mp4.json: the image of 'rocket_1.mp4'")
    assert lines[3] == "2 of 3 clips are bitwise equal"
    assert "error: 1 of 3 clips not verified: the image of 'rocket_1.mp4' is not at" in answer.err


def test_a_moved_clip_and_its_photograph(out: Path) -> None:
    """The photograph has another name or comes from --image; without it there is no proof."""
    elsewhere = out.parent / "elsewhere" / "deep"
    elsewhere.mkdir(parents=True)
    shutil.copy(out / "rocket_0.mp4", elsewhere / "mine.mp4")
    (out.parent / "rocket.jpg").rename(out.parent / "moved.jpg")
    lost = svdpp_here("verify", str(elsewhere / "mine.mp4"), "-q")
    assert_error(lost, 7, "the image of 'mine.mp4' is not at", "--image PATH")
    named = svdpp_here("verify", str(elsewhere / "mine.mp4"), "--image", "moved.jpg", "-q")
    assert named.code == 0, named
    assert "no sha256 of the file is recorded" in named.out
    refused = svdpp_here("verify", "moved.jpg", *DEMO, "--image", "moved.jpg")
    assert_error(refused, 2, "--image is for finished clips")


# --- metadata of strangers ----------------------------------------------------------------------

# tests/test_config.py has all limits.
BEYOND: dict[str, tuple[Any, str]] = {
    "num_inference_steps": (10**30, "--steps must be 1 to 1000"),
    "num_frames": (10**5, "--frames must be 1 to 1024"),
    "height": (33, "--height must be a multiple of 8"),
    "num_threads": (max_threads() + 1, "--threads must be 1 to"),
    "max_guidance_scale": (1e300, "--max-guidance-scale must be"),
    "decode_chunk_size": (0, "--decode-chunk-size must be"),
    "device": ("cuda", ""),
    "model": ("dummy", "names the model 'dummy', which makes no clips"),
}


@pytest.mark.usefixtures("no_reference")
@pytest.mark.parametrize("name", BEYOND)
def test_metadata_beyond_the_limits_is_refused_before_any_work(out: Path, name: str) -> None:
    value, words = BEYOND[name]
    _edit(out / "rocket_0.mp4.json", **{name: value})
    assert_error(svdpp_here("verify", "out/rocket_0.mp4"), 2, words)


def damaged_records(record: dict[str, Any]) -> dict[str, str]:
    """Texts that are not clip metadata, by their defect."""
    texts = {
        "empty": "",
        "cut short": json.dumps(record)[:-9],
        "no object": "[1]",
        "null": "null",
        "deep": "[" * 100_000,
        "not UTF-8": "\udcff",
        "large": json.dumps({**record, "remark": "x" * 1_000_000}),
    }
    for name in (
        *("input", "input_sha256", "latents_sha256", "frames_sha256", "seed", "model", "height"),
        *("dtype", "device", "num_threads", "fps", "format"),
    ):
        texts[f"without {name}"] = json.dumps({n: v for n, v in record.items() if n != name})
    for name, values in {
        "schema_version": (True, 1.0, 2.0, "2", 3, 0, None),
        "exact": ("false", 1, None, {}),
        "input": (7, None, ["a"]),
        "input_sha256": ("", "0" * 63, "0" * 64 + "\n", "G" * 64, 7),
        "file_sha256": ("", 7, ["0" * 64]),
        "output": ("../x.mp4", "", 7, None),
        "seed": ("0", -1, None, 0.5, True, 2**63),
        "height": ("32", None, 32.5, True),
        "num_inference_steps": ("2", 2.0),
        "fps": (None, "7"),
        "max_guidance_scale": ("1", None, True),
        "num_threads": ("1", None, True),
        "memory_opt": (0, "no", None),
        "dtype": ("int8", 7),
        "device": (7, None, "cuda:0"),
        "model": (7, None),
        "fit": (7, "zoom"),
        "versions": ([], {"torch": 2}),
        "conditions": ([], "none"),
    }.items():
        for value in values:
            texts[f"{name}={value!r}"] = json.dumps({**record, name: value})
    return texts


@pytest.mark.usefixtures("no_reference")
def test_verify_refuses_what_is_no_metadata(out: Path) -> None:
    """Any content of a JSON file gives one sentence and exit code 7, not an unexpected error."""
    bad = []
    record = json.loads((out / "rocket_0.mp4.json").read_text())
    for what, text in damaged_records(record).items():
        Path("damaged.json").write_text(text, encoding="utf-8", errors="surrogateescape")
        result = svdpp_here("verify", "damaged.json")
        if result.code != 7 or result.out or len(result.err.splitlines()) > 2:
            bad.append(f"{what}: exit {result.code}: {result.err.splitlines()[0]}")
    assert not bad, "\n".join(bad)


@pytest.mark.usefixtures("no_reference")
def test_photographs_of_strangers_names(out: Path) -> None:
    for value in ("\0", "/dev/zero", "x" * 5000, "~/no.jpg"):
        _edit(out / "rocket_0.mp4.json", input=value, input_sha256="0" * 64)
        answer = svdpp_here("verify", "out/rocket_0.mp4")
        assert answer.code == 7, (value, answer)
        assert "unexpected" not in answer.err
