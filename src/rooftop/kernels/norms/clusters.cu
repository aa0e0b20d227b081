// Layer norm and RMS norm of rows that bulk copies load to shared memory (rooftop.kernels.norms.clusters).
//
// The CLUSTER blocks of a cluster share a row: each block computes `share` of the row's groups of eight elements (16
// bytes). A cluster computes every C-th row, where C is the number of clusters. One thread starts the copies of later
// rows (cp.async.bulk). A copy needs no registers, and completes on the mbarrier of its stage. The blocks of a cluster
// exchange two floats per row through distributed shared memory. Sums are always added in the same order.
//
// Rows may begin at odd addresses: the copies load the groups that enclose a row, so element i of a group has column =
// 8 * group + i - shift. All rows of a cluster have the same shift, because eight divides N or the number of clusters.
// Only threads whose group overlaps a neighbouring row process single elements. pieces.cu and
// operands/cluster_pieces.cu must precede this file.

constexpr int GROUP = 8;

// The beginning of dynamic shared memory; parameters and stages follow.
struct Exchange {
    unsigned long long full[8];     // barrier of each stage
    unsigned long long arrived[2];  // barriers of the cluster's exchange, used in turns
    float of_warps[2][2][32];       // two sums of a row, in turns: a late warp may still read the previous row's sums
    float4 of_blocks[2][8];
};

// The part of a row that one block computes.
struct Part {
    int shift, share, first, groups;  // first: index of the part's first group in the row
    int columns;

    __device__ Part(int cluster, int rank, int blocks, int columns) : columns(columns) {
        shift = cluster % 8 * (columns % 8) % 8;
        const int of_row = (shift + columns + GROUP - 1) / GROUP;
        share = (of_row + blocks - 1) / blocks;
        first = rank * share;
        groups = max(0, min(share, of_row - first));
    }

    // The column of a group's first element; negative if elements of the neighbouring row come first.
    __device__ int column(int group) const { return (first + group) * GROUP - shift; }
    __device__ bool has(int column) const { return column >= 0 && column < columns; }
    __device__ bool is_whole(int column) const { return column >= 0 && column + GROUP <= columns; }

    // Whether the group is whole and aligned in a tensor whose rows begin at multiples of 16 bytes.
    __device__ bool is_aligned(int column) const { return is_whole(column) && column % GROUP == 0 && columns % GROUP == 0; }

    // The number of columns that the block with this rank in the cluster computes.
    __device__ int count(int rank) const {
        const int from = rank * share * GROUP - shift;
        return max(0, min(columns, from + share * GROUP) - max(0, from));
    }
};

// Start the copies of a row of both tensors; b may be null. One thread calls this.
template <typename T>
__device__ void start_copies(const Part& part, Pack<T, GROUP>* stage, const T* a, const T* b, unsigned long long* full) {
    const int bytes = part.groups * static_cast<int>(sizeof(Pack<T, GROUP>));
    expect_copies(full, b == nullptr ? bytes : 2 * bytes);
    if (bytes == 0) return;
    copy_bulk(stage, a + part.column(0), bytes, full);
    if (b != nullptr) copy_bulk(stage + part.share, b + part.column(0), bytes, full);
}

// Load a parameter in the same groups of eight elements as the rows; `missing` replaces elements outside the parameter.
template <typename P>
__device__ void fetch_parameter(const Part& part, const P* from, P* to, float missing) {
    for (int group = threadIdx.x; group < part.groups; group += blockDim.x) {
        const int column = part.column(group);
        if (from != nullptr && part.is_whole(column) && reinterpret_cast<unsigned long long>(from + column) % 16 == 0) {
            *reinterpret_cast<Pack<P, GROUP>*>(to + group * GROUP) = load<P, GROUP>(from + column);
            continue;
        }
#pragma unroll
        for (int i = 0; i < GROUP; ++i) {
            if (from != nullptr && part.has(column + i)) to[group * GROUP + i] = from[column + i];
            else narrow(missing, to + group * GROUP + i);
        }
    }
}

