"""Warp kernels that build the rulebook on GPU and CPU, by an open-addressing hash table of int64 keys.

A table is (slots,) int64, where the number of slots is a power of two and free slots are EMPTY. A second array stores
the row of each slot's key. The search for a key starts at the slot of its hash and ends at the first slot that is empty
or has the key, or after PROBES slots. Threads compete by compare-and-swap, and no thread waits for another. One launch
fills a table, and only later launches read the table.

Sizes are passed as vectors of four, of which kernels use the first `dims` entries. `faults` has the flags of
`Rulebook.faults`. A thread that finds a fault sets the fault's flag to 1 and skips the site.
"""

import warp as wp

from rooftop.sparse import geometries

wp.set_module_options({"enable_backward": False})

Four = wp.types.vector(length=geometries.MAX_DIMS, dtype=wp.int64)

EMPTY = wp.constant(wp.int64(geometries.EMPTY))
NO_KEY = wp.constant(wp.int64(geometries.NO_KEY))
MIX = wp.constant(wp.uint64(0xFF51AFD7ED558CCD))  # constant of MurmurHash3's finalizer
HALF = wp.constant(wp.uint64(33))
# In a half-full table, the probability of a run of n full slots is below exp(-0.19 n). So a run of PROBES full slots
# means that the table has no room.
PROBES = wp.constant(256)
REPEATED, OUTSIDE, NO_ROOM = wp.constant(0), wp.constant(1), wp.constant(geometries.NO_ROOM)


@wp.func
def first_slot(table: wp.array(dtype=wp.int64), key: wp.int64):
    """The slot where the search for a key starts: a hash of the key's bits."""
    mixed = wp.uint64(key)
    mixed = (mixed ^ (mixed >> HALF)) * MIX
    mixed = mixed ^ (mixed >> HALF)
    return wp.int32(mixed & wp.uint64(table.shape[0] - 1))


@wp.func
def insert(table: wp.array(dtype=wp.int64), key: wp.int64):
    """Insert a key into the hash table. Return the key's slot (-1 if the table has no room), and whether the key is
    new."""
    slot = first_slot(table, key)
    mine = wp.int32(-1)
    new = wp.bool(False)
    probe = wp.int32(0)
    while probe < PROBES:
        there = table[slot]
        if there == EMPTY:
            there = wp.atomic_cas(table, slot, EMPTY, key)
        new = there == EMPTY
        if new or there == key:
            mine = slot
            probe = PROBES
        slot = (slot + 1) & (table.shape[0] - 1)
        probe += 1
    return mine, new


@wp.func
def find(table: wp.array(dtype=wp.int64), key: wp.int64):
    """Return the slot of a key, or -1 if the table does not contain the key."""
    slot = first_slot(table, key)
    mine = wp.int32(-1)
    probe = wp.int32(0)
    while probe < PROBES:
        there = table[slot]
        if there == EMPTY:
            probe = PROBES
        if there == key:
            mine = slot
            probe = PROBES
        slot = (slot + 1) & (table.shape[0] - 1)
        probe += 1
    return mine


@wp.func
def is_inside(sites: wp.array2d(dtype=wp.int64), row: int, dims: int, batch_size: wp.int64, shape: Four):
    """Whether the site in row `row` of `sites` is on the grid, whose sizes are `batch_size` and `shape`."""
    inside = sites[row, 0] >= wp.int64(0) and sites[row, 0] < batch_size
    for dim in range(dims):
        at = sites[row, 1 + dim]
        inside = inside and at >= wp.int64(0) and at < shape[dim]
    return inside


@wp.kernel
def insert_sites(
    sites: wp.array2d(dtype=wp.int64),  # (N, 1 + dims)
    dims: int,
    batch_size: wp.int64,
    shape: Four,
    table: wp.array(dtype=wp.int64),
    rows: wp.array(dtype=wp.int32),
    faults: wp.array(dtype=wp.int32),
):
    """Insert the key of each site into the hash table `table`. At the key's slot, `rows` gets the site's row number in
    `sites`. Record a fault for sites off the grid and for repeated sites.
    """
    row = wp.tid()
    if is_inside(sites, row, dims, batch_size, shape):
        key = sites[row, 0]
        for dim in range(dims):
            key = key * shape[dim] + sites[row, 1 + dim]
        slot, new = insert(table, key)
        if new:
            rows[slot] = row
        elif slot < 0:
            faults[NO_ROOM] = 1
        else:
            faults[REPEATED] = 1
    else:
        none = wp.bool(True)
        for column in range(1 + dims):
            none = none and sites[row, column] == wp.int64(-1)
        if not none:
            faults[OUTSIDE] = 1


