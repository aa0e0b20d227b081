"""Samples in tar files are found and read in any order. Errors name damaged samples."""

from __future__ import annotations

import io
import tarfile
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from rooftop.data import ImageTransform, Loader, TarShards
from rooftop.errors import InputError


def pixels(number: int) -> np.ndarray:
    return np.random.default_rng(number).integers(0, 256, (12, 16, 3), dtype=np.uint8)


def encoded(number: int) -> bytes:
    file = io.BytesIO()
    Image.fromarray(pixels(number)).save(file, "PNG")
    return file.getvalue()


def write(path: Path, files: Mapping[str, bytes]) -> Path:
    with tarfile.open(path, "w") as tar:
        for name, content in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
    return path


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for shard in range(3):
        numbers = range(4 * shard, 4 * shard + 4)
        files = {f"{n:06d}.{end}": make for n in numbers for end, make in (("png", encoded(n)), ("cls", b"%d" % n))}
        write(tmp_path / f"train-{shard:03d}.tar", files)
    return tmp_path


def test_samples_by_number(folder: Path) -> None:
    data = TarShards(folder)
    assert len(data) == 12
    for number in (11, 0, 5, -1):
        image, label = data[number]
        assert label == number % 12
        assert torch.equal(image, torch.from_numpy(pixels(number % 12)).permute(2, 0, 1))
    assert data.name(5) == f"{folder}/train-001.tar: 000005"
    with pytest.raises(IndexError):
        data[12]


def test_ways_to_name_shards(folder: Path) -> None:
    text = str(folder / "train-{001..002}.tar")
    assert len(TarShards(text)) == 8
    assert TarShards(text)[0][1] == 4
    assert len(TarShards(str(folder / "train-*.tar"))) == 12
    assert len(TarShards([folder / "train-002.tar", str(folder / "train-000.tar")])) == 8
    assert len(TarShards(folder / "train-002.tar")) == 4
    with pytest.raises(InputError, match=r"train-003\.tar does not exist"):
        TarShards(str(folder / "train-{001..003}.tar"))
    with pytest.raises(InputError, match="no tar files"):
        TarShards(str(folder / "test-*.tar"))
    with pytest.raises(InputError, match="is not a file"):
        TarShards([folder])
    with pytest.raises(InputError, match=r"fields is the string 'cls': expected a sequence such as \('cls',\)"):
        TarShards(folder, fields="cls")


def test_fields(tmp_path: Path) -> None:
    array = io.BytesIO()
    np.save(array, np.arange(6).reshape(2, 3))
    files = {"a/one.left.png": encoded(1), "a/one.json": b'{"boxes": [1, 2]}', "a/one.npy": array.getvalue()}
    files |= {"a/two.txt": "Grüße".encode(), "a/two.bin": b"\x00\x01"}
    path = write(tmp_path / "mixed.tar", files)
    first, second = (TarShards(path, fields=None)[number] for number in (0, 1))
    assert list(first) == ["__key__", "left.png", "json", "npy"]
    assert first["left.png"].shape == (3, 12, 16)
    assert first["json"] == {"boxes": [1, 2]}
    assert first["npy"].tolist() == [[0, 1, 2], [3, 4, 5]]
    assert second == {"__key__": "a/two", "txt": "Grüße", "bin": b"\x00\x01"}
    assert TarShards(path, fields=("json",))[0] == ({"boxes": [1, 2]},)
    with pytest.raises(InputError, match=r"mixed\.tar: a/two has no image: it has txt, bin"):
        TarShards(path)[1]


def test_loaded_in_any_order_by_threads(folder: Path) -> None:
    data = TarShards(folder, ImageTransform(8, {"crop": 0.3, "flip": 0.5}, train=True))
    loaders = (Loader(data, 5, shuffle=True, how=how, workers=2) for how in ("here", "threads"))
    here, threads = ([batch.value for batch in loader.batches(0)] for loader in loaders)
    assert sorted(label for _, labels in here for label in labels.tolist()) == list(range(12))
    for one, other in zip(here, threads, strict=True):
        assert torch.equal(one[0], other[0])
        assert torch.equal(one[1], other[1])
    decoded = data.decoded(3, data.content(3), np.random.default_rng(1))
    image, label = data.changed(3, decoded, np.random.default_rng(1))
    expected, _ = data.draw(3, np.random.default_rng(1))
    assert label == 3
    assert torch.equal(image, expected)


