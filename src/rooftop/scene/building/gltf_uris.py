"""Read the content of a URI in a glTF document: embedded bytes, or a file next to the document."""

from __future__ import annotations

import base64
import os
from pathlib import Path
from urllib.parse import unquote

from rooftop.errors import InputError
from rooftop.scene.arguments import short


def has_escapes(uri: str) -> bool:
    """Whether a URI names a file with escaped characters, such as `%20` for a blank."""
    return uri[:5].lower() != "data:" and unquote(uri) != uri


def content_of(uri: str, document: Path, what: str) -> bytes:
    """Read the bytes of a `data:` URI, or of a file in the document's folder or below it. Symbolic links are followed.

    Args:
        uri: the URI.
        document: path of the glTF document.
        what: words for the beginning of a message, such as "mesh.gltf names".

    Raises:
        InputError: the file does not exist, or the URI leads out of the folder.
        ValueError: a `data:` URI is damaged.
    """
    if uri[:5].lower() == "data:":
        return base64.b64decode(uri.partition(",")[2])
    name = Path(os.path.normpath(unquote(uri)))
    if name.is_absolute() or name.parts[:1] == ("..",):
        folder = document.parent.absolute()  # the name may lead back into this folder
        name = Path(os.path.relpath(os.path.normpath(folder / name), folder))
    if name.parts[:1] == ("..",):
        raise InputError(f"{what} {short(uri)}, which is outside the document's folder: put the file into that folder")
    file = document.parent / name
    if not os.path.isfile(file):  # isfile also returns False for a name that is too long
        raise InputError(
            f"{what} {uri if len(uri) < 200 else short(uri)}, which is not a file beside the document: put it there"
        )
    return file.read_bytes()
