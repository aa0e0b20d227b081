"""Photographs as tensors have Pillow's pixels, upright, whichever decoder is used; incomplete ones are refused."""

from __future__ import annotations

import io
import re
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from skimage import data
from torch import Tensor

from rooftop.errors import InputError
from rooftop.mat import CV_8UC3, Mat
from rooftop.media import ImageDecoder, NoImageDecoderError, jpegs, nvjpeg, read_image, read_images
from rooftop.media.images import pillow_image, rgb_pixels

ORIENTATION = 0x0112
CAT = Image.fromarray(data.chelsea()).resize((91, 60))


def stored(image: Image.Image, form: str, **options: object) -> bytes:
    file = io.BytesIO()
    image.save(file, form, **options)
    return file.getvalue()


def hwc(image: Image.Image) -> Tensor:
    return torch.from_numpy(np.array(image))


FORMS = {
    "jpeg": stored(CAT, "JPEG", quality=90),
    "progressive": stored(CAT, "JPEG", progressive=True, restart_marker_rows=2),
    "grey": stored(CAT.convert("L"), "JPEG"),
    "cmyk": stored(CAT.convert("CMYK"), "JPEG"),
    "png": stored(CAT, "PNG"),
    "palette": stored(CAT.convert("P"), "PNG"),
    "webp": stored(CAT, "WEBP", lossless=True),
    "gif": stored(CAT.convert("P"), "GIF", save_all=True, append_images=[Image.new("P", CAT.size)]),
    "tiff": stored(CAT, "TIFF", compression="tiff_lzw"),
    "bmp": stored(CAT, "BMP"),
    "ppm": stored(CAT, "PPM"),
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """One photograph of each form."""
    folder = tmp_path / "photographs"
    folder.mkdir()
    for name, content in FORMS.items():
        (folder / f"{name}.jpg").write_bytes(content)  # recognized by its content, not by its name
    return folder


@pytest.mark.skipif(torch.cuda.is_available(), reason="with a GPU, colours are NVJPEG's and the device is the GPU")
def test_the_example_of_the_page_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    page = (Path(__file__).parents[2] / "docs" / "media.md").read_text(encoding="utf-8")
    section = page.split("## Photographs\n")[1].split("\n## ")[0]
    (snippet,) = re.findall(r"```py\n(.*?)```", section, re.DOTALL)
    monkeypatch.chdir(tmp_path)
    Path("holiday").mkdir()
    Path("holiday/cat.jpg").write_bytes(FORMS["jpeg"])
    names: dict[str, object] = {"__name__": "snippet"}
    exec(compile(snippet, "snippet", "exec"), names)
    out = capsys.readouterr().out.splitlines()
    assert out[0] == "cat.jpg (3, 60, 91)"
    assert out[1].startswith("cpu there is no NVJPEG")
    assert isinstance(names["mat"], Mat)


@pytest.mark.parametrize("form", FORMS)
def test_pixels_are_those_of_pillow(form: str, tmp_path: Path) -> None:
    path = tmp_path / "photo"
    path.write_bytes(FORMS[form])
    with Image.open(path) as image:
        expected = hwc(image.convert("RGB"))
    for source in (path, str(path), FORMS[form]):
        assert torch.equal(read_image(source, layout="hwc"), expected)
        pixels = read_image(source)
        assert torch.equal(pixels, expected.permute(2, 0, 1))
        assert (pixels.dtype, pixels.is_contiguous()) == (torch.uint8, True)


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("form", ["PNG", "JPEG", "WEBP"])
def test_photographs_are_upright(orientation: int, form: str) -> None:
    exif = Image.Exif()
    exif[ORIENTATION] = orientation
    turns = {2: 0, 3: 3, 4: 1, 5: 5, 6: 4, 7: 6, 8: 2}  # values of Image.Transpose
    lying = read_image(stored(CAT, form))
    upright = hwc(CAT if orientation == 1 else CAT.transpose(Image.Transpose(turns[orientation]))).permute(2, 0, 1)
    found = read_image(stored(CAT, form, exif=exif))
    assert found.shape == upright.shape
    assert torch.equal(found, nvjpeg.turned(lying, orientation))
    assert torch.equal(nvjpeg.turned(hwc(CAT).permute(2, 0, 1), orientation), upright)


def test_what_is_transparent_lies_on_white_and_sixteen_bits_are_scaled() -> None:
    half = Image.new("RGBA", (1, 1), (200, 0, 0, 128))
    assert read_image(stored(half, "PNG")).flatten().tolist() == [227, 127, 127]
    deep = Image.fromarray(np.array([[0, 32768], [65535, 257]], dtype=np.uint16))
    assert read_image(stored(deep, "PNG"))[1].tolist() == [[0, 128], [255, 1]]


@pytest.mark.parametrize("value", [np.float32(0.5), np.int32(70_000), np.int32(-1)])
def test_pixels_of_unknown_range_are_refused(value: np.generic, tmp_path: Path) -> None:
    """Floating-point pixels of 0 to 1 became black, and numbers of 32 bits wrapped around."""
    Image.fromarray(np.full((4, 4), value)).save(tmp_path / "deep.tif")
    with pytest.raises(InputError, match=r"deep\.tif cannot be read: its pixels are .*: save it with 8 or 16 bits"):
        read_image(tmp_path / "deep.tif")


def test_a_mat_lies_on_a_photograph_without_a_copy() -> None:
    pixels = read_image(FORMS["png"], layout="hwc")
    mat = Mat(pixels)
    assert (mat.type(), mat.rows, mat.cols) == (CV_8UC3, 60, 91)
    pixels[7, 5] = torch.tensor([1, 2, 3], dtype=torch.uint8)
    assert mat.tensor().data_ptr() == pixels.data_ptr()
    assert mat.tensor()[7, 5].tolist() == [1, 2, 3]


JPEGS = {
    "4:4:4": {"subsampling": 0},
    "4:2:2": {"subsampling": 1},
    "4:2:0": {"subsampling": 2},
    "progressive": {"progressive": True},
    "restarts": {"restart_marker_blocks": 3},
    "RGB": {"keep_rgb": True},
    "coarse": {"quality": 3},
}


@pytest.mark.parametrize("size", [(1, 1), (7, 3), (91, 60), (16, 129)], ids=str)
@pytest.mark.parametrize("form", JPEGS)
def test_simplejpeg_has_the_pixels_of_pillow(form: str, size: tuple[int, int], tmp_path: Path) -> None:
    path = tmp_path / "photo.jpg"
    path.write_bytes(stored(CAT.resize(size), "JPEG", **JPEGS[form]))
    expected = np.array(pillow_image(path))
    for source in (path, path.read_bytes(), memoryview(path.read_bytes())):
        found = rgb_pixels(source)
        assert isinstance(found, np.ndarray)
        assert found.flags.writeable
        assert np.array_equal(found, expected)


@pytest.mark.parametrize("form", ["grey", "cmyk", "png", "cut off", "turned", "reduced", "not installed"])
def test_pillow_decodes_what_simplejpeg_does_not(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    exif = Image.Exif()
    exif[ORIENTATION] = 6
    content = stored(CAT, "JPEG", exif=exif) if form == "turned" else FORMS.get(form, FORMS["jpeg"])
    if form == "not installed":
        monkeypatch.setattr(jpegs, "_simplejpeg", lambda: None)
    if form == "cut off":
        with pytest.raises(InputError, match="truncated"):
            rgb_pixels(content[:-200])
        return
    reduction = (lambda width, height: 3.0) if form == "reduced" else None
    found = rgb_pixels(content, reduction)
    assert isinstance(found, Image.Image)
    assert np.array_equal(np.array(found), np.array(pillow_image(content, reduction)))


DAMAGED = pytest.mark.filterwarnings("ignore::UserWarning:PIL")  # Pillow also warns of errors that it raises


@DAMAGED
@pytest.mark.parametrize("form", FORMS)
def test_a_file_that_was_cut_off_is_an_error_not_half_a_picture(form: str) -> None:
    content = FORMS[form]
    whole, errors = read_image(content), 0
    ends = len(content) - np.array([1, 2, 3, 5, 9, 13, 40])
    for end in sorted({*range(0, len(content), len(content) // 25), *ends.tolist()}):
        try:
            found = read_image(content[:end])
        except InputError:
            errors += 1
        else:  # data after the pixels may be missing
            assert torch.equal(found, whole), end
    assert errors >= (10 if form == "gif" else 24)  # a GIF's second picture is not read


@DAMAGED
def test_changed_bytes_give_pixels_or_one_kind_of_error() -> None:
    random = np.random.default_rng(0)
    for form in ("jpeg", "png", "webp", "gif", "tiff"):
        errors = 0
        for _ in range(60):
            content = bytearray(FORMS[form])
            for place in random.integers(0, int(random.choice([40, 400, len(content)])), 3):
                content[place] = random.integers(256)
            try:
                read_image(bytes(content))
            except InputError:
                errors += 1
        assert errors


def test_an_image_larger_than_memory_is_refused_by_its_header(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    header = bytearray(stored(Image.new("L", (8, 8)), "BMP"))
    header[18:26] = (20_000).to_bytes(4, "little") + (20_000).to_bytes(4, "little")
    path = tmp_path / "bomb.bmp"
    path.write_bytes(header)
    with pytest.raises(InputError, match=r"bomb\.bmp cannot be read"):
        read_image(path)
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", None)  # some libraries switch this limit off for the whole process
    with pytest.raises(InputError, match=r"bomb\.bmp cannot be read: it has 20000 x 20000 pixels, more than"):
        read_image(path)


def test_folders_in_order_ahead(folder: Path) -> None:
    found = list(read_images([folder, folder / "png.jpg"], threads=3))
    names = [*sorted(FORMS), "png"]
    assert [each.path.stem for each in found] == names
    for each in found:
        assert torch.equal(each.pixels, read_image(FORMS[each.path.stem])), each.path
    assert next(read_images([folder], layout="hwc")).pixels.shape == (60, 91, 3)


def test_a_broken_file_is_named_or_skipped(folder: Path) -> None:
    (folder / "broken.jpg").write_bytes(FORMS["jpeg"][:700])
    (folder / "a.jpg").write_text("no image")
    with pytest.raises(InputError, match=r"a\.jpg is not an image"):
        list(read_images([folder]))
    decoder = ImageDecoder(on_error="skip", threads=2)
    with pytest.warns(UserWarning, match="skipped: ") as warned:
        found = list(decoder.read([folder]))
    assert [path.stem for path, _ in found] == sorted(FORMS)
    assert [path.name for path, _ in decoder.skipped] == ["a.jpg", "broken.jpg"]
    assert "truncated" in decoder.skipped[1][1]
    assert len(warned) == 2
    with pytest.raises(InputError, match="is not an image"):
        decoder.decode(folder / "a.jpg")
    with pytest.raises(InputError, match="does not exist"):
        decoder.read([folder / "missing.jpg"])
    with pytest.raises(InputError, match="expected a list of photographs and folders"):
        decoder.read(str(folder))


@pytest.mark.parametrize(
    "options", [{"layout": "nchw"}, {"on_error": "ignore"}, {"threads": 0}, {"device": "tpu"}, {"device": "meta"}]
)
def test_wrong_arguments(options: dict[str, object]) -> None:
    with pytest.raises(InputError, match=rf"{next(iter(options))}.*expected"):
        ImageDecoder(**options)  # type: ignore[arg-type]


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_without_a_gpu_auto_says_why_and_cuda_raises() -> None:
    decoder = ImageDecoder("auto")
    assert decoder.device == torch.device("cpu")
    assert "no CUDA GPU" in str(decoder.fallback_reason)
    assert torch.equal(decoder.decode(FORMS["png"]), read_image(FORMS["png"]))
    assert ImageDecoder("cpu").fallback_reason is None
    with pytest.raises(NoImageDecoderError, match=r'cannot be decoded on cuda: there is no NVJPEG.*Use device="cpu"'):
        read_image(FORMS["jpeg"], device="cuda")


# What is given to the GPU's decoder. In these tests, another decoder takes its place.


def lying(content: bytes) -> Tensor:
    """(3, H, W) as NVJPEG returns it, without rotation."""
    return hwc(Image.open(io.BytesIO(content)).convert("RGB")).permute(2, 0, 1).contiguous()


def test_jpegs_go_to_nvjpeg_and_what_it_refuses_to_pillow() -> None:
    exif = Image.Exif()
    exif[ORIENTATION] = 6
    turned = stored(CAT, "JPEG", exif=exif)
    refused = stored(CAT.resize((30, 30)), "JPEG")
    other_size = stored(CAT.resize((24, 30)), "JPEG")
    given: list[list[bytes]] = []

    def decode(contents: Sequence[bytes]) -> list[Tensor]:
        given.append(list(contents))
        if refused in contents:
            raise RuntimeError("nvjpegDecode failed: 3")
        return [lying(each)[:, : 20 if each == other_size else None] for each in contents]

    broken, text = FORMS["jpeg"][:-700], b"no image"
    group = [FORMS["jpeg"], turned, FORMS["png"], broken, refused, FORMS["cmyk"], text, other_size]
    for layout in ("chw", "hwc"):
        decoder = ImageDecoder(layout=layout)
        found = decoder._by_either(group, decode)
        for content, pixels in zip(group, found, strict=True):
            if content in (broken, text):
                assert isinstance(pixels, InputError)
                assert f"image of {len(content):,} bytes" in str(pixels)
            else:
                assert isinstance(pixels, Tensor)
                assert pixels.is_contiguous()
                assert torch.equal(pixels, read_image(content, layout=layout))
        assert decoder.by_pillow == {
            "PNG": 1,
            "JPEG in CMYK": 1,
            "JPEG without its end": 1,
            "JPEG that NVJPEG refuses": 2,
        }
    jpegs = [FORMS["jpeg"], turned, refused, other_size]
    assert given[: len(given) // 2] == [jpegs, jpegs[:2], jpegs[2:], [refused], [other_size]]


def test_a_jpeg_is_whole_up_to_the_marker_of_its_end() -> None:
    for form in ("jpeg", "progressive", "grey", "cmyk"):
        content = FORMS[form]
        assert nvjpeg.is_whole(content)
        assert nvjpeg.is_whole(content + b"what cameras write behind it")
        assert not any(nvjpeg.is_whole(content[:end]) for end in range(len(content)))


def test_colours_that_are_not_luma_and_chroma_are_not_for_nvjpeg() -> None:
    plain = FORMS["jpeg"]
    at = plain.index(b"\xff\xdb")  # the first table, behind JFIF's segment
    adobe = plain[:2] + b"\xff\xee\x00\x0eAdobe\x00\x64\x00\x00\x00\x00\x00" + plain[at:]
    bare = bytearray(plain[:2] + plain[at:])
    start, scan = bare.index(b"\xff\xc0"), bare.index(b"\xff\xda")
    for number, name in enumerate(b"RGB"):
        bare[start + 10 + 3 * number] = bare[scan + 5 + 2 * number] = name
    for content, against in (
        (plain, None),
        (FORMS["grey"], None),
        (FORMS["progressive"], None),
        (adobe, "stored as red, green and blue"),
        (bytes(bare), "stored as red, green and blue"),
    ):
        with Image.open(io.BytesIO(content)) as image:
            found = nvjpeg.reason_against(image, content)
            assert found is None if against is None else against in str(found)


@pytest.mark.gpu
def test_a_gpu_gives_what_the_cpu_gives(folder: Path) -> None:
    photo = Image.fromarray(data.astronaut())
    exif = Image.Exif()
    exif[ORIENTATION] = 6
    for sampling in range(3):  # chroma with all samples, with half of them, with a quarter
        photo.save(folder / f"a{sampling}.jpg", quality=95, subsampling=sampling, exif=exif)
        photo.resize((333, 251)).save(folder / f"b{sampling}.jpg", quality=95, subsampling=sampling, progressive=True)
    decoder = ImageDecoder("cuda", threads=3)
    assert (decoder.device.type, decoder.fallback_reason) == ("cuda", None)
    cpu = list(read_images([folder]))
    for _ in range(3):
        for (path, pixels), (other, expected) in zip(decoder.read([folder]), cpu, strict=True):
            assert (path, pixels.device) == (other, decoder.device)
            apart = (pixels.cpu().int() - expected.int()).abs().float()
            if path.stem in ("png", "palette", "webp", "gif", "tiff", "bmp", "ppm", "cmyk"):
                assert apart.max() == 0, path
            else:
                assert apart.mean() <= 2, path
            if path.stem in ("a0", "b0", "grey"):
                assert apart.max() <= 4, path  # one level of luma and one of chroma, and the rounding
    assert decoder.by_pillow.total() == 3 * 8


@pytest.mark.gpu
def test_memory_of_photographs_is_not_used_again_while_a_stream_reads_it(folder: Path) -> None:
    photo = Image.fromarray(data.astronaut()).resize((1500, 1000))
    for number in range(24):
        photo.rotate(number).save(folder / f"{number:02}-turned.jpg", quality=95, subsampling=0)
    paths = sorted(folder.glob("*-turned.jpg"))
    expected = [pixels.double().mean() for _, pixels in read_images(paths)]
    stream, found = torch.cuda.Stream(), []
    with torch.cuda.stream(stream):
        for _, pixels in read_images(paths, device="cuda"):
            torch.cuda._sleep(20_000_000)  # so that the stream is far behind when the pixels are released
            found.append(pixels.double().mean())
            del pixels
        stream.synchronize()
    for ours, theirs in zip(found, expected, strict=True):
        assert abs(ours.item() - theirs.item()) < 1
