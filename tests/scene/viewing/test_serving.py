"""The viewer's server: permitted requests, their answers, and how wrong requests end."""

from __future__ import annotations

import http.client
import io
import json
import re
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from PIL import Image

from rooftop import scene
from rooftop.cli.main import main
from rooftop.errors import InputError
from rooftop.scene.pictures import NIGHT, picture
from rooftop.scene.viewing import asking, serving
from rooftop.scene.viewing.drawing import Drawing, DroppedError
from rooftop.scene.viewing.modes import MODES, Pages, legend_of
from rooftop.scene.viewing.serving import Viewer, page


@dataclass(frozen=True)
class Answer:
    """The server's answer."""

    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def error(self) -> str:
        """The error message, which must be a single sentence."""
        found = self.json
        assert list(found) == ["error"]
        assert "Traceback" not in found["error"]
        return str(found["error"])

    @property
    def about(self) -> Any:
        """The data sent with a picture."""
        return json.loads(self.headers["Rooftop-Frame"])

    @property
    def pixels(self) -> NDArray[np.uint8]:
        with Image.open(io.BytesIO(self.body)) as image:
            assert f"image/{image.format}".lower() == self.headers["Content-Type"]
            return np.asarray(image.convert("RGB"))


@dataclass
class Client:
    """Sends requests like a page does, over one connection."""

    viewer: Viewer
    tab: str
    connection: http.client.HTTPConnection = field(init=False)

    def __post_init__(self) -> None:
        self.connection = http.client.HTTPConnection("127.0.0.1", self.viewer.port, timeout=60)

    def ask(self, method: str, path: str, body: Any = None, **headers: str) -> Answer:
        """`headers` replace those of a page; empty ones are omitted."""
        given = {"Authorization": f"Bearer {self.viewer.token}", "Host": f"127.0.0.1:{self.viewer.port}"} | headers
        content = body if isinstance(body, bytes) or body is None else json.dumps(body).encode()
        self.connection.putrequest(method, path, skip_host=True)
        for name, value in given.items():
            if value:
                self.connection.putheader(name.replace("_", "-"), value)
        if content is not None and "Content_Length" not in headers:
            self.connection.putheader("Content-Length", str(len(content)))
        self.connection.endheaders(content)
        reply = self.connection.getresponse()
        return Answer(reply.status, dict(reply.getheaders()), reply.read())

    def frame(self, **request: Any) -> Answer:
        return self.ask("POST", "/frame", {"tab": self.tab, "size": [48, 32], "format": "png"} | request)


@pytest.fixture
def client(viewer: Viewer, request: pytest.FixtureRequest) -> Iterator[Client]:
    client = Client(viewer, request.node.name[:60])
    yield client
    client.connection.close()


VIEW = {"eye": [1.5, -9.0, 2.0], "target": [1.5, 0.0, 0.0], "up": [0, 0, 1], "fov_y_degrees": 40.0}


# ---- pictures --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("width", "height", "format"), [(48, 32, "png"), (33, 70, "jpeg"), (1, 1, "png")])
def test_a_frame_is_a_picture_of_the_asked_size(client: Client, width: int, height: int, format: str) -> None:
    answer = client.frame(size=[width, height], format=format)
    assert answer.status == 200
    assert answer.pixels.shape == (height, width, 3)
    assert answer.about["size"] == [width, height]


def test_a_frame_is_what_the_renderer_draws(client: Client, world: scene.Scene) -> None:
    camera = scene.Camera.look_at(VIEW["eye"], VIEW["target"], (0, 0, 1), 40.0, 48, 32, near=1e-3)
    frame = scene.Renderer(world, "cpu").render(camera, ("color", "normal", "level", "overdraw"))
    for show in ("color", "normal", "level", "overdraw"):
        assert np.array_equal(client.frame(view=VIEW, show=show).pixels, picture(frame, show)), show


def test_a_frame_comes_with_its_statistics(client: Client) -> None:
    answer = client.frame()
    stats, ms = answer.about["stats"], answer.about["ms"]
    assert stats["triangles"] > 100
    assert 0 < stats["clusters"] <= 32 * stats["groups"]
    assert stats["nodes"] > 0
    assert stats["levels"]
    assert {"rasterize", "base_pass", "hzb", "colours", "png"} <= ms.keys()
    assert all(each >= 0 for each in ms.values())
    assert answer.about["memory_bytes"] is None  # only a GPU's memory is reported


