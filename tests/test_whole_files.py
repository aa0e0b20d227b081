"""Files are written completely or not at all."""

from __future__ import annotations

import json
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier

import pytest
from torch import nn

from rooftop.whole_files import whole_file, write_json, write_whole


def write_half_and(place: Path, error: BaseException | None) -> None:
    with whole_file(place) as path:
        path.write_text("half")
        if error is not None:
            raise error


def test_json_gets_its_folders_and_a_failure_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "results" / "h200" / "rows.json"
    write_json(path, {"rows": [1.5, None]})
    with pytest.raises(TypeError):
        write_json(path, {"rows": [object()]})
    assert json.loads(path.read_text()) == {"rows": [1.5, None]}
    assert list(path.parent.iterdir()) == [path]


@pytest.mark.parametrize("fails", ["in the block", "at the end"])
def test_a_failed_write_leaves_the_old_file_and_nothing_else(
    fails: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "report.html"
    write_whole(path, "old")
    full = OSError(28, "No space left on device")

    def no_room(*args: object) -> None:
        raise full

    if fails == "at the end":
        monkeypatch.setattr(os, "replace", no_room)
    with pytest.raises(OSError, match=r"No space left on device: '.*report\.html'$") as failure:
        write_half_and(path, full if fails == "in the block" else None)
    assert failure.value.filename == str(path)
    assert path.read_text() == "old"
    assert os.listdir(tmp_path) == ["report.html"]


def test_another_exception_leaves_the_old_file_too(tmp_path: Path) -> None:
    path = tmp_path / "report.html"
    write_whole(path, "old")
    with pytest.raises(KeyboardInterrupt):
        write_half_and(path, KeyboardInterrupt())
    assert path.read_text() == "old"
    assert os.listdir(tmp_path) == ["report.html"]


def test_the_name_keeps_its_suffix_until_the_file_is_complete(tmp_path: Path) -> None:
    with whole_file(tmp_path / "frame.png") as place:
        assert place.suffix == ".png"
        assert place.name.startswith(".")
        place.write_bytes(b"")
        assert not (tmp_path / "frame.png").exists()
    assert os.listdir(tmp_path) == ["frame.png"]


def test_a_link_stays_a_link(tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    link = tmp_path / "report.html"
    link.symlink_to(tmp_path / "disk" / "there.html")
    write_whole(link, "new")
    assert link.is_symlink()
    assert (tmp_path / "disk" / "there.html").read_text() == "new"
    assert os.listdir(tmp_path / "disk") == ["there.html"]


def test_a_pipe_is_written_to_and_not_replaced(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDWR)
    write_whole(pipe, "text")
    assert pipe.is_fifo()
    assert os.read(reader, 100) == b"text"
    os.close(reader)


def test_weights_that_are_exported_keep_a_link(tmp_path: Path) -> None:
    pytest.importorskip("safetensors")
    from rooftop.train.fitting.exports import export_weights

    link = tmp_path / "best.safetensors"
    link.symlink_to(tmp_path / "there.safetensors")
    export_weights(link, nn.Linear(2, 1), {})
    assert link.is_symlink()


def test_threads_may_write_one_file_at_the_same_time(tmp_path: Path) -> None:
    path, both_write = tmp_path / "report.html", Barrier(2)

    def write(text: str) -> None:
        with whole_file(path) as temporary:
            temporary.write_text(text)
            both_write.wait(10)

    with ThreadPoolExecutor(2) as threads:
        list(threads.map(write, ["one", "two"]))
    assert path.read_text() in ("one", "two")
    assert os.listdir(tmp_path) == ["report.html"]