// The sum over the warps of a block. Every thread gets the sum.
template <int WARPS>
__device__ float block_sum(float value, float (&scratch)[32]) {
    value = warp_sum(value);
    if constexpr (WARPS == 1) {
        __syncwarp();
        return value;
    }
    if (threadIdx.x % 32 == 0) scratch[threadIdx.x / 32] = value;
    __syncthreads();
    return sum_of<WARPS>(scratch);
}

template <int WARPS>
__device__ float2 block_sums(float2 values, float (&scratch)[2][32]) {
    if constexpr (WARPS > 1) {
        values.x = warp_sum(values.x);
        if (threadIdx.x % 32 == 0) scratch[0][threadIdx.x / 32] = values.x;
        values.y = block_sum<WARPS>(values.y, scratch[1]);
        return {sum_of<WARPS>(scratch[0]), values.y};
    }
    return {warp_sum(values.x), block_sum<WARPS>(values.y, scratch[1])};
}

// Each block of a cluster sends two floats to all blocks, and receives two floats from each block. Work between `send`
// and `received` hides the time in which blocks wait for each other. `number` counts the exchanges. `of_blocks` has two
// sets, used in turns, because a block may be one exchange ahead of another block, but not two exchanges.
template <int CLUSTER>
__device__ void send(float2 values, int rank, Exchange& shared, unsigned number) {
    unsigned long long* const arrived = &shared.arrived[number % 2];
    if (threadIdx.x == 0) expect_copies(arrived, CLUSTER * sizeof(float4));
    if (threadIdx.x < CLUSTER) {
        send_to_block(&shared.of_blocks[number % 2][rank], threadIdx.x, {values.x, values.y, 0.0f, 0.0f}, arrived);
    }
}

template <int CLUSTER>
__device__ const float4* received(Exchange& shared, unsigned number) {
    await_blocks(&shared.arrived[number % 2], number / 2 % 2);
    return shared.of_blocks[number % 2];
}

// The groups of a thread. Loops over these groups do not branch: for a group past the block's end, a loop reads the
// last group and ignores the result. `edge`: whether a group of this thread overlaps a neighbouring row, so that the
// thread processes single elements.
template <int CHUNKS, int THREADS>
struct Own {
    const Part& part;
    bool edge = false;

    __device__ explicit Own(const Part& part) : part(part) {
#pragma unroll
        for (int chunk = 0; chunk < CHUNKS; ++chunk) edge |= has(chunk) && !part.is_whole(part.column(group(chunk)));
    }
    __device__ int group(int chunk) const { return chunk * THREADS + threadIdx.x; }
    __device__ bool has(int chunk) const { return group(chunk) < part.groups; }
    __device__ int place(int chunk) const { return min(group(chunk), max(0, part.groups - 1)); }

    // Accumulate by `add(sum, chunk, first, last)` over elements first to last of each group.
    template <typename Sum, typename Add>
    __device__ Sum sums(Sum zero, Add add) const {
        Sum total = zero;
        if (!edge) {
#pragma unroll
            for (int chunk = 0; chunk < CHUNKS; ++chunk) {
                Sum more = total;
                add(more, chunk, 0, GROUP);
                if (has(chunk)) total = more;
            }
        } else {
#pragma unroll
            for (int chunk = 0; chunk < CHUNKS; ++chunk) {
                const int column = part.column(group(chunk));
                if (has(chunk)) add(total, chunk, max(0, -column), min(GROUP, part.columns - column));
            }
        }
        return total;
    }

    template <typename T>
    __device__ void store_group(int chunk, const float (&values)[GROUP], T* row) const {
        if (!has(chunk)) return;
        const int column = part.column(group(chunk));
        if (!edge || part.is_whole(column)) {
            store(values, row + column);
        } else {
#pragma unroll
            for (int i = 0; i < GROUP; ++i) {
                if (part.has(column + i)) narrow(values[i], row + column + i);
            }
        }
    }
};

