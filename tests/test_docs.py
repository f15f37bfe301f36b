"""Documentation: files and links exist, and each command runs as written, except those in
`NOT_RUN`.

The examples in docstrings run, and the types of the public names are in the stub. Other tests
compare the printed output in docs/scheduling.md, docs/api.md and docs/serving.md
(tests/cli/test_cli_plan.py, tests/driver/test_requests.py, tests/serve/test_serving_docs.py).
"""

from __future__ import annotations

import ast
import doctest
import re
import shlex
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import svdpp
from svdpp.cli.app import COMMANDS, load_command
from svdpp.cli.options.declare import with_aliases
from svdpp.media import inputs
from svdpp.media.inputs import example_images
from svdpp.plan import costs, forecast
from svdpp.verification import verify
from tests.support.markdown_pages import code_blocks, code_spans, headings, links
from tests.support.shell import DEMO, PHOTO, ROOT, TINY, svdpp_here

ALL_PAGES = sorted(
    path
    for pattern in ("*.md", "docs/*.md", "deploy/*.md", ".github/**/*.md")
    for path in ROOT.glob(pattern)
)
#: Pages with commands to run. docs/cli.md is left out, because it is generated from the commands.
PAGES = [ROOT / "README.md", *sorted(set(ROOT.glob("docs/*.md")) - {ROOT / "docs/cli.md"})]

#: Beginnings of commands that are not run, each with the reason. The options of svdpp's commands
#: are still checked.
NOT_RUN = {
    "pip install": "make has installed it",
    "make ": "the Makefile is not for a copy of the documentation's files",
    "export ": "for the network between hosts",
    "torchrun ": "tests/cli/test_end_to_end.py runs torchrun; others need several hosts",
    "srun ": "needs Slurm",
    "curl ": "tests/serve/test_serving_docs.py asks a server",
    "svdpp run --jobs clips.csv --server": "tests/serve/test_run_at_server.py runs it",
    "svdpp serve": "runs until it is stopped; tests/serve",
    "svdpp bench": "takes minutes; tests/cli/test_tools.py",
    "svdpp verify --model path/to/checkpoint": "any checkpoint",
    "svdpp verify --model demo --gpus 7": "seven ranks of the demo model on two cores",
    "svdpp run --model Wan-AI/": "downloads weights from the hub",
    "svdpp run --model path/to/": "any checkpoint",
    "svdpp run photo.jpg --gpus 4 --split": "needs many frames; tests/driver/test_pairs.py",
    "svdpp plan --memory --model Wan-AI/": "downloads configs from the hub",
    "svdpp plan --costs tight.json": "the file is on the page; tests/cli/test_cli_plan.py",
    "svdpp plan --costs mixed.json": "the file is on the page; tests/cli/test_cli_plan.py",
    "svdpp plan --world 4096": "takes seconds; tests/cli/test_cli_plan.py",
}
#: Options that are put before a command's own options, so that the command needs no GPU, no
#: download and little time.
_SIZE = "--frames 2 --height 32 --width 32 --threads 1 --steps 8"
SETTINGS = {"run": f"{_SIZE} --model demo --device cpu --overwrite", "verify": _SIZE}

_ASKED = re.compile(rf"svdpp ({'|'.join(COMMANDS)})((?: [^\n#]+)?)")
_PROGRAM = re.compile(r"(?:\$ )?((?:svdpp|pip|make|export|torchrun|srun|curl) .*)")


def _commands(page: Path) -> Iterator[str]:
    """Yield the commands in the code blocks of a page of the docs, each on one line."""
    for block in code_blocks(page.read_text(encoding="utf-8")):
        if block.language not in ("", "bash", "console"):
            continue
        lines = re.sub(r"\s*\\\n\s*", " ", block.text).splitlines()
        programs = [_PROGRAM.fullmatch(re.sub(r"\s+# .*", "", line)) for line in lines]
        if programs and (programs[0] or lines[0].startswith("#!")):  # else it is printed output
            yield from (program[1] for program in programs if program)


_SHOWN = {page.name: list(_commands(page)) for page in PAGES}


