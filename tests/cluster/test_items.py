"""Items: their selection and order, errors for damaged ones, and their results."""

from __future__ import annotations

import json
import pickle
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from rooftop.cluster.items import KINDS, Damage, Decoding, Item, decoder, find_inputs, list_items, suffixes
from rooftop.errors import InputError

pa = pytest.importorskip("pyarrow")
pq = pytest.importorskip("pyarrow.parquet")


def listed(path: Path, kind: str, **options: int) -> list[Item]:
    return list(list_items([path], Decoding(kind, **options)))


def test_the_names_of_files_say_their_kind(tmp_path: Path) -> None:
    for kind in KINDS[:-1]:
        suffix = sorted(suffixes(kind))[0]
        (tmp_path / f"a{suffix}").touch()
        assert find_inputs([tmp_path / f"a{suffix}"]) == (kind, [tmp_path / f"a{suffix}"])


def test_no_suffix_has_two_kinds() -> None:
    assert sum(len(suffixes(kind)) for kind in KINDS[:-1]) == len(suffixes("path"))


def test_folders_have_what_is_below_them(tmp_path: Path) -> None:
    for name in ("b/2.jpg", "b/1.png", "a.JPG", "notes.txt", ".hidden/3.jpg", "_temporary/4.jpg"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    images = [tmp_path / name for name in ("a.JPG", "b/1.png", "b/2.jpg")]
    assert find_inputs([tmp_path], "image") == ("image", images)
    assert find_inputs([tmp_path / "b", tmp_path], "image")[1] == [*images[1:], images[0]]  # once, in its first place
    assert find_inputs([tmp_path], "path")[1] == [*images, tmp_path / "notes.txt"]
    with pytest.raises(InputError, match=r"several kinds \(image: .*a.JPG and text: .*notes.txt\).*--as"):
        find_inputs([tmp_path])


def test_links_to_folders_are_followed_without_loops(tmp_path: Path) -> None:
    for name in ("there/1.jpg", "here/2.jpg"):
        (tmp_path / name).parent.mkdir()
        (tmp_path / name).touch()
    here = tmp_path / "here"
    for name, end in (("loop", here), ("linked", tmp_path / "there"), ("broken.jpg", tmp_path / "nothing")):
        (here / name).symlink_to(end)
    (tmp_path / "there" / "back").symlink_to(here)
    found = [str(path.relative_to(here)) for path in find_inputs([here])[1]]
    assert found == ["2.jpg", "broken.jpg", "linked/1.jpg"]


def test_inputs_that_cannot_be_found(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "what.xyz").touch()
    for inputs, kind, said in (
        ([], None, "expected a list"),
        ([3], None, r"expected a list of files and folders, got \[3\]"),
        ([tmp_path / "missing"], None, "does not exist"),
        ([tmp_path / "empty"], "image", "holds no files with items of kind image"),
        ([tmp_path / "what.xyz"], None, "give the kind .*--as.*image"),
        ([tmp_path], "imege", "did you mean image"),
    ):
        with pytest.raises(InputError, match=said):
            find_inputs(inputs, kind)


@given(lines=st.lists(st.text(st.characters(blacklist_characters="\r\n", blacklist_categories=["Cs"]))))
def test_each_line_of_a_text_is_an_item(lines: list[str], tmp_path_factory: pytest.TempPathFactory) -> None:
    path = tmp_path_factory.mktemp("lines") / "a.txt"
    path.write_bytes("".join(f"{line}\n" for line in lines).encode())
    lines[:1] = [line.removeprefix("\ufeff") for line in lines[:1]]  # a byte-order mark is no part of the text
    assert [(item.place, item.content) for item in listed(path, "text")] == list(enumerate(lines))


def test_a_byte_order_mark_is_no_part_of_the_first_line(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("one\n\ufefftwo\n", encoding="utf-8-sig")
    assert [item.content for item in listed(tmp_path / "a.txt", "text")] == ["one", "\ufefftwo"]
    (tmp_path / "a.txt").write_text("one\ntwo\n", encoding="utf-16")
    (item,) = listed(tmp_path / "a.txt", "text")
    assert item.content == Damage("UTF-16: save the file with the encoding UTF-8", rest=True)


def test_a_line_that_is_no_utf8_is_damaged_alone(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"one\r\n\xff\nthree")
    one, two, three = listed(tmp_path / "a.txt", "text")
    assert (one.content, three.content, three.place) == ("one", "three", 2)
    assert isinstance(two.content, Damage)
    assert "no UTF-8" in two.content.why


def test_rows_of_three_formats(tmp_path: Path) -> None:
    rows = [{"a": 1, "b": "x, y"}, {"a": 2, "b": 'say "z"\nagain'}]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "a.parquet")
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (tmp_path / "a.csv").write_text('a,b\n1,"x, y"\n2,"say ""z""\nagain"\n', encoding="utf-8-sig")
    for name in ("a.parquet", "a.jsonl"):
        assert [item.content for item in listed(tmp_path / name, "row")] == rows
    assert [item.content for item in listed(tmp_path / "a.csv", "row")] == [{**row, "a": str(row["a"])} for row in rows]


def test_rows_that_are_damaged(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("a,b\n1,2\n3\n4,5,6\n7,8\n")
    contents = [item.content for item in listed(tmp_path / "a.csv", "row")]
    assert contents[::3] == [{"a": "1", "b": "2"}, {"a": "7", "b": "8"}]
    said = "expected as many as the header has: 2"
    assert [each.why for each in contents[1:3]] == [f"1 cell, {said}", f"3 cells, {said}"]
    (tmp_path / "a.jsonl").write_text('{"a": 1}\n{"a": \n[1]\n\n{"a": 2}\n')
    items = listed(tmp_path / "a.jsonl", "row")
    assert [item.place for item in items] == [0, 1, 2, 4]
    assert [isinstance(item.content, Damage) for item in items] == [False, True, True, False]
    pq.write_table(pa.table({"a": list(range(9))}), tmp_path / "a.parquet")
    (tmp_path / "cut.parquet").write_bytes((tmp_path / "a.parquet").read_bytes()[:-20])
    (cut,) = listed(tmp_path / "cut.parquet", "row")
    assert "cannot be read further" in cut.content.why


def test_json_that_is_nested_too_deep_is_an_error_of_its_row(tmp_path: Path) -> None:
    deep = [f'{{"a": {"[" * levels}{"]" * levels}}}' for levels in (199, 200, 600, 3000)]
    (tmp_path / "a.jsonl").write_text("\n".join(deep))
    items = listed(tmp_path / "a.jsonl", "row")
    pickle.dumps(items)  # as for a worker
    assert [isinstance(item.content, Damage) for item in items] == [False, True, True, True]
    assert "nested more than 200 levels" in items[1].content.why


def test_values_of_the_same_name_are_not_lost(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("a,a,b\n1,2,3\n")
    pq.write_table(pa.Table.from_arrays([pa.array([1])] * 2, ["a", "a"]), tmp_path / "a.parquet")
    for name in ("a.csv", "a.parquet"):
        (item,) = listed(tmp_path / name, "row")
        assert item.content.rest
        assert "several columns named 'a'" in item.content.why
    (tmp_path / "b.csv").write_text("a,,\n1,,\n2,x,y\n")
    empty, lost = (item.content for item in listed(tmp_path / "b.csv", "row"))
    assert empty == {"a": "1", "": ""}
    assert "columns without a name" in lost.why
    (tmp_path / "a.jsonl").write_text('{"a": 1, "b": {"c": 1, "c": 2}}\n')
    (item,) = listed(tmp_path / "a.jsonl", "row")
    assert "several values for 'c'" in item.content.why


def test_a_large_cell_of_a_csv(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text(f"a,b\n1,{'x' * 200_000}\n2,y\n")
    assert [len(item.content["b"]) for item in listed(tmp_path / "a.csv", "row")] == [200_000, 1]


def test_a_malformed_row_of_a_csv_hides_no_other_rows(tmp_path: Path) -> None:
    row = {"a": "9", "b": 'say "z"\nagain'}
    for malformed in (b'1,"never closed', b'1,"x"y', b"1,caf\xe9"):
        (tmp_path / "a.csv").write_bytes(b"a,b\n" + malformed + b'\n9,"say ""z""\nagain"\n\n9,"say ""z""\nagain"\n')
        items = listed(tmp_path / "a.csv", "row")
        assert [item.place for item in items] == [0, 1, 2]
        assert isinstance(items[0].content, Damage)
        assert [item.content for item in items[1:]] == [row, row]


def test_a_damaged_part_of_a_parquet_file_hides_no_other_rows(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"a": range(9)}), path, row_group_size=3, compression="none", use_dictionary=False)
    column = pq.read_metadata(path).row_group(1).column(0)
    content = bytearray(path.read_bytes())
    content[column.data_page_offset : column.data_page_offset + 8] = b"\xff" * 8
    path.write_bytes(content)
    contents = [item.content for item in listed(path, "row")]
    assert [isinstance(each, Damage) for each in contents] == [False] * 3 + [True] * 3 + [False] * 3
    assert contents[8] == {"a": 8}
    pq.write_table(pa.table({"t": pa.array([0, 2**60, 1], pa.timestamp("ms"))}), path)
    contents = [item.content for item in listed(path, "row")]
    assert [isinstance(each, Damage) for each in contents] == [False, True, False]


def test_photographs_and_clouds_become_tensors(tmp_path: Path) -> None:
    Image.new("RGB", (4, 3), (9, 8, 7)).save(tmp_path / "a.png")
    (item,) = listed(tmp_path / "a.png", "image")
    assert torch.equal(
        decoder(Decoding("image"))(item), torch.tensor([9, 8, 7], dtype=torch.uint8)[:, None, None].expand(3, 3, 4)
    )
    points = np.arange(20, dtype=np.float32).reshape(4, 5)
    np.save(tmp_path / "a.npy", points)
    points.tofile(tmp_path / "a.bin")
    (tmp_path / "a.ply").write_text(
        "ply\nformat ascii 1.0\nelement vertex 2\nproperty float x\nproperty float y\nproperty float z\nend_header\n"
        "0 1 2\n3 4 5\n"
    )
    for name in ("a.npy", "a.bin"):
        (item,) = listed(tmp_path / name, "cloud")
        assert torch.equal(decoder(Decoding("cloud", point_columns=5))(item), torch.from_numpy(points))
    (item,) = listed(tmp_path / "a.ply", "cloud")
    pytest.importorskip("numba")
    assert decoder(Decoding("cloud"))(item).tolist() == [[0, 1, 2], [3, 4, 5]]


def test_a_cloud_has_each_vertex_of_a_mesh_and_numbers_of_either_order_of_bytes(tmp_path: Path) -> None:
    pytest.importorskip("numba")
    points = np.array([[0, 0, 0], [1, 0, 0], [0, 1, 0], [0, 0, 0], [9, 9, 9]], np.float32)  # two equal, one unused
    text = "ply\nformat ascii 1.0\nelement vertex 5\n" + "".join(f"property float {axis}\n" for axis in "xyz")
    text += "element face 2\nproperty list uchar int vertex_indices\nend_header\n"
    text += "\n".join(" ".join(map(str, point)) for point in points) + "\n3 0 1 2\n3 3 1 2\n"
    (tmp_path / "a.ply").write_text(text)
    np.save(tmp_path / "a.npy", points.astype(">f4"))
    for name in ("a.ply", "a.npy"):
        (item,) = listed(tmp_path / name, "cloud")
        assert decoder(Decoding("cloud"))(item).tolist() == points.tolist()


def test_clouds_that_are_none(tmp_path: Path) -> None:
    np.zeros(5, np.float32).tofile(tmp_path / "a.bin")
    np.save(tmp_path / "a.npy", np.zeros(3))
    (tmp_path / "cut.bin").write_bytes(np.zeros(8, np.float32).tobytes()[:-3])
    np.save(tmp_path / "wide.npy", np.zeros((2, 3), np.longdouble))
    with (tmp_path / "several.npy").open("wb") as file:
        np.savez(file, np.zeros((2, 3)))
    (tmp_path / "cut.ply").write_text(
        "ply\nformat ascii 1.0\nelement vertex 2\nproperty float x\nproperty float y\nproperty float z\nend_header\n"
        "0 1 2\n"
    )
    for name, said in (
        ("a.bin", "20 bytes are not a multiple of 16"),
        ("cut.bin", "29 bytes are not a multiple of 16, for 4 float32 per point: .* its end is missing"),
        ("a.npy", r"expected numbers of shape \(N, C\)"),
        ("wide.npy", "at most 64 bits"),
        ("several.npy", "several arrays"),
        ("cut.ply", "ends in row 1 of 2"),
    ):
        (item,) = listed(tmp_path / name, "cloud")
        with pytest.raises(InputError, match=said):
            decoder(Decoding("cloud"))(item)


def test_clips_of_a_video(tmp_path: Path) -> None:
    pytest.importorskip("av")
    from rooftop.media import VideoReader, VideoWriter

    with VideoWriter(tmp_path / "a.mp4", 10) as writer:
        for value in range(20):
            writer.write(torch.full((3, 32, 32), 10 * value, dtype=torch.uint8))
    (tmp_path / "bad.mp4").write_bytes(b"no video")
    items = listed(tmp_path / "a.mp4", "clip", frames=4, step=2, stride=5)
    assert [item.place for item in items] == [0, 5, 10]  # 15 + 6 is past the end
    frames = VideoReader(tmp_path / "a.mp4")[5:12:2]
    assert torch.equal(decoder(Decoding("clip", frames=4, step=2, stride=5))(items[1]), frames)
    (short,) = listed(tmp_path / "a.mp4", "clip", frames=21)
    assert "20 frames, expected at least 21" in short.content.why
    (bad,) = listed(tmp_path / "bad.mp4", "clip")
    with pytest.raises(InputError):
        decoder(Decoding("clip"))(bad)


def test_numbers_below_one_are_refused() -> None:
    for name in ("frames", "step", "stride", "point_columns"):
        with pytest.raises(InputError, match=f"{name} is 0"):
            Decoding("clip", **{name: 0})