@wp.kernel
def pair_submanifold(
    sites: wp.array2d(dtype=wp.int64),  # (N, 1 + dims)
    dims: int,
    batch_size: wp.int64,
    shape: Four,
    ksize: Four,
    dilation: Four,
    table: wp.array(dtype=wp.int64),
    rows: wp.array(dtype=wp.int32),
    neighbours: wp.array2d(dtype=wp.int32),  # (N, K), filled with -1
):
    """Each of N * (K // 2 + 1) threads finds the neighbour of one site at one offset up to the centre. The thread
    stores this pair and the mirrored pair."""
    row, k = wp.tid()
    last = neighbours.shape[1] - 1
    if not is_inside(sites, row, dims, batch_size, shape):
        return
    if 2 * k == last:
        neighbours[row, k] = row
        return
    key, cells = wp.int64(0), wp.int64(1)
    rest = wp.int32(k)  # offsets fit in 32 bits, and 32-bit division is faster than 64-bit division
    inside = wp.bool(True)
    for back in range(dims):
        dim = dims - 1 - back
        across = wp.int32(ksize[dim])
        at = sites[row, 1 + dim] + dilation[dim] * wp.int64(rest % across - across / 2)
        inside = inside and at >= wp.int64(0) and at < shape[dim]
        key += at * cells
        cells *= shape[dim]
        rest = rest / across
    if not inside:
        return
    slot = find(table, key + sites[row, 0] * cells)
    if slot >= 0:
        other = rows[slot]
        neighbours[row, k] = other
        neighbours[other, last - k] = row


@wp.kernel
def reach_outputs(
    sites: wp.array2d(dtype=wp.int64),  # (N, 1 + dims)
    dims: int,
    batch_size: wp.int64,
    in_shape: Four,
    out_shape: Four,
    ksize: Four,
    stride: Four,
    padding: Four,
    dilation: Four,
    transposed: bool,
    table: wp.array(dtype=wp.int64),
    slots: wp.array2d(dtype=wp.int32),  # (N, K)
    faults: wp.array(dtype=wp.int32),
):
    """Each of N * K threads inserts the key of the output that one input reaches at one offset, and stores the key's
    slot, or -1."""
    row, k = wp.tid()
    slots[row, k] = -1
    if faults[NO_ROOM] != 0 or not is_inside(sites, row, dims, batch_size, in_shape):
        return
    key, cells = wp.int64(0), wp.int64(1)
    rest = wp.int32(k)  # offsets fit in 32 bits, and 32-bit division is faster than 64-bit division
    valid = wp.bool(True)
    for back in range(dims):
        dim = dims - 1 - back
        across = wp.int32(ksize[dim])
        shift = dilation[dim] * wp.int64(rest % across) - padding[dim]
        at = sites[row, 1 + dim] - shift
        if transposed:
            at = sites[row, 1 + dim] * stride[dim] + shift
        elif at >= wp.int64(0):
            valid = valid and at % stride[dim] == wp.int64(0)
            at = at / stride[dim]
        valid = valid and at >= wp.int64(0) and at < out_shape[dim]
        key += at * cells
        cells *= out_shape[dim]
        rest = rest / across
    if not valid:
        return
    slot, _new = insert(table, key + sites[row, 0] * cells)
    if slot < 0:
        faults[NO_ROOM] = 1
    slots[row, k] = slot


@wp.kernel
def number_outputs(
    keys: wp.array(dtype=wp.int64),  # (O,), sorted, with NO_KEY in rows without an output
    dims: int,
    shape: Four,
    table: wp.array(dtype=wp.int64),
    rows: wp.array(dtype=wp.int32),
    sites: wp.array2d(dtype=wp.int64),  # (O, 1 + dims)
):
    """For each sorted key, write its row number to `rows` at the key's slot, and its coordinates to `sites`. Rows
    without a key get coordinates of -1.
    """
    row = wp.tid()
    key = keys[row]
    if key == NO_KEY:
        for column in range(1 + dims):
            sites[row, column] = wp.int64(-1)
        return
    rows[find(table, key)] = row
    for back in range(dims):
        dim = dims - 1 - back
        sites[row, 1 + dim] = key % shape[dim]
        key = key / shape[dim]
    sites[row, 0] = key


@wp.kernel
def pair_outputs(
    rows: wp.array(dtype=wp.int32),
    reverse: wp.array2d(dtype=wp.int32),  # (N, K), slots on entry, output rows on return
    neighbours: wp.array2d(dtype=wp.int32),  # (O, K), filled with -1
):
    """Each of N * K threads replaces one slot in `reverse` by the output's row, and writes the input's row to
    `neighbours`."""
    row, k = wp.tid()
    slot = reverse[row, k]
    if slot < 0:
        return
    output = rows[slot]
    reverse[row, k] = output
    if output >= 0:
        neighbours[output, k] = row


@wp.kernel
def set_bits(
    table: wp.array2d(dtype=wp.int32),  # (rows, K)
    masks: wp.array2d(dtype=wp.int32),  # (rows, ceil(K / 32))
):
    """Each of rows * ceil(K / 32) threads computes one word of `masks`, with a bit for each entry that is not -1."""
    row, word = wp.tid()
    bits = wp.uint32(0)
    for bit in range(32):
        k = 32 * word + bit
        if k < table.shape[1] and table[row, k] >= 0:
            bits = bits | (wp.uint32(1) << wp.uint32(bit))
    masks[row, word] = wp.int32(bits)
