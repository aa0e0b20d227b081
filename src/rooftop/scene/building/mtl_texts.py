"""Read the materials of an OBJ file: Kd and map_Kd of the .mtl files that the OBJ file names.

Colours and images are displayed values (sRGB), as in the programs that write such files. `map_Kd` is multiplied by
`Kd`, as the format specifies. If there is a `map_Kd`, a Kd of 0 0 0 counts as white, because some programs write 0 0 0
for textured materials. The options -s and -o of `map_Kd` (scale and offset of the texture coordinates) and -clamp are
read. The format's other options are skipped, with a warning if they would change the picture. An unknown option is an
error. A path may contain blanks, backslashes or a drive. If the path does not exist, the file of that
name next to the .mtl file is used.

Source: the MTL specification of Alias|Wavefront (Object files, appendix B1, "Material file format").
"""

from __future__ import annotations

import math
import re
import warnings
from pathlib import Path, PureWindowsPath

from rooftop.errors import InputError
from rooftop.scene.building.gltf_materials import WITHOUT
from rooftop.scene.building.obj_texts import utf8
from rooftop.scene.building.part_materials import AS_IT_IS, PartMaterial
from rooftop.scene.images import Texture
from rooftop.scene.materials import Material

_LIBRARY = re.compile(rb"(?:^|[\r\n])[ \t]*mtllib[ \t]+([^\r\n]+)")
_NUMBERS = {"-s": 3, "-o": 3, "-t": 3}  # maximum count of numbers after each option
# number of words after each other option
_WORDS = {**dict.fromkeys(("-blendu", "-blendv", "-clamp", "-cc", "-texres", "-boost", "-bm", "-imfchan"), 1), "-mm": 2}
# options that are ignored: -bm is for bump maps, and the others control how other programs filter images
_HARMLESS = {"-blendu", "-blendv", "-texres", "-bm", "-boost"}


def materials_of_obj(content: bytes, path: Path, textures: bool) -> dict[str, PartMaterial] | None:
    """Read the materials that an OBJ file can use, by name; None if the OBJ file names no existing .mtl file.

    Args:
        content: content of the OBJ file, in UTF-8.
        path: path of the OBJ file.
        textures: whether images are read.

    Raises:
        InputError: an image is missing, damaged or too large, or a number is invalid. The message names the file and
            the material.
    """
    files: list[Path] = []
    for line in dict.fromkeys(_LIBRARY.findall(content)):
        files += _libraries(line.decode(errors="replace").strip(), path)
    if not files:
        return None
    found: dict[str, PartMaterial] = {}
    for file in files:
        images: dict[Path, Texture] = {}
        for name, words in _described(file).items():
            if name not in found:
                found[name] = _material(name, words, file, images, textures)
    return found


def _libraries(names: str, path: Path) -> list[Path]:
    """The files that a `mtllib` line names. If the whole text `names` is the name of an existing file, only that file;
    otherwise a file for each word, without those that do not exist."""
    whole = _beside(names, path.parent)
    if whole is not None:
        return [whole]
    found = []
    for name in names.split():
        file = _beside(name, path.parent)
        if file is None:
            warnings.warn(f"{path} names {name}, which does not exist: its materials are ignored", stacklevel=6)
        else:
            found.append(file)
    return found


def _beside(name: str, folder: Path) -> Path | None:
    """Find a file that a file in `folder` names: at the named path, relative to `folder`; else under the last part of
    this path in `folder` itself."""
    for each in (name, name.replace("\\", "/"), PureWindowsPath(name).name):
        file = folder / each
        if each and file.is_file():
            return file
    return None


def _described(file: Path) -> dict[str, dict[str, tuple[int, str]]]:
    """Parse an .mtl file: for each material, a dict from a line's first word (in lower case) to the line's number and
    its other words."""
    found: dict[str, dict[str, tuple[int, str]]] = {}
    words: dict[str, tuple[int, str]] = {}
    text = utf8(file.read_bytes()).decode()
    for number, line in enumerate(re.sub(r"\\\r?\n", " ", text).splitlines(), 1):
        word, _, rest = line.strip().replace("\t", " ").partition(" ")
        if word.lower() == "newmtl":
            words = {}
            found.setdefault(" ".join(rest.split()), words)
        elif word and not word.startswith("#"):
            words[word.lower()] = (number, rest.strip())
    return found


