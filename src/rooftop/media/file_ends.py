"""Find the size that a file must have by its own structure, to detect that it was cut off. Durations and counts in
headers are not used, since many writers state wrong values."""

from __future__ import annotations

import struct
from typing import BinaryIO

_SEGMENT, _CLUSTER = 0x18538067, 0x1F43B675  # names of elements in https://www.rfc-editor.org/rfc/rfc9559
_ASF_FILE = bytes.fromhex("a1dcab8c47a9cf118ee400c00c205365")  # "File Properties Object" of Microsoft's ASF, 3.2
_ASF_LIVE = 1  # flag of a stream whose size was not known
_MXF_PARTITION = bytes.fromhex("060e2b34020501010d01020101")  # SMPTE ST 377-1, 7.1
_HEADER_BYTES = 1 << 16
_OPEN_RIFF = (0, 0xFFFFFFFF)  # sizes of a RIFF chunk that its writer did not finish


def declared_end(file: BinaryIO, container: str, size_bytes: int) -> int | None:
    """The size in bytes that a file's structure states (for MXF, the minimum size); None if it states no size.

    Args:
        file: an open file. The current position of the file is restored.
        container: FFmpeg's names for the format of the file; only AVI, Matroska (WebM), ASF and MXF are supported.
        size_bytes: size of the file.
    """
    place = file.tell()
    try:
        if "matroska" in container:
            return _end_of_matroska(file, size_bytes)
        if container == "asf":
            return _end_of_asf(file)
        if container == "mxf":
            return _end_of_mxf(file, size_bytes)
        return _end_of_riff(file, size_bytes) if "avi" in container else None
    finally:
        file.seek(place)


def _end_of_riff(file: BinaryIO, size_bytes: int) -> int | None:
    """The byte at which the last RIFF chunk of a file ends; None if unknown. (AVI files above 1 GB have several
    chunks.)"""
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


def _end_of_asf(file: BinaryIO) -> int | None:
    file.seek(0)
    header = file.read(_HEADER_BYTES)
    place = header.find(_ASF_FILE)
    if place < 0 or len(header) < place + 92:
        return None
    (size,) = struct.unpack_from("<Q", header, place + 40)
    (flags,) = struct.unpack_from("<I", header, place + 88)
    return None if flags & _ASF_LIVE else size or None


def _end_of_mxf(file: BinaryIO, size_bytes: int) -> int | None:
    """The least size in bytes of a complete MXF file, whose header states where the footer begins. None if the header
    does not state it."""
    file.seek(0)
    header = file.read(_HEADER_BYTES)
    place = header.find(_MXF_PARTITION)
    value = place + 17 + (header[place + 16] & 0x7F if header[place + 16] & 0x80 else 0) if place >= 0 else 0
    if place < 0 or len(header) < value + 32:
        return None
    (footer,) = struct.unpack_from(">Q", header, value + 24)
    return max(size_bytes, footer + 1) if footer else None


def _end_of_matroska(file: BinaryIO, size_bytes: int) -> int | None:
    """The byte at which the segment of a Matroska file ends. If the segment's size is unknown, as in a live stream, the
    segment ends with its last element."""
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
            return size_bytes + 1  # the file ends within the head of an element
        name, begin, size = found
        if size is None and name != _CLUSTER:
            return None
        place = begin + (size or 0)  # elements of a cluster of unknown size are read like elements of the segment
    return place


def _element(file: BinaryIO, place: int) -> tuple[int, int, int | None] | None:
    """Read the head of the Matroska element at a position: (ID, start of the content, bytes of the content or None if
    unknown)."""
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
    """The length in bytes of a number with this first byte: the byte's leading zero bits plus one. 0 if the byte is 0
    or the length exceeds `most`."""
    count = 9 - first[0].bit_length() if first and first[0] else 0
    return count if count <= most else 0


def is_webp(file: BinaryIO) -> bool:
    """Whether a file begins like a WebP picture, animated or not."""
    file.seek(0)
    head = file.read(12)
    return head[:4] == b"RIFF" and head[8:] == b"WEBP"
