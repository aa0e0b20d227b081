"""facebookresearch's weights by name: the right file is fetched once and loaded into the network that it was trained
for."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from rooftop.errors import InputError, WeightsError
from rooftop.models import detr_resnet50, load, load_report
from rooftop.models.detr.network import Detr
from rooftop.models.weights.files import WEIGHTS, Weights, options_of, preprocessing_of

SMALL: dict[str, Any] = {
    "num_classes": 5,
    "queries": 7,
    "width": 32,
    "heads": 4,
    "encoder_layers": 1,
    "decoder_layers": 1,
    "feed_forward": 48,
}
ADDRESS = "https://dl.fbaipublicfiles.com/detr"


class Folder(SimpleHTTPRequestHandler):
    """Serves files and records the requested paths."""

    asked: list[str]

    def __init__(self, asked: list[str], *arguments: Any, **options: Any) -> None:
        self.asked = asked
        super().__init__(*arguments, **options)

    def do_GET(self) -> None:
        self.asked.append(self.path)
        super().do_GET()

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture(scope="module")
def tensors() -> dict[str, Tensor]:
    """The tensors of a small DETR on a ResNet-50. Each is filled with a different value, so that their file is
    small."""
    with torch.device("meta"):
        shapes = {key: value.shape for key, value in detr_resnet50(**SMALL).state_dict().items()}
    return {key: torch.tensor(1 + i / 8).expand(shape) for i, (key, shape) in enumerate(shapes.items())}


@pytest.fixture
def asked(tensors: dict[str, Tensor], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """The paths requested from a loopback server that has both files of DETR on a ResNet-50."""
    folder = tmp_path / "published"
    folder.mkdir()
    torch.save({"model": tensors}, folder / "file")
    sha256 = hashlib.sha256((folder / "file").read_bytes()).hexdigest()[:8]
    for name, published in WEIGHTS["detr_resnet50"].items():
        file = f"{published.file.rpartition('-')[0]}-{sha256}.pth"
        (folder / file).write_bytes((folder / "file").read_bytes())
        entry = Weights(file, None, dilation=published.dilation)
        monkeypatch.setitem(WEIGHTS["detr_resnet50"], name, entry)
    asked: list[str] = []
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Folder, asked, directory=folder)) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        monkeypatch.setenv("ROOFTOP_WEIGHTS_URL", f"http://127.0.0.1:{server.server_port}")
        yield asked
        server.shutdown()
        thread.join()


def assert_loaded(model: torch.nn.Module, tensors: dict[str, Tensor]) -> None:
    found = model.state_dict()
    assert list(found) == list(tensors)
    assert all(torch.equal(found[key], value) for key, value in tensors.items())


def cells(model: torch.nn.Module) -> int:
    """The cells along each side of the map of an image of 64 x 64 pixels."""
    assert isinstance(model, Detr)
    with torch.no_grad():
        return model.eval().backbone(torch.zeros(1, 3, 64, 64)).shape[-1]


@pytest.mark.parametrize(
    ("builder", "name", "file"),
    [
        ("detr_resnet50", "COCO", "detr-r50-e632da11.pth"),
        ("detr_resnet50", "COCO_DC5", "detr-r50-dc5-f0fb7ef5.pth"),
        ("detr_resnet101", "COCO", "detr-r101-2c7b67e5.pth"),
        ("detr_resnet101", "COCO_DC5", "detr-r101-dc5-a2e86def.pth"),
    ],
)
def test_names_stand_for_facebookresearchs_files(
    builder: str, name: str, file: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The names are those of DETR's hubconf.py. The digits in a name are the beginning of the checksum."""
    monkeypatch.delenv("ROOFTOP_WEIGHTS_URL")
    published = WEIGHTS[builder][name]
    assert published.url == f"{ADDRESS}/{file}"
    assert published.sha256 == file[-12:-4]
    assert published.path.name == file
    expected = {"dilation": True} if name == "COCO_DC5" else {}
    assert options_of(builder, name) == expected
    assert options_of(builder, Path("copies") / file) == expected
    monkeypatch.setenv("ROOFTOP_WEIGHTS_URL", "file:///mnt/weights/")
    assert published.url == f"file:///mnt/weights/{file}"


def test_the_default_is_the_plain_network() -> None:
    for builder in ("detr_resnet50", "detr_resnet101"):
        assert options_of(builder, "DEFAULT") == options_of(builder, "mine.pth") == {}
    assert preprocessing_of("resnet50", "mine.pth") == preprocessing_of("detr_resnet50", "COCO")


def test_a_name_is_downloaded_once(
    asked: list[str], tensors: dict[str, Tensor], cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = WEIGHTS["detr_resnet50"]["COCO"].file
    assert_loaded(detr_resnet50(weights="COCO", **SMALL), tensors)
    monkeypatch.setenv("ROOFTOP_WEIGHTS_URL", "http://127.0.0.1:9")  # from here on there is no server
    assert_loaded(load("detr_resnet50", "DEFAULT", **SMALL), tensors)
    assert load_report("detr_resnet50", "COCO", **SMALL).fits
    assert asked == [f"/{file}"]
    assert [path.name for path in cache.iterdir()] == [file]


def test_dilated_weights_come_in_a_dilated_network(asked: list[str], tensors: dict[str, Tensor], cache: Path) -> None:
    """Dilated and plain weights have the same keys and shapes, so only the file's name tells them apart."""
    model = detr_resnet50(weights="COCO_DC5", **SMALL)
    assert_loaded(model, tensors)
    assert cells(model) == 4
    copy = cache / WEIGHTS["detr_resnet50"]["COCO_DC5"].file
    assert cells(load("detr_resnet50", copy, **SMALL)) == 4
    assert cells(load("detr_resnet50", copy, dilation=False, **SMALL)) == 2


def test_a_damaged_file_is_not_loaded(asked: list[str], cache: Path) -> None:
    path = WEIGHTS["detr_resnet50"]["COCO"].path
    cache.mkdir(parents=True)
    path.write_bytes(b"half of it")
    with pytest.raises(WeightsError, match=r"is damaged: its SHA-256 begins with .*Delete it"):
        detr_resnet50(weights="COCO", **SMALL)
    assert asked == []


@pytest.mark.parametrize("weights", ["coco", "COCO_DC6", Path("COCO")])
def test_what_is_neither_a_name_nor_a_file(weights: str | Path) -> None:
    message = "is neither a file nor.*detr_resnet50 has DEFAULT, COCO_DC5, COCO, or give a file"
    with pytest.raises(InputError, match=message):
        detr_resnet50(weights=weights, **SMALL)
    with pytest.raises(InputError, match=message):
        load("detr_resnet50", weights, **SMALL)
