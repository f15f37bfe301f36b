"""Web page in a real browser, with a real server and real ranks."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import re
import shutil
import time
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from svdpp.config import OutputConfig
from svdpp.media.inputs import example_images
from svdpp.media.video import write_clip
from tests.support.http_server import QUICK, HttpServer, ServerHere, wait
from tests.support.shell import ROOT
from tests.support.tiny_families import save_tiny

PHOTOS = example_images()
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
DRIVER = shutil.which("chromedriver")

pytestmark = pytest.mark.slow


class Page:
    """Web page of a server in a browser, with methods that act as a user does."""

    def __init__(self, driver: Any, url: str) -> None:
        self.driver = driver
        self.url = url

    def open(self) -> None:
        """Load the web page, after clearing what an earlier test left in the browser."""
        self.driver.get(self.url)
        self.driver.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
        self.driver.execute_script("sessionStorage.clear(); localStorage.clear()")
        self.driver.get_log("browser")
        self.driver.get(self.url)

    def all(self, selector: str) -> list[Any]:
        return [e for e in self.driver.find_elements("css selector", selector) if e.is_displayed()]

    def one(self, selector: str) -> Any:
        self.wait(lambda: self.all(selector))
        return self.all(selector)[0]

    def text(self, selector: str) -> str:
        return " ".join(self.driver.find_element("css selector", selector).text.split())

    def rows(self, kind: str = "queue") -> list[Any]:
        return self.all(f"#{kind}-list .row")

    def run(self, script: str, *arguments: Any) -> Any:
        return self.driver.execute_script(script, *arguments)

    def fill(self, name: str, value: object) -> None:
        field = self.driver.find_element("name", name)
        self.run("arguments[0].closest('details')?.setAttribute('open', '')", field)
        field.clear()
        field.send_keys(str(value))

    def choose(self, *files: Path) -> None:
        before = len(self.all(".input"))
        field = self.driver.find_element("id", "files")
        field.send_keys("\n".join(map(str, files)))
        self.wait(lambda: len(self.all(".input")) == before + len(files))

    def press(self, *keys: str) -> None:
        """Press keys in the browser, in the element that has the focus."""
        self.driver.switch_to.active_element.send_keys(*keys)

    def focused(self) -> str:
        """Return the id, name, label or text of the web page's element that has the focus."""
        name: str = self.run(
            "const a = document.activeElement;"
            "return a.id || a.name || a.getAttribute('aria-label') || a.textContent"
        )
        return name

    def wait(self, happens: Callable[[], object]) -> None:
        from selenium.common.exceptions import StaleElementReferenceException

        def has_happened() -> bool:
            time.sleep(0.1)  # short compared with a query of the browser
            try:
                return bool(happens())
            except StaleElementReferenceException:
                return False

        wait(has_happened, lambda: self.text("body"))

    def wait_text(self, selector: str, part: str) -> None:
        self.wait(lambda: part in self.text(selector))

    def console_errors(self) -> list[str]:
        """Return the messages on the browser's console, except failed requests."""
        lines = [entry["message"] for entry in self.driver.get_log("browser")]
        return [line for line in lines if "Failed to load resource" not in line]


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    webdriver = pytest.importorskip("selenium.webdriver", reason="selenium is not installed")
    if CHROMIUM is None or DRIVER is None:
        pytest.skip("no Chromium, or no chromedriver")
    folder = tmp_path_factory.mktemp("browser")
    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM
    for name in ("headless=new", "no-sandbox", "disable-gpu", "disable-quic", "no-first-run"):
        options.add_argument(f"--{name}")
    # With reduced motion, clips do not play by themselves, because drawing them would take most of
    # the time.
    options.add_argument("--force-prefers-reduced-motion")
    for name in ("background-networking", "component-update", "sync", "dev-shm-usage"):
        options.add_argument(f"--disable-{name}")
    options.add_argument(f"--user-data-dir={folder / 'profile'}")
    options.add_argument("--window-size=1000,1000")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    # The browser leaves temporary files behind, so it gets its own folder for them.
    environment = {**os.environ, "TMPDIR": str(folder)}
    service = webdriver.ChromeService(DRIVER, env=environment)
    driver = webdriver.Chrome(options=options, service=service)
    yield driver
    driver.quit()


@pytest.fixture
def page(driver: Any, server: HttpServer) -> Iterator[Page]:
    yield from opened(driver, server)


