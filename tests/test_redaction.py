"""What must not be shown is taken out, and nothing else is; names in clips' JSON lead back."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from svdpp.errors import located_path, recorded_name, recorded_path, redact, redact_all

TOKEN = "hf_" + "aB3" * 11 + "x"


@pytest.fixture(autouse=True)
def home(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/al")


def test_tokens_and_passwords_are_taken_out_of_texts_but_not_of_keys() -> None:
    value = {TOKEN: [f"--model {TOKEN}/x", 1, None, True, {"a": ("http://me:pass@host/x",)}]}
    shown = {TOKEN: ["--model hf_***/x", 1, None, True, {"a": ["http://***@host/x"]}]}
    assert redact_all(value) == shown
    assert redact_all(["'/home/al/out' is full", "file:/home/al/x"]) == [
        "'~/out' is full",
        "file:~/x",
    ]
    others = [
        "/home/alice/x",
        "/mnt/home/al/x",
        "hf_internal and hf_short",
        "mail me@host, clip c0 @14",
        "https://host/a@b",
    ]
    assert redact_all(others) == others


def test_values_of_secret_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HF_TOKEN", "AWS_SECRET_ACCESS_KEY", "api_key", "DB_PASSWORD", "PGPASSWD"):
        monkeypatch.setenv(name, f"correct {name}")
        assert redact(f"a correct {name}!") == "a ***!"
    monkeypatch.setenv("SHORT_TOKEN", "1")
    monkeypatch.setenv("LONGER_TOKEN", "correct HF_TOKEN battery")
    assert redact("1 correct HF_TOKEN battery") == "1 ***"


@pytest.mark.parametrize(
    ("path", "folder", "recorded"),
    [
        ("/home/al/pics/a.jpg", "/home/al/out", "../pics/a.jpg"),
        ("/home/al/pics/a.jpg", "/home/al", "pics/a.jpg"),
        ("/home/al/pics/a.jpg", "/data/out", "~/pics/a.jpg"),
        ("/data/a.jpg", "/data/out", "../a.jpg"),
        ("/data/a.jpg", "/home/al/out", "../../../data/a.jpg"),
        ("/home/alice/a.jpg", "/home/al/out", "../../alice/a.jpg"),
        ("/data/out/~/a.jpg", "/data/out", "./~/a.jpg"),
        ("/data/out/~a.jpg", "/data/out", "./~a.jpg"),
    ],
)
def test_recorded_paths_lead_back(path: str, folder: str, recorded: str) -> None:
    assert recorded_path(path, folder) == recorded
    assert os.path.normpath(located_path(recorded, folder)) == path


def test_a_record_is_read_in_another_home(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/Users/eve")
    assert located_path("~/pics/a.jpg", "/data/out") == Path("/Users/eve/pics/a.jpg")


def test_recorded_models() -> None:
    names = {
        "/home/al/models/svd/": "~/models/svd",
        "/data/svd": "/data/svd",
        f"{TOKEN}/x": "hf_***/x",
        "~/models/svd": "~/models/svd",
    }
    assert {name: recorded_name(name) for name in names} == names


def test_a_home_behind_a_link_is_found_under_both_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "disk7").mkdir()
    (tmp_path / "me").symlink_to(tmp_path / "disk7")
    monkeypatch.setenv("HOME", str(tmp_path / "me"))
    assert {recorded_name(f"{tmp_path}/{name}/a") for name in ("me", "disk7")} == {"~/a"}
