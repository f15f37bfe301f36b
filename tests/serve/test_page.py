"""The page, in a real browser, with the real server and real ranks."""

from __future__ import annotations

import os
import re
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from svdpp.config import OutputConfig
from svdpp.media.inputs import example_photos
from svdpp.media.video import write_clip
from tests.cli.shell import ROOT
from tests.serve.http_server import QUICK, HttpServer, wait
from tests.serve.server_here import ServerHere

PAGE = ROOT / "svdpp" / "serve" / "page"
CODE = ("text/javascript", "text/css")
PHOTOS = example_photos()
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
DRIVER = shutil.which("chromedriver")

pytestmark = pytest.mark.processes


class Page:
    """The page of a server in a browser."""

    def __init__(self, driver: Any, url: str) -> None:
        self.driver = driver
        self.url = url

    def open(self) -> None:
        """Loads the page without what an earlier test left in the browser."""
        self.driver.get(self.url)
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

    def run(self, script: str, *arguments: Any) -> Any:
        return self.driver.execute_script(script, *arguments)

    def fill(self, name: str, value: object) -> None:
        field = self.driver.find_element("name", name)
        self.run("arguments[0].closest('details')?.setAttribute('open', '')", field)
        field.clear()
        field.send_keys(str(value))

    def choose(self, *files: Path) -> None:
        before = len(self.all(".photo"))
        field = self.driver.find_element("id", "files")
        field.send_keys("\n".join(map(str, files)))
        self.wait(lambda: len(self.all(".photo")) == before + len(files))

    def press(self, *keys: str) -> None:
        """Keys for whatever has the focus."""
        from selenium.webdriver import ActionChains

        ActionChains(self.driver).send_keys(*keys).perform()

    def focused(self) -> str:
        """A name of the element with the focus."""
        name: str = self.run(
            "const a = document.activeElement;"
            "return a.id || a.name || a.getAttribute('aria-label') || a.textContent"
        )
        return name

    def wait(self, happens: Callable[[], object]) -> None:
        from selenium.common.exceptions import StaleElementReferenceException

        def has_happened() -> bool:
            time.sleep(0.1)  # each question costs the browser more than this
            try:
                return bool(happens())
            except StaleElementReferenceException:
                return False

        wait(has_happened, lambda: self.text("body"))

    @contextmanager
    def of_width(self, width: int) -> Iterator[None]:
        size = {"width": width, "height": 800, "deviceScaleFactor": 1, "mobile": width < 500}
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
        try:
            yield
        finally:
            self.driver.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})

    def wait_text(self, selector: str, part: str) -> None:
        self.wait(lambda: part in self.text(selector))

    def complaints(self) -> list[str]:
        """What the console has, other than refused requests, which the tests provoke."""
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
    # Clips wait to be played: to draw them costs more than all else here.
    options.add_argument("--force-prefers-reduced-motion")
    for name in ("background-networking", "component-update", "sync", "dev-shm-usage"):
        options.add_argument(f"--disable-{name}")
    options.add_argument(f"--user-data-dir={folder / 'profile'}")
    options.add_argument("--window-size=1000,1000")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    # The browser leaves files in the folder for temporary ones.
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
    assert page.complaints() == []


@pytest.fixture
def clips(server: HttpServer) -> list[str]:
    """At least two finished clips, with files."""
    found = server.client.get("/v1/videos?status=completed").json()["data"]
    ids = [video["id"] for video in found]
    new = server.add(max(0, 2 - len(ids)), name="sea.jpg")
    for id in new:
        server.wait_for(id, "completed")
    for id in ids + new:
        write_file(server, id)
    return ids + new


def write_file(server: HttpServer, id: str) -> None:
    """Writes the file of a clip, which the dummy model does not make."""
    path = server.folder / "clips" / f"{id}.mp4"
    if not path.exists():
        frames = np.random.default_rng(0).integers(0, 256, (14, 36, 64, 3), np.uint8)
        write_clip(frames, OutputConfig(path=str(path)), fps=7, metadata={})


