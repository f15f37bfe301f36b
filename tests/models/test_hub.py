"""Whether a model comes from the hub: its own library, a cache, and a server on this machine."""

from __future__ import annotations

import hashlib
import json
import shutil
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any, ClassVar

import huggingface_hub
import pytest

from svdpp.config import DEFAULT_MODEL, ModelConfig
from svdpp.errors import ModelError
from svdpp.models.checkpoint import find_checkpoint
from tests.cli.shell import svdpp_here
from tests.models.builders import save_tiny_checkpoint

UNET = "unet/diffusion_pytorch_model.safetensors"
COMMIT = "0123456789abcdef0123456789abcdef01234567"
TOKEN = "hf_" + "x" * 34


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_checkpoint(tmp_path_factory.mktemp("sound") / "tiny")


def fault_of(name: str, **options: Any) -> ModelError:
    """The error that finding `name` ends with, after the checks that hold for all of them."""
    with pytest.raises(ModelError) as caught:
        find_checkpoint(ModelConfig(name=name, **options))
    error = caught.value
    assert error.exit_code == 5
    for text in (error.message, error.hint):
        assert text
        assert text.isprintable()
        assert len(text) < 400
    return error


class Hub(BaseHTTPRequestHandler):
    """Answers every question as the hub does for one kind of trouble."""

    status: ClassVar[int] = 200
    error_code: ClassVar[str] = ""

    def do_GET(self) -> None:
        self.send_response(type(self).status)
        self.send_header("X-Error-Code", type(self).error_code)
        self.send_header("X-Error-Message", f"denied for {TOKEN}")
        self.send_header("Content-Length", "0")
        self.end_headers()

    do_HEAD = do_GET

    def log_message(self, *args: object) -> None:
        """Says nothing."""


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty hub cache, and a token that no message may hold."""
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    return tmp_path / "hub"


@pytest.fixture
def hub(cache: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[type[Hub]]:
    assert not cache.exists()
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    huggingface_hub.close_session()
    handler = type("OneHub", (Hub,), {})
    server = HTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    url = f"http://127.0.0.1:{server.server_port}"
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", url)
    yield handler
    huggingface_hub.close_session()
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.mark.parametrize(
    ("status", "error_code", "sentence", "mend"),
    [
        (
            403,
            "GatedRepo",
            "accepted its licence",
            "https://huggingface.co/org/tiny, then: hf auth",
        ),
        (404, "RepoNotFound", "no such model on the hub", "hf auth login"),
        (404, "RevisionNotFound", "has no revision 'v9'", "leave --revision out"),
        (401, "", "the hub answered 401", "hf auth login"),
        (400, "", "out of reach", "hf download org/tiny"),
    ],
)
def test_hub_says_no(
    hub: type[Hub], status: int, error_code: str, sentence: str, mend: str
) -> None:
    hub.status, hub.error_code = status, error_code
    error = fault_of("org/tiny", revision="v9")
    assert sentence in error.message
    assert mend in error.hint
    assert TOKEN not in error.message + error.hint


@pytest.mark.parametrize("switch", ["local_files_only", "HF_HUB_OFFLINE", "no server"])
def test_hub_out_of_reach(cache: Path, monkeypatch: pytest.MonkeyPatch, switch: str) -> None:
    assert not cache.exists()
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", "http://127.0.0.1:1")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", switch == "HF_HUB_OFFLINE")
    huggingface_hub.close_session()  # the session is made for the settings of its time
    error = fault_of("org/tiny", local_files_only=switch == "local_files_only")
    huggingface_hub.close_session()
    assert "'org/tiny' is not whole on this machine" in error.message
    assert error.hint == "hf download org/tiny where there is a network, or --model demo"


def test_disk_full_while_downloading(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> str:
        raise OSError(28, "No space left on device", "/cache/blob")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
    assert "cannot be downloaded (No space left on device)" in fault_of("org/tiny").message


def test_token_in_place_of_a_name_is_hidden(cache: Path) -> None:
    assert not cache.exists()
    error = fault_of(f"org/{TOKEN}", local_files_only=True)
    assert TOKEN not in error.message + error.hint


def test_cached_snapshot_gives_its_commit(sound: Path, cache: Path) -> None:
    repository = cache / "models--org--tiny"
    shutil.copytree(sound, repository / "snapshots" / COMMIT)
    (repository / "refs").mkdir()
    (repository / "refs/main").write_text(COMMIT)
    found = find_checkpoint(ModelConfig(name="org/tiny", local_files_only=True))
    assert (found.name, found.revision) == ("org/tiny", COMMIT)
    (repository / "snapshots" / COMMIT / UNET).unlink()
    error = fault_of("org/tiny", local_files_only=True)
    assert f"{UNET} is missing" in error.message
    assert error.hint == "hf download org/tiny --force-download"


@pytest.mark.parametrize("tag", ["", ".fp16"])
def test_only_what_is_read_is_downloaded(monkeypatch: pytest.MonkeyPatch, tag: str) -> None:
    """The published repository holds each weight in several forms, 9.6 GB in one file alone."""
    asked: dict[str, Any] = {}

    def record(*_: object, **options: Any) -> str:
        asked.update(options)
        raise huggingface_hub.errors.LocalEntryNotFoundError("enough")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", record)
    fault_of(DEFAULT_MODEL, variant=tag[1:] or None)
    wanted = {
        "model_index.json",
        "feature_extractor/preprocessor_config.json",
        "image_encoder/config.json",
        "scheduler/scheduler_config.json",
        "unet/config.json",
        "vae/config.json",
        f"image_encoder/model{tag}.safetensors",
        f"unet/diffusion_pytorch_model{tag}-00001-of-00002.safetensors",
        f"unet/diffusion_pytorch_model.safetensors.index{tag}.json",
        f"vae/diffusion_pytorch_model{tag}.safetensors",
    }
    other = ".fp16" if not tag else ""
    unwanted = {
        "svd_xt.safetensors",
        "README.md",
        "pipeline.py",
        "unet/diffusion_pytorch_model.bin",
        f"image_encoder/model{other}.safetensors",
        f"unet/diffusion_pytorch_model{other}-00001-of-00002.safetensors",
        f"vae/diffusion_pytorch_model{other}.safetensors",
    }
    kept = huggingface_hub.utils.filter_repo_objects(
        wanted | unwanted, allow_patterns=asked["allow_patterns"]
    )
    assert set(kept) == wanted


class _Served(Hub):
    """A hub that has one model, and remembers which of its files were asked for."""

    folder: ClassVar[Path]
    asked: ClassVar[list[str]]

    def do_GET(self) -> None:
        files = [path for path in self.folder.rglob("*") if path.is_file()]
        names = [path.relative_to(self.folder).as_posix() for path in files]
        if "/tree/" in self.path:
            tree = [{"type": "file", "path": name, "size": 1, "oid": name} for name in names]
            answer = json.dumps(tree).encode()
        elif self.path.startswith("/api/models/org/tiny"):
            siblings = [{"rfilename": name} for name in names]
            answer = json.dumps({"id": "org/tiny", "sha": COMMIT, "siblings": siblings}).encode()
        elif not self.path.startswith("/org/tiny/"):  # some question of the library's own
            self.send_error(404)
            return
        else:
            name = self.path.removeprefix(f"/org/tiny/resolve/{COMMIT}/")
            self.asked.append(name)
            answer = (self.folder / name).read_bytes()
        self.send_response(200)
        self.send_header("X-Repo-Commit", COMMIT)
        self.send_header("ETag", hashlib.sha256(answer).hexdigest())
        self.send_header("Content-Length", str(len(answer)))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(answer)

    do_HEAD = do_GET


def test_configs_alone_bring_no_weight(
    hub: type[Hub], sound: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What `plan --memory` is told from; afterwards it is found without a network, too."""
    constants = huggingface_hub.constants
    addresses = constants.ENDPOINT + "/{repo_id}/resolve/{revision}/{filename}"
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", addresses)
    for name in ("do_GET", "do_HEAD"):
        monkeypatch.setattr(hub, name, getattr(_Served, name), raising=False)
    hub.folder, hub.asked = sound, []  # type: ignore[attr-defined]
    model = ModelConfig(name="org/tiny")
    found = find_checkpoint(model, weights=False)
    asked: list[str] = hub.asked  # type: ignore[attr-defined]
    assert "unet/config.json" in asked
    assert not [name for name in asked if "safetensors" in name]
    assert not list(cache.rglob("*.safetensors"))
    assert (found.revision, found.num_frames) == (COMMIT, 4)

    there = ModelConfig(name="org/tiny", local_files_only=True)
    answer = svdpp_here("plan", "--memory", "--model", "org/tiny", "--local-files-only", "--json")
    assert answer.code == 0, answer.err
    assert json.loads(answer.out)["costs"]["denoise_weights_gib"] > 0
    with pytest.raises(ModelError, match="not whole"):
        find_checkpoint(there)
    find_checkpoint(model)
    assert UNET in asked