def test_with_a_pool_and_shadows_pictures_become_what_they_are_without(world: scene.Scene) -> None:
    """Frames do not wait for pages. Shadows move with the light."""
    plain = scene.Scene()
    for number, mesh in enumerate(world.meshes):
        plain.add_mesh(mesh)
        plain.add_instance(number)
    drawing = Drawing(plain, "cpu", pool_bytes=10**8, shadows=True)
    try:
        lights = [(0.4, 0.3, 0.85), (1.0, 0.0, 0.1)]
        for light in lights:
            asked = asking.asked({"tab": "a", "size": [48, 32], "light": list(light), "view": VIEW}, MODES)
            ends = time.monotonic() + 120
            while (drawn := drawing.picture(asked)).stats["streaming"]["missing"]:
                assert time.monotonic() < ends
            assert drawn.stats["streaming"]["resident"] > 0
            found = drawing.picture(asked).image
            lit = scene.Scene()
            for number, mesh in enumerate(world.meshes):
                lit.add_mesh(mesh)
                lit.add_instance(number)
            lit.add_light(scene.DirectionalLight([-each for each in light]))
            camera = drawn.view.camera((48, 32), drawing.scene_size)
            frame = scene.Renderer(lit, "cpu").render(camera, ("color",))
            assert np.array_equal(found, scene.picture(frame, "color"))
    finally:
        assert drawing.stop(60)


def test_every_mode_shows_something_of_its_own(client: Client) -> None:
    facts = client.ask("GET", "/scene").json
    names = [mode["name"] for mode in facts["modes"]]
    assert set(MODES) - set(names) == {"uv", "vertex_color"}  # both meshes lack these
    shown = {name: client.frame(show=name, view=VIEW, pixel_error=0).pixels for name in names}
    covered = (shown["color"] != NIGHT).any(-1)
    assert covered.mean() > 0.05
    for name, pixels in shown.items():
        assert np.array_equal((pixels != NIGHT).any(-1), covered), name
    del shown["page"]  # a mesh of one page each: as instances
    assert len({pixels.tobytes() for pixels in shown.values()}) == len(shown)


def test_the_facts_of_the_scene(client: Client, world: scene.Scene) -> None:
    facts = client.ask("GET", "/scene").json
    assert facts["files"] == ["ball.rtg", "box.rtg"]
    assert facts["triangles"] == facts["instanced_triangles"] == 1280 + 12
    assert facts["bytes"] == sum(mesh.path.stat().st_size for mesh in world.meshes)
    assert not facts["streamed"]
    assert facts["pages"] == sum(mesh.pages for mesh in world.meshes)
    assert facts["device"] == "CPU"
    np.testing.assert_allclose(facts["bounds"], [[-1, -1, -1], [3.5, 1, 1]], atol=0.01)


def test_a_page_does_not_begin_with_the_detail_and_light_of_another(client: Client) -> None:
    client.frame(pixel_error=20, light=[-5, 0, 0])
    facts = client.ask("GET", "/scene").json
    assert facts["pixel_error"] == 1
    usual = client.frame().pixels
    assert np.array_equal(client.frame(pixel_error=facts["pixel_error"], light=facts["light"]).pixels, usual)
    assert not np.array_equal(client.frame(light=[-5, 0, 0]).pixels, usual)


def test_a_view_moves_as_it_is_asked_to_and_back(client: Client) -> None:
    there = client.frame(view=VIEW, move={"orbit_degrees": [40, 10]})
    back = client.frame(view=there.about["view"], move={"orbit_degrees": [-40, -10]})
    np.testing.assert_allclose(back.about["view"]["eye"], VIEW["eye"], atol=1e-9)
    still = client.frame(view=VIEW).pixels
    assert (there.pixels != still).any(-1).mean() > 0.05
    assert (back.pixels != still).any(-1).mean() < 0.02


def test_home_and_framing_show_all_of_the_scene(client: Client) -> None:
    home = client.frame(size=[80, 60])
    away = client.frame(size=[80, 60], view=VIEW, move={"fly": [50, 3, 2]})
    assert (away.pixels == NIGHT).all()
    for answer in (home, client.frame(size=[80, 60], view=away.about["view"], framed=True)):
        covered = (answer.pixels != NIGHT).any(-1)
        assert covered.mean() > 0.1
        assert not covered[[0, -1]].any()
        assert not covered[:, [0, -1]].any()