def test_the_page_asks_no_other_server_and_needs_no_inline_code() -> None:
    files = {path.name: path.read_text() for path in PAGE.iterdir()}
    scripts = {name: text for name, text in files.items() if name.endswith(".js")}

    assert set(files) == {"index.html", "page.css", *scripts}
    for text in files.values():
        links = re.findall(r"https?://[^\s\"'<]+", text)
        assert set(links) <= {"http://www.w3.org/2000/svg"}, "a request to another server"
    assert not re.search(
        r"<style|\sstyle=|\son[a-z]+=|<script(?! type=\"module\" src=)", files["index.html"]
    )
    for name, text in scripts.items():
        assert not re.search(r"innerHTML|outerHTML|insertAdjacent|document\.write|eval\(", text)
        assert set(re.findall(r"from \"\./([^\"]+)\"", text)) <= set(scripts)
        assert text.startswith("// Owns "), f"{name} does not say what it owns"
        assert text.count("\n") < 350


def test_only_known_files_are_served(server: HttpServer) -> None:
    for file in PAGE.iterdir():
        path = "/" if file.name == "index.html" else f"/page/{file.name}"
        answer = server.client.get(path)
        assert answer.content == file.read_bytes()
        assert answer.headers["content-type"].partition(";")[0] in ("text/html", *CODE)
    for path in ("nothing.js", "", "..%2fapi.py", "%2e%2e/api.py", "/etc/passwd"):
        assert server.client.get(f"/page/{path}").status_code == 404, path


def test_photographs_become_clips(page: Page, server: HttpServer) -> None:
    page.choose(*PHOTOS[:2])
    assert page.text("#make") == "Make 2 clips"
    page.wait(lambda: len(page.all(".photo img")) == 2)
    page.fill("seed", 2**63 - 1)
    page.fill("steps", 250)  # long enough for both to be seen in the queue
    page.one("#make").click()

    page.wait(lambda: len(page.all("#queue-list .row")) == 2)
    assert page.all(".photo") == []
    for row in page.all("#queue-list .row"):
        assert row.find_element("css selector", "progress").get_attribute("aria-label")
    page.wait(lambda: len(page.all(".card")) == 2)
    assert page.text("#queue-empty") == "The queue is empty."
    titles = {card.find_element("css selector", ".title").text for card in page.all(".card")}
    assert titles == {photo.name for photo in PHOTOS[:2]}
    videos = server.client.get("/v1/videos").json()["data"]
    assert {video["seed"] for video in videos} == {2**63 - 1}
    assert f"seed {2**63 - 1}" in page.text(".card")


@pytest.mark.long
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
    page.wait(lambda: page.all("#error-min_guidance_scale"))
    assert "diffusers cannot run" in page.text("#error-min_guidance_scale")

    found = page.run(
        "return import('/page/form.js').then((form) => form.faultsOf("
        "{ status: 422, message: 'these ranks', words: 'why', details: { field: 'steps' } }))"
    )
    assert found == [["steps", "why"]]

    page.one("#reset").click()
    assert page.all(".field .error") == []
    page.one("#make").click()
    page.wait(lambda: page.all(".photo .error"))
    assert "is not an image" in page.text(".photo .error")
    assert page.all("#queue-list .row") == []


@pytest.mark.long
def test_a_running_clip_is_cancelled_and_made_again(page: Page, server: HttpServer) -> None:
    page.choose(PHOTOS[2])
    page.fill("steps", 1000)
    page.one("#make").click()
    page.wait(lambda: re.search(r"Step [1-9]\d* of 1000", page.text("#queue-list")))
    page.wait(lambda: re.search(r"Step \d+ of 1000", page.text("#rank-list")))
    assert len(page.all(".strip[aria-label^='Last minute of rank ']")) == 2

    page.one("#queue-list button[aria-label^=Cancel]").click()
    page.wait(lambda: page.all("#failed-list .row"))
    assert "Cancelled." in page.text("#failed-list")

    page.driver.refresh()  # from now on only the server has the photograph
    page.wait(lambda: page.all("#failed-list img.thumb"))
    page.one("#failed-list button[aria-label^=Make]").click()
    page.wait(lambda: page.all("#queue-list .row"))
    page.one("#queue-list button[aria-label^=Cancel]").click()
    page.wait(lambda: len(page.all("#failed-list .row")) == 2)
    hashes = [each["input"]["sha256"] for each in server.client.get("/v1/videos").json()["data"]]
    assert hashes[0] == hashes[1]
    for _ in range(2):
        button = page.one("#failed-list button[aria-label^=Remove]")
        left = len(page.all("#failed-list .row"))
        button.click()
        assert len(page.all("#failed-list .row")) == left  # until it is pressed again
        button.click()
        page.wait(lambda left=left: len(page.all("#failed-list .row")) == left - 1)  # type: ignore[misc]
    assert server.client.get("/v1/videos?status=cancelled").json()["data"] == []


