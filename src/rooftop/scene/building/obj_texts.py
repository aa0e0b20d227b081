"""Convert Wavefront OBJ in its full format to a simple form, for a reader that supports only part of the format.

The simple form is UTF-8, with lines that end with a line feed, blanks between words, indices counted from the
beginning, and triangles or convex polygons. The full format also allows any encoding, carriage returns, tabs, comments
behind numbers, lines continued after a backslash, indices counted back from their position, and concave polygons, which
a fan of triangles covers wrongly. A text in simple form is not changed, since each pass over a large text takes long.

Source: the OBJ specification of Alias|Wavefront (B1. Object Files, version 3.0).
"""

from __future__ import annotations

import codecs
import re
import warnings

import numpy as np
import numpy.typing as npt

from rooftop.errors import InputError
from rooftop.scene.building.polygons import are_concave, cut_polygon

Points = npt.NDArray[np.float64]

# sequences of bytes that a text in the simple form never contains
_MARKS_OF_OTHERS = (b"\t", b"\\\n", b"\\\r", b"\nfo ")
_LONE_RETURN, _INDENTED = re.compile(rb"\r(?!\n)"), re.compile(rb"\n +\S")
_BACKWARD = re.compile(rb"\nf [^\n]*-\d")
_ZERO = re.compile(rb"\nf (?:[^\n]*[ /])?0(?:[ /\r\n]|\Z)")  # an index of 0 is invalid; `_absolute` reports it
_MARKS_OF_ZERO = (b" 0 ", b" 0\n", b" 0\r", b" 0/", b"/0")
_FACE, _VERTEX = re.compile(rb"\nf ([^\n]*)"), re.compile(rb"\nv ([^\n]*)")
_COLORED = re.compile(rb"\nv(?:[ \t]+[^\s#]+){3}((?:[ \t]+[^\s#]+){3})")
_OTHER_INDICES = re.compile(rb"/\S*")
_MARKS = ((codecs.BOM_UTF8, "utf-8-sig"), (codecs.BOM_UTF16_LE, "utf-16"), (codecs.BOM_UTF16_BE, "utf-16"))


def utf8(content: bytes) -> bytes:
    """Convert a text to UTF-8 without a byte order mark; invalid UTF-8 is read as Latin-1, which older exporters
    write."""
    for mark, encoding in _MARKS:
        if content.startswith(mark):
            return content.decode(encoding, errors="replace").encode()
    try:
        content.decode()
    except UnicodeDecodeError:
        return content.decode("latin-1").encode()
    return content


def plain_obj(content: bytes, name: str) -> bytes:
    """Convert an OBJ text to the simple form that the module describes, with the same mesh.

    Args:
        content: content of a file.
        name: the file's name in messages.

    Raises:
        InputError: a face names a missing vertex, or an index is not a number.
    """
    content = utf8(content)
    if _is_plain(b"\n" + content):
        return content
    return "\n".join(_lines(content.decode(), name)).encode() + b"\n"


def brightest(content: bytes) -> float | None:
    """Return the largest colour value of an OBJ file's vertices. None if no vertex line has six words (position and
    colour), or if one of these words is not a number."""
    colors = _COLORED.findall(b"\n" + content)
    try:
        return float(np.array(b" ".join(colors).split(), dtype=np.float64).max()) if colors else None
    except ValueError:
        return None


def _is_plain(text: bytes) -> bool:
    """Whether an OBJ text that begins with a line feed is in the simple form that the module describes. The checks are
    chosen for speed on large texts."""
    if any(mark in text for mark in _MARKS_OF_OTHERS) or (b"\r" in text and _LONE_RETURN.search(text)):
        return False
    if (b"\n " in text and _INDENTED.search(text)) or _BACKWARD.search(text):
        return False
    if _has_remarks(text) or (any(mark in text for mark in _MARKS_OF_ZERO) and _ZERO.search(text)):
        return False
    return not (_has_polygons(text) and _has_concave(text))


def _has_remarks(text: bytes) -> bool:
    """Whether a comment follows the numbers of a vertex or a face on the same line."""
    lines = (text.rfind(b"\n", 0, found.start()) + 1 for found in re.finditer(b"#", text))
    return any(text[begin : begin + 1] in (b"v", b"f") for begin in lines)


