"""Compute the theoretical occupancy: how many warps of a kernel one multiprocessor holds, and which resource limits
their number.

    occupancy = active blocks x warps per block / warps that the multiprocessor can hold
    active blocks = min over the limits: warps, blocks, registers, shared memory

Registers are allocated per warp, in units. Each warp stays in one of four sub-partitions, each with a quarter of the
registers. Shared memory is allocated per block, in units. From compute capability 8.0 on, the driver reserves 1 KiB
more per block.

Sources: CUDA C++ Programming Guide, "Technical Specifications per Compute Capability"; the occupancy calculator of the
CUDA toolkit 13.0 (cuda_occupancy.h), with which the tests compare. Shared memory is assumed to grow as needed, at the
expense of L1 (the default carve-out).

Not modelled: named barriers (a kernel with more than one or two per block may have lower occupancy), thread block
clusters, `setmaxnreg`. Occupancy hides latency. Once the latency is hidden, higher occupancy does not make a kernel
faster.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, replace

KIB = 1024
WARP = 32  # threads


@dataclass(frozen=True)
class Multiprocessor:
    """The resources of one multiprocessor, and their allocation units.

    Attributes:
        max_warps, max_blocks: the maximum number of warps and blocks that are resident at a time.
        shared_carveouts: possible sizes of shared memory in bytes, ascending; the rest of the on-chip memory is L1.
        shared_unit: allocation unit of a block's shared memory, in bytes.
        reserved_shared_bytes: bytes that the driver adds to each block.
        registers: number of 32-bit registers. A block can use all registers.
        register_unit: allocation unit of a warp's registers.
        sub_partitions: number of sub-partitions that divide the warps and registers among themselves (the calculator's
            "warp allocation granularity").
        max_registers_per_thread, max_threads_per_block: limits of any launch.
    """

    max_warps: int
    max_blocks: int
    shared_carveouts: tuple[int, ...]
    shared_unit: int = 128
    reserved_shared_bytes: int = 1 * KIB
    registers: int = 65536
    register_unit: int = 256
    sub_partitions: int = 4
    max_registers_per_thread: int = 255
    max_threads_per_block: int = 1024

    @property
    def shared_bytes(self) -> int:
        """Shared memory at the largest carve-out."""
        return self.shared_carveouts[-1]

    @property
    def max_shared_bytes_per_block(self) -> int:
        """The most static plus dynamic shared memory of a block, if the kernel opts in to it."""
        return self.shared_bytes - self.reserved_shared_bytes


def _carveouts(*kib: int) -> tuple[int, ...]:
    return tuple(each * KIB for each in kib)


_UP_TO_100 = _carveouts(0, 8, 16, 32, 64, 100)
_UP_TO_164 = _carveouts(0, 8, 16, 32, 64, 100, 132, 164)
_UP_TO_228 = _carveouts(0, 8, 16, 32, 64, 100, 132, 164, 196, 228)

MULTIPROCESSORS: dict[tuple[int, int], Multiprocessor] = {
    (7, 0): Multiprocessor(64, 32, _carveouts(0, 8, 16, 32, 64, 96), shared_unit=256, reserved_shared_bytes=0),
    (7, 5): Multiprocessor(32, 16, _carveouts(32, 64), shared_unit=256, reserved_shared_bytes=0),
    (8, 0): Multiprocessor(64, 32, _UP_TO_164),
    (8, 6): Multiprocessor(48, 16, _UP_TO_100),
    (8, 7): Multiprocessor(48, 16, _UP_TO_164),
    (8, 9): Multiprocessor(48, 24, _UP_TO_100),
    (9, 0): Multiprocessor(64, 32, _UP_TO_228),
    (10, 0): Multiprocessor(64, 32, _UP_TO_228),
    (10, 3): Multiprocessor(64, 32, _UP_TO_228),
    (12, 0): Multiprocessor(48, 24, _UP_TO_100),
}
"""Multiprocessors by compute capability."""


@dataclass(frozen=True)
class Change:
    """Another value for one resource of a launch, and the occupancy with that value.

    Attributes:
        resource: "registers per thread", "bytes of shared memory per block" or "threads per block".
        before, after: values of the resource.
        fraction: the occupancy that `after` reaches.
    """

    resource: str
    before: int
    after: int
    fraction: float

    @property
    def size(self) -> float:
        """The size of this change relative to the value before it: |after - before| / before. This makes changes of
        different resources comparable.
        """
        return abs(self.after - self.before) / self.before

    def __str__(self) -> str:
        return f"{self.after:,} {self.resource} instead of {self.before:,} reach {self.fraction:.0%}"


@dataclass(frozen=True)
class Occupancy:
    """The occupancy of one launch on one multiprocessor.

    Attributes:
        capability: compute capability.
        threads_per_block, registers_per_thread, shared_bytes_per_block: the resources of the launch. Shared memory is
            static plus dynamic.
        limits: for each of "warps", "blocks", "registers" and "shared memory", the number of blocks that fit. None: the
            kernel does not use the resource. 0: the launch fails.
    """

    capability: tuple[int, int]
    threads_per_block: int
    registers_per_thread: int
    shared_bytes_per_block: int
    limits: dict[str, int | None]

    @property
    def multiprocessor(self) -> Multiprocessor:
        return MULTIPROCESSORS[self.capability]

    @property
    def blocks_per_multiprocessor(self) -> int:
        """The number of resident blocks; 0 if the registers of one block do not fit, so that a launch fails."""
        return min(limit for limit in self.limits.values() if limit is not None)

    @property
    def active_warps(self) -> int:
        """The number of resident warps. A block's last warp counts as a whole warp even if the block does not fill
        it."""
        return self.blocks_per_multiprocessor * _warps(self.threads_per_block)

    @property
    def fraction(self) -> float:
        """Resident warps / warps that the multiprocessor can hold, 0 to 1."""
        return self.active_warps / self.multiprocessor.max_warps

    @property
    def limiters(self) -> tuple[str, ...]:
        """All resources with the lowest limit. If several resources have the lowest limit, raising only one of these
        limits changes nothing."""
        return tuple(name for name, limit in self.limits.items() if limit == self.blocks_per_multiprocessor)

    @property
    def limiter(self) -> str:
        """The resource that limits the blocks: the first of `limiters`, in the order of `limits`."""
        return self.limiters[0]

    @property
    def shared_carveout(self) -> int:
        """The smallest carve-out, in bytes, that holds the shared memory of all resident blocks."""
        sm = self.multiprocessor
        used = self.blocks_per_multiprocessor * _shared_allocated(sm, self.shared_bytes_per_block)
        return next(size for size in sm.shared_carveouts if size >= used)

    def changes(self) -> tuple[Change, ...]:
        """For each resource that alone can raise the occupancy, the smallest change that raises it. The change with
        the smallest `size` comes first.

        The changes are fewer registers per thread, less shared memory per block, or another block size (in whole warps,
        with the same registers per thread and shared memory per block).
        """
        found = [
            self._less("registers_per_thread", least=1),
            self._less("shared_bytes_per_block", least=0),
            self._other_block_size(),
        ]
        return tuple(sorted((change for change in found if change is not None), key=lambda change: change.size))

    def nearest_change(self) -> Change | None:
        """The smallest relative change of a single resource that raises the occupancy. None if no change of a single
        resource raises it.
        """
        return next(iter(self.changes()), None)

    @property
    def advice(self) -> str:
        """The occupancy, its limiter and the nearest change, in one sentence."""
        sm, change = self.multiprocessor, self.nearest_change()
        now = f"{self.active_warps} of {sm.max_warps} warps ({self.fraction:.0%}), limited by {_and(self.limiters)}"
        if change is not None:
            return f"{now}: {change}"
        return now if self.active_warps == sm.max_warps else f"{now}: changing one resource alone does not raise it"

    def _with(self, field: str, value: int) -> Occupancy:
        changed = replace(self, **{field: value})  # type: ignore[arg-type]
        return replace(changed, limits=_limits(changed))

    def _raised_by(self, field: str, value: int) -> bool:
        return self._with(field, value).active_warps > self.active_warps

    def _less(self, field: str, least: int) -> Change | None:
        """The largest value of `field`, at least `least`, below the present value that raises the occupancy.

        If a value raises the occupancy, any smaller value does too.
        """
        before: int = getattr(self, field)
        smaller = range(least, before)
        raising = bisect_left(smaller, True, key=lambda value: not self._raised_by(field, value))
        return self._change(field, smaller[raising - 1]) if raising else None

    def _other_block_size(self) -> Change | None:
        sizes = range(WARP, self.multiprocessor.max_threads_per_block + 1, WARP)
        for size in sorted(sizes, key=lambda size: abs(size - self.threads_per_block)):
            if self._raised_by("threads_per_block", size):
                return self._change("threads_per_block", size)
        return None

    def _change(self, field: str, value: int) -> Change:
        return Change(RESOURCES[field], getattr(self, field), value, self._with(field, value).fraction)


RESOURCES = {
    "registers_per_thread": "registers per thread",
    "shared_bytes_per_block": "bytes of shared memory per block",
    "threads_per_block": "threads per block",
}
"""Field of `Occupancy` that a `Change` can change -> its name for readers."""


def occupancy(
    threads_per_block: int, registers_per_thread: int, shared_bytes_per_block: int, capability: tuple[int, int]
) -> Occupancy:
    """The theoretical occupancy of a launch, as cudaOccupancyMaxActiveBlocksPerMultiprocessor computes it.

    Args:
        threads_per_block: 1 to 1024.
        registers_per_thread: as the compiler reports them (`ptxas -v`, CU_FUNC_ATTRIBUTE_NUM_REGS), 0 to 255.
        shared_bytes_per_block: static plus dynamic bytes. Above 48 KiB the kernel must opt in to its dynamic shared
            memory.
        capability: compute capability of the GPU, e.g. (9, 0).

    Raises:
        TypeError: an argument has a wrong type.
        ValueError: the compute capability is not in `MULTIPROCESSORS`, or an argument has a value that no launch can
            have. If only the registers of a block do not fit, the occupancy is 0 without an error, and `nearest_change`
            says what would fit.
    """
    counts = (threads_per_block, registers_per_thread, shared_bytes_per_block)
    if not all(isinstance(count, int) for count in counts) or not isinstance(capability, tuple):
        raise TypeError(
            "expected threads, registers and bytes as integers and a compute capability as in (9, 0), "
            f"got {counts} and {capability!r}"
        )
    sm = MULTIPROCESSORS.get(capability)
    if sm is None:
        known = ", ".join(f"{major}.{minor}" for major, minor in MULTIPROCESSORS)
        raise ValueError(
            f"the multiprocessor of compute capability {'.'.join(map(str, capability))} is not known: expected one of "
            f"{known}; a new GPU needs a row in rooftop.hardware.occupancies.MULTIPROCESSORS"
        )
    if not 1 <= threads_per_block <= sm.max_threads_per_block:
        raise ValueError(
            f"a block of {threads_per_block} threads cannot be launched: expected 1 to {sm.max_threads_per_block}; "
            "launch more blocks with fewer threads"
        )
    if not 0 <= registers_per_thread <= sm.max_registers_per_thread:
        raise ValueError(
            f"{registers_per_thread} registers per thread: expected 0 to {sm.max_registers_per_thread}; the compiler "
            "spills the rest to local memory, so pass the count that it reports (ptxas -v)"
        )
    if not 0 <= shared_bytes_per_block <= sm.max_shared_bytes_per_block:
        raise ValueError(
            f"{shared_bytes_per_block:,} bytes of shared memory per block: compute capability "
            f"{capability[0]}.{capability[1]} allows 0 to {sm.max_shared_bytes_per_block:,}, static and dynamic "
            "together; use a smaller tile or fewer stages"
        )
    launch = Occupancy(capability, threads_per_block, registers_per_thread, shared_bytes_per_block, {})
    return replace(launch, limits=_limits(launch))


def _limits(launch: Occupancy) -> dict[str, int | None]:
    """For each resource of a multiprocessor (warps, registers, ...), the number of the launch's blocks that fit; None
    if the blocks do not use the resource.
    """
    sm, warps = launch.multiprocessor, _warps(launch.threads_per_block)
    shared = _shared_allocated(sm, launch.shared_bytes_per_block)
    return {
        "warps": sm.max_warps // warps,
        "blocks": sm.max_blocks,
        "registers": _register_limit(sm, warps, launch.registers_per_thread),
        "shared memory": sm.shared_bytes // shared if shared else None,
    }


def _register_limit(sm: Multiprocessor, warps: int, registers_per_thread: int) -> int | None:
    per_warp = _round_up(registers_per_thread * WARP, sm.register_unit)
    if not per_warp:
        return None
    # The check assumes that each sub-partition holds as many of the block's warps as the fullest sub-partition does.
    if per_warp * _round_up(warps, sm.sub_partitions) > sm.registers:
        return 0
    warps_per_partition = sm.registers // sm.sub_partitions // per_warp
    return warps_per_partition * sm.sub_partitions // warps


def _shared_allocated(sm: Multiprocessor, shared_bytes_per_block: int) -> int:
    return _round_up(shared_bytes_per_block + sm.reserved_shared_bytes, sm.shared_unit)


def _warps(threads: int) -> int:
    return -(-threads // WARP)


def _round_up(value: int, unit: int) -> int:
    return -(-value // unit) * unit


def _and(names: tuple[str, ...]) -> str:
    return " and ".join(filter(None, [", ".join(names[:-1]), names[-1]]))
