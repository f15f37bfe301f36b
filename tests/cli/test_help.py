"""Help texts of the commands, aliases of options, and shell completion."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from svdpp.cli.app import COMMANDS, load_command
from svdpp.cli.options.complete import families
from tests.support.shell import parsed, svdpp_alone, svdpp_here


def _listed_options(text: str) -> list[str]:
    """Return the options that a command's help text lists, in its order."""
    return re.findall(r"^│ (--[a-z-]+)", text, re.M)


@pytest.mark.parametrize("name", COMMANDS)
def test_help_fits_a_screen_and_its_examples_are_command_lines(name: str) -> None:
    spec, answer = load_command(name), svdpp_here(name, "--help")

    assert answer.code == 0
    assert svdpp_here(name, "-h") == answer
    text, examples = answer.out.split("\n Examples:")
    assert len(answer.out.splitlines()) <= 60
    whole = svdpp_here(name, "--help-all").out
    assert max(map(len, whole.splitlines())) <= 80
    assert COMMANDS[name].split(":")[0] in " ".join(text.split())
    options = {one.opts[0] for one in spec.params if one.param_type_name == "option"}
    assert {*_listed_options(text)} <= {*_listed_options(whole)} == options
    # Help texts must not have square brackets, because rich reads them as markup.
    assert not any("[" in (one.help or "") for one in spec.params)  # type: ignore[attr-defined]
    shown = [line.strip() for line in examples.strip().splitlines()]
    assert 2 <= len(shown) <= 3
    for example in shown:
        assert example.split()[1] == name
        parsed(example)


def test_help_of_run_shows_the_common_options_in_panels() -> None:
    text = svdpp_here("run", "--help").out
    titles = ["Arguments", "Options", "Output", "Video", "Prompts", "Model and precision", "Layout"]
    assert re.findall(r"^╭─ ([A-Z][a-z ]+) ─", text, re.M) == titles
    common = (
        "prompt prompts jobs negative-prompt model lora out seed seeds steps frames width height"
    )
    common += " fps fit guidance-scale gpus layout decode-chunk-size resume overwrite dry-run"
    assert {*_listed_options(text)} == {
        f"--{name}" for name in [*common.split(), "help", "help-all"]
    }
    whole = svdpp_here("run", "--help-all").out
    assert re.findall(r"^╭─ ([A-Z][a-z ]+) ─", whole, re.M) == [*titles, "Recovery", "Diagnostics"]


def test_spellings_of_diffusers_are_taken() -> None:
    values = parsed("svdpp run photo.jpg --num-inference-steps 25 --num-frames 14")
    assert (values["options"].steps, values["options"].num_frames) == (25, 14)


@pytest.mark.parametrize(
    ("line", "completed"),
    [
        ("svdpp ver", ["verify"]),
        ("svdpp run --spl", ["--split"]),  # also options that the short help leaves out
        ("svdpp run --split a", ["alternating"]),
        ("svdpp run --model d", ["demo", "demo-text", "dummy"]),
        ("svdpp run --costs svd-xt-h", ["svd-xt-h100-pcie"]),
        ("svdpp run --family wan_v2", ["wan_v2v"]),
        ("svdpp models lt", families("lt")),
        # svdpp completes nothing here, so that the shell completes paths.
        ("svdpp run ph", []),
        ("svdpp run --model ./mo", []),
        ("svdpp run --prompts pr", []),
        ("svdpp report ou", []),
    ],
)
def test_a_shell_completes(line: str, completed: list[str]) -> None:
    words = {"_SVDPP_COMPLETE": "complete_bash", "COMP_CWORD": str(len(line.split()) - 1)}
    answer = svdpp_here(env={**words, "COMP_WORDS": line})
    assert (answer.code, answer.out.split()) == (0, completed), answer


def test_completion_is_installed_and_leaves_paths_to_the_shell(tmp_path: Path) -> None:
    home = {"HOME": str(tmp_path), "_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION": "1"}
    answer = svdpp_alone("--install-completion", "bash", env=home)
    assert answer.code == 0, answer
    script = (tmp_path / ".bash_completions/svdpp.sh").read_text()
    assert "complete -o default -F _svdpp_completion svdpp" in script