def opened(driver: Any, server: HttpServer) -> Iterator[Page]:
    page = Page(driver, server.url)
    page.open()
    page.wait_text("#state", "Ready")
    yield page
    assert page.console_errors() == []


@pytest.fixture
def clips(server: HttpServer) -> None:
    """Make sure that the server has at least two finished clips with mp4 files."""
    found = server.client.get("/v1/videos?status=completed").json()["data"]
    ids = [video["id"] for video in found]
    ids += server.add(max(0, 2 - len(ids)), name="sea.jpg")
    for id in ids:
        server.wait_for(id, "completed")
        write_clip_file(server, id)


def _remove_all(server: HttpServer, status: str = "cancelled") -> None:
    for video in server.client.get(f"/v1/videos?status={status}").json()["data"]:
        server.client.delete(f"/v1/videos/{video['id']}")


def write_clip_file(server: HttpServer, id: str) -> None:
    """Write an mp4 file for a server's clip, because the dummy model writes none."""
    path = server.folder / "clips" / f"{id}.mp4"
    if not path.exists():
        frames = np.random.default_rng(0).integers(0, 256, (14, 36, 64, 3), np.uint8)
        write_clip(frames, OutputConfig(path=str(path)), fps=7, metadata={})


def test_the_page_asks_no_other_server_and_needs_no_inline_code() -> None:
    files = {path.name: path.read_text() for path in (ROOT / "svdpp/serve/page").iterdir()}
    scripts = {name: text for name, text in files.items() if name.endswith(".js")}

    assert set(files) == {"index.html", "page.css", "icon.svg", *scripts}
    for text in files.values():
        links = re.findall(r"https?://[^\s\"'<]+", text)
        assert set(links) <= {"http://www.w3.org/2000/svg"}, "a request to another server"
    assert not re.search(
        r"<style|\sstyle=|\son[a-z]+=|<script(?! type=\"module\" src=)", files["index.html"]
    )
    for text in scripts.values():
        assert not re.search(r"innerHTML|outerHTML|insertAdjacent|document\.write|eval\(", text)


def test_photographs_become_clips(page: Page, server: HttpServer) -> None:
    page.choose(*PHOTOS[:2])
    assert page.text("#make") == "Make 2 clips"
    page.run("document.querySelector('details').open = true")
    labels = [label.text for label in page.all("#model-fields label > span")]
    assert labels[:2] == ["Motion bucket id", "Noise aug strength"], "as the server lists them"
    assert "Fit of the image" in labels
    page.wait(lambda: len(page.all(".input img")) == 2)
    page.fill("seed", 2**63 - 1)
    page.fill("steps", 250)  # slow enough that both clips are seen in the queue
    page.one("#make").click()

    page.wait(lambda: len(page.rows()) == 2)
    assert page.all(".input") == []
    for row in page.rows():
        assert row.find_element("css selector", "progress").get_attribute("aria-label")
    page.wait(lambda: len(page.all(".card")) == 2)
    assert page.text("#queue-empty") == "The queue is empty."
    titles = {card.find_element("css selector", ".title").text for card in page.all(".card")}
    assert titles == {photo.name for photo in PHOTOS[:2]}
    videos = server.client.get("/v1/videos").json()["data"]
    assert {video["seed"] for video in videos} == {2**63 - 1}
    assert f"seed {2**63 - 1}" in page.text(".card")
    num_remarks = sum(card.text.count("is stretched to") for card in page.all(".card"))
    assert num_remarks == sum(len(video["remarks"]) for video in videos) > 0


def test_a_refusal_is_shown_where_it_can_be_corrected(page: Page, tmp_path: Path) -> None:
    text = tmp_path / "notes.png"
    text.write_text("no image")
    page.one("#make").click()
    assert page.text("#form-error") == "Choose an image first."
    assert page.focused() == "files"

    page.choose(text)
    page.fill("steps", 0)
    page.one("#make").click()
    assert "from 1 to 1000" in page.text("#error-steps")
    assert page.focused() == "steps"

    page.fill("steps", 2)
    page.fill("min_guidance_scale", 2)
    page.fill("max_guidance_scale", 1)
    page.one("#make").click()
    page.one("#error-min_guidance_scale")
    assert "diffusers cannot run" in page.text("#error-min_guidance_scale")

    page.one("#reset").click()
    assert page.all(".field .error") == []
    page.one("#make").click()
    page.one(".input .error")
    assert "is not an image" in page.text(".input .error")
    assert page.rows() == []


