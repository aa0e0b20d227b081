"""The viewer's page in a real browser: mouse, keys and buttons work, and other pages cannot read it."""

from __future__ import annotations

import base64
import io
import json
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image

from rooftop.scene.viewing.recorded_paths import RecordedPath
from rooftop.scene.viewing.serving import Viewer

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-component-update"]
FLAGS += ["--disable-sync", "--no-first-run"]
PATIENCE_S = 120  # long enough for a machine that is busy with other tests
pytestmark = [pytest.mark.browser, pytest.mark.skipif(CHROMIUM is None, reason="needs chromium or google-chrome")]

Open = Callable[..., "Page"]


class Page:
    """The viewer in a tab, with all messages of its console and all requests to other servers."""

    def __init__(self, tab: Any, viewer: Viewer) -> None:
        self.page, self.said = tab, []
        tab.on("console", lambda message: self.said.append(message.text))
        tab.on("pageerror", lambda error: self.said.append(str(error)))
        ours = (f"http://127.0.0.1:{viewer.port}/", "data:", "blob:")
        tab.on("request", lambda request: request.url.startswith(ours) or self.said.append(f"request: {request.url}"))
        tab.goto(viewer.url)
        self.wait_for("changes > 1")  # the mode; then the canvas has its size
        self.settle()

    def wait_for(self, condition: str) -> None:
        """Waits until a JavaScript expression is true."""
        ends = time.monotonic() + PATIENCE_S
        while not self.page.evaluate(condition):
            assert time.monotonic() < ends, f"{condition} is still false after {PATIENCE_S} s: {self.said}"
            self.page.wait_for_timeout(20)

    def settle(self) -> None:
        """Waits for the full-size picture that shows all changes. Fails if the page shows an error."""
        picture, error = self.page.locator("#picture"), self.page.locator("#error")
        self.wait_for("state !== 'changing'")
        assert not error.is_visible(), error.inner_text()
        assert picture.get_attribute("data-state") == "sharp"
        assert picture.get_attribute("data-shown") == picture.get_attribute("data-changes")

    @contextmanager
    def change(self) -> Iterator[None]:
        """Code in this block must change the picture; on exit, waits until all changes are shown."""
        before = self.page.evaluate("changes")
        yield
        self.wait_for(f"changes > {before}")
        self.settle()

    def pixels(self) -> NDArray[np.int64]:
        """(H, W, 3): the content of the canvas when it no longer changes."""
        self.settle()
        url = self.page.evaluate("document.getElementById('picture').toDataURL('image/png')")
        with Image.open(io.BytesIO(base64.b64decode(url.split(",")[1]))) as image:
            return np.asarray(image.convert("RGB")).astype(np.int64)

    def view(self) -> Any:
        self.settle()
        return self.page.evaluate("view")

    def drag(self, right: int, down: int, button: str = "left") -> None:
        """Drags from the middle of the picture."""
        with self.change():
            self.pull(right, down, button)

    def pull(self, right: int, down: int, button: str = "left") -> None:
        """Like `drag`, without waiting for a result."""
        mouse, box = self.page.mouse, self.page.locator("#picture").bounding_box()
        x, y = box["x"] + box["width"] / 2, box["y"] + box["height"] / 2
        mouse.move(x, y)
        mouse.down(button=button)
        for part in (1, 2, 3):
            mouse.move(x + right * part / 3, y + down * part / 3)
        mouse.up(button=button)
        self.wait_for("!pointers.size")

    def press(self, key: str) -> None:
        """Presses a key that changes the picture."""
        with self.change():
            self.page.keyboard.press(key)


@pytest.fixture(scope="module")
def chromium() -> Iterator[Any]:
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        launched = playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        yield launched
        launched.close()