def test_home_is_the_same_whatever_the_size_of_the_picture_while_moving(client: Client) -> None:
    full = client.frame(size=[100, 211]).about["view"]
    small = client.frame(size=[25, 53], window=[100, 211], view=VIEW, framed=True).about["view"]
    assert client.frame(size=[25, 53], window=[100, 211]).about["view"] == full
    assert client.frame(size=[25, 53]).about["view"] != full
    assert client.frame(size=[100, 211], view=VIEW, framed=True).about["view"] == small


def test_light_comes_from_where_it_is_asked_to(client: Client) -> None:
    ball = VIEW | {"eye": [0, -4, 0], "target": [0, 0, 0]}
    left, right, usual = (
        client.frame(view=ball, **({"light": light} if light else {})).pixels.astype(int).sum(-1)
        for light in ([-5, 0, 0], [5, 0, 0], None)
    )
    assert left[:, :24].sum() > 1.5 * left[:, 24:].sum()
    assert right[:, 24:].sum() > 1.5 * right[:, :24].sum()
    assert not np.array_equal(usual, right)  # a request without a light does not keep the last light


def test_a_finer_picture_draws_more(client: Client) -> None:
    drawn = [client.frame(pixel_error=error).about["stats"]["triangles"] for error in (0, 20)]
    assert drawn[0] == 1280 + 12
    assert drawn[0] > 2 * drawn[1]


def test_the_point_under_a_pixel(client: Client) -> None:
    request = {"tab": "points", "size": [101, 101], "view": VIEW | {"eye": [0, -5, 0], "target": [0, 0, 0]}}
    found = client.ask("POST", "/point", request | {"at": [50, 50]}).json
    np.testing.assert_allclose(found["point"], (0, -1, 0), atol=0.03)
    assert found["view"]["target"] == found["point"]
    assert found["view"]["eye"] == [0, -5, 0]
    outside = client.ask("POST", "/point", request | {"at": [0, 0]}).json
    assert outside["point"] is None
    assert outside["view"]["target"] == [0, 0, 0]
    assert "at is missing" in client.ask("POST", "/point", request).error


def test_pages_are_counted_over_all_meshes(world: scene.Scene) -> None:
    pages = Pages(world, torch.device("cpu"))
    assert pages.count == 2
    camera = scene.Camera.look_at(VIEW["eye"], VIEW["target"], width=48, height=32)
    frame = scene.Renderer(world, "cpu").render(camera, ("instance", "cluster"))
    assert torch.equal(pages.of(frame), frame["instance"][0].long())  # a mesh of one page each


def test_legends_are_colours_of_the_pictures() -> None:
    assert [entry["label"] for entry in legend_of("level")] == [*map(str, range(11)), "11+"]
    assert all(re.fullmatch(r"#[0-9a-f]{6}", entry["color"]) for name in MODES for entry in legend_of(name))
    assert len({entry["color"] for entry in legend_of("overdraw")}) == 6


# ---- permitted requests ----------------------------------------------------------------------------------------------


def test_the_page_is_whole_and_asks_nobody_else(client: Client, viewer: Viewer) -> None:
    answer = client.ask("GET", f"/?token={viewer.token}", Authorization="")
    assert answer.status == 200
    text = answer.body.decode()
    assert not re.findall(r"(?:src|href)\s*=\s*[\"'](?!data:)", text)
    for foreign in ("http://", "https://", "@import", "url(", "{{"):
        assert foreign not in text
    assert viewer.token not in text
    policy = answer.headers["Content-Security-Policy"]
    (nonce,) = set(re.findall(r"'nonce-([^']+)'", policy))
    assert text.count(f'nonce="{nonce}"') == 2
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    assert page("other") != text


@pytest.mark.parametrize(
    "host", ["127.0.0.1:{port}", "localhost:{port}", "LOCALHOST", "[::1]:80", "127.0.0.1:9000", "127.9.9.9"]
)
def test_any_name_of_this_machine_will_do_through_a_tunnel(client: Client, viewer: Viewer, host: str) -> None:
    assert client.ask("GET", "/scene", Host=host.format(port=viewer.port)).status == 200


