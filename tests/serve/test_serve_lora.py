"""A server with a LoRA for each expert, no guidance, and four ranks of one step each."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

pytest.importorskip("fastapi")

from tests.models.tiny_families import save_tiny_wan
from tests.models.tiny_loras import save_tiny_lora
from tests.serve.http_server import HttpServer
from tests.serve.test_serve_families import made

pytestmark = [pytest.mark.processes, pytest.mark.long]

#: As in docs/lora.md.
FOUR_STEPS = ("--world", "4", "--steps", "4", "--guidance-scale", "1", "--param", "flow_shift=5")
SIZES = ("--frames", "5", "--height", "32", "--width", "32", "--max-prompt-tokens", "8")


def test_clips_with_loras_are_proven(tmp_path: Path) -> None:
    folder = save_tiny_wan(tmp_path / "wan", boundary_ratio=0.875)
    high = save_tiny_lora(folder, tmp_path / "high.safetensors", seed=1)
    low = save_tiny_lora(folder, tmp_path / "low.safetensors", part="transformer_2", seed=2)
    model = ("--model", str(folder), "--device", "cpu", "--threads", "1", *SIZES, *FOUR_STEPS)
    loras = ("--lora", f"{high}:high", "--lora", f"{low}:low")
    with HttpServer(tmp_path / "data", *model, *loras) as server:
        server.wait_ready()
        video = made(server, photo=None, prompt="the sea", seed=7)
        assert video["proof"] == "equal", video
        metadata = server.client.get(f"/v1/videos/{video['id']}/metadata").json()
    hashes = [hashlib.sha256(file.read_bytes()).hexdigest() for file in (high, low)]
    assert [each["sha256"] for each in metadata["lora"]] == hashes
