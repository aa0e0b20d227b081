"""Weights are loaded completely and correctly, or not at all: from a local server, the cache, or a file."""

from __future__ import annotations

import argparse
import hashlib
import io
import json
import os
import pickle
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from PIL import Image
from torch import Tensor, nn

from rooftop import models
from rooftop.errors import InputError, WeightsError
from rooftop.models.images import Preprocessing
from rooftop.models.weights import downloads
from rooftop.models.weights.files import (
    PUBLIC_URL,
    WEIGHTS,
    Weights,
    load_weights,
    preprocessing_of,
    read_weights,
    weights_file,
)

try:
    from safetensors.torch import save as save_safetensors

    SAFE = save_safetensors(nn.Linear(2, 3).state_dict())
except ImportError:
    SAFE = b""

BODY = os.urandom(3 << 20)  # three chunks
SHA256 = hashlib.sha256(BODY).hexdigest()
PUBLISHED_NAMES = models.builtin_models().keys() - {"hybrid_t", "hybrid_s"}  # hybrids have no published weights
PUBLISHED = dict(WEIGHTS)  # unchanged; each test has its own files for ResNet-18


class Server(ThreadingHTTPServer):
    """Answers every request with `answer`, and records the requested paths."""

    daemon_threads = True
    answer: Callable[[BaseHTTPRequestHandler], None]

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.asked: list[str] = []
        self.answer = whole
        self.body = BODY
        self.released = threading.Event()  # ends waiting answers


class Handler(BaseHTTPRequestHandler):
    server: Server

    def do_GET(self) -> None:
        self.server.asked.append(self.path)
        self.server.answer(self)

    def log_message(self, *_: object) -> None:
        pass


def whole(request: Any) -> None:
    send(request, request.server.body, len(request.server.body))


def send(request: Any, body: bytes, length: int | str | None) -> None:
    request.send_response(200)
    if length is not None:
        request.send_header("Content-Length", str(length))
    request.end_headers()
    request.wfile.write(body)
    request.wfile.flush()


def not_found(request: Any) -> None:
    request.send_error(404)