@pytest.fixture
def opened(chromium: Any, viewer: Viewer) -> Iterator[Open]:
    """Opens the viewer in a tab of its own."""
    contexts = []

    def open_(width: int = 720, height: int = 340, scheme: str = "light") -> Page:
        contexts.append(chromium.new_context(viewport={"width": width, "height": height}, color_scheme=scheme))
        contexts[-1].set_default_timeout(1e3 * PATIENCE_S)
        return Page(contexts[-1].new_page(), viewer)

    yield open_
    for context in contexts:
        context.close()


def apart(a: NDArray[np.int64], b: NDArray[np.int64]) -> float:
    """The share of pixels that differ by more than the errors of JPEG."""
    return float((np.abs(a - b).max(-1) > 40).mean())


def test_the_picture_follows_the_camera_and_comes_back(opened: Open) -> None:
    found = opened()
    first, view = found.pixels(), found.view()
    assert first.shape[:2] == (340, 720 - 310)
    assert (first.sum(-1) > 150).mean() > 0.03
    found.drag(90, 30)
    assert apart(found.pixels(), first) > 0.02
    moved = found.view()
    assert moved["target"] == view["target"]
    assert np.linalg.norm(np.subtract(moved["eye"], view["eye"])) > 1
    found.drag(-90, -30)
    np.testing.assert_allclose(found.view()["eye"], view["eye"], atol=1e-6)
    assert apart(found.pixels(), first) < 0.002
    assert found.said == []


def test_mouse_and_keys_move_as_the_help_says(opened: Open) -> None:
    found = opened()
    home = found.view()

    def distance(view: Any) -> float:
        return float(np.linalg.norm(np.subtract(view["eye"], view["target"])))

    found.drag(50, 0, button="right")
    panned = found.view()
    assert distance(panned) == pytest.approx(distance(home))
    assert np.linalg.norm(np.subtract(panned["target"], home["target"])) > 0.1
    with found.change():
        found.page.mouse.wheel(0, -400)
    assert distance(found.view()) == pytest.approx(distance(home) / 2)
    found.press("h")
    assert found.view()["eye"] == pytest.approx(home["eye"])
    with found.change():
        found.page.keyboard.down("w")
        found.page.wait_for_timeout(150)
        found.page.keyboard.up("w")
    flown = found.view()
    ahead = np.subtract(home["target"], home["eye"]) / distance(home)
    way = np.subtract(flown["eye"], home["eye"])
    assert way @ ahead > 0.01
    np.testing.assert_allclose(way, (way @ ahead) * ahead, atol=1e-6)
    found.press("f")
    assert found.view()["eye"] == pytest.approx(home["eye"], abs=1e-5)
    found.page.keyboard.press("o")
    found.drag(40, 0)
    looked = found.view()
    assert looked["eye"] == pytest.approx(home["eye"], abs=1e-5)
    assert looked["target"] != pytest.approx(home["target"], abs=0.1)
    found.page.keyboard.press("?")
    assert found.page.locator("#keys").is_visible()
    found.page.keyboard.press("Escape")
    assert not found.page.locator("#keys").is_visible()
    assert found.said == []


def test_a_double_click_sets_what_is_orbited(opened: Open) -> None:
    found = opened()
    home = found.view()
    row, column = np.argwhere(found.pixels().sum(-1) > 150)[0]  # the uppermost, of the ball
    with found.change():
        found.page.mouse.dblclick(float(column), float(row) + 6)
    view = found.view()
    assert view["eye"] == home["eye"]
    assert np.linalg.norm(view["target"]) == pytest.approx(1, abs=0.05)  # on the ball
    assert found.said == []