// Each thread holds CHUNKS groups. weight and bias may be null. mean may be null for an RMS norm.
template <typename T, typename P, int CHUNKS, int WARPS, int CLUSTER, bool RMS>
__global__ void __launch_bounds__(32 * WARPS) norm_forward_staged(
    const T* __restrict__ x, const P* __restrict__ weight, const P* __restrict__ bias,    // (M, N), (N,), (N,)
    T* __restrict__ y, float* __restrict__ mean, float* __restrict__ rstd,                // (M, N), (M,), (M,)
    long long rows, int columns, long long x_stride, int stages, float eps) {
    constexpr int THREADS = 32 * WARPS;
    const int rank = CLUSTER == 1 ? 0 : block_rank();
    const int clusters = gridDim.x / CLUSTER;
    const Part part(blockIdx.x / CLUSTER, rank, CLUSTER, columns);
    Exchange& shared = *static_cast<Exchange*>(shared_memory());
    const Own<CHUNKS, THREADS> own(part);
    P* const weights = reinterpret_cast<P*>(&shared + 1);  // (share * 8,)
    P* const biases = weights + part.share * GROUP;
    Pack<T, GROUP>* const staged = reinterpret_cast<Pack<T, GROUP>*>(biases + part.share * GROUP);  // (stages, share)

    long long row = blockIdx.x / CLUSTER;
    const auto fill = [&](long long next, int stage) {
        const T* const none = nullptr;
        if (next < rows) start_copies(part, staged + stage * part.share, x + next * x_stride, none, &shared.full[stage]);
    };
    if (threadIdx.x == 0) {
        for (int stage = 0; stage < stages; ++stage) prepare_copies(&shared.full[stage]);
        for (int turn = 0; turn < 2; ++turn) prepare_copies(&shared.arrived[turn]);
        prepared();
        for (int stage = 0; stage < stages; ++stage) fill(row + static_cast<long long>(stage) * clusters, stage);
    }
    fetch_parameter(part, weight, weights, 1.0f);
    fetch_parameter(part, bias, biases, 0.0f);
    if constexpr (CLUSTER > 1) cluster_wait();  // no block writes to a block that has not started
    else __syncthreads();

    int stage = 0;
    unsigned parity = 0, number = 0;
    Pack<T, GROUP> taken[CHUNKS];
    const auto take = [&] {  // returns the sum over the elements of the row that this thread has
        await_copies(&shared.full[stage], parity);
#pragma unroll
        for (int chunk = 0; chunk < CHUNKS; ++chunk) taken[chunk] = staged[stage * part.share + own.place(chunk)];
        return own.sums(0.0f, [&](float& total, int chunk, int begin, int end) {
            float values[GROUP];
            widen(taken[chunk], values);
#pragma unroll
            for (int i = 0; i < GROUP; ++i) {
                if (i >= begin && i < end) total += RMS ? values[i] * values[i] : values[i];
            }
        });
    };
    float sum = row < rows ? take() : 0.0f;
    for (; row < rows; row += clusters) {
        sum = block_sum<WARPS>(sum, shared.of_warps[0][RMS ? number % 2 : 0]);
        // All threads have read this stage.
        if (threadIdx.x == 0) fill(row + static_cast<long long>(stages) * clusters, stage);
        if (++stage == stages) stage = 0, parity ^= 1;
        Pack<T, GROUP> held[CHUNKS];
#pragma unroll
        for (int chunk = 0; chunk < CHUNKS; ++chunk) held[chunk] = taken[chunk];
        float average = 0.0f, squares = sum;
        if constexpr (!RMS) {
            average = sum / max(1, part.count(rank));
            squares = own.sums(0.0f, [&](float& total, int chunk, int begin, int end) {
                float values[GROUP];
                widen(held[chunk], values);
#pragma unroll
                for (int i = 0; i < GROUP; ++i) {
                    if (i >= begin && i < end) total += (values[i] - average) * (values[i] - average);
                }
            });
            squares = block_sum<WARPS>(squares, shared.of_warps[0][1]);
        }
        if constexpr (CLUSTER > 1) send<CLUSTER>({average, squares}, rank, shared, number);
        const bool early = CLUSTER > 1 && stages > 1;  // load the next row while waiting for the other blocks
        if (early && row + clusters < rows) sum = take();
        if constexpr (CLUSTER > 1) {  // merge means and squared deviations of all parts (Chan, Golub and LeVeque 1979)
            const float4* all = received<CLUSTER>(shared, number);
            average = squares = 0.0f;
            if constexpr (!RMS) {
#pragma unroll
                for (int other = 0; other < CLUSTER; ++other) average += part.count(other) * all[other].x;
                average /= columns;
            }
#pragma unroll
            for (int other = 0; other < CLUSTER; ++other) {
                const float apart = all[other].x - average;
                squares += all[other].y + part.count(other) * apart * apart;
            }
        }
        const float scale = 1.0f / sqrtf(squares / columns + eps);
#pragma unroll
        for (int chunk = 0; chunk < CHUNKS; ++chunk) {
            float values[GROUP], factors[GROUP], terms[GROUP];
            widen(held[chunk], values);
            widen(load<P, GROUP>(weights + own.place(chunk) * GROUP), factors);
            widen(load<P, GROUP>(biases + own.place(chunk) * GROUP), terms);
#pragma unroll
            for (int i = 0; i < GROUP; ++i) values[i] = (values[i] - average) * scale * factors[i] + terms[i];
            own.store_group(chunk, values, y + row * columns);
        }
        if (threadIdx.x == 0 && rank == 0) {
            if constexpr (!RMS) mean[row] = average;
            rstd[row] = scale;
        }
        if (!early && row + clusters < rows) sum = take();
        ++number;
    }
}