def cut_short(request: Any) -> None:
    send(request, BODY[: len(BODY) // 2], len(BODY))


def cut_short_without_a_length(request: Any) -> None:
    send(request, BODY[: len(BODY) // 2], None)


def another_file(request: Any) -> None:
    send(request, b"<html>", 6)


def nonsense(request: Any) -> None:
    send(request, BODY, "many")


def no_http(request: Any) -> None:
    request.wfile.write(b"220 ready\r\n")


def breaks_off(request: Any) -> None:
    send(request, BODY[: len(BODY) // 2], len(BODY))
    # the connection is reset, not closed properly
    request.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    request.connection.close()


def stalls(request: Any) -> None:
    send(request, BODY[:1000], len(BODY))
    request.server.released.wait(60)


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    with Server() as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        monkeypatch.setenv("ROOFTOP_WEIGHTS_URL", f"http://127.0.0.1:{server.server_port}/mirror/")
        yield server
        server.released.set()
        server.shutdown()
        thread.join()


@pytest.fixture(autouse=True)
def published(monkeypatch: pytest.MonkeyPatch) -> Weights:
    """The only weights of ResNet-18: BODY."""
    return publish(monkeypatch, SHA256)


def publish(monkeypatch: pytest.MonkeyPatch, sha256: str) -> Weights:
    weights = Weights(f"resnet18-{sha256[:8]}.pth", Preprocessing())
    monkeypatch.setitem(WEIGHTS, "resnet18", {"IMAGENET1K_V1": weights})
    return weights


def files_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.rglob("*") if not path.is_dir())


@pytest.mark.parametrize("name", sorted(PUBLISHED_NAMES))
def test_files_and_preprocessing_are_torchvisions(
    name: str, torchvision_models: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("ROOFTOP_WEIGHTS_URL")
    theirs = torchvision_models.get_model_weights(name)
    assert list(PUBLISHED[name]) == [entry.name for entry in theirs]
    assert list(PUBLISHED[name])[-1] == theirs.DEFAULT.name
    for entry in theirs:
        ours, transforms = PUBLISHED[name][entry.name], entry.transforms()
        assert ours.url == entry.url
        assert ours.path.name == Path(entry.url).name
        sizes = (transforms.resize_size[0], transforms.crop_size[0])
        filter_ = Image.Resampling[transforms.interpolation.name]
        expected = Preprocessing(*sizes, filter_, mean=(*transforms.mean,), std=(*transforms.std,))
        assert ours.preprocessing == expected


def test_every_builder_of_a_published_model_has_weights() -> None:
    assert set(WEIGHTS) == {*PUBLISHED_NAMES, "detr_resnet50", "detr_resnet101"}


@pytest.mark.parametrize("name", ["IMAGENET1K_V1", "DEFAULT"])
def test_a_name_is_downloaded_once(name: str, server: Server, cache: Path, published: Weights) -> None:
    for _ in range(2):
        path = weights_file("resnet18", name)
        assert path == cache / published.file
        assert path.read_bytes() == BODY
    assert server.asked == [f"/mirror/{published.file}"]
    assert files_in(cache) == [published.file]


def test_what_torchvision_has_downloaded_serves(server: Server, cache: Path, published: Weights) -> None:
    cache.mkdir(parents=True)
    (cache / published.file).write_bytes(BODY)
    assert weights_file("resnet18", "DEFAULT") == cache / published.file
    assert server.asked == []


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (not_found, "the server answered 404 Not Found"),
        (cut_short, f"the connection closed after {len(BODY) // 2:,} of {len(BODY):,} bytes"),
        (cut_short_without_a_length, "the server sent a different file, whose SHA-256 begins with"),
        (another_file, f"begins with {hashlib.sha256(b'<html>').hexdigest()[:8]}"),
        (nonsense, "'many'"),
        (no_http, "220 ready"),
        (breaks_off, "reset by peer"),
        (stalls, "no data arrived for 2 s, after 1,000 bytes"),
    ],
)
def test_a_download_that_fails_leaves_nothing_and_can_be_repeated(
    answer: Callable[[Any], None],
    message: str,
    server: Server,
    cache: Path,
    published: Weights,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if answer is stalls:
        monkeypatch.setattr(downloads, "STALL_S", 2.0)
    monkeypatch.setattr(downloads, "CHUNK_BYTES", 1000)
    server.answer = answer
    with pytest.raises(WeightsError) as caught:
        weights_file("resnet18", "DEFAULT")
    for part in (message, published.url, published.sha256, str(cache / published.file)):
        assert part in str(caught.value)
    assert files_in(cache) == []
    server.answer = whole
    assert weights_file("resnet18", "DEFAULT").read_bytes() == BODY


def test_no_server_at_all(cache: Path) -> None:
    with pytest.raises(WeightsError, match=r"the server cannot be reached.*refused"):
        weights_file("resnet18", "DEFAULT")
    assert files_in(cache) == []


def test_an_address_that_is_none(monkeypatch: pytest.MonkeyPatch, cache: Path) -> None:
    monkeypatch.setenv("ROOFTOP_WEIGHTS_URL", "my-mirror")
    with pytest.raises(WeightsError, match=r"unknown url type.*ROOFTOP_WEIGHTS_URL takes"):
        weights_file("resnet18", "DEFAULT")
    assert files_in(cache) == []


def test_an_empty_address_is_none(monkeypatch: pytest.MonkeyPatch, published: Weights) -> None:
    monkeypatch.setenv("ROOFTOP_WEIGHTS_URL", "")
    assert published.url == f"{PUBLIC_URL}/{published.file}"


def test_a_folder_is_a_mirror(tmp_path: Path, cache: Path, published: Weights, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ROOFTOP_WEIGHTS_URL", tmp_path.as_uri())
    with pytest.raises(WeightsError, match="No such file"):
        weights_file("resnet18", "DEFAULT")
    (tmp_path / published.file).write_bytes(BODY)
    assert weights_file("resnet18", "DEFAULT").read_bytes() == BODY
    assert files_in(cache) == [published.file]


def test_a_cache_that_cannot_be_written(server: Server, tmp_path: Path, cache: Path, published: Weights) -> None:
    (tmp_path / "torch").write_text("a file where a folder should be")
    with pytest.raises(WeightsError, match="cannot be written") as caught:
        weights_file("resnet18", "DEFAULT")
    assert str(cache / published.file) in str(caught.value)
    assert server.asked == []


def test_an_interrupt_leaves_nothing(monkeypatch: pytest.MonkeyPatch, cache: Path) -> None:
    class Interrupted(io.BytesIO):
        headers: dict[str, str] = {}  # noqa: RUF012 (of the interface)

        def read(self, size: int | None = -1, /) -> bytes:
            if self.tell():
                raise KeyboardInterrupt
            return super().read(size)

    monkeypatch.setattr(downloads, "urlopen", lambda *_, **__: Interrupted(BODY))
    with pytest.raises(KeyboardInterrupt):
        weights_file("resnet18", "DEFAULT")
    assert files_in(cache) == []


def test_two_at_once_do_not_disturb_each_other(server: Server, cache: Path, published: Weights) -> None:
    both = threading.Barrier(2)

    def together(request: Any) -> None:
        both.wait(60)
        whole(request)

    server.answer = together
    with ThreadPoolExecutor(2) as pool:
        paths = list(pool.map(lambda _: weights_file("resnet18", "DEFAULT"), range(2)))
    assert [path.read_bytes() == BODY for path in paths] == [True, True]
    assert len(server.asked) == 2
    assert files_in(cache) == [published.file]


def test_a_damaged_cached_file_is_said_and_kept(server: Server, cache: Path, published: Weights) -> None:
    cache.mkdir(parents=True)
    damaged = cache / published.file
    damaged.write_bytes(BODY[:-1])
    with pytest.raises(WeightsError, match=r"is damaged.*Delete it") as caught:
        weights_file("resnet18", "DEFAULT")
    assert str(damaged) in str(caught.value)
    assert server.asked == []
    assert damaged.read_bytes() == BODY[:-1]


def test_a_model_is_loaded_from_the_server(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    source, model, file = nn.Linear(2, 3), nn.Linear(2, 3), io.BytesIO()
    torch.save(source.state_dict(), file)
    server.body = file.getvalue()
    publish(monkeypatch, hashlib.sha256(server.body).hexdigest())
    load_weights(model, "resnet18", "DEFAULT")
    assert torch.equal(model.weight, source.weight)
    assert torch.equal(model.bias, source.bias)


def test_builders_take_weights(resnet18_file: Path) -> None:
    model = models.resnet18(weights=resnet18_file, num_classes=3)
    saved = torch.load(resnet18_file, weights_only=True)
    state = model.state_dict()
    assert list(state) == list(saved)
    assert all(torch.equal(value, saved[key]) for key, value in state.items())


@pytest.mark.parametrize("wrap", [None, "state_dict", "model"])
@pytest.mark.parametrize("zipped", [True, False])
def test_files_as_they_are_in_the_wild(wrap: str | None, zipped: bool, tmp_path: Path) -> None:
    source, model = nn.BatchNorm1d(3), nn.BatchNorm1d(3)
    source.running_mean = torch.tensor([1.0, 2.0, 3.0])
    state = {key: value for key, value in source.state_dict().items() if key != "num_batches_tracked"}  # before 0.4.1
    content = state if wrap is None else {wrap: state, "epoch": 3}
    torch.save(content, tmp_path / "mine.pth", _use_new_zipfile_serialization=zipped)
    load_weights(model, "resnet18", str(tmp_path / "mine.pth"))
    assert model.running_mean is not None
    assert model.running_mean.tolist() == [1, 2, 3]


def test_weights_of_another_model_say_which(resnet18_file: Path) -> None:
    with torch.device("meta"):
        wrong_depth, wrong_head = models.resnet34(), models.resnet18()
    with pytest.raises(WeightsError, match=r"missing: layer1\.2\.conv1\.weight.*fits resnet18\(num_classes=3\)$"):
        load_weights(wrong_depth, "resnet34", resnet18_file)
    with pytest.raises(WeightsError, match=r"2 of another shape: fc\.weight \(file \(3, 512\), model \(1000, 512\)\)"):
        load_weights(wrong_head, "resnet18", resnet18_file)


def test_a_deeper_model_is_not_said_to_fit_a_shallower_one(tmp_path: Path) -> None:
    """Every key of ResNet-50 is also a key of ResNet-101."""
    with torch.device("meta"):
        shapes = {key: value.shape for key, value in models.resnet101(num_classes=3).state_dict().items()}
        shallower = models.resnet50(num_classes=3)
    torch.save({key: torch.zeros(()).expand(shape) for key, shape in shapes.items()}, tmp_path / "deep.pth")
    with pytest.raises(WeightsError, match=r"unexpected: layer3\.6.*The file fits resnet101\(num_classes=3\)$"):
        load_weights(shallower, "resnet50", tmp_path / "deep.pth")


def test_a_model_that_does_not_fit_is_not_changed(tmp_path: Path) -> None:
    model = nn.Linear(2, 3)
    before = model.weight.clone()
    torch.save({"weight": torch.ones(3, 2)}, tmp_path / "half.pth")
    with pytest.raises(WeightsError, match="1 missing: bias"):
        load_weights(model, "resnet18", tmp_path / "half.pth")
    assert torch.equal(model.weight, before)


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        ("IMAGENET1K_V3", r"did you mean IMAGENET1K_V1\?.*resnet18 has DEFAULT, IMAGENET1K_V1"),
        ("default", "neither a file nor the name.*resnet18 has DEFAULT"),
        (Path("DEFAULT"), "neither a file"),
        ("no/such/file.pth", r"'no/such/file\.pth' is neither a file"),
        (".", "is a folder"),
        ("model.safetensors", r"'model\.safetensors' is neither a file"),
    ],
)
def test_what_is_neither_a_name_nor_a_file(weights: str | Path, message: str, server: Server) -> None:
    with pytest.raises(InputError, match=message):
        weights_file("resnet18", weights)
    assert server.asked == []


def test_a_file_keeps_its_preprocessing_with_its_name() -> None:
    assert preprocessing_of("resnet50", "IMAGENET1K_V1").resize == 256
    assert preprocessing_of("resnet50", "IMAGENET1K_V2").resize == 232
    assert preprocessing_of("resnet50", "DEFAULT").resize == 232
    assert preprocessing_of("resnet50", Path("copies") / WEIGHTS["resnet50"]["IMAGENET1K_V2"].file).resize == 232
    assert preprocessing_of("resnet50", "mine.pth") == Preprocessing(resize=256, crop=224)
    assert preprocessing_of("resnet50", Path("IMAGENET1K_V2")).resize == 256  # a Path is not a name


class RunsCode:
    """An object that runs code when it is read, as in a malicious file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.path),)


@pytest.mark.parametrize("how", ["torch.save", "pickle 2", "pickle 5"])
def test_a_pickle_that_would_run_code_is_refused(how: str, tmp_path: Path) -> None:
    path, trace = tmp_path / "evil.pth", tmp_path / "ran"
    if how == "torch.save":
        torch.save({"weight": RunsCode(trace)}, path)
    else:
        path.write_bytes(pickle.dumps(RunsCode(trace), protocol=int(how[-1])))
    message = "is damaged or not a file of weights" if how == "pickle 5" else r"loading posix\.mkdir could run code"
    with pytest.raises(WeightsError, match=rf"evil\.pth .*{message}"):
        read_weights(path)
    assert not trace.exists()
    torch.load(path, weights_only=False) if how == "torch.save" else pickle.loads(path.read_bytes())
    assert trace.exists()  # reading without protection does run the code


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ([1, 2], "holds list: expected"),
        ({"epoch": 3, "lr": 0.1}, "holds epoch, lr: expected"),
        ({1: torch.ones(2)}, "holds 1: expected"),
        (torch.ones(2), "holds Tensor: expected"),
    ],
)
def test_files_of_something_else(content: object, message: str, tmp_path: Path) -> None:
    torch.save(content, tmp_path / "other.pth")
    with pytest.raises(WeightsError, match=message):
        read_weights(tmp_path / "other.pth")


@pytest.mark.parametrize(
    ("begin", "suffix", "message"),
    [
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:", ".pth", r"pointer of Git LFS.*git lfs pull"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:", ".safetensors", r"pointer of Git LFS.*git lfs"),
        (b"<!DOCTYPE html><title>404</title>", ".bin", "it is an HTML page: the download failed"),
        (b"\x89HDF\r\n\x1a\n", ".pt", r"it is an HDF5 file, as Keras writes: give its name the suffix \.h5"),
        (b"PK\x03\x04", ".safetensors", r"as torch\.save writes: give its name the suffix \.pth"),
        ((2).to_bytes(8, "little") + b"{}", ".pth", r"safetensors file: give its name the suffix \.safetensors"),
    ],
)
def test_a_file_that_is_something_else_is_named(begin: bytes, suffix: str, message: str, tmp_path: Path) -> None:
    if suffix == ".safetensors":
        pytest.importorskip("safetensors")
    path = (tmp_path / "weights").with_suffix(suffix)
    path.write_bytes(begin)
    with pytest.raises(WeightsError, match=message):
        read_weights(path)


@pytest.mark.parametrize("checksums", [True, False])
def test_damage_inside_a_tensor_is_found_by_the_checksums(checksums: bool, tmp_path: Path) -> None:
    """`torch.load` ignores checksums, and so it returned a wrong weight."""
    path, weight = tmp_path / "mine.pth", torch.arange(64.0)
    before = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(checksums)
    try:
        torch.save({"weight": weight}, path)
    finally:
        torch.serialization.set_crc32_options(before)
    assert torch.equal(read_weights(path)["weight"], weight)
    content = path.read_bytes()
    path.write_bytes(content.replace(weight.numpy().tobytes(), torch.ones(64).numpy().tobytes()))
    if not checksums:
        assert torch.equal(read_weights(path)["weight"], torch.ones(64))
        return
    with pytest.raises(WeightsError, match=r"mine\.pth is damaged: the bytes of mine/data/0 do not match its checksum"):
        read_weights(path)


@pytest.mark.parametrize(
    ("tensor", "message"),
    [(torch.ones(2, device="meta"), "weight has no data"), (torch.eye(2).to_sparse(), r"weight is torch\.sparse_coo")],
)
def test_a_tensor_without_dense_data_is_refused(tensor: Tensor, message: str, tmp_path: Path) -> None:
    torch.save({"weight": tensor}, tmp_path / "mine.pth")
    with pytest.raises(WeightsError, match=rf"mine\.pth: {message}.*save the weights as dense tensors"):
        read_weights(tmp_path / "mine.pth")


def test_options_beside_the_weights_are_read_over(tmp_path: Path) -> None:
    """facebookresearch/detr and many others save the result of argparse."""
    state = nn.Linear(2, 3).state_dict()
    torch.save({"model": state, "args": argparse.Namespace(lr=0.1), "epoch": 3}, tmp_path / "checkpoint.pth")
    assert list(read_weights(tmp_path / "checkpoint.pth")) == ["weight", "bias"]


def test_a_prefix_is_taken_off_only_where_every_key_has_it(tmp_path: Path) -> None:
    state = {"module.weight": torch.ones(3, 2), "bias": torch.ones(3)}
    torch.save(state, tmp_path / "odd.pth")
    assert list(read_weights(tmp_path / "odd.pth")) == list(state)


WHOLE: dict[bool, bytes] = {}
for zipped in (True, False):
    buffer = io.BytesIO()
    torch.save(nn.Linear(2, 3).state_dict(), buffer, _use_new_zipfile_serialization=zipped)
    WHOLE[zipped] = buffer.getvalue()

reading = settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@reading
@given(zipped=st.booleans(), data=st.data())
def test_a_file_cut_anywhere_is_called_damaged(zipped: bool, data: st.DataObject, tmp_path: Path) -> None:
    path = tmp_path / "cut.pth"
    path.write_bytes(WHOLE[zipped][: data.draw(st.integers(0, len(WHOLE[zipped]) - 1))])
    with pytest.raises(WeightsError, match=r"cut\.pth (is damaged or not a file of weights|holds more than tensors)"):
        read_weights(path)


@reading
@given(zipped=st.booleans(), data=st.data())
def test_a_file_changed_anywhere_raises_nothing_else(zipped: bool, data: st.DataObject, tmp_path: Path) -> None:
    content = bytearray(WHOLE[zipped])
    for where in data.draw(st.lists(st.integers(0, len(content) - 1), min_size=1, max_size=8)):
        content[where] = data.draw(st.integers(0, 255))
    path = tmp_path / "changed.pth"
    path.write_bytes(content)
    with suppress(WeightsError):
        load_weights(nn.Linear(2, 3), "resnet18", path)


@pytest.mark.skipif(not SAFE, reason="needs safetensors")
@reading
@given(data=st.data())
def test_safetensors_that_are_cut_or_changed(data: st.DataObject, tmp_path: Path) -> None:
    path = tmp_path / "changed.safetensors"
    path.write_bytes(SAFE[: data.draw(st.integers(0, len(SAFE) - 1))])
    with pytest.raises(WeightsError, match=r"changed\.safetensors is damaged or no"):
        read_weights(path)
    content = bytearray(SAFE)
    for where in data.draw(st.lists(st.integers(0, len(content) - 1), min_size=1, max_size=4)):
        content[where] = data.draw(st.integers(0, 255))
    path.write_bytes(content)
    with suppress(WeightsError):
        load_weights(nn.Linear(2, 3), "resnet18", path)


@pytest.mark.skipif(not SAFE, reason="needs safetensors")
@pytest.mark.parametrize("dtype", ["F8_E8M0", "F4", "U64", "BF16", "F64", "BOOL", "C64", "nonsense"])
def test_safetensors_of_any_dtype(dtype: str, tmp_path: Path) -> None:
    """Each dtype is read, or refused with one of our errors."""
    header = json.dumps({"weight": {"dtype": dtype, "shape": [2], "data_offsets": [0, SIZES.get(dtype, 2)]}}).encode()
    body = len(header).to_bytes(8, "little") + header + bytes(SIZES.get(dtype, 2))
    (tmp_path / "odd.safetensors").write_bytes(body)
    with suppress(WeightsError):
        assert read_weights(tmp_path / "odd.safetensors")["weight"].numel() in (1, 2)


# in bytes, for two values; elements of other dtypes have one value each
SIZES = {"F4": 1, "U64": 16, "BF16": 4, "F64": 16, "C64": 16}


def test_a_file_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(WeightsError, match=r"gone\.pth cannot be read: No such file"):
        read_weights(tmp_path / "gone.pth")