def test_false_colours_light_and_detail(opened: Open, tmp_path: Path) -> None:
    found = opened()
    shaded = found.pixels()
    names = found.page.evaluate("[...document.getElementById('show').options].map(option => option.value)")
    found.press("7")
    assert found.page.input_value("#show") == names[6] == "level"
    levels = found.pixels()
    assert apart(levels, shaded) > 0.03
    assert found.page.locator("#legend li").count() == 12
    drawn = found.page.evaluate("document.querySelector('#drawn td').textContent")
    with found.change():
        found.page.locator("#detail").fill("6")
    assert apart(found.pixels(), levels) > 0.01
    assert found.page.evaluate("document.querySelector('#drawn td').textContent") != drawn
    found.press("1")
    coarse = found.pixels()
    with found.change():
        found.page.locator("#light").click(position={"x": 6, "y": 36})
    assert apart(found.pixels(), coarse) > 0.02
    assert found.page.get_attribute("#light", "title").startswith("--light ")
    with found.change():
        found.page.click("#lightUsual")
    assert apart(found.pixels(), coarse) < 0.001
    with found.change():
        found.page.locator("#fov").fill("90")
    assert found.view()["fov_y_degrees"] == 90
    stages = found.page.evaluate("[...document.querySelectorAll('#stages th')].map(name => name.textContent)")
    assert {"rasterize", "hzb", "base pass", "colours", "jpeg"} <= set(stages)
    assert found.said == []


def test_a_screenshot_is_the_picture_at_full_size(opened: Open) -> None:
    found = opened()
    shown = found.pixels()
    with found.page.expect_download() as download:
        found.page.keyboard.press("p")
    assert download.value.suggested_filename == "ball-color.png"
    with Image.open(download.value.path()) as image:
        assert image.format == "PNG"
        assert apart(np.asarray(image.convert("RGB")).astype(np.int64), shown) < 0.005
    assert found.said == []


def test_a_path_is_recorded_kept_loaded_and_replayed(opened: Open, tmp_path: Path) -> None:
    found = opened()
    home, began = found.view(), time.monotonic()
    found.page.keyboard.press("r")
    found.drag(60, 10)
    there = found.view()
    found.page.keyboard.press("r")
    elapsed = time.monotonic() - began
    with found.page.expect_download() as download:
        found.page.click("#download")
    path = RecordedPath.read(Path(download.value.path()))
    assert path.views[0].eye == pytest.approx(home["eye"])
    assert path.views[-1].eye == pytest.approx(there["eye"])
    assert 0.01 < path.duration < elapsed

    other = opened()  # another tab, with the initial view
    assert other.view()["eye"] == pytest.approx(home["eye"])
    kept = json.loads(Path(download.value.path()).read_text())
    first = kept["views"][0]["seconds"]
    for number, view in enumerate(kept["views"]):
        view["seconds"] = first + 0.3 * number / len(kept["views"])  # the same pace on any machine
    (tmp_path / "path.json").write_text(json.dumps(kept))
    (tmp_path / "none.json").write_text('{"rooftop_path": 1, "views": []}')
    other.page.set_input_files("#file", tmp_path / "path.json")
    other.page.wait_for_selector("#replay:enabled")
    other.press(" ")
    assert other.view()["eye"] == pytest.approx(there["eye"])
    assert other.said == []
    other.page.set_input_files("#file", tmp_path / "none.json")
    other.page.wait_for_selector("#error:visible")
    assert "none.json: path: expected views, a list of 1 to 100,000" in other.page.inner_text("#error")
    assert found.said == []


def test_a_path_recorded_with_a_coarse_clock_can_be_read(opened: Open) -> None:
    """Some browsers round their clock, so several pictures may have the same time."""
    found = opened()
    found.page.evaluate(
        "const now = performance.now.bind(performance); performance.now = () => 400 * Math.floor(now() / 400)"
    )
    found.page.keyboard.press("r")
    found.drag(60, 10)
    found.page.keyboard.press("r")
    with found.page.expect_download() as download:
        found.page.click("#download")
    path = RecordedPath.read(Path(download.value.path()))
    assert path.views[-1].eye == pytest.approx(found.view()["eye"])