// Compute dx, and each cluster's sums over its rows for the gradients of weight and bias. These sums stay in registers
// until the end. weight may be null. For an RMS norm, mean is null and there are no sums for a bias.
template <typename T, typename P, int CHUNKS, int WARPS, int CLUSTER, bool RMS>
__global__ void __launch_bounds__(32 * WARPS, WARPS > 16 ? 1 : 16 / WARPS) norm_backward_staged(
    const T* __restrict__ dy, const T* __restrict__ x, const P* __restrict__ weight,      // (M, N), (M, N), (N,)
    const float* __restrict__ mean, const float* __restrict__ rstd,                       // (M,), (M,)
    T* __restrict__ dx, float* __restrict__ partial,                                      // (M, N), (clusters, 2, N)
    long long rows, int columns, long long dy_stride, long long x_stride, int stages) {
    constexpr int THREADS = 32 * WARPS;
    const int rank = CLUSTER == 1 ? 0 : block_rank();
    const int clusters = gridDim.x / CLUSTER;
    const Part part(blockIdx.x / CLUSTER, rank, CLUSTER, columns);
    Exchange& shared = *static_cast<Exchange*>(shared_memory());
    const Own<CHUNKS, THREADS> own(part);
    P* const weights = reinterpret_cast<P*>(&shared + 1);  // (share * 8,)
    Pack<T, GROUP>* const staged = reinterpret_cast<Pack<T, GROUP>*>(weights + part.share * GROUP);  // (stages, 2, share)

    long long row = blockIdx.x / CLUSTER;
    const auto fill = [&](long long next, int stage) {
        Pack<T, GROUP>* const to = staged + 2 * stage * part.share;
        if (next < rows) start_copies(part, to, dy + next * dy_stride, x + next * x_stride, &shared.full[stage]);
    };
    if (threadIdx.x == 0) {
        for (int stage = 0; stage < stages; ++stage) prepare_copies(&shared.full[stage]);
        for (int turn = 0; turn < 2; ++turn) prepare_copies(&shared.arrived[turn]);
        prepared();
        for (int stage = 0; stage < stages; ++stage) fill(row + static_cast<long long>(stage) * clusters, stage);
    }
    fetch_parameter(part, weight, weights, 1.0f);
    if constexpr (CLUSTER > 1) cluster_wait();
    else __syncthreads();

    float weight_sums[CHUNKS][GROUP] = {}, bias_sums[CHUNKS][GROUP] = {};
    float average = 0.0f, scale = 0.0f, next_average = 0.0f, next_scale = 0.0f;
    const auto look_up = [&](long long of, float& average, float& scale) {
        if (of >= rows) return;
        if constexpr (!RMS) average = mean[of];
        scale = rstd[of];
    };
    look_up(row, average, scale);
    look_up(row + clusters, next_average, next_scale);
    int stage = 0, before = -1;
    unsigned parity = 0, number = 0;
    // This thread's sums over its part of a row, of dy * weight, and of dy * weight * normalized x.
    const auto sums_of = [&](float average, float scale) {
        await_copies(&shared.full[stage], parity);
        const Pack<T, GROUP>* const gradients = staged + 2 * stage * part.share;
        return own.sums(float2{0.0f, 0.0f}, [&](float2& total, int chunk, int begin, int end) {
            float gradient[GROUP], values[GROUP], factors[GROUP];
            widen(gradients[own.place(chunk)], gradient);
            widen(gradients[part.share + own.place(chunk)], values);
            widen(load<P, GROUP>(weights + own.place(chunk) * GROUP), factors);
#pragma unroll
            for (int i = 0; i < GROUP; ++i) {
                if (i < begin || i >= end) continue;
                const float weighted = gradient[i] * factors[i];
                if constexpr (!RMS) total.x += weighted;
                total.y += weighted * ((values[i] - average) * scale);
            }
        });
    };
    float2 sums = row < rows ? sums_of(average, scale) : float2{0.0f, 0.0f};
    for (; row < rows; row += clusters) {
        float later_average = 0.0f, later_scale = 0.0f;
        look_up(row + 2ll * clusters, later_average, later_scale);
        float2 whole = block_sums<WARPS>(sums, shared.of_warps[number % 2]);
        if (threadIdx.x == 0 && before >= 0) {  // all threads have finished the previous row
            fill(row + static_cast<long long>(stages - 1) * clusters, before);
        }
        if constexpr (CLUSTER > 1) send<CLUSTER>(whole, rank, shared, number);
        before = stage;
        if (++stage == stages) stage = 0, parity ^= 1;
        if (row + clusters < rows) sums = sums_of(next_average, next_scale);  // no barrier until the code below
        if constexpr (CLUSTER > 1) {
            const float4* all = received<CLUSTER>(shared, number);
            whole = {0.0f, 0.0f};
#pragma unroll
            for (int other = 0; other < CLUSTER; ++other) {
                whole.x += all[other].x;
                whole.y += all[other].y;
            }
        }
        const float along = whole.x / columns, across = whole.y / columns;
        const Pack<T, GROUP>* const gradients = staged + 2 * before * part.share;
#pragma unroll
        for (int chunk = 0; chunk < CHUNKS; ++chunk) {
            float gradient[GROUP], values[GROUP], factors[GROUP];
            widen(gradients[own.place(chunk)], gradient);
            widen(gradients[part.share + own.place(chunk)], values);
            widen(load<P, GROUP>(weights + own.place(chunk) * GROUP), factors);
#pragma unroll
            for (int i = 0; i < GROUP; ++i) {
                const float normal = (values[i] - average) * scale;
                weight_sums[chunk][i] += gradient[i] * normal;
                if constexpr (!RMS) bias_sums[chunk][i] += gradient[i];
                values[i] = (gradient[i] * factors[i] - along - normal * across) * scale;
            }
            own.store_group(chunk, values, dx + row * columns);
        }
        average = next_average, scale = next_scale;
        next_average = later_average, next_scale = later_scale;
        ++number;
    }

    float* const of_weight = partial + 2ll * (blockIdx.x / CLUSTER) * columns;
#pragma unroll
    for (int chunk = 0; chunk < CHUNKS; ++chunk) {
        const int group = chunk * THREADS + threadIdx.x;
        if (group < part.groups) {
            const int column = part.column(group);
            if (part.is_aligned(column)) {
                store(weight_sums[chunk], of_weight + column);
                if constexpr (!RMS) store(bias_sums[chunk], of_weight + columns + column);
                continue;
            }
#pragma unroll
            for (int i = 0; i < GROUP; ++i) {
                if (!part.has(column + i)) continue;
                of_weight[column + i] = weight_sums[chunk][i];
                if constexpr (!RMS) of_weight[columns + column + i] = bias_sums[chunk][i];
            }
        }
    }
}
