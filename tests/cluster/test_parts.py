"""The folder of parts: each part is complete or absent, recognized later, and never mixed with other work."""

from __future__ import annotations

import errno
import json
import os
import re
import resource
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rooftop.cluster import parts as parts_module
from rooftop.cluster.items import Item
from rooftop.cluster.parts import Done, Parts
from rooftop.cluster.tables import Failure, to_batch
from rooftop.errors import InputError, OutputError

pa = pytest.importorskip("pyarrow")
pq = pytest.importorskip("pyarrow.parquet")


def schema() -> Any:
    return pa.schema([("n", pa.int64())])


def batch_of(names: list[str], failed: tuple[str, ...] = ()) -> Any:
    items = [Item(name, None, "") for name in names]
    outcomes: list[Any] = [Failure("no") if name in failed else {"n": len(name)} for name in names]
    return to_batch(items, outcomes, schema())[0]


def opened(folder: Path, retry_errors: bool = False, **arguments: Any) -> Parts:
    return Parts(folder, "my.py:fn", arguments, retry_errors)


@given(st.sets(st.tuples(st.sampled_from("abc"), st.none() | st.integers(0, 3000))))
def test_what_was_done_is_known_and_nothing_else(pairs: set[tuple[str, int | None]]) -> None:
    done = Done()
    for name, place in pairs:
        done.add(name, place)
    near = pairs | {(name, place + 1) for name, place in pairs if place is not None} | {("d", 0), ("a", None)}
    for name, place in near:
        assert (Item(name, place, "") in done) == ((name, place) in pairs)


def test_a_second_opening_knows_the_first_ones_rows(tmp_path: Path) -> None:
    out = tmp_path / "out.parquet"
    for names in (["a", "bb"], ["ccc"]):
        with opened(out, kind="image") as parts:
            parts.settle(schema())
            parts.add(batch_of(names))
    table = pq.read_table(out)
    assert table.schema.names == ["input", "place", "error", "n"]
    assert dict(zip(table["input"].to_pylist(), table["n"].to_pylist(), strict=True)) == {"a": 1, "bb": 2, "ccc": 3}
    assert [path.name for path in sorted(out.glob("part*"))] == ["part-00000.parquet", "part-00001.parquet"]
    with opened(out, kind="image") as parts:
        assert parts.done.rows == 3
        assert parts.columns == schema()
        assert Item("bb", None, "") in parts.done
        assert Item("b", None, "") not in parts.done


def test_other_work_is_refused(tmp_path: Path) -> None:
    out = tmp_path / "out.parquet"
    with opened(out, kind="image", top=5) as parts:
        parts.settle(schema())
    with pytest.raises(InputError, match=r"top was 5 and is 1\. To start over, remove the folder"):
        opened(out, kind="image", top=1)
    with pytest.raises(InputError, match=r"of my\.py:fn, not of resnet50"):
        Parts(out, "resnet50", {"kind": "image", "top": 5})
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "a.jpg").touch()
    with pytest.raises(InputError, match=r"contains a\.jpg, which rooftop map did not write"):
        opened(tmp_path / "photos")
    with pytest.raises(InputError, match="is a file"):
        opened(tmp_path / "photos" / "a.jpg")
    with pytest.raises(InputError, match="cannot be written"):
        opened(tmp_path / "missing" / "out.parquet")
    record = (out / "_rooftop.json").read_text()
    for damaged in ("{", re.sub('"schema": [^,}]*', '"schema": "AAAA"', record)):
        (out / "_rooftop.json").write_text(damaged)
        with pytest.raises(InputError, match="is damaged"):
            opened(out)


def test_two_runs_do_not_write_at_once(tmp_path: Path) -> None:
    with opened(tmp_path / "out"), pytest.raises(InputError, match="written by another run"):
        opened(tmp_path / "out")
    with opened(tmp_path / "out"):
        pass