@pytest.mark.parametrize(
    "headers",
    [
        {"Host": "attacker.example"},
        {"Host": "attacker.example:80"},
        {"Host": "127.0.0.1.attacker.example"},
        {"Host": "192.168.0.1"},
        {"Host": "[oops"},
        {"Host": ""},
        {"Origin": "http://attacker.example"},
        {"Origin": "https://127.0.0.1:{port}"},
        {"Origin": "http://127.0.0.1"},
        {"Origin": "http://localhost:{port}"},
        {"Origin": "null"},
        {"Authorization": ""},
        {"Authorization": "Bearer wrong"},
        {"Authorization": "Bearer \u00e9"},
    ],
    ids=str,
)
def test_who_is_no_page_of_ours_is_refused(client: Client, viewer: Viewer, headers: dict[str, str]) -> None:
    given = {name: value.format(port=viewer.port) for name, value in headers.items()}
    for answer in (client.ask("GET", "/scene", **given), client.ask("POST", "/frame", {"size": [8, 8]}, **given)):
        assert answer.status == 403
        assert answer.error
        assert "Access-Control-Allow-Origin" not in answer.headers
    (name, value), *_ = given.items()
    if name == "Authorization":
        token = value.removeprefix("Bearer ") if value.isascii() else ""
        assert client.ask("GET", f"/?token={token}").status == 403
    else:
        assert client.ask("GET", f"/?token={viewer.token}", **given).status == 403


def test_a_page_of_ours_is_not_refused(client: Client, viewer: Viewer) -> None:
    for host in (f"127.0.0.1:{viewer.port}", "localhost:9000"):  # port 9000 as through a tunnel
        answer = client.ask("POST", "/frame", {"size": [8, 8]}, Host=host, Origin=f"http://{host}")
        assert answer.status == 200


def test_beyond_loopback_names_of_the_machine_count(world: scene.Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serving.socket, "gethostname", lambda: "Gpu-Machine")
    serving._names_of_this_machine.cache_clear()
    drawing = Drawing(world, "cpu")
    with Viewer(drawing, "0.0.0.0") as viewer:
        assert viewer.url.startswith(f"http://Gpu-Machine:{viewer.port}/?token=")
        for host, named in {"gpu-machine:80": True, "10.0.0.7:80": True, "attacker.example": False}.items():
            assert viewer.is_named(host) == named, host
    serving._names_of_this_machine.cache_clear()
    assert drawing.stop()


# ---- wrong requests --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("request_", "words"),
    [
        (b"{", "not JSON"),
        (b"\xff\xfe", "not JSON"),
        (b"[" * 5000, "not JSON"),
        (b'{"size": [8, 8], "light": [NaN, 0, 1]}', "the request has NaN: expected finite numbers"),
        (b'{"size": [8, 8], "pixel_error": Infinity}', "the request has Infinity"),
        ([], "expected an object"),
        ({}, "size is None"),
        ({"size": [8]}, "a list of two integers"),
        ({"size": [0, 8]}, "size is 0: expected an integer from 1 to 16384"),
        ({"size": [8, 99999]}, "size is 99999"),
        ({"size": [16384, 16384]}, "size is 16384 x 16384: expected at most 33,554,432 pixels"),
        ({"size": [8.0, 8]}, "size is 8.0: expected an integer"),
        ({"size": [True, 8]}, "size is True"),
        ({"size": [8, 8], "window": [8, -8]}, "window is -8"),
        ({"size": [8, 8], "zoom": 3}, "'zoom' is not known"),
        ({"size": [8, 8], "shwo": "color"}, r"'shwo' is not known \(did you mean show\?\)"),
        ({"size": [8, 8], "show": "levle"}, r"show is 'levle' \(did you mean level\?\): expected one of color, normal"),
        ({"size": [8, 8], "show": "uv"}, "show is 'uv': expected one of"),
        ({"size": [8, 8], "show": ["color"]}, "show is"),
        ({"size": [8, 8], "show": "../../etc/passwd"}, "show is '../../etc/passwd': expected one of"),
        ({"size": [8, 8], "view": {"eye": [1, 2, 1e999], "target": [0, 0, 0]}}, "expected 3 finite numbers"),
        ({"size": [8, 8], "view": {"eye": [1, 2, "3"], "target": [0, 0, 0]}}, "view: eye is"),
        ({"size": [8, 8], "view": {"eye": [0, 0, 0], "target": [0, 0, 0]}}, "the same point"),
        ({"size": [8, 8], "view": VIEW, "move": {"fly": [1e30, 1e30, 1e30]}}, "this camera is not possible:"),
        (
            {"size": [8, 8], "view": VIEW, "move": {"fly": [1e29, 1e29, 1e29], "zoom_doublings": [1]}},
            "this camera is not possible: eye and target are the same",
        ),
        ({"size": [8, 8], "move": {"jump": [1]}}, "move 'jump' is not known"),
        ({"size": [8, 8], "light": [0, 0, 0]}, "light is 0, 0, 0: expected a direction"),
        ({"size": [8, 8], "light": [1, 0]}, "light is"),
        ({"size": [8, 8], "pixel_error": -1}, "pixel_error is -1: expected a number from 0"),
        ({"size": [8, 8], "quality": 0}, "quality is 0"),
        ({"size": [8, 8], "format": "gif"}, "format is 'gif': expected one of jpeg, png"),
        ({"size": [8, 8], "framed": "yes"}, "framed is 'yes': expected one of False, True"),
        ({"size": [8, 8], "framed": 1}, "framed is 1: expected one of False, True"),
        ({"size": [8, 8], "tab": "x" * 65}, "tab is"),
        ({"size": [8, 8], "at": [8, 0]}, "at is 8: expected an integer from 0 to 7"),
    ],
    ids=lambda value: str(value)[:60],
)
def test_a_wrong_request_is_answered_with_a_sentence(client: Client, request_: Any, words: str) -> None:
    if isinstance(request_, dict):  # Python writes 1e999 as Infinity
        request_ = json.dumps(request_).replace("Infinity", "1e999").encode()
    answer = client.ask("POST", "/frame", request_)
    assert answer.status == 400
    assert re.search(words, answer.error)
    assert len(answer.error) < 600
    assert client.frame().status == 200  # over the same connection