def test_an_error_in_rendering_is_shown_and_goes_away(
    opened: Open, viewer: Viewer, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = opened()

    def broken(*_: Any, **__: Any) -> None:
        raise RuntimeError("the kernel is broken")

    with monkeypatch.context() as patch:
        patch.setattr(viewer.drawing.renderer, "render", broken)
        found.pull(20, 0)
        found.page.wait_for_selector("#picture[data-state=failed]")
        assert found.page.inner_text("#error:visible") == "RuntimeError: the kernel is broken"
        with pytest.raises(AssertionError, match="the kernel is broken"):
            found.settle()
    found.drag(20, 0)
    assert not found.page.locator("#error").is_visible()


def test_a_change_while_an_error_is_on_its_way_is_drawn(opened: Open) -> None:
    found = opened()
    first = found.pixels()
    modes = found.page.evaluate("[...document.getElementById('show').options].map(option => option.value)")
    held: dict[str, Any] = {}  # the held first request for each of two modes

    def hold(route: Any) -> None:
        mode = route.request.post_data_json["show"]
        if mode in (modes[1], modes[6]) and mode not in held:
            held[mode] = route
        else:
            route.continue_()

    def wait_for_request(mode: str) -> Any:
        ends = time.monotonic() + PATIENCE_S
        while mode not in held:
            assert time.monotonic() < ends
            found.page.wait_for_timeout(20)
        return held[mode]

    found.page.route("**/frame", hold)
    found.page.keyboard.press("2")
    refused = wait_for_request(modes[1])
    found.page.keyboard.press("7")
    refused.fulfill(status=500, json={"error": "the kernel is broken"})
    drawn = wait_for_request(modes[6])
    assert found.page.inner_text("#error") == "the kernel is broken"
    assert found.page.evaluate("state") == "changing"
    drawn.continue_()
    found.wait_for("state === 'sharp'")
    assert apart(found.pixels(), first) > 0.03


def test_movement_of_a_picture_that_was_not_drawn_is_kept(opened: Open) -> None:
    """The test drops a request, as the server does if a cancelled request follows it."""
    found = opened()
    home, dropped = found.view(), []

    def drop(route: Any) -> None:
        dropped.append(route.request.post_data_json["move"])
        route.fulfill(status=204)

    found.page.route("**/frame", drop, times=1)
    found.drag(90, 30)
    assert list(dropped[0]) == ["orbit_degrees"]
    assert np.linalg.norm(np.subtract(found.view()["eye"], home["eye"])) > 1
    found.drag(-90, -30)
    np.testing.assert_allclose(found.view()["eye"], home["eye"], atol=1e-6)
    assert found.said == []


@pytest.mark.parametrize(("width", "scheme"), [(1280, "light"), (390, "dark")])
def test_it_fits_its_window_in_both_schemes(width: int, scheme: str, opened: Open) -> None:
    found = opened(width, 500, scheme)
    assert found.page.evaluate("document.documentElement.scrollWidth <= window.innerWidth")
    assert found.page.evaluate(
        "(() => { const p = document.getElementById('panel'); return p.scrollWidth <= p.clientWidth })()"
    )
    assert found.page.evaluate("document.documentElement.dataset.theme") == scheme
    with found.change():
        found.page.click("#close")
    assert found.pixels().shape[:2] == (500, width)
    found.page.click("#open")
    assert found.page.locator("#panel").is_visible()
    assert found.said == []


def test_other_pages_can_neither_read_nor_frame_it(chromium: Any, viewer: Viewer, tmp_path: Path) -> None:
    """Even a page that has the token can neither read nor frame the viewer."""
    other = tmp_path / "other.html"
    other.write_text(f"<!doctype html><title>other</title><iframe src='{viewer.url}'></iframe>")
    page = chromium.new_page()
    page.goto(other.as_uri())
    frames = [frame for frame in page.frames if frame != page.main_frame]
    assert all("picture" not in frame.content() for frame in frames)
    headers = {"Authorization": f"Bearer {viewer.token}"}
    for request in ({"headers": headers}, {"method": "POST", "body": '{"size": [8, 8]}'}, {}):
        address = f"http://127.0.0.1:{viewer.port}/scene" if request else viewer.url
        ask = f"fetch({address!r}, {json.dumps(request)}).then(() => 'read', () => 'refused')"
        assert page.evaluate(ask) == "refused", request
    page.close()