def test_a_running_clip_is_cancelled_and_made_again(page: Page, server: HttpServer) -> None:
    page.choose(PHOTOS[2])
    page.fill("steps", 1000)
    page.one("#make").click()
    page.wait(lambda: re.search(r"Step [1-9]\d* of 1000", page.text("#queue-list")))
    assert page.all("#rank-list") == []  # hidden until the user opens it
    page.wait_text("#ranks-note", "2 ranks, 1 at work")
    page.one("#ranks summary").click()
    page.wait(lambda: re.search(r"Step \d+ of 1000", page.text("#rank-list")))
    assert len(page.all(".strip[aria-label^='Last minute of rank ']")) == 2

    page.one("#queue-list button[aria-label^=Cancel]").click()
    page.wait(lambda: page.rows("failed"))
    assert "Cancelled." in page.text("#failed-list")

    page.driver.refresh()  # the page has lost its copy of the image; only the server has it
    page.one("#rank-list")
    page.one("#failed-list img.thumb")
    page.one("#failed-list button[aria-label^=Make]").click()
    page.wait(page.rows)
    page.one("#queue-list button[aria-label^=Cancel]").click()
    page.wait(lambda: len(page.rows("failed")) == 2)
    hashes = [each["input"]["sha256"] for each in server.client.get("/v1/videos").json()["data"]]
    assert hashes[0] == hashes[1]
    _remove_all(server)


def test_a_removal_is_undone_or_done_and_moves_nothing(page: Page, server: HttpServer) -> None:
    first, second = server.add(2, name="gone.jpg", seed=3, steps=1000)
    for id in (first, second):
        server.client.post(f"/v1/videos/{id}/cancel")
    page.wait(lambda: len(page.rows("failed")) == 2)
    buttons = "#failed-list [aria-label^='Remove']"
    places = [button.rect for button in page.all(buttons)]
    page.all(buttons)[0].click()
    assert page.text("#failed-note") == "1 clip"
    assert "gone.jpg, seed 3: removed" in page.text("#failed-list .removal")
    assert page.focused().startswith("Undo the removal of gone.jpg")
    assert page.all(buttons)[-1].rect == places[1]
    assert server.video(second)["status"] == "cancelled"
    page.one("#failed-list .removal button").click()
    page.wait(lambda: [button.rect for button in page.all(buttons)] == places)
    assert page.text("#failed-note") == "2 clips"

    page.all(buttons)[0].click()
    page.driver.refresh()  # the removal happens at once, because it can no longer be undone
    page.wait(lambda: len(page.rows("failed")) == 1)
    left = server.client.get("/v1/videos?status=cancelled").json()["data"]
    assert [video["id"] for video in left] == [first]

    page.run("const slow = setTimeout; window.setTimeout = (work, time) => slow(work, time / 20)")
    page.run("document.querySelector(arguments[0]).click()", buttons)
    page.wait(lambda: server.client.get(f"/v1/videos/{first}").status_code == 404)
    page.wait(lambda: page.rows("failed") == [])


def test_variations_have_seeds_of_their_own(page: Page, server: HttpServer) -> None:
    from selenium.webdriver import Keys

    page.choose(*PHOTOS[:2])
    page.fill("variations", 3)
    assert page.text("#make") == "Make 6 clips"
    assert page.text("#plan") == "2 images \N{MULTIPLICATION SIGN} 3 variations, each 0.29 s long"
    page.fill("seed", 2**63 - 2)
    page.one("#make").click()
    assert "too large" in page.text("#error-seed")
    page.fill("seed", 7)
    page.fill("steps", 1)
    page.press(Keys.CONTROL + Keys.ENTER)
    page.wait(lambda: page.all(".input") == [])
    videos = server.client.get("/v1/videos?limit=6").json()["data"]
    made = {(video["input"]["name"], video["seed"]) for video in videos}
    assert made == {(photo.name, seed) for photo in PHOTOS[:2] for seed in (7, 8, 9)}
    for video in videos:
        server.wait_for(video["id"], "completed")


