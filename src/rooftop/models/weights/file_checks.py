"""Say what a file is if it is not a file of weights, and find the damage that `torch.load` does not notice."""

from __future__ import annotations

import zipfile
from pathlib import Path

CHUNK_BYTES = 1 << 20
_PAGE = "an HTML page: the download failed, so download the file again"

BEGINNINGS = (
    (b"version https://git-lfs", (), "a pointer of Git LFS, not the file itself: run `git lfs pull` in its repository"),
    (b"<!doctype html", (), _PAGE),
    (b"<html", (), _PAGE),
    (b"\x89hdf\r\n", (".h5", ".hdf5"), "an HDF5 file, as Keras writes: give its name the suffix .h5"),
    (b"gguf", (), "a GGUF file of llama.cpp: Rooftop reads only safetensors and PyTorch's files"),
    (
        b"pk\x03\x04",
        (".pth", ".pt", ".bin", ".ckpt", ".tar", ".keras"),
        "a zip archive, as torch.save writes: give its name the suffix .pth",
    ),
)
"""Each entry: the first bytes of a file, in lower case; the suffixes for which these bytes are right; and, for files
with any other suffix, what the file is and what to do.
"""


def called(path: Path) -> str:
    """Return " (it is ...)" if a file's first bytes show that it has a wrong suffix or is not a file of weights; "" if
    they do not show this.
    """
    with path.open("rb") as file:
        begin = file.read(64).lower()
    suffix, header_bytes = path.suffix.lower(), int.from_bytes(begin[:8], "little")
    if suffix != ".safetensors" and begin[8:9] == b"{" and header_bytes <= path.stat().st_size:
        return " (it is a safetensors file: give its name the suffix .safetensors)"
    for first, suffixes, what in BEGINNINGS:
        if begin.startswith(first) and suffix not in suffixes:
            return f" (it is {what})"
    return ""


def damaged_entry(path: Path) -> str | None:
    """Find an entry of a zip archive whose bytes do not match its checksum. `torch.load` does not compare checksums.

    Returns:
        The entry's name. None if there is no such entry, the file is no zip archive, or it was saved without checksums
        (`torch.serialization.set_crc32_options(False)`), so that none matches.
    """
    damaged, whole = [], 0
    try:
        with zipfile.ZipFile(path) as archive:
            for entry in archive.infolist():
                try:
                    with archive.open(entry) as file:
                        while file.read(CHUNK_BYTES):
                            pass
                    whole += 1
                except zipfile.BadZipFile:
                    damaged.append(entry.filename)
    except (zipfile.BadZipFile, NotImplementedError):
        return None
    return damaged[0] if damaged and whole else None
