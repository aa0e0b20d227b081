"""A folder of Parquet parts that grows during a run. Each part is written completely or not at all.

    out.parquet/
      part-00000.parquet     rows: input, place, error, and the columns of the results
      part-00001.parquet
      _rooftop.json          target and arguments; readers of Parquet ignore names that begin with _ or .
      .lock                  locked by the run that writes

Only the parts record which items are done. A run reads the parts' columns `input` and `place`, and computes the missing
items.
"""

from __future__ import annotations

import base64
import errno
import json
import os
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Self

import rooftop
from rooftop.cluster.arrow import load_arrow
from rooftop.cluster.items import Item
from rooftop.cluster.tables import fitted_table, whole_schema
from rooftop.errors import InputError, OutputError
from rooftop.whole_files import write_whole
from rooftop.words import counted, first_line

FORMAT = 1
RECORD = "_rooftop.json"
PART_BYTES = 64 << 20  # added rows are written as a part once they take this many bytes of memory
# An interrupted run loses at most the rows of its last 10 s, or of the last 2% of its time if that is longer. Longer
# intervals make fewer parts.
FIRST_PART_S = 10.0
PART_SHARE = 0.02

REMEDIES = {
    errno.ENOSPC: "make room on this disk",
    errno.EDQUOT: "make room within your quota",
    errno.EFBIG: "raise the maximum size of a file (ulimit -f)",
    errno.EROFS: "make this disk writable",
    errno.EACCES: "make this folder writable",
}
"""What a user can do about an error that occurs while a part is written."""