def test_a_full_queue_is_waited_for_or_the_rest_is_left(
    page: Page, server: HttpServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = dataclasses.replace(server.service.settings, max_open=1)
    monkeypatch.setattr(server.service, "settings", settings)
    page.choose(PHOTOS[0])
    page.fill("variations", 3)
    page.fill("steps", 150)
    page.one("#make").click()
    page.wait_text("#plan", "1 sent. The queue of this server is full. The page goes on by itself.")
    page.wait_text("#plan", "2 sent.")
    page.one("#stop").click()
    page.wait(lambda: page.text("#make") == "Make clip")
    monkeypatch.undo()
    page.one("#make").click()
    page.wait(lambda: page.all(".input") == [])
    videos = server.client.get("/v1/videos?limit=3").json()["data"]
    assert len({video["seed"] for video in videos}) == 3  # no request was sent twice
    for video in videos:
        server.client.delete(f"/v1/videos/{video['id']}")


def test_a_table_is_corrected_and_sent(page: Page, server: HttpServer, tmp_path: Path) -> None:
    name = PHOTOS[0].name
    path = tmp_path / "jobs.csv"
    path.write_text(
        f'image,"Seed",steps,size,promt\nphotos/{name},{2**63 - 1},3,,\n'
        f"{name},12.5,3,64 x 36,\nnone.jpg,1,5000,9x9,\n"
    )
    page.one("#table-open").click()
    page.driver.find_element("id", "table-file").send_keys(str(path))
    page.wait_text("#table-note", "3 rows")
    assert "No field of this model" in page.text("#table-head .fault")
    assert page.text("#make") == "Make clips"
    page.one("#table-head button").click()  # the page ignores the column from now on
    page.choose(PHOTOS[0])
    page.wait_text("#make", "Make clip")
    faults = {
        tuple(cell.get_attribute("aria-label").split(", row ")): cell.find_element(
            "xpath", "following-sibling::span"
        ).text
        for cell in page.all("#table-rows [aria-invalid]")
    }
    size = server.client.get("/v1/models").json()["data"][0]["sizes"][0]
    assert faults == {
        ("Seed", "2"): "Not a whole number.",
        ("size", "2"): f"One of {size}.",
        ("image", "3"): "Drop this file here, too.",
        ("steps", "3"): "1000 or less.",
        ("size", "3"): f"One of {size}.",
    }
    for label, value in (("Seed", "12"), ("size", size.replace("x", " X "))):
        cell = page.one(f"[aria-label='{label}, row 2']")
        cell.clear()
        cell.send_keys(value)
    assert page.text("#plan") == "2 of 3 rows"
    page.driver.refresh()
    page.wait_text("#make-rows", "Make 2 clips")
    page.one("#make-rows").click()
    page.wait(lambda: page.text("#table-note") == "1 row")
    videos = server.client.get("/v1/videos?limit=2").json()["data"]
    assert {video["seed"] for video in videos} == {2**63 - 1, 12}
    assert {video["steps"] for video in videos} == {3}
    for video in videos:
        server.wait_for(video["id"], "completed")
    assert {video["input"]["name"] for video in videos} == {name}
    assert page.all(".input") == []


def test_a_large_number_in_an_older_browser_is_not_called_a_fault_of_the_json(page: Page) -> None:
    """An older browser does not tell the text of a number, so it cannot read a large seed."""
    page.run(
        "const parse = JSON.parse;"
        "JSON.parse = (text, revive) =>"
        "  parse(text, revive && ((name, value) => revive(name, value)))"
    )
    page.one("#table-open").click()
    text = page.one("#table-text")
    for written, error in (
        (f'{{"seed": 1}}\n{{"seed": {2**53 + 1}}}', "Line 2: this browser cannot read the large"),
        ('{"seed": 1}\n{"seed": }', "Line 2 is not JSON: "),
    ):
        text.clear()
        text.send_keys(written)
        page.one("#table-use").click()
        page.wait(lambda error=error: page.text("#table-error").startswith(error))  # type: ignore[misc]


def test_rows_of_a_table_have_references_of_their_own(driver: Any, tmp_path: Path) -> None:
    """A cell names one reference, or several as a JSON list. An empty cell takes the form's."""
    model = save_tiny("wan_vace", tmp_path / "vace")
    options = ("--device", "cpu", "--world", "2", "--threads", "1", "--max-prompt-tokens", "8")
    options += ("--height", "32", "--width", "32", "--frames", "9", "--steps", "1")
    names = [photo.name for photo in PHOTOS[:3]]
    sha256 = [hashlib.sha256(photo.read_bytes()).hexdigest() for photo in PHOTOS[:3]]
    rows = [
        {"prompt": "two", "references": names[:2]},
        {"prompt": "one", "references": names[2]},
        {"prompt": "those of the form"},
        {"prompt": "unknown", "references": [names[0], "none.jpg"]},
        {"prompt": "no list", "references": [{"path": names[0]}]},
        {"prompt": "too many", "references": names * 3},
    ]
    with (
        ServerHere(tmp_path / "data", *options, "--model", str(model)) as server,
        contextmanager(opened)(driver, server) as page,
    ):
        page.one("#table-open").click()
        assert "references" in page.text("#table-fields")
        table = tmp_path / "jobs.jsonl"
        lines = [json.dumps({"image": names[0], **row}) for row in rows]
        table.write_text("\n".join(lines))
        driver.find_element("id", "table-file").send_keys(str(table))
        page.choose(*PHOTOS[:3])
        driver.find_element("name", "references").send_keys(str(PHOTOS[1]))
        page.wait_text("#make", "Make 3 clips")
        faults = {
            cell.get_attribute("aria-label"): cell.find_element(
                "xpath", "following-sibling::span"
            ).text
            for cell in page.all("#table-rows [aria-invalid]")
        }
        assert faults == {
            "references, row 4": "Drop this file here, too.",
            "references, row 5": 'Not a list of files, such as ["a.jpg", "b.jpg"].',
            "references, row 6": "7 files at most.",
        }
        page.one("#make").click()
        page.wait_text("#table-note", "3 rows")
        videos = server.client.get("/v1/videos?order=asc").json()["data"]
        found = {
            video["prompt"]: [reference["sha256"] for reference in video["references"]]
            for video in videos
        }
        assert found == {
            "two": sha256[:2],
            "one": [sha256[2]],
            "those of the form": [sha256[1]],
        }
        # The files of the remaining rows stay.
        assert [name.text for name in page.all(".input .name")] == [names[0]]
        for video in videos:
            server.client.delete(f"/v1/videos/{video['id']}")


def test_a_reload_keeps_the_form_and_its_images(page: Page) -> None:
    page.choose(*PHOTOS[:2])
    page.fill("steps", 17)
    page.fill("variations", 4)
    page.driver.refresh()
    page.wait(lambda: len(page.all(".input")) == 2)
    assert [name.text for name in page.all(".input .name")] == [photo.name for photo in PHOTOS[:2]]
    assert page.text("#make") == "Make 8 clips"
    assert page.driver.find_element("name", "steps").get_property("value") == "17"
    for button in page.all(".input button"):
        page.run("arguments[0].click()", button)
    page.driver.refresh()
    page.wait_text("#make", "Make 4 clips")
    assert page.all(".input") == []


@pytest.mark.usefixtures("clips")
def test_clips_are_downloaded_one_by_one_and_all_together(
    page: Page, server: HttpServer, tmp_path: Path
) -> None:
    behaviour = {"behavior": "allow", "downloadPath": str(tmp_path)}
    page.driver.execute_cdp_cmd("Browser.setDownloadBehavior", behaviour)
    page.one(".card .primary").click()
    page.wait(lambda: list(tmp_path.glob("*-seed*.mp4")))
    page.one("#download-all").click()
    page.wait(lambda: list(tmp_path.glob("clips-*.zip")))
    (path,) = tmp_path.glob("clips-*.zip")
    with zipfile.ZipFile(path) as archive:
        lines = archive.read("clips.jsonl").splitlines()
    done = server.client.get("/v1/videos?limit=100&status=completed").json()["data"]
    assert {json.loads(line)["id"] for line in lines} == {video["id"] for video in done}


def test_the_queue_is_cancelled_by_keyboard_and_all_at_once(page: Page, server: HttpServer) -> None:
    from selenium.webdriver import Keys

    assert "dummy is no model" in page.text("#toy")
    server.add(6, steps=1000)
    page.wait(lambda: len(page.rows()) == 6)
    page.one("#queue-list .row:not(.waiting)")
    assert page.text("#queue-list").count("Next") == 1
    rows = page.all("#queue-list .row.waiting")
    assert not rows[0].find_element("css selector", "progress").is_displayed()
    page.run("arguments[0].focus()", rows[-1].find_element("css selector", "button"))
    page.press(Keys.ENTER)
    page.wait(lambda: len(page.rows()) == 5)
    assert page.focused() == "queue"
    page.wait_text("#toast", "cancelled.")

    button = page.one("#cancel-all")
    place = button.rect
    button.click()
    assert button.text == "Cancel all?"
    assert button.rect == place  # a second click at the same place confirms
    assert len(page.rows()) == 5  # nothing is cancelled before the second click
    button.click()
    page.wait_text("#toast", "5 clips cancelled.")
    assert page.text("#queue-empty") == "The queue is empty."
    _remove_all(server)


@pytest.mark.usefixtures("clips")
def test_it_fits_any_window_and_a_narrow_one_has_the_queue_before_the_form(page: Page) -> None:
    order = "return [...document.querySelectorAll('#new, #queue')].map((each) => each.id)"
    page.one(".card .about .thumb")
    for width in (1600, 1000, 360):
        size = {"width": width, "height": 800, "deviceScaleFactor": 1, "mobile": width < 500}
        page.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
        first = "new" if width > 500 else "queue"
        page.wait(lambda first=first: page.run(order)[0] == first)  # type: ignore[misc]
        assert page.run("return document.documentElement.scrollWidth") <= width


@pytest.mark.usefixtures("clips")
def test_two_clips_are_compared_by_keyboard_alone(page: Page) -> None:
    from selenium.webdriver import Keys

    page.wait(lambda: len(page.all(".card")) >= 2)
    for button in page.all(".card button[aria-pressed]")[:2]:
        page.run("arguments[0].focus()", button)
        page.press(Keys.SPACE)
    page.one("#compare")
    times = "return [...document.querySelectorAll('#compare video')].map((v) => v.currentTime)"
    page.run("document.getElementById('compare-play').focus()")
    page.press(Keys.ENTER)
    page.wait(lambda: min(page.run(times)) > 0.2)
    page.wait(lambda: max(now := page.run(times)) - min(now) < 0.2)
    page.press(Keys.ENTER)
    page.press(Keys.TAB, Keys.TAB)
    assert page.focused() == "compare-forth"
    page.press(Keys.ENTER)
    page.wait(lambda: len(set(page.run(times))) == 1)
    page.press(Keys.ESCAPE)
    page.wait(lambda: not page.all("#compare"))
    assert "Compare" in page.focused()
    assert page.all(".card [aria-pressed=true]") == []


@pytest.mark.full
def test_a_finished_clip_is_verified(driver: Any, demo: HttpServer) -> None:
    with contextmanager(opened)(driver, demo) as page:
        page.choose(PHOTOS[0])
        page.one("#make").click()
        page.one(".card .link").click()
        page.wait_text(".verification", "Bitwise equal to diffusers on one device")


def test_the_page_says_that_the_server_is_gone_and_finds_it_again(
    driver: Any, tmp_path: Path
) -> None:
    with ServerHere(tmp_path / "data", *QUICK) as server:
        page = Page(driver, server.url)
        page.open()
        page.wait_text("#state", "Ready")
        (id,) = server.add(steps=1000)
        page.wait(page.rows)
        server.stop()
    page.wait_text("#state", "Server gone")
    page.wait_text("#banner", "The server does not answer.")
    assert page.rows()
    page.one("#banner-button").click()  # the page checks at once, and finds no server yet

    port = int(server.url.rpartition(":")[2])
    with ServerHere(tmp_path / "data", *QUICK, port=port) as server:
        page.wait_text("#state", "Ready")
        assert page.all("#banner") == []
        page.wait(lambda: re.search(r"Step [1-9]", page.text("#queue-list")))
        assert server.client.delete(f"/v1/videos/{id}").status_code == 202


def test_the_page_asks_for_a_key_and_uses_it(
    driver: Any, keyed: HttpServer, tmp_path: Path
) -> None:
    (id,) = keyed.add()
    keyed.wait_for(id, "completed")
    write_clip_file(keyed, id)
    page = Page(driver, keyed.url)
    page.open()
    page.one("#lock")
    assert page.focused() == "key"
    assert page.all("#main") == []
    page.press("wrong\n")
    page.wait_text("#lock-text", "The server refuses this key")
    page.one("#key").clear()
    page.one("#key").send_keys(keyed.client.headers["Authorization"].split()[1] + "\n")
    page.wait_text("#state", "Ready")
    page.wait(
        lambda: page.run(
            "const video = document.querySelector('.card video');"
            "return video?.src.startsWith('blob:') && video.readyState > 2"
        )
    )
    behaviour = {"behavior": "allow", "downloadPath": str(tmp_path)}
    driver.execute_cdp_cmd("Browser.setDownloadBehavior", behaviour)
    page.one("#download-all").click()  # the page uses `fetch`, because a link sends no key
    page.wait(lambda: [*tmp_path.glob("clips-*.zip")])
    with zipfile.ZipFile(next(tmp_path.glob("clips-*.zip"))) as archive:
        assert "sea-seed" in archive.namelist()[0]
    assert page.run("return Object.keys(localStorage)") == ["svdpp-theme"]
    assert page.console_errors() == []