def _material(
    name: str, words: dict[str, tuple[int, str]], file: Path, images: dict[Path, Texture], textures: bool
) -> PartMaterial:
    color = _color(words, file, name)
    see_through = ""
    for word, opaque in (("d", 1.0), ("tr", 0.0)):
        if word in words and _last_number(words[word][1]) not in (None, opaque):
            see_through = f"{word if word == 'd' else 'Tr'} of material {name}"
    if "map_d" in words:
        see_through = f"map_d of material {name}"
    if "map_kd" not in words or not textures:
        return PartMaterial(Material(color, name=name), AS_IT_IS, see_through)
    where = f"{file}, line {words['map_kd'][0]}: material {name}"
    image, options = _image_and_options(words["map_kd"][1], where)
    (wide, high), (right, up) = _pair(options, "-s", 1.0, where), _pair(options, "-o", 0.0, where)
    place = _beside(image, file.parent)
    if place is None:
        raise InputError(
            f"{file}: material {name} names the image {image or 'of an empty name'}, which does not exist: put it "
            f"beside the file, or {WITHOUT}"
        )
    try:
        if place not in images:
            images[place] = Texture.of(place)
            images[place].texels()
    except InputError as error:
        raise InputError(f"{file}: material {name}: {error}; or {WITHOUT}") from error
    color = (1.0, 1.0, 1.0) if not any(color) else color
    wrap = "clamp" if options.get("-clamp") == ["on"] else "repeat"
    placing = ((wide, 0.0, right), (0.0, high, up))
    return PartMaterial(Material(color, images[place], wrap, name=name), placing, see_through)


def _color(words: dict[str, tuple[int, str]], file: Path, name: str) -> tuple[float, float, float]:
    if "kd" not in words:
        return 1.0, 1.0, 1.0
    number, rest = words["kd"]
    parts = rest.split()
    if parts and parts[0].lower() in ("spectral", "xyz"):
        warnings.warn(f"{file}: Kd {parts[0]} of material {name} is not supported; the material is white", stacklevel=6)
        return 1.0, 1.0, 1.0
    try:
        given = [float(part) for part in parts[:3]]
        if any(map(math.isnan, given)):
            raise ValueError
        numbers = [min(max(each, 0.0), 1.0) for each in given]
        red, green, blue = numbers * 3 if len(numbers) == 1 else numbers
    except ValueError as error:
        raise InputError(
            f"{file}, line {number}: Kd of material {name} is {rest!r}: expected one or three numbers"
        ) from error
    return red, green, blue


def _last_number(text: str) -> float | None:
    """Parse the last word as a number, for example of `0.5` or `-halo 0.5`; None if it is no number."""
    try:
        return float(text.split()[-1])
    except (IndexError, ValueError):
        return None


def _image_and_options(text: str, where: str) -> tuple[str, dict[str, list[str]]]:
    """Split an image line into the path, which may have blanks, and the options before it."""
    options: dict[str, list[str]] = {}
    rest = text
    while rest.startswith("-"):
        option, _, after = rest.partition(" ")
        option, rest = option.lower(), after.lstrip()
        if option not in _NUMBERS and option not in _WORDS:
            raise InputError(f"{where} has the unknown option {option} of map_Kd: remove it")
        options[option] = []
        for _ in range(_NUMBERS.get(option) or _WORDS[option]):
            word, _, after = rest.partition(" ")
            if not after or (option in _NUMBERS and _last_number(word) is None):
                break  # -s, -o and -t have one to three numbers
            options[option].append(word)
            rest = after.lstrip()
        if option not in _HARMLESS and option not in ("-s", "-o", "-clamp") and not _changes_nothing(options, option):
            warnings.warn(f"{where}: {option} {' '.join(options[option])} of map_Kd is ignored", stacklevel=7)
    return rest.strip().strip('"'), options


def _changes_nothing(options: dict[str, list[str]], option: str) -> bool:
    """Whether the words of an option are those that the format assumes without the option."""
    usual = {"-mm": [0.0, 1.0], "-t": [0.0] * len(options[option])}
    if option in usual:
        return [_last_number(word) for word in options[option]] == usual[option]
    return option == "-cc" and options[option] == ["off"]


def _pair(options: dict[str, list[str]], option: str, otherwise: float, where: str) -> tuple[float, float]:
    """Parse an option's numbers for u and v; a missing number becomes `otherwise`."""
    words = options.get(option, [])[:2]
    numbers = [float(word) for word in words]
    if not all(map(math.isfinite, numbers)):
        raise InputError(f"{where} has {option} {' '.join(words)}: expected finite numbers")
    numbers += [otherwise] * (2 - len(numbers))
    return numbers[0], numbers[1]
