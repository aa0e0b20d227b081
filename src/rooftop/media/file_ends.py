"""Where a file must end by its own structure: whether it was cut off is seen from that, and not from durations and
counts in its header, which writers get wrong."""

from __future__ import annotations

import struct
from typing import BinaryIO

_SEGMENT, _CLUSTER = 0x18538067, 0x1F43B675  # of https://www.rfc-editor.org/rfc/rfc9559
_OPEN_RIFF = (0, 0xFFFFFFFF)  # sizes of a file whose writer did not come to its end


def declared_end(file: BinaryIO, container: str, size_bytes: int) -> int | None:
    """The byte after the last one that the file says it has; None where it does not say.

    Args:
        file: read from where it is, and put back there.
        container: FFmpeg's names of its format: of AVI and Matroska (WebM) the structure is known.
        size_bytes: of the file.
    """
    place = file.tell()
    try:
        if "matroska" in container:
            return _end_of_matroska(file, size_bytes)
        return _end_of_riff(file, size_bytes) if "avi" in container else None
    finally:
        file.seek(place)


def _end_of_riff(file: BinaryIO, size_bytes: int) -> int | None:
    """The end of the last RIFF chunk: AVI files of more than 1 GB have several."""
    end = 0
    while end + 8 <= size_bytes:
        file.seek(end)
        name, size = struct.unpack("<4sI", file.read(8))
        if name != b"RIFF":
            break
        if size in _OPEN_RIFF:
            return None
        end += 8 + size + size % 2
    return end or None


def _end_of_matroska(file: BinaryIO, size_bytes: int) -> int | None:
    """The end of the segment. If its size is unknown, as in a live stream, it ends with its last element."""
    place = 0
    while (found := _element(file, place)) is not None:
        name, begin, size = found
        if name == _SEGMENT:
            return begin + size if size is not None else _end_of_elements(file, begin, size_bytes)
        if size is None:
            return None
        place = begin + size
    return None


def _end_of_elements(file: BinaryIO, place: int, size_bytes: int) -> int | None:
    while place < size_bytes:
        found = _element(file, place)
        if found is None:
            return size_bytes + 1  # not even the head of an element is whole
        name, begin, size = found
        if size is None and name != _CLUSTER:
            return None
        place = begin + (size or 0)  # the elements of an open cluster are looked at like those of the segment
    return place


def _element(file: BinaryIO, place: int) -> tuple[int, int, int | None] | None:
    """(name, where its content begins, how long that is: None if not known) of the element at a place."""
    file.seek(place)
    head = file.read(12)
    name_bytes = _length(head[:1], 4)
    size_bytes = _length(head[name_bytes : name_bytes + 1], 8)
    if not name_bytes or not size_bytes or len(head) < name_bytes + size_bytes:
        return None
    bits = int.from_bytes(head[name_bytes : name_bytes + size_bytes]) & ((1 << 7 * size_bytes) - 1)
    unknown = bits == (1 << 7 * size_bytes) - 1
    return int.from_bytes(head[:name_bytes]), place + name_bytes + size_bytes, None if unknown else bits


def _length(first: bytes, most: int) -> int:
    """Bytes of a number that begins so: as many as there are zeros before its first 1, and one. 0 if there is none."""
    count = 9 - first[0].bit_length() if first and first[0] else 0
    return count if count <= most else 0


def is_webp(file: BinaryIO) -> bool:
    """Whether a file, from its beginning on, is a WebP picture; animated or not."""
    file.seek(0)
    head = file.read(12)
    return head[:4] == b"RIFF" and head[8:] == b"WEBP"