@pytest.mark.parametrize("length", ["", "-1", "abc", "9" * 30, str(1 << 30)])
def test_a_body_that_is_too_long_or_of_no_length_is_not_read(client: Client, length: str) -> None:
    answer = client.ask("POST", "/frame", None, Content_Length=length, Connection="close")
    assert answer.status == 400
    assert "expected a body of at most 65,536 bytes" in answer.error


@pytest.mark.parametrize("path", ["/../../etc/passwd", "/page.js", "/%2e%2e/page.js", "/frame/", "/scene2"])
def test_there_are_no_files_to_be_had(client: Client, path: str) -> None:
    answer = client.ask("GET", path)
    assert answer.status == 404
    assert "there is no GET" in answer.error
    assert client.ask("POST", path, {"a": 1}).status == 404
    assert client.frame().status == 200


def test_other_methods_are_not_there(client: Client) -> None:
    assert client.ask("OPTIONS", "/frame").status == 501
    assert client.ask("PUT", "/frame").status == 501


def test_a_path_is_looked_at(client: Client) -> None:
    path = {"rooftop_path": 1, "views": [{"seconds": 0, "eye": [1, 2, 3], "target": [0, 0, 0]}]}
    found = client.ask("POST", "/path", path).json
    assert found["views"] == [path["views"][0] | {"up": [0, 0, 1], "fov_y_degrees": 50}]
    answer = client.ask("POST", "/path", {"rooftop_path": 1, "views": []})
    assert answer.status == 400
    assert "expected views" in answer.error


# ---- many at once ----------------------------------------------------------------------------------------------------


def test_many_tabs_each_get_their_own_picture(viewer: Viewer) -> None:
    def one(number: int) -> tuple[int, list[float], tuple[int, ...]]:
        client = Client(viewer, f"tab {number}")
        eye = [5.0 + number, 1, 2]
        answers = [client.frame(view=VIEW | {"eye": eye}, size=[20 + number, 16]) for _ in range(3)]
        client.connection.close()
        return number, answers[-1].about["view"]["eye"], answers[-1].pixels.shape

    with ThreadPoolExecutor(8) as pool:
        for number, eye, shape in pool.map(one, range(8)):
            assert eye == [5.0 + number, 1, 2]
            assert shape == (16, 20 + number, 3)


