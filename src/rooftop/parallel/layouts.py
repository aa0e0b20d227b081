"""A layout of ranks along four axes, in Megatron's rank order. The layout says which rank computes which part.

    layout = Layout(dp=2, tp=2, pp=4)
    layout.groups()["tp"]     # [[0, 1], [2, 3], ...]
    layout.coordinates(5)     # {"tp": 1, "cp": 0, "dp": 0, "pp": 1}

`order` names the axes, fastest first. With "tp-cp-dp-pp", the rank is `tp + TP * (cp + CP * (dp + DP * pp))`, with
small letters for coordinates and capitals for sizes. Tensor parallel ranks communicate most, so they are neighbours on
one machine. Pipeline stages communicate least, so they may be on different machines. A layout is only arithmetic: only
`mesh` and `process_groups` need torch.

Source: Shoeybi et al., "Megatron-LM" (arXiv:1909.08053); the order follows Megatron-Core's `parallel_state`.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

AXES = ("tp", "cp", "dp", "pp")
COMBINED = ("dp-cp", "tp-cp", "tp-pp")
"""Groups along two axes. Ranks of "dp-cp" hold the same parameters and sum their gradients. Ranks of "tp-cp" hold the
parts of one stage's activations. Ranks of "tp-pp" hold the parts of one model, whose gradient norms add up.
"""
NEAREST = 3
"""Number of fitting layouts that an error message names."""


@dataclass(frozen=True)
class Layout:
    """The number of ranks along each axis of parallelism.

    Attributes:
        dp: number of data parallel ranks, which have the same parameters and different sequences.
        tp: number of tensor parallel ranks, which have parts of each layer.
        pp: number of pipeline parallel ranks, which have different layers.
        cp: number of context parallel ranks, which have different positions of the same sequences.
        sequence_parallel: whether tensor ranks also split norms and dropout along the sequence.
        order: the axes, fastest first, joined by "-".

    Raises:
        ValueError: a size is not a positive integer, or `order` does not name each axis once.
    """

    dp: int = 1
    tp: int = 1
    pp: int = 1
    cp: int = 1
    sequence_parallel: bool = False
    order: str = "tp-cp-dp-pp"

    def __post_init__(self) -> None:
        for axis in AXES:
            _positive(axis, getattr(self, axis))
        if not isinstance(self.order, str) or sorted(self.order.split("-")) != sorted(AXES):
            raise ValueError(
                f"order={self.order!r}: expected each of {', '.join(AXES)} once, fastest first, such as 'tp-cp-dp-pp'"
            )

    @classmethod
    def of_world(
        cls,
        world_size: int,
        tp: int = 1,
        pp: int = 1,
        cp: int = 1,
        sequence_parallel: bool = False,
        order: str = "tp-cp-dp-pp",
    ) -> Layout:
        """Create the layout of `world_size` ranks. `dp` follows from `world_size`, `tp`, `pp` and `cp`.

        Raises:
            ValueError: `tp * pp * cp` does not divide `world_size`. The message names the fitting layouts of
                `world_size` ranks with the nearest axis sizes.
        """
        _positive("world_size", world_size)
        layout = cls(1, tp, pp, cp, sequence_parallel, order)
        if world_size % layout.world_size:
            raise ValueError(
                f"a world of {world_size} cannot be split by tp={tp} pp={pp} cp={cp}: {layout.world_size} does not "
                f"divide the world size. {_nearest(layout, world_size, {})}"
            )
        return cls(world_size // layout.world_size, tp, pp, cp, sequence_parallel, order)

    def __str__(self) -> str:
        sequence = " sequence_parallel" if self.sequence_parallel else ""
        return f"dp={self.dp} tp={self.tp} pp={self.pp} cp={self.cp}{sequence}"

    @property
    def axes(self) -> tuple[str, ...]:
        """The names of the axes, in the order that `order` states. Consecutive ranks are neighbours along the first
        axis."""
        return tuple(self.order.split("-"))

    @property
    def world_size(self) -> int:
        """The number of ranks: the product of the sizes of all axes, dp * tp * pp * cp."""
        return self.dp * self.tp * self.pp * self.cp

    def size(self, name: str) -> int:
        """The number of ranks in a group along an axis ("tp") or several axes ("dp-cp").

        Raises:
            ValueError: an axis is unknown or named twice.
        """
        return math.prod(getattr(self, axis) for axis in _named(name))

    def coordinates(self, rank: int) -> dict[str, int]:
        """The coordinate of a rank on each axis, fastest first.

        Raises:
            ValueError: there is no such rank.
        """
        if isinstance(rank, bool) or not isinstance(rank, int) or not 0 <= rank < self.world_size:
            raise ValueError(f"rank {rank!r}: the layout {self} has ranks 0 to {self.world_size - 1}")
        found = {}
        for axis in self.axes:
            rank, found[axis] = divmod(rank, getattr(self, axis))
        return found

    def rank(self, **coordinates: int) -> int:
        """The rank at these coordinates. Omitted axes are at 0.

        Raises:
            ValueError: an axis is unknown, or a coordinate is out of range.
        """
        _named("-".join(coordinates) or "tp")
        rank, stride = 0, 1
        for axis in self.axes:
            size, at = getattr(self, axis), coordinates.get(axis, 0)
            if isinstance(at, bool) or not isinstance(at, int) or not 0 <= at < size:
                raise ValueError(f"{axis}={at!r}: the layout {self} has indices 0 to {size - 1} on this axis")
            rank, stride = rank + stride * at, stride * size
        return rank

    def groups_along(self, name: str) -> list[list[int]]:
        """All groups along an axis ("tp") or several axes ("dp-cp"). The ranks of a group differ only in these axes.

        Returns:
            Groups of ascending ranks, in the order of their first ranks. Every rank is in exactly one group.

        Raises:
            ValueError: an axis is unknown or named twice.
        """
        within = _named(name)
        found: dict[tuple[int, ...], list[int]] = {}
        for rank in range(self.world_size):
            outside = tuple(at for axis, at in self.coordinates(rank).items() if axis not in within)
            found.setdefault(outside, []).append(rank)
        return list(found.values())

    def groups(self) -> dict[str, list[list[int]]]:
        """The groups that training needs, by name.

        - "tp", "cp", "dp", "pp": groups along one axis;
        - "dp-cp": ranks that sum gradients; "tp-cp": ranks that split a stage's activations; "tp-pp": ranks that
          split a model's parameters;
        - "embedding": the first and the last stage of each pipeline, which sum the gradients of tied embeddings. With
          one stage, this group has one rank. Ranks of other stages are in no such group.
        """
        named = {name: self.groups_along(name) for name in (*AXES, *COMBINED)}
        return {**named, "embedding": [sorted({group[0], group[-1]}) for group in named["pp"]]}

    def check(
        self,
        world_size: int | None = None,
        *,
        heads: int | None = None,
        kv_heads: int | None = None,
        hidden: int | None = None,
        feed_forward: int | None = None,
        vocabulary: int | None = None,
        layers: int | None = None,
        sequence: int | None = None,
        batch: int | None = None,
        micro_batch: int | None = None,
        axes: Collection[str] = AXES,
    ) -> None:
        """Raise an error if the layout does not fit the world, the model or the batch. The check skips omitted
        arguments.

        Args:
            world_size: number of ranks.
            heads: attention heads, which the tensor ranks split.
            kv_heads: heads of keys and values. The tensor ranks split these heads. If there are more ranks than heads,
                several ranks share each head.
            hidden: width of the model, which the tensor ranks split in attention's projections.
            feed_forward: width within the MLP, which the tensor ranks split.
            vocabulary: rows of the embedding. Tensor ranks may get unequal parts, but each must get at least one row.
            layers: number of layers. Stages may get unequal parts, but each must get at least one layer.
            sequence: length of a sequence. If there are several context ranks, each gets two chunks, one from the front
                and one from the back, which balances causal work. With `sequence_parallel`, the tensor ranks split a
                context rank's part.
            batch: sequences of one optimizer step over all ranks, which the data ranks split.
            micro_batch: sequences that a rank computes at once (default: 1).
            axes: the axes that may have several ranks in the layouts that the error proposes.

        Raises:
            ValueError: the layout does not fit. The message lists everything that does not fit. It also names the
                fitting layouts of `world_size` ranks (None: as many as this layout has) with the nearest axis sizes.
                The error is also raised, without layouts, if a number is not a positive integer or `kv_heads` does not
                divide `heads`.
        """
        given = {
            "heads": heads,
            "kv_heads": kv_heads,
            "hidden": hidden,
            "feed_forward": feed_forward,
            "vocabulary": vocabulary,
            "layers": layers,
            "sequence": sequence,
            "batch": batch,
            "micro_batch": micro_batch,
        }
        sizes = {name: value for name, value in given.items() if value is not None}
        for name, value in sizes.items():
            _positive(name, value)
        if heads is not None and kv_heads is not None and heads % kv_heads:
            raise ValueError(
                f"heads={heads} is not divisible by kv_heads={kv_heads}: all KV heads must serve the same number of "
                "heads"
            )
        wrong = _misfits(self, sizes)
        if world_size is not None:
            _positive("world_size", world_size)
            if self.world_size != world_size:
                wrong.insert(0, f"it has {self.world_size} ranks and the world {world_size}")
        if wrong:
            nearest = _nearest(self, world_size or self.world_size, sizes, axes)
            raise ValueError(f"the layout {self} does not fit: {'; '.join(wrong)}. {nearest}")

    def mesh(self, device_type: str | None = None) -> DeviceMesh:
        """Create torch.distributed's device mesh of the ranks, with the axes as names of its dimensions, slowest first.

        Every rank must call this, since the call creates the groups along each axis.

        Args:
            device_type: "cuda" or "cpu". Default: the process group's device type.

        Raises:
            RuntimeError: there is no process group yet.
            ValueError: the process group has another number of ranks.
        """
        import torch.distributed as dist
        from torch.distributed.device_mesh import init_device_mesh

        if not dist.is_initialized():
            raise RuntimeError(
                "a mesh needs a process group: start several processes with torchrun, and create the mesh within `with "
                "rooftop.parallel.join(layout):`. A single process needs no mesh"
            )
        self.check(dist.get_world_size())
        slowest_first = self.axes[::-1]
        return init_device_mesh(
            device_type or ("cuda" if "nccl" in dist.get_backend() else "cpu"),
            tuple(getattr(self, axis) for axis in slowest_first),
            mesh_dim_names=slowest_first,
        )

    def process_groups(self, mesh: DeviceMesh | None = None) -> dict[str, ProcessGroup | None]:
        """Create this rank's process group for each name in `groups()`.

        Every rank must call this. If two names have the same ranks, they share one group. A rank between the first and
        the last stage is in no "embedding" group, so its result lacks this name.

        Args:
            mesh: the result of `mesh()`, whose groups are reused. Default: a new mesh.

        Returns:
            The group for each name. In a single process without a process group, every group is None.

        Raises:
            RuntimeError: there are several ranks, but no process group yet.
            ValueError: the process group has another number of ranks.
        """
        import torch.distributed as dist

        if self.world_size == 1 and not dist.is_initialized():
            return dict.fromkeys(self.groups())
        mesh = mesh or self.mesh()
        made: dict[str, ProcessGroup | None] = {}
        known: dict[str, ProcessGroup | None] = {}  # partition of the ranks, as text -> this rank's group in it
        for name, partition in self.groups().items():
            if name in AXES:
                known.setdefault(str(partition), mesh.get_group(name))
            elif str(partition) not in known:
                known[str(partition)] = dist.new_subgroups_by_enumeration(partition)[0]
            if known[str(partition)] is not None:
                made[name] = known[str(partition)]
        return made


def _positive(name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"{name}={value!r}: expected a positive integer")


def _named(name: str) -> tuple[str, ...]:
    axes = tuple(name.split("-"))
    if not set(axes) <= set(AXES) or len(set(axes)) != len(axes):
        raise ValueError(f"{name!r}: expected axes among {', '.join(AXES)}, each once, joined by '-'")
    return axes


def _misfits(layout: Layout, sizes: Mapping[str, int]) -> list[str]:
    """Describe the sizes of a model or batch that this layout cannot split."""
    tp, pp, cp, dp = layout.tp, layout.pp, layout.cp, layout.dp
    chunks = 2 * cp if cp > 1 else 1
    parts = cp * tp if layout.sequence_parallel else 1
    rows = dp * sizes.get("micro_batch", 1)
    divisors = {
        "heads": (tp, f"tp={tp}"),
        "hidden": (tp, f"tp={tp}"),
        "feed_forward": (tp, f"tp={tp}"),
        "sequence": (
            math.lcm(chunks, parts),
            f"{math.lcm(chunks, parts)} (two chunks for each of the cp={cp} ranks"
            + (f", each context rank's part split into tp={tp} parts)" if layout.sequence_parallel else ")"),
        ),
        "batch": (rows, f"dp={dp}" if "micro_batch" not in sizes else _rows_in_words(dp, sizes["micro_batch"])),
    }
    wrong = [
        f"{name}={sizes[name]} is not divisible by {words}"
        for name, (divisor, words) in divisors.items()
        if name in sizes and sizes[name] % divisor
    ]
    kv_heads = sizes.get("kv_heads", tp)
    if kv_heads % tp and tp % kv_heads:
        wrong.append(f"kv_heads={kv_heads} neither divides tp={tp} nor is divisible by it")
    for name, ranks, words in (("vocabulary", tp, f"tp={tp}"), ("layers", pp, f"pp={pp}")):
        if sizes.get(name, ranks) < ranks:
            wrong.append(f"{name}={sizes[name]} is less than {words}: some ranks would get nothing")
    return wrong


def _rows_in_words(dp: int, micro_batch: int) -> str:
    of_ranks = f"{dp * micro_batch}, that is dp={dp} times " if dp > 1 else ""
    return f"{of_ranks}micro_batch={micro_batch}"


def _nearest(layout: Layout, world_size: int, sizes: Mapping[str, int], axes: Collection[str] = AXES) -> str:
    """Name the layouts with `world_size` ranks that fit the `sizes` of model and batch, and are closest to `layout`.
    The ratios of their axis sizes to those of `layout` decide. If `layout` has no pipeline ranks, layouts without
    pipeline ranks are preferred; the same holds for context ranks. If none is left, all that fit are compared.
    """
    used = [axis for axis in AXES if getattr(layout, axis) > 1]

    def distance(other: Layout) -> tuple[float, ...]:
        ratios = {axis: abs(math.log2(getattr(other, axis) / getattr(layout, axis))) for axis in AXES}
        asked_for = sum(ratios[axis] for axis in ("tp", "pp", "cp"))  # dp follows from the other sizes
        return round(asked_for, 9), round(ratios["dp"], 9), other.tp, other.pp, other.cp

    fitting = [
        other
        for tp, pp, cp, dp in _factorings(world_size, 4)
        if not _misfits(other := Layout(dp, tp, pp, cp, layout.sequence_parallel, layout.order), sizes)
        and all(axis in axes or getattr(other, axis) == 1 for axis in AXES)
    ]
    simple = [other for other in fitting if all(getattr(other, axis) == 1 for axis in ("pp", "cp") if axis not in used)]
    fitting = simple or fitting
    if not fitting:
        if world_size == 1:
            return "One rank has no other layout: change the sizes that do not divide"
        return f"No layout of {world_size} ranks fits: use fewer ranks, or change the sizes that do not divide"
    ranks = "1 rank" if world_size == 1 else f"{world_size} ranks"
    return f"Nearest for {ranks}: {', or '.join(map(str, sorted(fitting, key=distance)[:NEAREST]))}"


def _factorings(number: int, parts: int) -> Iterator[tuple[int, ...]]:
    """All ways to write a number as an ordered product of `parts` factors."""
    if parts == 1:
        yield (number,)
        return
    for divisor in (d for d in range(1, number + 1) if number % d == 0):
        for rest in _factorings(number // divisor, parts - 1):
            yield (divisor, *rest)