def test_steps_of_a_sample_of_all_files_make_the_sample(folder: Path) -> None:
    data = TarShards(folder, fields=None)
    made = data.changed(3, data.decoded(3, data.content(3)), None)
    assert list(made) == ["__key__", "png", "cls"]
    assert made["cls"] == 3
    assert torch.equal(made["png"], data[3]["png"])


def test_a_shard_that_is_cut_off(folder: Path) -> None:
    path = folder / "train-001.tar"
    with tarfile.open(path) as tar:
        last = tar.getmember("000006.png")
    path.write_bytes(path.read_bytes()[: last.offset_data + last.size // 2])
    data = TarShards(folder)
    with pytest.raises(InputError, match=r"train-001\.tar: 000006\.png is cut off"):
        list(Loader(data, 4, how="here"))
    loader = Loader(data, 4, how="here", on_damage="skip")
    labels = [label for batch in loader if batch.value is not None for label in batch.value[1].tolist()]
    assert labels == [0, 1, 2, 3, 4, 5, 8, 9, 10, 11]
    assert [each.name for each in loader.skipped] == [f"{path}: 000006"]


def test_a_header_that_is_damaged(folder: Path) -> None:
    path = folder / "train-001.tar"
    with tarfile.open(path) as tar:
        at = tar.getmember("000006.png").offset
    content = bytearray(path.read_bytes())
    content[at : at + 512] = b"\xff" * 512
    path.write_bytes(content)
    loader = Loader(TarShards(folder), 12, how="here", on_damage="skip")
    labels = [label for batch in loader for label in batch.value[1].tolist()]
    assert labels == [0, 1, 2, 3, 4, 5, 8, 9, 10, 11]
    assert "is damaged after 000005" in loader.skipped[0].reason


def test_contents_that_are_damaged(tmp_path: Path) -> None:
    path = write(tmp_path / "a.tar", {"1.png": encoded(1)[:60], "1.cls": b"1", "2.png": encoded(2), "2.cls": b"two"})
    with pytest.raises(InputError, match=r"a\.tar: 1\.png (cannot be read|is not an image)"):
        TarShards(path)[0]
    with pytest.raises(InputError, match=r"a\.tar: 2\.cls cannot be read: invalid literal"):
        TarShards(path)[1]


def test_what_is_no_shard(tmp_path: Path) -> None:
    (tmp_path / "text.tar").write_text("no tar file at all" * 100)
    with pytest.raises(InputError, match="is not an uncompressed tar file"):
        TarShards(tmp_path / "text.tar")
    with pytest.raises(InputError, match="holds no samples"):
        TarShards(write(tmp_path / "empty.tar", {}))


def test_a_sample_without_a_class_is_a_damaged_sample(tmp_path: Path) -> None:
    files = {"1.png": encoded(1), "1.cls": b"1", "2.png": encoded(2), "3.png": encoded(3), "3.cls": b"0"}
    data = TarShards(write(tmp_path / "a.tar", files))
    assert data.labels() == [1, -1, 0]
    loader = Loader(data, 3, how="here", on_damage="skip")
    assert [batch.value[1].tolist() for batch in loader] == [[1, 0]]
    assert [each.sample for each in loader.skipped] == [1]
    with pytest.raises(InputError, match=r"2 has no cls: it has png"):
        list(Loader(data, 3, how="here"))
    with pytest.raises(InputError, match=r"no sample has a class: expected a number in NAME\.cls"):
        TarShards(write(tmp_path / "b.tar", {"1.png": encoded(1)})).labels()
    with pytest.raises(InputError, match=r"1\.cls is -3: expected a class number of 0 or more"):
        TarShards(write(tmp_path / "c.tar", {**files, "1.cls": b"-3"})).labels()
