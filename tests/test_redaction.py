"""What must not be shown is taken out, and nothing else is."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from svdpp.redaction import located_path, recorded_name, recorded_path, redact, redact_all

TOKEN = "hf_" + "aB3" * 11 + "x"


@pytest.fixture(autouse=True)
def home(monkeypatch: pytest.MonkeyPatch) -> str:
    for name in list(os.environ):
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", "/home/al")
    return "/home/al"


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("'/home/al/out' is full", "'~/out' is full"),
        ("/home/al", "~"),
        ("/home/al: gone", "~: gone"),
        ('File "/home/al/x.py", line 3', 'File "~/x.py", line 3'),
        ("file:/home/al/x and /home/al/y", "file:~/x and ~/y"),
        ("/home/alice/x", "/home/alice/x"),
        ("/home/al-2/x", "/home/al-2/x"),
        ("/mnt/home/al/x", "/mnt/home/al/x"),
        ("file:///home/al/x, ../../home/al/x", "file://~/x, ../..~/x"),
        ("al and /home and nothing", "al and /home and nothing"),
        (f"--model {TOKEN}/x", "--model hf_***/x"),
        ("hf_internal and hf_short", "hf_internal and hf_short"),
        ("proxy http://me:pass@host/x", "proxy http://***@host/x"),
        ("mail me@host, clip c0 @14", "mail me@host, clip c0 @14"),
        ("https://host/a@b", "https://host/a@b"),
    ],
)
def test_text(text: str, shown: str) -> None:
    assert redact(text) == shown


@pytest.mark.parametrize(
    "name", ["HF_TOKEN", "AWS_SECRET_ACCESS_KEY", "api_key", "DB_PASSWORD", "PGPASSWD", "X_AUTH"]
)
def test_values_of_secret_variables(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setenv(name, "correct horse")
    monkeypatch.setenv("SHORT_TOKEN", "1")
    monkeypatch.setenv("LONGER_TOKEN", "correct horse battery")
    monkeypatch.setenv("EDITOR", "emacs-without-x")
    text = "a correct horse battery, a correct horse: 1 emacs-without-x"
    assert redact(text) == "a ***, a ***: 1 emacs-without-x"


@pytest.mark.parametrize("home", ["/", "", "relative"])
def test_a_home_that_is_no_folder_s_name_changes_nothing(
    monkeypatch: pytest.MonkeyPatch, home: str
) -> None:
    monkeypatch.setenv("HOME", home)
    assert redact("/ /x relative ''") == "/ /x relative ''"


def test_a_home_behind_a_link_is_found_under_both_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "disk7").mkdir()
    (tmp_path / "me").symlink_to(tmp_path / "disk7")
    monkeypatch.setenv("HOME", str(tmp_path / "me"))
    assert redact(f"{tmp_path}/me/a {tmp_path}/disk7/b {tmp_path}/c") == f"~/a ~/b {tmp_path}/c"


def test_json_values() -> None:
    value = {"/home/al": ["/home/al/x", 1, None, True, {"a": ("/home/al",)}]}
    assert redact_all(value) == {"/home/al": ["~/x", 1, None, True, {"a": ["~"]}]}


@pytest.mark.parametrize(
    ("path", "folder", "recorded"),
    [
        ("/home/al/pics/a.jpg", "/home/al/out", "../pics/a.jpg"),
        ("/home/al/pics/a.jpg", "/home/al", "pics/a.jpg"),
        ("/home/al/pics/a.jpg", "/data/out", "~/pics/a.jpg"),
        ("/home/al/a.jpg", "/", "~/a.jpg"),
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


@pytest.mark.parametrize(
    ("name", "recorded"),
    [
        ("/home/al/models/svd", "~/models/svd"),
        ("/home/al/models/svd/", "~/models/svd"),
        ("/data/svd", "/data/svd"),
        ("stabilityai/stable-video-diffusion-img2vid-xt", None),
        ("demo", None),
        ("~/models/svd", None),
    ],
)
def test_recorded_models(name: str, recorded: str | None) -> None:
    assert recorded_name(name) == (recorded or name)