class Done:
    """The items whose results are in the Parquet parts. For a file that is one item, this set has the file's name. For
    any other file, it has one bit for each place: line, row, or first frame of a clip."""

    def __init__(self) -> None:
        self._whole: set[str] = set()
        self._places: dict[str, bytearray] = {}
        self.rows = self.errors = 0

    def add(self, name: str, place: int | None) -> None:
        if place is None:
            self._whole.add(name)
            return
        bits = self._places.setdefault(name, bytearray())
        if len(bits) <= place >> 3:
            bits.extend(bytes((place >> 3) + 1 - len(bits) + len(bits) // 8))
        bits[place >> 3] |= 1 << (place & 7)

    def __contains__(self, item: Item) -> bool:
        if item.place is None:
            return item.input in self._whole
        bits = self._places.get(item.input, b"")
        return item.place >> 3 < len(bits) and bool(bits[item.place >> 3] >> (item.place & 7) & 1)


class Parts:
    """The folder of parts, locked for this run.

        with Parts(folder, target, arguments) as parts:
            if item not in parts.done: ...
            parts.settle(columns)
            parts.add(batch)

    `Parts` writes added rows once they take `PART_BYTES`, once the oldest has waited for `FIRST_PART_S` (or for
    `PART_SHARE` of the run's time, if that is longer), and when the `with` block ends, even by an exception.

    Args:
        folder: created if its parent exists.
        target, arguments: the run's target and arguments, which must be the same for all runs that write to this
            folder.
        retry_errors: whether to remove rows with an error from the parts, so that their items are repeated.

    Attributes:
        done: the items that the parts had when the folder was opened.
        columns: the results' columns (a pyarrow.Schema), or None until the first result.

    Raises:
        InputError: the folder is a file or cannot be created; another run is writing to the folder; the folder has
            results of another target or of other arguments, or unrelated files; or a part is damaged.
        OutputError: with `retry_errors`, a part cannot be written.
    """

    def __init__(self, folder: Path, target: str, arguments: Mapping[str, Any], retry_errors: bool = False) -> None:
        self.folder, self._made_by = folder, {"target": target, "arguments": dict(arguments)}
        self.columns: Any | None = None
        self.done = Done()
        self._waiting: list[Any] = []
        self._waiting_bytes = 0
        self._begun = self._since = time.monotonic()  # `_since`: the time when the oldest waiting row was added
        self._lock: IO[str] = self._locked()
        try:
            self._check_record()
            for leftover in folder.glob(".part-*"):
                leftover.unlink()
            names = sorted(folder.glob("part-*.parquet"))
            self._next = 1 + max(map(_number_of, names), default=-1)
            for path in names:
                self._read(path, retry_errors)
        except BaseException:
            self._lock.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self.flush()
        finally:
            self._lock.close()

    # ---- opening -----------------------------------------------------------------------------------------------------

    def _locked(self) -> IO[str]:
        import fcntl

        if self.folder.exists() and not self.folder.is_dir():
            raise InputError(f"{self.folder} is a file, expected a folder for the results: give another name")
        try:
            self.folder.mkdir(exist_ok=True)
            lock = (self.folder / ".lock").open("w")
        except OSError as error:
            raise InputError(f"{self.folder} cannot be written ({error.strerror}): give another name") from error
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            lock.close()
            raise InputError(
                f"{self.folder} is being written by another run: wait until it ends, or give another name"
            ) from error
        return lock

    def _check_record(self) -> None:
        path = self.folder / RECORD
        if not path.exists():
            others = [each.name for each in self.folder.iterdir() if not each.name.startswith(".")]
            if others:
                raise InputError(
                    f"{self.folder} contains {others[0]}, which rooftop map did not write: give a new or empty folder"
                )
            return
        try:
            record = json.loads(path.read_text(encoding="utf-8"))
            made_by = {"target": record["target"], "arguments": record["arguments"]}
            encoded, version = record["schema"], record["format"]
            if encoded is not None and version == FORMAT:
                pa = load_arrow()
                self.columns = pa.ipc.read_schema(pa.py_buffer(base64.b64decode(encoded)))
        except (ValueError, KeyError, TypeError) as error:
            raise InputError(f"{path} is damaged: to start over, remove {self.folder} or give another name") from error
        if version != FORMAT:
            raise InputError(f"{path} has format {version}, expected {FORMAT}: give another folder for the results")
        mine = json.loads(json.dumps(self._made_by))
        if made_by != mine:
            raise InputError(
                f"{self.folder} has results of another job: {_differences(made_by, mine)}. To start over, remove the "
                "folder or give another name"
            )

    def _read(self, path: Path, retry_errors: bool) -> None:
        pa = load_arrow()
        try:
            table = pa.parquet.read_table(path, columns=["input", "place", "error"])
            bad = table.num_rows - table["error"].null_count
            again = retry_errors and bad > 0
            if again:
                whole = pa.parquet.read_table(path)
                table, bad = whole.filter(whole["error"].is_null()), 0
        except (OSError, ValueError) as error:
            raise InputError(
                f"{path} is damaged ({first_line(error)}): remove it, and run the command again to repeat its items"
            ) from error
        if again:
            self._write(path, table) if table.num_rows else path.unlink()
        for batch in table.to_batches():
            for name, place in zip(batch["input"].to_pylist(), batch["place"].to_pylist(), strict=True):
                self.done.add(name, place)
        self.done.rows += table.num_rows
        self.done.errors += bad

    # ---- writing -----------------------------------------------------------------------------------------------------

    def settle(self, columns: Any | None) -> None:
        """Set the columns of the results (a pyarrow.Schema), also in existing parts."""
        if self.columns is not None and columns == self.columns and (self.folder / RECORD).exists():
            return
        self.columns = columns
        pa = load_arrow()
        whole = whole_schema(columns)
        for path in sorted(self.folder.glob("part-*.parquet")):
            if not pa.parquet.read_schema(path).equals(whole):
                table = pa.parquet.read_table(path)
                self._write(path, fitted_table(table.to_batches(), whole))
        encoded = None if columns is None else base64.b64encode(columns.serialize().to_pybytes()).decode()
        types = None if columns is None else {field.name: str(field.type) for field in columns}
        record = {
            "rooftop": rooftop.__version__,
            "format": FORMAT,
            **self._made_by,
            "columns": types,
            "schema": encoded,
        }
        with self._explained(self.folder / RECORD):
            write_whole(self.folder / RECORD, json.dumps(record, indent=1) + "\n")

    def add(self, batch: Any) -> None:
        """Add rows (a pyarrow.RecordBatch). The rows are written at once or later."""
        if not self._waiting:
            self._since = time.monotonic()
        self._waiting.append(batch)
        self._waiting_bytes += batch.nbytes
        self.write_if_due()

    def write_if_due(self) -> None:
        """Write the added rows that are not yet on the disk, if they take enough bytes or have waited long enough (see
        `Parts`)."""
        now = time.monotonic()
        patience = max(FIRST_PART_S, PART_SHARE * (now - self._begun))
        if self._waiting and (self._waiting_bytes >= PART_BYTES or now - self._since >= patience):
            self.flush()

    def flush(self) -> None:
        """Write the added rows that are not yet on the disk, as a new part."""
        if not self._waiting:
            return
        if not (self.folder / RECORD).exists():
            self.settle(self.columns)
        whole = whole_schema(self.columns)
        self._write(self.folder / f"part-{self._next:05d}.parquet", fitted_table(self._waiting, whole))
        self._next += 1
        self._waiting, self._waiting_bytes = [], 0

    def _write(self, path: Path, table: Any) -> None:
        """Write a part completely or not at all, even if the machine loses power.

        Raises:
            OutputError: the part cannot be written.
        """
        temporary = path.with_name(f".{path.name}.tmp")
        with self._explained(path):
            try:
                load_arrow().parquet.write_table(table, temporary, compression="zstd")
                with temporary.open("rb") as file:
                    os.fsync(file.fileno())
                os.replace(temporary, path)
            except OSError:
                temporary.unlink(missing_ok=True)  # leave its disk space to other files
                raise

    @contextmanager
    def _explained(self, path: Path) -> Iterator[None]:
        """Within the block, turn an OSError into an error that says which file cannot be written, why, which results
        are kept, and what to do."""
        try:
            yield
        except OSError as error:
            why = os.strerror(error.errno) if error.errno else str(error)
            kept = sum(load_arrow().parquet.read_metadata(each).num_rows for each in self.folder.glob("part-*.parquet"))
            remedy = REMEDIES.get(error.errno or 0, "fix the cause")
            raise OutputError(
                f"{path} cannot be written ({why}), but {self.folder} keeps {counted(kept, 'row')}: {remedy}, and run "
                "the same command again, which computes only the missing rows"
            ) from error


def _number_of(path: Path) -> int:
    number = path.stem.removeprefix("part-")
    if not number.isdecimal():
        raise InputError(f"{path} is not a part that rooftop map wrote: move it to another folder")
    return int(number)


def _differences(there: dict[str, Any], mine: dict[str, Any]) -> str:
    if there["target"] != mine["target"]:
        return f"of {there['target']}, not of {mine['target']}"
    names = [*there["arguments"], *(name for name in mine["arguments"] if name not in there["arguments"])]
    pairs = ((name, there["arguments"].get(name), mine["arguments"].get(name)) for name in names)
    return ", ".join(f"{name} was {old!r} and is {new!r}" for name, old, new in pairs if old != new)
