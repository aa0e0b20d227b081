"""Parse a browser page's request from JSON. All values are checked before anything is drawn."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from rooftop.errors import InputError
from rooftop.scene.arguments import MAX_SIDE
from rooftop.scene.viewing.viewpoints import Viewpoint, checked_moves, finite_numbers
from rooftop.words import did_you_mean

MOST_PIXELS = 2**25  # maximum number of pixels of a picture: enough for 7680 x 4320
MOST_PIXEL_ERROR = 1e6
TAB_LETTERS = 64
FORMATS = ("jpeg", "png")


@dataclass(frozen=True)
class Asked:
    """The request of a browser tab for a picture.

    Attributes:
        tab: the tab's name. Of two requests of one tab, only the newer counts.
        view: the view; None is the home view.
        move: moves to apply to the view before it is drawn: the parameters of each move, by its name in `MOVES`.
        framed: whether to move the view so that the whole scene is in the picture.
        size: width and height in pixels.
        window: the size for which home and framed views are computed. `window` differs from `size` if the page requests
            a smaller picture while the camera moves.
        show: the mode, one of `modes.MODES`.
        light: the direction to the light; None keeps the renderer's light.
        pixel_error: as in `Renderer`; None for the initial value.
        format: "jpeg" or "png".
        quality: quality of JPEG, 1 to 100.
        at: the pixel (column, row) whose point is requested, if any.
    """

    tab: str
    view: Viewpoint | None
    move: Mapping[str, tuple[float, ...]]
    framed: bool
    size: tuple[int, int]
    window: tuple[int, int]
    show: str
    light: tuple[float, ...] | None
    pixel_error: float | None
    format: str
    quality: int
    at: tuple[int, int] | None


def content_of(body: bytes) -> Any:
    """Parse the JSON of a request.

    Raises:
        InputError: the content is not JSON. (NaN and Infinity, which Python accepts, are not JSON.)
    """

    def refuse(word: str) -> None:
        raise InputError(f"the request has {word}: expected finite numbers")

    try:
        return json.loads(body, parse_constant=refuse)
    except InputError:
        raise
    except (ValueError, RecursionError) as error:
        raise InputError(f"the request is not JSON: {error}") from None


def asked(content: object, modes: Collection[str]) -> Asked:
    """Parse and check a request of the page.

    Args:
        content: the request's JSON.
        modes: the modes in which the scene can be shown.

    Raises:
        InputError: a name is unknown or a value is invalid.
    """
    if not isinstance(content, Mapping):
        raise InputError(f"the request is {content!r:.80}: expected an object")
    for name in content:
        if name not in Asked.__annotations__:
            near = did_you_mean(name, Asked.__annotations__)
            raise InputError(f"{name!r} is not known{near}; a request may have {', '.join(Asked.__annotations__)}")
    view, light, error, at = (content.get(name) for name in ("view", "light", "pixel_error", "at"))
    tab = content.get("tab", "")
    if not isinstance(tab, str) or len(tab) > TAB_LETTERS:
        raise InputError(f"tab is {tab!r:.80}: expected a name of at most {TAB_LETTERS} letters")
    size = _size("size", content.get("size"))
    return Asked(
        tab=tab,
        view=None if view is None else Viewpoint.of_plain(view, "view"),
        move=checked_moves(content.get("move", {})),
        framed=_one_of("framed", content.get("framed", False), (False, True)),
        size=size,
        window=_size("window", content["window"]) if "window" in content else size,
        show=_one_of("show", content.get("show", "color"), modes),
        light=None if light is None else _direction(light),
        pixel_error=None if error is None else _between("pixel_error", error, 0, MOST_PIXEL_ERROR),
        format=_one_of("format", content.get("format", "jpeg"), FORMATS),
        quality=_whole("quality", content.get("quality", 80), 1, 100),
        at=None if at is None else _pixel(at, size),
    )


def _one_of(name: str, value: Any, known: Collection[Any]) -> Any:
    if type(value) not in {type(each) for each in known} or value not in known:
        near = did_you_mean(value, map(str, known)) if isinstance(value, str) else ""
        raise InputError(f"{name} is {value!r:.80}{near}: expected one of {', '.join(map(str, known))}")
    return value


def _between(name: str, value: Any, low: float, high: float) -> float:
    if type(value) not in (int, float) or not low <= value <= high:
        raise InputError(f"{name} is {value!r:.80}: expected a number from {low:g} to {high:g}")
    return float(value)


def _whole(name: str, value: Any, low: int, high: int) -> int:
    if type(value) is not int or not low <= value <= high:
        raise InputError(f"{name} is {value!r:.80}: expected an integer from {low} to {high}")
    return value


def _pair(name: str, content: Any) -> tuple[Any, Any]:
    if not isinstance(content, list) or len(content) != 2:
        raise InputError(f"{name} is {content!r:.80}: expected a list of two integers")
    return content[0], content[1]


def _size(name: str, content: Any) -> tuple[int, int]:
    width, height = (_whole(name, side, 1, MAX_SIDE) for side in _pair(name, content))
    if width * height > MOST_PIXELS:
        raise InputError(f"{name} is {width} x {height}: expected at most {MOST_PIXELS:,} pixels")
    return width, height


def _pixel(content: Any, size: tuple[int, int]) -> tuple[int, int]:
    column, row = _pair("at", content)
    return _whole("at", column, 0, size[0] - 1), _whole("at", row, 0, size[1] - 1)


def _direction(content: Any) -> tuple[float, ...]:
    direction = finite_numbers(content, 3, "light")
    if not any(direction):
        raise InputError("light is 0, 0, 0: expected a direction with at least one number that is not 0")
    return direction