def test_the_newest_picture_of_a_tab_takes_the_place_of_older_ones(viewer: Viewer) -> None:
    drawing, begun, go = viewer.drawing, threading.Event(), threading.Event()

    def slow() -> None:
        begun.set()
        go.wait(120)

    def ask(tab: str) -> Answer:
        client = Client(viewer, tab)
        try:
            return client.frame()
        finally:
            client.connection.close()

    blocker = threading.Thread(target=drawing._wait, args=("blocker", slow))
    blocker.start()
    assert begun.wait(60)
    with ThreadPoolExecutor(3) as pool:
        older = pool.submit(ask, "same")
        while "picture same" not in drawing._waiting:
            time.sleep(0.01)
        first = drawing._waiting["picture same"]
        newer, other = pool.submit(ask, "same"), pool.submit(ask, "other")
        assert older.result(60).status == 204
        assert drawing._waiting["picture same"] is not first
        go.set()
        assert newer.result(60).status == 200
        assert other.result(60).status == 200
    blocker.join(60)
    assert not blocker.is_alive()


def test_an_error_in_rendering_is_said_and_the_next_picture_is_drawn(
    client: Client, viewer: Viewer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    renderer = viewer.drawing.renderer
    for error, words in (
        (RuntimeError("the kernel is broken"), "RuntimeError: the kernel is broken"),
        (torch.cuda.OutOfMemoryError("2 GiB"), "does not fit into the memory of cpu; make the window smaller"),
        (
            RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 4096 bytes."),
            "does not fit into the memory of cpu; make the window smaller",
        ),
    ):

        def broken(*_: Any, error: Exception = error, **__: Any) -> None:
            raise error

        with monkeypatch.context() as patch:
            patch.setattr(renderer, "render", broken)
            answer = client.frame()
            assert answer.status == 500
            assert words in answer.error
        assert client.frame().status == 200
    assert "the kernel is broken" in capsys.readouterr().err  # for the user who started the server


def test_who_goes_away_disturbs_nobody(client: Client, viewer: Viewer, capsys: pytest.CaptureFixture[str]) -> None:
    for _ in range(3):
        gone = Client(viewer, "gone")
        gone.connection.request("POST", "/frame", b"{", {"Content-Length": "100"})
        gone.connection.close()
    assert client.frame().status == 200
    assert capsys.readouterr().err == ""


def test_who_stops_sending_disturbs_nobody(
    viewer: Viewer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(serving._Handler, "timeout", 0.2)
    stalled = Client(viewer, "stalled")
    with pytest.raises(ConnectionError):
        stalled.ask("POST", "/frame", b"{", Content_Length="100")
    assert capsys.readouterr().err == ""


# ---- beginning and end -----------------------------------------------------------------------------------------------


def test_who_waits_when_it_ends_is_let_go(world: scene.Scene) -> None:
    drawing = Drawing(world, "cpu")
    begun, go = threading.Event(), threading.Event()
    with ThreadPoolExecutor(2) as pool:
        busy = pool.submit(drawing._wait, "busy", lambda: (begun.set(), go.wait(120)))
        assert begun.wait(60)
        waiting = pool.submit(drawing._wait, "waiting", lambda: None)
        while "waiting" not in drawing._waiting:
            time.sleep(0.01)
        assert not drawing.stop(0.05)  # a frame that is being drawn cannot be cancelled
        with pytest.raises(DroppedError):
            waiting.result(60)
        go.set()
        assert busy.result(60)
    assert drawing.stop(60)
    with pytest.raises(DroppedError):
        drawing._wait("late", lambda: None)


def test_a_port_that_is_taken(viewer: Viewer) -> None:
    with pytest.raises(InputError, match=f"cannot listen at 127.0.0.1, port {viewer.port}: .*; try another --port"):
        Viewer(viewer.drawing, port=viewer.port)
    with pytest.raises(InputError, match=r"cannot listen at no\.such\.host\.invalid.*; --host takes an address"):
        Viewer(viewer.drawing, "no.such.host.invalid")
    with pytest.raises(InputError, match="host is '': expected an address"):
        Viewer(viewer.drawing, "")


def test_the_command_prints_an_address_serves_and_ends(
    world: scene.Scene, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    ended: list[float] = []
    open_: list[http.client.HTTPConnection] = []

    def look_and_interrupt() -> None:
        printed = re.search(
            r"open http://127\.0\.0\.1:(\d+)/\?token=([\w-]{32})$", capsys.readouterr().out, re.MULTILINE
        )
        assert printed is not None
        connection = http.client.HTTPConnection("127.0.0.1", int(printed[1]), timeout=60)
        connection.request("GET", f"/?token={printed[2]}")
        assert b"rooftop scene view" in connection.getresponse().read()
        body, sender = json.dumps({"size": [16, 16]}), {"Authorization": f"Bearer {printed[2]}"}
        connection.request("POST", "/frame", body, sender)
        assert connection.getresponse().read()[:3] == b"\xff\xd8\xff"  # JPEG
        open_.append(connection)
        ended.append(time.perf_counter())
        raise KeyboardInterrupt

    monkeypatch.setattr("rooftop.cli.scene_view.wait_for_interrupt", look_and_interrupt)
    assert main(["scene", "view", *(str(mesh.path) for mesh in world.meshes), "--device", "cpu"]) == 0
    assert time.perf_counter() - ended[0] < serving.IDLE_S / 2  # the server's end does not wait for the open connection
    open_[0].close()
    said = capsys.readouterr()
    assert "ended" in said.out
    assert said.err == ""


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("none.rtg",), "there is no file none.rtg"),
        (("BALL", "--port", "99999"), "99999 is not in the range"),
        (("BALL", "--host", "no.such.host.invalid"), "cannot listen at no.such.host.invalid"),
        (("BALL", "--up", "0,0,0"), "expected a direction"),
        (("BALL", "--fov", "180"), "fov_y_degrees=180"),
        (("BALL", "--device", "tpu"), "tpu"),
    ],
)
def test_wrong_calls(words: tuple[str, ...], said: str, world: scene.Scene, capsys: pytest.CaptureFixture[str]) -> None:
    ball = str(world.meshes[0].path)
    status = main(["scene", "view", *(ball if word == "BALL" else word for word in words)])
    err = capsys.readouterr().err
    assert (status, err.count("\n")) == (2, 1), err
    assert said in err