def _has_polygons(text: bytes) -> bool:
    """Whether a face may have more than three corners: its line has more than three blanks."""
    characters = np.frombuffer(text, np.uint8)
    starts = np.flatnonzero(characters == ord("\n")) + 1
    faces = np.flatnonzero(characters[np.minimum(starts, len(characters) - 1)] == ord("f"))
    blanks = np.append(np.flatnonzero(characters == ord(" ")), [len(text)] * 4)
    ends = np.append(starts[1:], len(text))
    return bool((blanks[np.searchsorted(blanks, starts[faces]) + 3] < ends[faces]).any())


def _has_concave(text: bytes) -> bool:
    """Whether any polygon has an inward corner. Also True if the text cannot be parsed here."""
    try:
        vertices = _table(_VERTEX.findall(text))
        by_count: dict[int, list[bytes]] = {}
        for each in _FACE.findall(text):
            by_count.setdefault(len(each.split()), []).append(each)
        for count, rows in by_count.items():
            if count > 3:
                indices = _table(rows).astype(np.int64) - 1
                if (indices < 0).any() or bool(are_concave(vertices[indices, :3]).any()):
                    return True
    except (ValueError, IndexError):
        return True  # the caller then checks the words one by one, and its error names the first wrong word
    return False


def _table(lines: list[bytes]) -> Points:
    """Parse lines with equal counts of words to an array of numbers. A word `v/vt/vn` becomes its first number.

    Raises:
        ValueError: a word is not a number, or lines have different numbers of words.
    """
    text = b" ".join(lines)
    if b"/" in text:
        text = _OTHER_INDICES.sub(b"", text)
    with warnings.catch_warnings():
        # if a text ends with something other than a number, NumPy only warns
        warnings.simplefilter("error")
        try:
            numbers: Points = np.fromstring(text, dtype=np.float64, sep=" ")
        except DeprecationWarning as warning:
            raise ValueError(str(warning)) from warning
    return numbers.reshape(len(lines), -1)


def _lines(text: str, name: str) -> list[str]:
    text = re.sub(r"\\(\r\n|\r|\n)", " ", text)
    counts = {"v": 0, "vt": 0, "vn": 0}
    vertices: list[list[float]] = []
    found: list[str] = []
    # the face's index in `found`, its corners, and the corners' vertices
    faces: list[tuple[int, list[str], list[int]]] = []
    for number, line in enumerate(re.split(r"\r\n|\r|\n", text), 1):
        word, *rest = (line.partition("#")[0] if line.lstrip()[:1] in ("v", "f") else line).split() or [""]
        if word in counts:
            counts[word] += 1
            if word == "v":
                vertices.append(_numbers(rest[:3], number, name))
        elif word in ("f", "fo"):  # in version 2 of the OBJ format, lines of faces begin with `fo`
            corners = [_absolute(corner, counts, number, name) for corner in rest]
            faces.append((len(found), corners, [int(corner.partition("/")[0]) - 1 for corner in corners]))
            word, rest = "f", corners
        found.append(" ".join([word, *rest]))
    points = np.array(vertices, np.float64).reshape(-1, 3)
    for place, corners, at in faces:
        if at and max(at) >= len(points):
            raise InputError(f"{name}: {found[place]!r} names vertex {max(at) + 1}, but there are only {len(points):,}")
        if len(corners) > 3:
            found[place] = "\n".join(f"f {corners[a]} {corners[b]} {corners[c]}" for a, b, c in cut_polygon(points[at]))
    return found


def _numbers(words: list[str], line: int, name: str) -> list[float]:
    try:
        return [float(word) for word in words] + [0.0] * (3 - len(words))
    except ValueError as error:
        raise InputError(f"{name}, line {line}: a vertex needs three numbers, got {' '.join(words)!r}") from error


def _absolute(corner: str, counts: dict[str, int], line: int, name: str) -> str:
    """Convert a face's corner `v/vt/vn` with negative indices, which count back from this line, to indices that count
    from the beginning of the file."""
    parts = []
    for part, kind in zip(corner.split("/"), counts, strict=False):
        try:
            index = int(part) if part else None
        except ValueError as error:
            raise InputError(f"{name}, line {line}: {corner!r} is not an index of a vertex") from error
        if index == 0:
            raise InputError(f"{name}, line {line}: {corner!r} has the index 0, but indices of OBJ begin at 1")
        if index is not None and index < 0:
            index += counts[kind] + 1
        if index is not None and index < 1:
            raise InputError(
                f"{name}, line {line}: {corner!r} counts back beyond the first of {counts[kind]:,} `{kind}` lines"
            )
        parts.append("" if index is None else str(index))
    return "/".join(parts)