@pytest.mark.long
def test_the_queue_is_cancelled_by_keyboard_and_all_at_once(page: Page, server: HttpServer) -> None:
    from selenium.webdriver import Keys

    assert "dummy is no model" in page.text("#toy")
    server.add(6, steps=1000)
    page.wait(lambda: len(page.all("#queue-list .row")) == 6)
    page.wait(lambda: page.all("#queue-list .row:not(.waiting)"))
    assert page.text("#queue-list").count("Next") == 1
    rows = page.all("#queue-list .row.waiting")
    assert not rows[0].find_element("css selector", "progress").is_displayed()
    page.run("arguments[0].focus()", rows[-1].find_element("css selector", "button"))
    page.press(Keys.ENTER)
    page.wait(lambda: len(page.all("#queue-list .row")) == 5)
    assert page.focused() == "queue"
    page.wait_text("#say", "cancelled.")

    button = page.one("#cancel-all")
    place = button.rect
    button.click()
    assert button.text == "Cancel all?"
    assert button.rect == place  # a second press at the same place is meant for it
    assert len(page.all("#queue-list .row")) == 5  # until it is pressed again
    button.click()
    page.wait_text("#say", "5 clips cancelled.")
    assert page.text("#queue-empty") == "The queue is empty."
    for video in server.client.get("/v1/videos?status=cancelled").json()["data"]:
        server.client.delete(f"/v1/videos/{video['id']}")


def test_what_is_said_of_clips_that_wait_and_run(page: Page) -> None:
    said = page.driver.execute_async_script(
        "const done = arguments[arguments.length - 1];"
        "const held = { status: 'queued', held: 'its model is demo' };"
        "const waits = { status: 'queued' }, runs = { status: 'in_progress' };"
        "Promise.all([import('/page/words.js'), import('/page/top.js')]).then("
        "([{ placeText, stepText, etaText, allText }, { summaryText }]) => done(["
        "placeText({ place: 0, step: 0 }, 0), placeText({ place: 0, step: 0 }, 1),"
        "placeText({ place: 4, step: 7 }, 1), stepText({ step: 0, steps: 9, rank: 0 }),"
        "stepText({ step: 8, steps: 9, rank: 1 }), stepText({ step: 9, steps: 9, rank: 1 }),"
        "etaText({ eta_seconds: null }), allText([{ eta_seconds: 5, eta_at: 1e9 }, {}]),"
        "etaText({ eta_seconds: null, held: 'its model is demo' }),"
        "summaryText([held, held]), summaryText([runs, waits, held]), summaryText([])]))"
    )
    # Two answers may both call a clip the next.
    assert said[:3] == ["Next", "1 clip before it", "4 clips before it; goes on after step 7"]
    assert said[3:6] == ["Step 1 of 9", "Step 9 of 9", "Decoding"]
    # The time of one clip is not that of all; a first step here tells nothing of other servers.
    assert said[6:9] == ["time known after a first step", "", ""]
    assert said[9:] == ["2 held", "1 running · 1 waiting · 1 held", ""]


@pytest.mark.long
def test_a_narrow_window_has_the_queue_before_the_form_and_the_theme_is_kept(page: Page) -> None:
    order = "return [...document.querySelectorAll('#new, #queue')].map((each) => each.id)"
    assert page.run(order) == ["new", "queue"]
    page.wait_text("#rank-list", "% busy")
    with page.of_width(400):
        page.wait(lambda: page.run(order) == ["queue", "new"])
        page.run("document.getElementById('say').textContent = 'A message. '.repeat(9)")
        box = "return document.querySelector(arguments[0]).getBoundingClientRect().toJSON()"
        assert page.run(box, "#say")["top"] >= page.run(box, ".top")["bottom"]
    page.wait(lambda: page.run(order) == ["new", "queue"])
    colour = "return getComputedStyle(document.body).backgroundColor"
    page.one("#theme").click()
    light = page.run(colour)
    page.one("#theme").click()
    dark = page.run(colour)
    assert light != dark
    page.driver.refresh()
    assert page.run(colour) == dark


