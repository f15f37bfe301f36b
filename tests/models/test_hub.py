"""Downloads from the hub: the hub's own library, a cache, and a server on this machine."""

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
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_checkpoint(tmp_path_factory.mktemp("tiny") / "tiny")


def error_of(name: str, **options: Any) -> ModelError:
    """The error for model `name`; checks what every such error must have."""
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
    """A hub that answers every request with one kind of error."""

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
        """Prints nothing."""


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty hub cache, and a token that no message may contain."""
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
    ("status", "error_code", "message", "hint"),
    [
        (
            403,
            "GatedRepo",
            "accept the licence",
            "https://huggingface.co/org/tiny, then: hf auth",
        ),
        (404, "RepoNotFound", "nor a model on the hub", "hf auth login"),
        (404, "RevisionNotFound", "has no revision 'v9'", "omit --revision"),
        (401, "", "the hub answered 401", "hf auth login"),
        (400, "", "the hub is unreachable", "hf download org/tiny"),
    ],
)
def test_hub_answers_with_an_error(
    hub: type[Hub], status: int, error_code: str, message: str, hint: str
) -> None:
    hub.status, hub.error_code = status, error_code
    error = error_of("org/tiny", revision="v9")
    assert message in error.message
    assert hint in error.hint
    assert TOKEN not in error.message + error.hint


@pytest.mark.parametrize("switch", ["local_files_only", "HF_HUB_OFFLINE", "no server"])
def test_hub_is_unreachable(cache: Path, monkeypatch: pytest.MonkeyPatch, switch: str) -> None:
    assert not cache.exists()
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", "http://127.0.0.1:1")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", switch == "HF_HUB_OFFLINE")
    huggingface_hub.close_session()  # a new session reads the changed settings
    error = error_of("org/tiny", local_files_only=switch == "local_files_only")
    huggingface_hub.close_session()
    assert "'org/tiny' is not fully cached here" in error.message
    expected = "run hf download org/tiny with a network connection, or use --model demo"
    assert error.hint == expected


def test_disk_full_while_downloading(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> str:
        raise OSError(28, "No space left on device", "/cache/blob")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
    assert "cannot be downloaded (No space left on device)" in error_of("org/tiny").message


def test_token_in_a_model_name_is_redacted(cache: Path) -> None:
    assert not cache.exists()
    error = error_of(f"org/{TOKEN}", local_files_only=True)
    assert TOKEN not in error.message + error.hint


def test_commit_of_a_cached_snapshot(tiny: Path, cache: Path) -> None:
    repository = cache / "models--org--tiny"
    shutil.copytree(tiny, repository / "snapshots" / COMMIT)
    (repository / "refs").mkdir()
    (repository / "refs/main").write_text(COMMIT)
    found = find_checkpoint(ModelConfig(name="org/tiny", local_files_only=True))
    assert (found.name, found.revision) == ("org/tiny", COMMIT)
    (repository / "snapshots" / COMMIT / UNET).unlink()
    error = error_of("org/tiny", local_files_only=True)
    assert f"{UNET} is missing" in error.message
    assert error.hint == "hf download org/tiny --force-download"


@pytest.mark.parametrize("tag", ["", ".fp16"])
def test_only_what_is_read_is_downloaded(monkeypatch: pytest.MonkeyPatch, tag: str) -> None:
    """The published repository has all weights in several forms; one file alone has 9.6 GB."""
    requested: dict[str, Any] = {}

    def record(*_: object, **options: Any) -> str:
        requested.update(options)
        raise huggingface_hub.errors.LocalEntryNotFoundError("recorded")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", record)
    error_of(DEFAULT_MODEL, variant=tag[1:] or None)
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
    matched = huggingface_hub.utils.filter_repo_objects(
        wanted | unwanted, allow_patterns=requested["allow_patterns"]
    )
    assert set(matched) == wanted


class _Served(Hub):
    """A hub with one model, which records the requested files."""

    folder: ClassVar[Path]
    requested: ClassVar[list[str]]

    def do_GET(self) -> None:
        files = [path for path in self.folder.rglob("*") if path.is_file()]
        names = [path.relative_to(self.folder).as_posix() for path in files]
        if "/tree/" in self.path:
            tree = [{"type": "file", "path": name, "size": 1, "oid": name} for name in names]
            answer = json.dumps(tree).encode()
        elif self.path.startswith("/api/models/org/tiny"):
            siblings = [{"rfilename": name} for name in names]
            answer = json.dumps({"id": "org/tiny", "sha": COMMIT, "siblings": siblings}).encode()
        elif not self.path.startswith("/org/tiny/"):  # some other request of the library
            self.send_error(404)
            return
        else:
            name = self.path.removeprefix(f"/org/tiny/resolve/{COMMIT}/")
            self.requested.append(name)
            answer = (self.folder / name).read_bytes()
        self.send_response(200)
        self.send_header("X-Repo-Commit", COMMIT)
        self.send_header("ETag", hashlib.sha256(answer).hexdigest())
        self.send_header("Content-Length", str(len(answer)))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(answer)

    do_HEAD = do_GET


def test_only_configs_are_downloaded_without_weights(
    hub: type[Hub], tiny: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`plan --memory` needs only configs; afterwards it works without a network."""
    constants = huggingface_hub.constants
    addresses = constants.ENDPOINT + "/{repo_id}/resolve/{revision}/{filename}"
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", addresses)
    for name in ("do_GET", "do_HEAD"):
        monkeypatch.setattr(hub, name, getattr(_Served, name), raising=False)
    hub.folder, hub.requested = tiny, []  # type: ignore[attr-defined]
    model = ModelConfig(name="org/tiny")
    found = find_checkpoint(model, weights=False)
    requested: list[str] = hub.requested  # type: ignore[attr-defined]
    assert "unet/config.json" in requested
    assert not [name for name in requested if "safetensors" in name]
    assert not list(cache.rglob("*.safetensors"))
    assert (found.revision, found.num_frames) == (COMMIT, 4)

    cached = ModelConfig(name="org/tiny", local_files_only=True)
    answer = svdpp_here("plan", "--memory", "--model", "org/tiny", "--local-files-only", "--json")
    assert answer.code == 0, answer.err
    assert json.loads(answer.out)["costs"]["denoise_weights_gib"] > 0
    with pytest.raises(ModelError, match="not fully cached"):
        find_checkpoint(cached)
    find_checkpoint(model)
    assert UNET in requested
