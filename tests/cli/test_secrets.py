"""No command prints the path of the user's home, a token or a secret, even if it fails."""

from __future__ import annotations

import shlex
import shutil
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from tests.support.builders import save_tiny_checkpoint
from tests.support.shell import PHOTO, TINY, svdpp_alone, svdpp_here

MARKS = ("markedhome", "markedtoken", "markedsecret")
TOKEN = "hf_markedtoken" + "x" * 20
UNET = "unet/diffusion_pytorch_model.safetensors"


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Home folder of a user, with an image, and a checkpoint that lacks a weight."""
    folder = tmp_path_factory.mktemp("users") / "markedhome"
    file = save_tiny_checkpoint(folder / "models/broken") / UNET
    weights = load_file(file)
    weights.pop("conv_in.weight")
    save_file(weights, file, metadata={"format": "pt"})
    shutil.copy(PHOTO, folder / "rocket.jpg")
    (folder / "text.png").write_text("hello")
    return folder


@pytest.fixture
def env(home: Path) -> dict[str, str]:
    return {
        "HOME": str(home),
        "HF_HOME": str(home / "cache"),
        "HF_TOKEN": TOKEN,
        "STORE_PASSWORD": "markedsecret 1",
    }


def assert_unmarked(*texts: str) -> None:
    for text in texts:
        for mark in MARKS:
            assert mark not in text, text[max(0, text.index(mark) - 200) :][:400]


RUN = f"run {PHOTO} --device cpu"


@pytest.mark.parametrize(
    ("line", "code"),
    [
        ("run {home}/gone.png {home}/text.png --device cpu --model demo", 7),
        ("verify {home}/gone.json", 7),
        (f"{RUN} --model demo --out {{home}}/text.png", 8),
        ("simulate --log-file {home}/text.png/log", 8),
        (f"{RUN} --model {{home}}/gone", 5),
        (f"{RUN} --model {{home}}/text.png", 5),
        (f"{RUN} --model {TOKEN}", 5),
        (f"{RUN} --model 'https://u:markedsecret 1@host/x'", 5),
        (f"{RUN} --model demo --device 'markedsecret 1'", 2),
    ],
)
def test_refusals_show_none(home: Path, env: dict[str, str], line: str, code: int) -> None:
    for more in ((), ("--debug", "--json")):
        answer = svdpp_here(*shlex.split(line.format(home=home)), *more, env=env)
        assert answer.code == code, answer
        assert ("Traceback" in answer.err) == bool(more)
        assert_unmarked(answer.out, answer.err)


@pytest.mark.slow
@pytest.mark.full
def test_a_rank_s_traceback_shows_none(home: Path, env: dict[str, str], tmp_path: Path) -> None:
    """A rank's traceback shows no secret, even with the most verbose output."""
    log = tmp_path / "run.jsonl"
    answer = svdpp_alone(
        *("run", str(home / "rocket.jpg"), "--model", str(home / "models/broken"), *TINY),
        *("--device", "cpu", "--world", "2", "--json", "-vv", "--debug", "--log-file", str(log)),
        *("--out", str(tmp_path / "out")),
        env=env,
    )

    assert answer.code == 5
    assert "model '~/models/broken'" in answer.err
    assert "Traceback" in log.read_text()
    assert_unmarked(answer.out, answer.err, log.read_text())