@pytest.mark.long
@pytest.mark.usefixtures("clips")
def test_a_card_shows_its_image_and_plays_and_its_buttons_fit_any_window(page: Page) -> None:
    page.wait(lambda: page.all(".card .about .thumb"))
    for button in page.all(".card .actions button"):
        assert button.text, "an icon alone"
    lines = (
        "return [...document.querySelectorAll('.card .actions')].every((each) => new Set("
        "[...each.querySelectorAll('.icon-button')].map((button) => button.offsetTop)).size === 1)"
    )
    cut = "return [...document.querySelectorAll('.about > .note')].filter("
    cut += "(each) => each.scrollWidth > each.clientWidth).length"
    for width in (1600, 1200, 1000, 360):
        with page.of_width(width):
            assert page.run(lines), f"the buttons of a card in two lines at {width}"
            assert page.run(cut) == 0
            assert page.run("return document.documentElement.scrollWidth") <= width
    page.one("#play-all").click()
    page.wait(
        lambda: page.run(
            "return [...document.querySelectorAll('.card video')].some("
            "(video) => video.readyState > 2 && !video.paused && video.muted && video.loop)"
        )
    )


@pytest.mark.long
@pytest.mark.usefixtures("clips")
def test_two_clips_are_compared_by_keyboard_alone(page: Page) -> None:
    from selenium.webdriver import Keys

    page.wait(lambda: len(page.all(".card")) >= 2)
    for button in page.all(".card button[aria-pressed]")[:2]:
        page.run("arguments[0].focus()", button)
        page.press(Keys.SPACE)
    page.wait(lambda: page.all("#compare"))
    times = (
        "return [...document.querySelectorAll('#compare video')].map((each) => each.currentTime)"
    )
    page.run("document.getElementById('compare-play').focus()")
    page.press(Keys.ENTER)
    page.wait(lambda: min(page.run(times)) > 0.2)

    def are_together() -> bool:
        first, second = page.run(times)
        return bool(abs(first - second) < 0.2)

    page.wait(are_together)

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
@pytest.mark.long
def test_a_finished_clip_is_verified(driver: Any, demo: HttpServer) -> None:
    for page in opened(driver, demo):
        page.choose(PHOTOS[0])
        page.one("#make").click()
        page.one(".card .link").click()
        page.wait_text(".proof", "Bitwise equal to diffusers on one device")


@pytest.mark.long
def test_the_page_says_that_the_server_is_gone_and_finds_it_again(
    driver: Any, tmp_path: Path
) -> None:
    with ServerHere(tmp_path / "data", *QUICK) as server:
        page = Page(driver, server.url)
        page.open()
        page.wait_text("#state", "Ready")
        (id,) = server.add(steps=1000)
        page.wait(lambda: page.all("#queue-list .row"))
        server.stop()
    page.wait_text("#state", "Server gone")
    page.wait_text("#banner", "The server does not answer.")
    assert page.all("#queue-list .row")
    page.one("#banner-button").click()  # which looks at once, and finds none yet

    port = int(server.url.rpartition(":")[2])
    with ServerHere(tmp_path / "data", *QUICK, port=port) as server:
        page.wait_text("#state", "Ready")
        assert page.all("#banner") == []
        page.wait(lambda: re.search(r"Step [1-9]", page.text("#queue-list")))
        assert server.client.delete(f"/v1/videos/{id}").status_code == 200


@pytest.mark.long
def test_the_page_asks_for_a_key_and_uses_it(driver: Any, keyed: HttpServer) -> None:
    (id,) = keyed.add()
    keyed.wait_for(id, "completed")
    write_file(keyed, id)
    page = Page(driver, keyed.url)
    page.open()
    page.wait(lambda: page.all("#lock"))
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
    assert page.run("return Object.keys(localStorage)") == ["svdpp-theme"]
    assert page.complaints() == []