def test_beyond_loopback_there_is_a_warning(
    world: scene.Scene, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("rooftop.cli.scene_view.wait_for_interrupt", interrupted)
    ball = str(world.meshes[0].path)
    assert main(["scene", "view", ball, "--device", "cpu", "--host", "0.0.0.0"]) == 0
    assert "warning: --host 0.0.0.0 lets other machines connect" in capsys.readouterr().err
    assert main(["scene", "view", ball, "--device", "cpu"]) == 0
    assert capsys.readouterr().err == ""


# ---- a recorded path, rendered ---------------------------------------------------------------------------------------


def test_a_recorded_path_is_rendered(world: scene.Scene, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ends = [VIEW | {"seconds": 0.0}, VIEW | {"seconds": 0.1, "eye": [3.5, -9, 2]}]
    (tmp_path / "path.json").write_text(json.dumps({"rooftop_path": 1, "views": ends}))
    files = [str(mesh.path) for mesh in world.meshes]
    words = [*files, "--path", str(tmp_path / "path.json"), "--size", "48x32", "--device", "cpu"]

    def pixels(name: str) -> NDArray[np.uint8]:
        with Image.open(tmp_path / name) as image:
            return np.asarray(image.convert("RGB"))

    assert main(["scene", "render", "-o", str(tmp_path / "all.png"), *words]) == 0, capsys.readouterr().err
    assert len(list(tmp_path.glob("all-*.png"))) == 1 + 3  # 30 a second
    assert main(["scene", "render", "-o", str(tmp_path / "two.png"), "--frames", "2", *words]) == 0
    eye = ("--eye", "3.5,-9,2", "--target", "1.5,0,0", "--fov", "40")
    assert main(["scene", "render", "-o", str(tmp_path / "end.png"), *eye, *words[:2], *words[4:]]) == 0
    assert np.array_equal(pixels("two-0001.png"), pixels("all-0003.png"))
    assert np.array_equal(pixels("two-0001.png"), pixels("end.png"))
    assert not np.array_equal(pixels("two-0000.png"), pixels("two-0001.png"))
    capsys.readouterr()
    assert main(["scene", "render", "-o", str(tmp_path / "no.png"), *words, "--fov", "40"]) == 2
    assert "--fov does not go with --path" in capsys.readouterr().err
    assert main(["scene", "render", "-o", str(tmp_path / "no.png"), *words, "--eye", "1,2,3"]) == 2
    assert "--path and --eye each set the camera" in capsys.readouterr().err
    assert main(["scene", "render", "-o", str(tmp_path / "no.png"), *words[:3], files[0], *words[4:]]) == 2
