"""Compute which positions attend to which when context parallel ranks split sequences. The computation is only
arithmetic, without processes.

    packing = Packing.of(length=16, ranks=2)           # chunks from the front and from the back
    packing.held[0]                                    # positions of rank 0
    packing.rows(0, 1)                                 # the rows of rank 1's keys that rank 0 needs
    packing.blocks(0, 1)                               # which of rank 0's queries attend to which of these rows

The work of a rank is a list of blocks. In a block, each query attends to all keys, or to the keys up to its own
position. No block crosses the border of a document, so ranks neither compute nor send anything that a mask would
exclude. With documents, chunks are distributed over ranks by their numbers of visible (query, key) pairs. All ranks get
the same number of chunks.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate
from typing import Any

from rooftop.parallel.chunks import Chunks
from rooftop.parallel.documents import Documents, Span

CHUNKS_OF_RANK = (2, 4, 8, 16, 32, 64)
"""Numbers of chunks per rank to try for packed documents. The smallest number that balances the work wins, since few
chunks make large blocks."""
BALANCED = 1.01
"""Work counts as balanced, and no finer chunks are tried, if the ranks' maximum work divided by their mean work is at
most this number."""


@dataclass(frozen=True)
class Block:
    """A range of queries, and the range of keys that they attend to.

    Attributes:
        row: index of the sequence in the batch; None: the block applies to all sequences.
        queries, keys: ranges of indices into the rank's positions, and into the rows that it has received.
        causal: whether each query attends to the keys up to its own position. The queries are then at the last of the
            keys' positions. Without a window, a causal block has as many keys as queries. In a block that is not
            causal, each query attends to all keys.
        window: the number of positions that a query of a causal block attends to, including itself; None: all positions
            up to itself.
    """

    row: int | None
    queries: Span
    keys: Span
    causal: bool
    window: int | None = None

    @property
    def pairs(self) -> int:
        """The number of visible (query, key) pairs in one sequence."""
        queries, keys = self.queries[1] - self.queries[0], self.keys[1] - self.keys[0]
        if not self.causal:
            return queries * keys
        seen = range(keys - queries + 1, keys + 1)
        return sum(seen) if self.window is None else sum(min(each, self.window) for each in seen)


@dataclass(frozen=True)
class Packing:
    """Which positions of a batch's sequences each rank holds.

    Attributes:
        length: number of positions in a sequence.
        held: positions of each rank, which are the same in all sequences.
        documents: the documents in the sequences; None: each sequence is a single document.
        ready: tables that attention has prepared, which later layers and steps reuse.
    """

    length: int
    held: tuple[Chunks, ...]
    documents: Documents | None = None
    ready: dict[Any, Any] = field(default_factory=dict, init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        runs = sorted(run for chunks in self.held for run in chunks.runs())
        ends = [0, *(end for _, end in runs)]
        if any(chunks.length != self.length for chunks in self.held) or ends != [
            *(first for first, _ in runs),
            self.length,
        ]:
            raise ValueError(
                f"Packing: the ranks must hold each of the {self.length} positions once, got {self.held}: create the "
                "packing with Packing.of"
            )

    @staticmethod
    def of(length: int, ranks: int = 1, documents: Documents | None = None, parts: int = 1) -> Packing:
        """Give each rank the same number of positions and about the same work.

        Args:
            length: number of positions in a sequence.
            ranks: number of ranks that split a sequence.
            documents: the documents in a batch's sequences.
            parts: number of equal parts into which a rank's positions must split, as for sequence parallelism.

        Raises:
            ValueError: the length cannot be split over these ranks and parts, or the documents have another length than
                the sequences.
        """
        if length < 1 or ranks < 1 or parts < 1:
            raise ValueError(f"Packing: length, ranks and parts must be positive, got {length}, {ranks} and {parts}")
        if documents is not None and documents.length != length:
            raise ValueError(f"Packing: the documents have {documents.length} positions, the sequences {length}")
        held = [Chunks.zigzag(length, index, ranks) for index in range(ranks)]
        if documents is not None and ranks > 1:
            held = _balanced(documents, ranks)
        if any(len(chunks) % parts for chunks in held):
            raise ValueError(
                f"{len(held[0])} of {length} positions on each of {ranks} context parallel ranks cannot be split among "
                f"{parts} tensor parallel ranks: pad the sequences to a multiple of {2 * ranks * parts}"
            )
        return Packing(length, tuple(held), documents)

    def drawn(self, width: int = 64) -> str:
        """Draw a text picture: one line per rank, with its positions and its share of the visible pairs."""
        width = max(2, min(width, self.length))
        lines = [f"positions 0{f'{self.length - 1:,}':>{width - 1}}"]
        for rank, chunks in enumerate(self.held):
            held = set(chunks.positions().tolist())
            marks = (round(at * self.length / width) for at in range(width))
            share = 100 * self.pairs[rank] / max(1, sum(self.pairs))
            picture = "".join("#" if position in held else "." for position in marks)
            lines.append(f"rank {rank:<4} {picture}  {share:.1f}% of the pairs")
        return "\n".join(lines)

    @property
    def spans(self) -> tuple[tuple[int | None, tuple[Span, ...]], ...]:
        """The documents of each sequence, as (row of the batch, spans of positions). If all sequences have the same
        documents, there is one entry, with None as its row."""
        if self.documents is None:
            return ((None, ((0, self.length),) if self.length else ()),)
        rows = self.documents.spans
        return ((None, rows[0]),) if rows and len(set(rows)) == 1 else tuple(enumerate(rows))

    def rows(self, to: int, of: int, window: int | None = None) -> tuple[Span, ...]:
        """The positions whose keys and values rank `to` needs from rank `of`, as ascending runs."""
        needed = _united(
            (max(first, run[0] - window + 1) if window else first, end)
            for _, spans in self.spans
            for run in self.held[to].runs()
            for first, end in _met(run, spans)
        )
        return tuple(_common(needed, list(self.held[of].runs())))

    def blocks(self, to: int, of: Sequence[int], window: int | None = None) -> list[Block]:
        """The attention blocks that rank `to` computes with the keys and values that it needs from the ranks `of`. Keys
        and values are in ascending order of position."""
        runs = _united(run for each in of for run in self.rows(to, each, window))
        return list(self._blocks(list(self.held[to].runs()), runs, window))

    def own_blocks(self, rank: int) -> list[Block]:
        """The blocks of a rank's queries with its own rows: a causal block for each document.

        A rank's rows are in ascending order. So rows before a query in memory also precede the query in the document,
        even if other ranks have rows in between.
        """
        place = _counter(list(self.held[rank].runs()))
        spans = ((row, (place(first), place(end))) for row, documents in self.spans for first, end in documents)
        return [Block(row, at, at, True) for row, at in spans if at[0] < at[1]]

    def full_blocks(self, rank: int, spans: Iterable[Span]) -> list[Block]:
        """The blocks that a rank computes with other ranks' rows at the positions `spans`. In a block, all queries
        attend to all keys.

        No query is in two blocks. Neighbouring queries that attend to the same keys are in one block.
        """
        place, found = _counter(_united(spans)), list[Block]()
        for row, documents in self.spans:
            for run, here in _placed(self.held[rank].runs()):
                for first, end in _met(run, documents):
                    begin = max(first, run[0])
                    queries = (begin - run[0] + here, end - run[0] + here)
                    seen = place(first), place(begin)
                    if seen[0] == seen[1]:
                        continue
                    last = found[-1] if found else None
                    if last is not None and (last.row, last.keys, last.queries[1]) == (row, seen, queries[0]):
                        queries = last.queries[0], queries[1]
                        found.pop()
                    found.append(Block(row, queries, seen, False))
        return found

    def _blocks(self, queries: list[Span], keys: list[Span], window: int | None) -> Iterator[Block]:
        """Yield the attention blocks of queries with keys. Both are ascending runs of positions."""
        placed = list(_placed(keys))
        for row, spans in self.spans:
            for query, here in _placed(queries):
                for first, end in _met(query, spans):
                    begin = max(first, query[0])  # the queries in this document are [begin, end)
                    at = (begin - query[0] + here, end - query[0] + here)
                    for key, there in placed[_first_after(keys, first) : bisect_left(keys, (end, 0))]:
                        if window is not None:  # one run of `keys` has all visible keys of these queries
                            seen = max(first, begin - window + 1)
                            if key[0] <= seen and end <= key[1]:
                                yield Block(row, at, (seen - key[0] + there, end - key[0] + there), True, window)
                            continue
                        before = (max(first, key[0]), min(begin, key[1]))
                        if before[0] < before[1]:
                            yield Block(row, at, (before[0] - key[0] + there, before[1] - key[0] + there), False)
                        if key[0] <= begin and end <= key[1]:
                            yield Block(row, at, (begin - key[0] + there, end - key[0] + there), True)

    @cached_property
    def pairs(self) -> tuple[int, ...]:
        """The number of visible pairs of each rank. With documents, pairs are counted over all sequences of the batch;
        without documents, in one sequence."""
        batch = len(self.documents.spans) if self.documents is not None else 1
        ranks = range(len(self.held))
        return tuple(
            sum(block.pairs * (batch if block.row is None else 1) for block in self.blocks(rank, ranks))
            for rank in ranks
        )


def _met(run: Span, spans: Sequence[Span]) -> Iterator[Span]:
    """For each document in `spans` that overlaps a run of positions, yield (first position of the document, end of the
    overlap)."""
    for first, end in spans[_first_after(spans, run[0]) : bisect_left(spans, (run[1], 0))]:
        yield first, min(end, run[1])


def _counter(runs: Sequence[Span]) -> Callable[[int], int]:
    """Return a function that counts how many positions of ascending runs precede a given position."""
    firsts, before = [first for first, _ in runs], [0, *accumulate(end - first for first, end in runs)]

    def count(position: int) -> int:
        place = bisect_right(firsts, position) - 1
        return before[place] + min(runs[place][1], position) - firsts[place] if place >= 0 else 0

    return count


def _first_after(spans: Sequence[Span], position: int) -> int:
    """The index of the first span that ends after a position. The spans are ascending."""
    return bisect_right(spans, position, key=lambda span: span[1])


def _placed(runs: Iterable[Span]) -> Iterator[tuple[Span, int]]:
    """Yield each run with the number of positions in the runs before it."""
    before = 0
    for first, end in runs:
        yield (first, end), before
        before += end - first


def _united(runs: Iterable[Span]) -> list[Span]:
    found: list[Span] = []
    for first, end in sorted(runs):
        if found and first <= found[-1][1]:
            found[-1] = (found[-1][0], max(end, found[-1][1]))
        else:
            found.append((first, end))
    return found


def _common(one: list[Span], other: list[Span]) -> Iterator[Span]:
    for first, end in one:
        for start, stop in other[_first_after(other, first) : bisect_left(other, (end, 0))]:
            yield max(first, start), min(end, stop)


def _balanced(documents: Documents, ranks: int) -> list[Chunks]:
    """Distribute equal chunks over ranks, equally many to each rank. In descending order of visible pairs, each chunk
    is given to the rank that has the fewest pairs so far and still lacks chunks."""
    length, best = documents.length, list[Chunks]()
    least = float("inf")
    for count in CHUNKS_OF_RANK:
        if length % (count * ranks):
            break
        held, most = _handed_out(documents, ranks, count)
        if most < least:
            best, least = held, most
        if least <= BALANCED:
            break
    return best or [Chunks.zigzag(length, index, ranks) for index in range(ranks)]  # raises the error


def _handed_out(documents: Documents, ranks: int, count: int) -> tuple[list[Chunks], float]:
    """Distribute the sequence's chunks over ranks, `count` chunks to each rank. Return the positions of each rank, and
    the ratio of the highest work of a rank to the mean work."""
    size = documents.length // (count * ranks)
    pairs = [0] * (count * ranks)
    for spans in documents.spans:
        for first, end in spans:
            for place in range(first // size, -(-end // size)):
                begin, stop = max(first, place * size) - first, min(end, (place + 1) * size) - first
                pairs[place] += (stop * (stop + 1) - begin * (begin + 1)) // 2
    sums, places = [0] * ranks, [list[int]() for _ in range(ranks)]
    for place in sorted(range(len(pairs)), key=lambda place: -pairs[place]):
        rank = min((r for r in range(ranks) if len(places[r]) < count), key=lambda r: sums[r])
        sums[rank] += pairs[place]
        places[rank].append(place)
    _swap(places, sums, pairs)
    held = [Chunks(documents.length, size, tuple(sorted(each))) for each in places]
    return held, max(sums) * ranks / max(1, sum(sums))


def _swap(places: list[list[int]], sums: list[int], pairs: Sequence[int]) -> None:
    """Swap a chunk between the ranks with the most and the least work, as long as a swap balances these two ranks
    better.
    """
    ranks = range(len(places))
    while True:
        most, least = max(ranks, key=lambda rank: sums[rank]), min(ranks, key=lambda rank: sums[rank])
        apart = sums[most] - sums[least]
        given = {(pairs[a] - pairs[b]): (a, b) for a in places[most] for b in places[least] if pairs[a] > pairs[b]}
        moved = min(given, key=lambda moved: abs(apart - 2 * moved), default=0)
        if moved == 0 or abs(apart - 2 * moved) >= apart:
            return
        a, b = given[moved]
        places[most][places[most].index(a)], places[least][places[least].index(b)] = b, a
        sums[most] -= moved
        sums[least] += moved