def test_every_page_is_read() -> None:
    shown = [command for commands in _SHOWN.values() for command in commands]
    assert [start for start in NOT_RUN if not any(each.startswith(start) for each in shown)] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_option_exists(page: Path) -> None:
    """Every option on a page exists, also in commands within a sentence or a table."""
    text = page.read_text(encoding="utf-8")
    code = [*code_spans(text), *(block.text for block in code_blocks(text))]
    for name, arguments in _ASKED.findall("\n".join(code).replace("\\\n", " ")):
        known = {option for each in load_command(name).params for option in with_aliases(each.opts)}
        asked = set(re.findall(r"(?<= )--[a-z-]+(?=[ =]|$)", arguments))
        assert asked <= known, (name, arguments)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with the files that the commands in the docs name."""
    folder = tmp_path_factory.mktemp("docs")
    (folder / "photos").mkdir()
    for name in ("rocket.jpg", "photo.jpg", "photo.png", "photos/cat.jpg"):
        shutil.copy(PHOTO, folder / name)
    shutil.copytree(example_images()[0].parent, folder / "svdpp/assets/photos")
    shutil.copy(folder / "svdpp/assets/photos/astronaut.jpg", folder)
    for block in code_blocks((ROOT / "docs/batches.md").read_text(encoding="utf-8")):
        if block.language in ("csv", "json", "yaml"):
            suffix = {"json": "jsonl"}.get(block.language, block.language)
            (folder / f"clips.{suffix}").write_text(block.text, encoding="utf-8")
    for more in ((), ("--format", "frames")):
        run = ("run", str(folder / "photos/cat.jpg"), *DEMO, *TINY, "--seeds", "1", *more)
        answer = svdpp_here(*run, "--out", str(folder / "clips"), "--overwrite")
        assert answer.code == 0, answer
    shutil.copytree(folder / "clips", folder / "out")
    for name in ("cat_1.mp4", "cat_1.mp4.json"):
        shutil.copy(folder / "clips" / name, folder)
    return folder


def _quick_options(name: str, arguments: list[str]) -> list[str]:
    """Return options that make a command of the docs quick; none to `verify` a finished clip."""
    is_finished = any(Path(word).is_dir() or word.endswith((".mp4", ".json")) for word in arguments)
    if name == "verify" and is_finished:
        return []
    words = SETTINGS.get(name, "").split()
    if "demo-text" in arguments:  # only one size is possible
        words = [] if name == "verify" else ["--overwrite"]
    return [word for word in words if word != "--overwrite" or "--resume" not in arguments]


#: Pages whose commands take half a minute or more.
_LONG = ("batches.md", "models.md", "report.md", "verification.md")


@pytest.mark.slow
@pytest.mark.parametrize(
    "page",
    [
        pytest.param(name, marks=pytest.mark.full if name in _LONG else ())
        for name, shown in _SHOWN.items()
        if shown
    ],
)
def test_commands_run(
    page: str, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = shutil.copytree(folder, tmp_path / "here")
    monkeypatch.chdir(here)
    for command in _SHOWN[page]:
        if not command.startswith(tuple(NOT_RUN)):
            name, *arguments = shlex.split(command)[1:]
            answer = svdpp_here(name, *_quick_options(name, arguments), *arguments)
            print(command, answer.out, answer.err, sep="\n")
            assert answer.code == 0, command


# --- files and links ---------------------------------------------------------------------------

_SOURCE_FILE = re.compile(r"(?:\w+/)+\w+\.(?:py|md|yaml)")


def _anchors(page: Path) -> set[str]:
    """Return the anchors that GitHub creates for the headings of a page of the docs."""
    texts = headings(page.read_text(encoding="utf-8"))
    return {re.sub(r"[^\w\- ]", "", text.lower()).strip().replace(" ", "-") for text in texts}


def _leads_somewhere(page: Path, link: str) -> bool:
    if link.startswith(("http://", "https://", "../../")):  # "../../" is for pages on GitHub
        return True
    name, _, anchor = link.partition("#")
    target = page.parent / name if name else page
    return target.exists() and (not anchor or anchor in _anchors(target))


@pytest.mark.parametrize("page", ALL_PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere_and_source_files_exist(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert [link for link in links(text) if not _leads_somewhere(page, link)] == []
    # The changelog may name files of earlier versions.
    spans = [] if page.name == "CHANGELOG.md" else code_spans(text)
    named = [span for span in spans if _SOURCE_FILE.fullmatch(span)]
    assert [n for n in named if not ((ROOT / n).exists() or (ROOT / "svdpp" / n).exists())] == []


# --- the public names ---------------------------------------------------------------------------


def test_each_public_name_is_there_and_in_the_stub() -> None:
    stub = Path(svdpp.__file__).with_suffix(".pyi").read_text()
    imported = {
        alias.asname: f"{node.module}.{alias.name}"
        for node in ast.parse(stub).body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    assert {*map(str, imported)} == {*svdpp.__all__} - {"__version__"} <= {*dir(svdpp)}
    for name, path in imported.items():
        value, (module, _, original) = getattr(svdpp, str(name)), path.rpartition(".")
        assert getattr(sys.modules[module], original) is value


def test_old_public_names_stay_for_a_version() -> None:
    assert costs.Costs is costs.CostModel
    assert forecast.replay is forecast.simulate_schedule
    assert inputs.example_photos is inputs.example_images


@pytest.mark.slow
def test_an_example_in_a_docstring_runs() -> None:
    found = doctest.testmod(verify)
    assert found.attempted > 0
    assert found.failed == 0
