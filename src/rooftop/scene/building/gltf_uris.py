"""What a URI of a glTF document names: bytes in it, or a file beside it."""

from __future__ import annotations

import base64
import os
from pathlib import Path
from urllib.parse import unquote

from rooftop.errors import InputError
from rooftop.scene.arguments import short


def content_of(uri: str, document: Path, what: str) -> bytes:
    """The bytes of a `data:` URI, or of a file in the folder of the document or below it; links there are followed.

    Args:
        what: words for the beginning of a message, such as "mesh.gltf names".

    Raises:
        InputError: there is no such file, or the URI leads out of the folder.
    """
    if uri[:5].lower() == "data:":
        return base64.b64decode(uri.partition(",")[2])
    folder = document.parent.absolute()
    file = os.path.normpath(folder / unquote(uri))
    if not Path(file).is_relative_to(folder):
        raise InputError(f"{what} {short(uri)}, which leads out of the folder: put the file beside the document")
    if not os.path.isfile(file):  # also of a name that is too long for one
        raise InputError(f"{what} {uri if len(uri) < 200 else short(uri)}, which is no file beside it: put it there")
    return Path(file).read_bytes()