def test_a_part_that_was_begun_is_no_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "out"

    def broken(*_: object) -> None:
        raise KeyboardInterrupt

    parts = opened(out)
    parts.settle(schema())
    parts.add(batch_of(["a"]))
    monkeypatch.setattr(os, "replace", broken)
    with pytest.raises(KeyboardInterrupt):
        parts.__exit__(None, None, None)
    monkeypatch.undo()
    assert [path.name for path in out.glob(".part*")] == [".part-00000.parquet.tmp"]
    with opened(out) as parts:
        assert parts.done.rows == 0
        assert not list(out.glob(".part*"))


def test_a_full_disk_keeps_earlier_parts_and_is_explained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "out"
    parts = opened(out)
    parts.settle(schema())
    parts.add(batch_of(["a", "b"], failed=("b",)))
    parts.flush()
    _, limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    parts.add(batch_of(["c"]))
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, limit))
    said = (
        r"out/part-0000{} cannot be written \(File too large\), but .*out keeps 2 rows: raise .*ulimit.* same command"
    )
    try:
        with pytest.raises(OutputError, match=said.format("1.parquet")):
            parts.__exit__(None, None, None)
        with pytest.raises(OutputError, match=said.format("0.parquet")):
            opened(out, retry_errors=True)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
    assert [path.name for path in out.glob("*part-*")] == ["part-00000.parquet"]
    with opened(out) as parts:
        assert parts.done.rows == 2

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "Error writing bytes")

    monkeypatch.setattr(os, "replace", full)
    said = r"_rooftop.json cannot be written \(No space left on device\).*make room"
    with opened(tmp_path / "new") as parts, pytest.raises(OutputError, match=said):
        parts.settle(schema())


def test_errors_are_done_again_if_asked_for(tmp_path: Path) -> None:
    out = tmp_path / "out"
    with opened(out) as parts:
        parts.settle(schema())
        parts.add(batch_of(["a", "b"], failed=("b",)))
        parts.flush()
        parts.add(batch_of(["c"], failed=("c",)))
    with opened(out) as parts:
        assert (parts.done.rows, parts.done.errors) == (3, 2)
    with opened(out, retry_errors=True) as parts:
        assert (parts.done.rows, parts.done.errors) == (1, 0)
        parts.add(batch_of(["b", "c"]))
    table = pq.read_table(out)
    assert sorted(table["input"].to_pylist()) == ["a", "b", "c"]
    assert table["error"].null_count == 3


def test_parts_of_errors_alone_get_the_columns_later(tmp_path: Path) -> None:
    out = tmp_path / "out"
    with opened(out) as parts:
        parts.add(to_batch([Item("a", None, "")], [Failure("no")], None)[0])
    assert json.loads((out / "_rooftop.json").read_text())["columns"] is None
    with opened(out) as parts:
        assert parts.columns is None
        parts.settle(schema())
        parts.add(batch_of(["bb"]))
    assert sorted(pq.read_table(out)["n"].to_pylist(), key=str) == [2, None]


def test_a_damaged_part_is_named(tmp_path: Path) -> None:
    out = tmp_path / "out"
    with opened(out) as parts:
        parts.settle(schema())
        parts.add(batch_of(["a"]))
    (out / "part-00000.parquet").write_bytes(b"PAR1")
    with pytest.raises(InputError, match=r"part-00000.parquet is damaged .* remove it"):
        opened(out)
    (out / "part-00000.parquet").rename(out / "part-00000-by-spark.parquet")
    with pytest.raises(InputError, match=r"by-spark\.parquet is not a part that rooftop map wrote: move it"):
        opened(out)


def test_what_is_old_or_much_is_written_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with opened(tmp_path / "out") as parts:
        parts.settle(schema())
        parts.add(batch_of(["a"]))
        assert not list((tmp_path / "out").glob("part*"))
        monkeypatch.setattr(parts_module, "PART_BYTES", 10)
        parts.add(batch_of(["b"]))
        assert len(list((tmp_path / "out").glob("part*"))) == 1
        monkeypatch.undo()
        parts.add(batch_of(["c"]))
        monkeypatch.setattr(parts_module, "FIRST_PART_S", 0.0)
        monkeypatch.setattr(parts_module, "PART_SHARE", 0.0)
        parts.write_if_due()
        assert len(list((tmp_path / "out").glob("part*"))) == 2
