// Softmax and cross entropy of long rows; each row is read from memory once (rooftop.kernels.softmaxes.clusters).
//
// Each block of a cluster has a part of the row in shared memory, loaded by one bulk copy. The copy loads the 16-byte
// groups that enclose the part, so rows may begin at any address. (A group lies within one memory page, so it is safe
// to read a group as a whole.) A thread reads up to HELD groups from shared memory once, and keeps these groups or
// their exponentials in registers. So exponentials are computed once, and a stage is free for a later row as soon as
// all threads have read it. Blocks exchange partial results through distributed shared memory, and add them in a fixed
// order. A block reads its next row before it reads the partial results of the other blocks.
//
// Cluster c begins with row c. The cluster's next rows are C rows apart, where C is the number of clusters. If there is
// a counter (initially 0), clusters that finish early compute the remaining rows, because memory access is slower from
// some SMs than from others. STAGES rows are in shared memory at a time. Shared memory of a block: 800 bytes of arrival
// barriers and warps' sums, 2 x (blocks of a cluster) float4 of partial results, and STAGES x TENSORS parts of rows.
// operands/cluster_pieces.cu must precede this file.

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#ifdef __CUDACC__
#ifndef INFINITY
#define INFINITY __int_as_float(0x7f800000)
#endif

__device__ __forceinline__ float exponential(float value) {
    float power;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(power) : "f"(value * 1.4426950408889634f));
    return power;
}
__device__ __forceinline__ float power_of_two(float exponent) {
    float power;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(power) : "f"(exponent));
    return power;
}
// No kernel reads the stored values again, so the compiler may move loads across the stores (no memory clobber).
__device__ __forceinline__ void store_words(void* to, const unsigned (&words)[4]) {
    asm volatile("st.global.v4.b32 [%0], {%1, %2, %3, %4};" ::"l"(__cvta_generic_to_global(to)), "r"(words[0]),
                 "r"(words[1]), "r"(words[2]), "r"(words[3]));
}
#endif

template <typename T>
constexpr int WIDTH = 16 / sizeof(T);

constexpr float LOG2_E = 1.4426950408889634f;

// 16 bytes of elements, stored as words, because the compiler would load and store a struct of elements in pieces.
struct alignas(16) Group {
    unsigned words[4];
};

__device__ float2 wide_pair_of(unsigned word, __half) {
    __half2 pair;
    memcpy(&pair, &word, 4);
    return __half22float2(pair);
}
__device__ float2 wide_pair_of(unsigned word, __nv_bfloat16) {
    __nv_bfloat162 pair;
    memcpy(&pair, &word, 4);
    return __bfloat1622float2(pair);
}
__device__ unsigned larger_of_each(unsigned a, unsigned b, float) {
    float first, second;
    memcpy(&first, &a, 4);
    memcpy(&second, &b, 4);
    first = fmaxf(first, second);
    memcpy(&a, &first, 4);
    return a;
}
template <typename Pair>
__device__ unsigned larger_pair(unsigned a, unsigned b) {
    Pair first, second;
    memcpy(&first, &a, 4);
    memcpy(&second, &b, 4);
    first = __hmax2(first, second);
    memcpy(&a, &first, 4);
    return a;
}
__device__ unsigned larger_of_each(unsigned a, unsigned b, __half) { return larger_pair<__half2>(a, b); }
__device__ unsigned larger_of_each(unsigned a, unsigned b, __nv_bfloat16) { return larger_pair<__nv_bfloat162>(a, b); }

__device__ __half2 rounded(float2 values, __half) { return __float22half2_rn(values); }
__device__ __nv_bfloat162 rounded(float2 values, __nv_bfloat16) { return __float22bfloat162_rn(values); }

template <typename T>
__device__ void widen(const Group* from, float (&values)[WIDTH<T>]) {
    const Group group = *from;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        if constexpr (sizeof(T) == 4) {
            memcpy(values + i, group.words + i, 4);
        } else {
            const float2 pair = wide_pair_of(group.words[i], T());
            values[2 * i] = pair.x;
            values[2 * i + 1] = pair.y;
        }
    }
}

template <typename T>
__device__ Group narrowed(const float (&values)[WIDTH<T>]) {
    Group group;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        if constexpr (sizeof(T) == 4) {
            memcpy(group.words + i, values + i, 4);
        } else {
            const auto pair = rounded({values[2 * i], values[2 * i + 1]}, T());
            memcpy(group.words + i, &pair, 4);
        }
    }
    return group;
}

// The groups of a row that a block computes. `first`: the column of the first group's first element; negative if this
// element is before the row's start.
struct Part {
    int groups;
    int first;
    int columns;

    template <typename T>
    __device__ Part(const T* row, int columns, int rank, int part_groups) : columns(columns) {
        const int shift = reinterpret_cast<unsigned long long>(row) % 16 / sizeof(T);
        const int left = (shift + columns + WIDTH<T> - 1) / WIDTH<T> - rank * part_groups;
        groups = max(0, min(part_groups, left));
        first = rank * part_groups * WIDTH<T> - shift;
    }

    template <typename T>
    __device__ int column(int group) const {
        return first + group * WIDTH<T>;
    }
    template <typename T>
    __device__ bool is_whole(int group) const {
        return column<T>(group) >= 0 && column<T>(group) + WIDTH<T> <= columns;
    }
    __device__ bool has(int column) const { return column >= 0 && column < columns; }
};

// ---- partial results of a row -------------------------------------------------------------------------------------

// A share: the partial results of a thread or block. It contains the maximum, the sum of exponentials relative to the
// maximum, and a plain sum. Exponentials are 2^((value - largest) * factor), where `factor` includes log2(e). The
// maximum is subtracted first, because value * factor may be out of range.
struct Share {
    float factor;
    float largest = -INFINITY;
    float total = 0.0f;
    float sum = 0.0f;

    __device__ Share(float highest, float factor) : factor(factor), largest(highest) {}

    __device__ float origin() const { return largest == -INFINITY ? 0.0f : largest; }
    __device__ float power(float value) const { return power_of_two((value - origin()) * factor); }
    // The factor that converts sums relative to the value `largest` to sums relative to the maximum of this share.
    __device__ float from(float largest) const { return power(largest); }
};

// ---- loading rows -------------------------------------------------------------------------------------------------

// The beginning of dynamic shared memory; shares and parts follow.
struct Arrivals {
    unsigned long long of_stage[8];
    unsigned long long of_blocks[2];
    float maxima[32];                // of each warp
    int rows[8];                     // rows that the cluster takes
    int labels[8];                   // targets of these rows
    float picked[2];                 // logits of the targets, in turns
    long long target;                // target in flight
    float totals[2][32], sums[2][32];  // in turns: a late warp may still read the previous row's sums
};

// The ring buffer of parts in a block's shared memory, and the exchange with the other blocks of the cluster. `number`
// is the number of a row among the cluster's rows.
template <typename T, int TENSORS, int BLOCKS, int STAGES>
struct Ring {
    Arrivals* arrivals;
    float4* shares;  // (2, BLOCKS)
    Group* parts;    // (STAGES, TENSORS, part_groups)
    int* counter;    // rows that clusters have taken after their first STAGES + 1 rows; or null
    int part_groups, rank;

    __device__ Ring(int part_groups, int* counter) : counter(counter), part_groups(part_groups), rank(block_rank()) {
        arrivals = static_cast<Arrivals*>(shared_memory());
        shares = reinterpret_cast<float4*>(arrivals + 1);
        parts = reinterpret_cast<Group*>(shares + 2 * BLOCKS);
        if (threadIdx.x == 0) {
            for (int stage = 0; stage < STAGES; ++stage) prepare_copies(arrivals->of_stage + stage);
            for (int turn = 0; turn < 2; ++turn) prepare_copies(arrivals->of_blocks + turn);
            prepared();
        }
        cluster_wait();  // the other blocks have started, so their memory exists
    }

    // The index of the cluster's row `number`, valid for the current row and the next STAGES rows. Indices ascend, so
    // no row follows an index past the end.
    __device__ long long row_of(int number) const {
        if (counter != nullptr && number > STAGES) return arrivals->rows[number % 8];
        return blockIdx.x / BLOCKS + static_cast<long long>(number) * (gridDim.x / BLOCKS);
    }
    // Reserve one more row for the cluster. Only one thread gets the row's index, and `send` passes the index to the
    // other threads. Kernels call this function early, since the atomic operation takes a while.
    __device__ int ask() const {
        if (counter == nullptr || rank > 0 || threadIdx.x > 0) return 0;
        return gridDim.x / BLOCKS * (STAGES + 1) + atomicAdd(counter, 1);
    }

    __device__ Part part_of(const T* row, int columns) const { return Part(row, columns, rank, part_groups); }

    __device__ Group* groups(int number, int tensor = 0) const {
        return parts + (number % STAGES * TENSORS + tensor) * part_groups;
    }

    // Start the load of a row. One thread calls this function after all threads have read the stage's previous row.
    // `from`: rows to load; null: there is nothing to load.
    __device__ void fetch(int number, const T* const (&from)[TENSORS], const Part& part) const {
        unsigned long long* arrival = arrivals->of_stage + number % STAGES;
        const int bytes = from[0] == nullptr ? 0 : part.groups * 16;
        expect_copies(arrival, TENSORS * bytes);
        for (int i = 0; i < TENSORS && bytes > 0; ++i) {
            copy_bulk(groups(number, i), from[i] + part.first, bytes, arrival);
        }
    }

    __device__ void wait(int number) const {
        await_copies(arrivals->of_stage + number % STAGES, number / STAGES % 2);
    }

    // The largest value of the block's threads. This function is also a barrier of the block, and another barrier must
    // separate two calls.
    template <int WARPS>
    __device__ float largest_of_block(float value) const {
#pragma unroll
        for (int lanes = 16; lanes > 0; lanes /= 2) value = fmaxf(value, __shfl_xor_sync(0xffffffffu, value, lanes));
        if (threadIdx.x % 32 == 0) arrivals->maxima[threadIdx.x / 32] = value;
        __syncthreads();
        return largest_of<WARPS>(arrivals->maxima);
    }

    // `send` and `received` merge the shares of a block's threads, which have the same `largest`, and then of all
    // blocks. Work between the two calls hides the time in which blocks wait for each other. `send` is also a barrier
    // of the block. `received` must not be the last step of a row.
    template <int WARPS, bool TOTAL, bool SUM>
    __device__ void send(Share& share, int number, int asked) const {
#pragma unroll
        for (int lanes = 16; lanes > 0; lanes /= 2) {
            if constexpr (TOTAL) share.total += __shfl_xor_sync(0xffffffffu, share.total, lanes);
            if constexpr (SUM) share.sum += __shfl_xor_sync(0xffffffffu, share.sum, lanes);
        }
        const int turn = number % 2;
        if (threadIdx.x % 32 == 0) {
            if constexpr (TOTAL) arrivals->totals[turn][threadIdx.x / 32] = share.total;
            if constexpr (SUM) arrivals->sums[turn][threadIdx.x / 32] = share.sum;
        }
        if (BLOCKS == 1 && threadIdx.x == 0) arrivals->rows[(number + STAGES + 1) % 8] = asked;
        __syncthreads();
        if constexpr (TOTAL) share.total = sum_of<WARPS>(arrivals->totals[turn]);
        if constexpr (SUM) share.sum = sum_of<WARPS>(arrivals->sums[turn]);
        if (BLOCKS == 1 || threadIdx.x >= 32) return;
        // There are two sets of shares, used in turns, because a block may be one row ahead of another block, but not
        // two rows.
        unsigned long long* arrival = arrivals->of_blocks + turn;
        if (threadIdx.x == 0) expect_copies(arrival, BLOCKS * sizeof(float4));
        asked = __shfl_sync(0xffffffffu, asked, 0);
        float more;
        memcpy(&more, &asked, 4);
        if (threadIdx.x < BLOCKS) {
            const float4 own = {share.largest, share.total, share.sum, more};
            send_to_block(shares + turn * BLOCKS + rank, threadIdx.x, own, arrival);
        }
    }

    template <bool TOTAL, bool SUM>
    __device__ Share received(const Share& share, int number) const {
        if (BLOCKS == 1) return share;
        const float4* of_blocks = shares + number % 2 * BLOCKS;
        await_blocks(arrivals->of_blocks + number % 2, number / 2 % 2);
        // Each lane has the share of one block.
        constexpr int LANES = BLOCKS > 8 ? 16 : BLOCKS > 4 ? 8 : BLOCKS > 2 ? 4 : 2;
        const int lane = threadIdx.x % LANES;
        const float4 one = lane < BLOCKS ? of_blocks[lane] : float4{-INFINITY, 0.0f, 0.0f, 0.0f};
        if (threadIdx.x == 0) memcpy(arrivals->rows + (number + STAGES + 1) % 8, &one.w, 4);
        float largest = one.x;
        if constexpr (TOTAL) {
#pragma unroll
            for (int lanes = LANES / 2; lanes > 0; lanes /= 2) {
                largest = fmaxf(largest, __shfl_xor_sync(0xffffffffu, largest, lanes));
            }
        }
        Share whole(largest, share.factor);
        whole.total = TOTAL ? one.y * whole.from(one.x) : 0.0f;
        whole.sum = one.z;
#pragma unroll
        for (int lanes = LANES / 2; lanes > 0; lanes /= 2) {
            if constexpr (TOTAL) whole.total += __shfl_xor_sync(0xffffffffu, whole.total, lanes);
            if constexpr (SUM) whole.sum += __shfl_xor_sync(0xffffffffu, whole.sum, lanes);
        }
        return whole;
    }
};

// ---- a thread's elements of a part --------------------------------------------------------------------------------

// A thread's elements of a part: groups threadIdx.x + j * THREADS among the groups inside the row. The elements of a
// group past the end have the value `outside`, so loops do not branch. If ODD, each of the first threads also gets one
// element of the groups at the row's ends, which overlap neighbouring rows. Without ODD, rows are whole groups.
template <typename T, int THREADS, int HELD, bool ODD>
struct Hold {
    Part part;
    int begin, end;  // range of the groups inside the row
    int single;      // the column of this thread's single element, or NO_COLUMN

    static constexpr int NO_COLUMN = -WIDTH<T>;

    __device__ explicit Hold(const Part& part) : part(part), begin(0), end(part.groups), single(NO_COLUMN) {
        const int last = part.groups - 1;
        if (!ODD || last < 0) return;
        const bool head = !part.is_whole<T>(0), tail = last > 0 && !part.is_whole<T>(last);
        begin += head;
        end -= tail;
        const bool second = threadIdx.x >= WIDTH<T>;
        if (threadIdx.x < 2 * WIDTH<T> && (second ? tail : head)) {
            const int column = part.column<T>(second ? last : 0) + threadIdx.x % WIDTH<T>;
            if (part.has(column)) single = column;
        }
    }
    __device__ int group(int j) const { return threadIdx.x + j * THREADS; }
    __device__ bool has_group(int j) const {  // `begin` is 0 or 1, so only group 0 can be before it
        return (!ODD || j > 0 || group(0) >= begin) && group(j) < end;
    }
    __device__ bool has_single() const { return ODD && single != NO_COLUMN; }
    __device__ bool has(int column) const {
        const int group = (column - part.first) / WIDTH<T>;
        const bool is_whole = column >= part.first && group >= begin && group < end;
        return (ODD && column == single) || (is_whole && group % THREADS == threadIdx.x);
    }

    // `outside`: a word whose elements all have the value for elements outside the row. Returns the single element.
    __device__ float load(const Group* from, unsigned outside, Group (&groups)[HELD]) const {
#pragma unroll
        for (int j = 0; j < HELD; ++j) {
            groups[j] = {outside, outside, outside, outside};
            if (has_group(j)) groups[j] = from[group(j)];
        }
        T element;
        memcpy(&element, &outside, sizeof(T));
        if (has_single()) element = reinterpret_cast<const T*>(from)[single - part.first];
        return static_cast<float>(element);
    }
    __device__ void store(const float (&values)[WIDTH<T>], T* row, int j) const {
        if (has_group(j)) store_words(row + part.column<T>(group(j)), narrowed<T>(values).words);
    }
    __device__ void store_single(float value, T* row) const {
        if (has_single()) row[single] = T(value);
    }
};

// A word whose elements are all -inf.
__device__ unsigned lowest(float) { return 0xff800000u; }
__device__ unsigned lowest(__half) { return 0xfc00fc00u; }
__device__ unsigned lowest(__nv_bfloat16) { return 0xff80ff80u; }

// A word with the sign bits of all elements.
__device__ unsigned signs(float) { return 0x80000000u; }
__device__ unsigned signs(__half) { return 0x80008000u; }
__device__ unsigned signs(__nv_bfloat16) { return 0x80008000u; }

// Read a thread's groups and single element of a loaded row, with -inf outside the row, and flip the signs given by
// `flipped`. Returns the maximum.
template <typename T, int THREADS, int HELD, bool ODD>
__device__ float taken(
    const Hold<T, THREADS, HELD, ODD>& hold, const Group* from, unsigned flipped, Group (&groups)[HELD], float& single) {
    single = hold.load(from, lowest(T()) ^ flipped, groups);
    if (flipped != 0) {
        single = -single;
#pragma unroll
        for (int j = 0; j < HELD; ++j) {
#pragma unroll
            for (int k = 0; k < 4; ++k) groups[j].words[k] ^= flipped;
        }
    }
    Group largest = groups[0];
#pragma unroll
    for (int j = 1; j < HELD; ++j) {
#pragma unroll
        for (int k = 0; k < 4; ++k) largest.words[k] = larger_of_each(largest.words[k], groups[j].words[k], T());
    }
    float values[WIDTH<T>], top = single;
    widen<T>(&largest, values);
#pragma unroll
    for (int k = 0; k < WIDTH<T>; ++k) top = fmaxf(top, values[k]);
    return top;
}

// ---- kernels -------------------------------------------------------------------------------------------------------

// Blocks on an SM, at 128 registers per thread.
template <int THREADS>
constexpr int RESIDENT = THREADS < 512 ? 512 / THREADS : 1;

// Compute y = softmax(x * scale), or its logarithm. x and y: (M, N). The addresses of equal rows of x and y are equal
// modulo 16.
template <typename T, bool LOG, int THREADS, int HELD, int BLOCKS, int STAGES, bool ODD>
__global__ void __launch_bounds__(THREADS, RESIDENT<THREADS>) softmax_cluster(
    const T* x, T* y, long long rows, int columns, long long x_stride, int part_groups, int* counter, float scale) {
    const Ring<T, 1, BLOCKS, STAGES> ring(part_groups, counter);
    const unsigned flipped = scale < 0.0f ? signs(T()) : 0;
    const float factor = fabsf(scale) * LOG2_E;
    const auto part_of = [&](int number) { return ring.part_of(x + ring.row_of(number) * x_stride, columns); };
    const auto fetch = [&](int number) {
        const long long row = ring.row_of(number);
        const T* const source[] = {x + row * x_stride};
        if (row < rows) ring.fetch(number, source, part_of(number));
    };
    Group groups[HELD];
    float single;
    Hold<T, THREADS, HELD, ODD> next(part_of(0));
    const auto take = [&](int number) {
        ring.wait(number);
        next = Hold<T, THREADS, HELD, ODD>(part_of(number));
        return taken<T>(next, ring.groups(number), flipped, groups, single);
    };
    if (threadIdx.x == 0) {
        for (int ahead = 0; ahead < STAGES; ++ahead) fetch(ahead);
    }
    float top = take(0);
#pragma unroll 1
    for (int number = 0; ring.row_of(number) < rows; ++number) {
        const int asked = ring.ask();
        const Hold<T, THREADS, HELD, ODD> hold = next;
        float values[HELD][WIDTH<T>];
        Share share(ring.template largest_of_block<THREADS / 32>(top), factor);
        if (threadIdx.x == 0) fetch(number + STAGES);  // all threads have read this stage
#pragma unroll
        for (int j = 0; j < HELD; ++j) {
            widen<T>(groups + j, values[j]);
#pragma unroll
            for (int k = 0; k < WIDTH<T>; ++k) {
                const float power = share.power(values[j][k]);
                share.total += power;
                if constexpr (!LOG) values[j][k] = power;
            }
        }
        const float single_power = ODD ? share.power(single) : 0.0f, of_single = LOG ? single : single_power;
        share.total += single_power;
        ring.template send<THREADS / 32, true, false>(share, number, asked);
        if (ring.row_of(number + 1) < rows) top = take(number + 1);
        const Share whole = ring.template received<true, false>(share, number);
        const float inverse = whole.from(share.largest) / whole.total;
        const float size = fabsf(scale), logarithm = LOG ? logf(whole.total) : 0.0f;
        const auto result = [&](float value) {
            return LOG ? (value - whole.largest) * size - logarithm : value * inverse;
        };
        T* const row = y + ring.row_of(number) * columns;
#pragma unroll
        for (int j = 0; j < HELD; ++j) {
#pragma unroll
            for (int k = 0; k < WIDTH<T>; ++k) values[j][k] = result(values[j][k]);
            hold.store(values[j], row, j);
        }
        hold.store_single(result(of_single), row);
    }
}

// Compute dx from dy and y, where y = softmax(x * scale), or its logarithm.
template <typename T, bool LOG, int THREADS, int HELD, int BLOCKS, int STAGES, bool ODD>
__global__ void __launch_bounds__(THREADS, RESIDENT<THREADS>) softmax_backward_cluster(
    const T* dy, const T* y, T* dx, long long rows, int columns, long long dy_stride, int part_groups, int* counter, float scale) {
    const Ring<T, 2, BLOCKS, STAGES> ring(part_groups, counter);
    const auto fetch = [&](int number) {
        const long long row = ring.row_of(number);
        const T* const sources[] = {dy + row * dy_stride, y + row * columns};
        if (row < rows) ring.fetch(number, sources, ring.part_of(sources[1], columns));
    };
    if (threadIdx.x == 0) {
        for (int ahead = 0; ahead < STAGES; ++ahead) fetch(ahead);
    }
#pragma unroll 1
    for (int number = 0; ring.row_of(number) < rows; ++number) {
        const int asked = ring.ask();
        const long long row = ring.row_of(number);
        const Part part = ring.part_of(y + row * columns, columns);
        const Hold<T, THREADS, HELD, ODD> hold(part);
        Group gradients[HELD], results[HELD];
        float gradient[WIDTH<T>], result[WIDTH<T>];
        Share share(0.0f, 1.0f);
        ring.wait(number);
        const float single_gradient = hold.load(ring.groups(number, 0), 0, gradients);
        const float single_result = hold.load(ring.groups(number, 1), 0, results);
        share.sum = LOG ? single_gradient : single_gradient * single_result;
#pragma unroll
        for (int j = 0; j < HELD; ++j) {
            widen<T>(gradients + j, gradient);
            if constexpr (!LOG) {
                widen<T>(results + j, result);
#pragma unroll
                for (int k = 0; k < WIDTH<T>; ++k) gradient[k] *= result[k];
            }
#pragma unroll
            for (int k = 0; k < WIDTH<T>; ++k) share.sum += gradient[k];
        }
        ring.template send<THREADS / 32, false, true>(share, number, asked);
        if (threadIdx.x == 0) fetch(number + STAGES);  // all threads have read this stage
        const float sum = ring.template received<false, true>(share, number).sum;
        if (columns < 0) {  // never true; without this, the compiler holds the floats above in registers, and spills
            hold.load(ring.groups(number, 0), 0, gradients);
            hold.load(ring.groups(number, 1), 0, results);
        }
        const auto slope = [&](float gradient, float result) {
            return LOG ? (gradient - exponential(result) * sum) * scale : (gradient - sum) * result * scale;
        };
#pragma unroll
        for (int j = 0; j < HELD; ++j) {
            widen<T>(gradients + j, gradient);
            widen<T>(results + j, result);
#pragma unroll
            for (int k = 0; k < WIDTH<T>; ++k) gradient[k] = slope(gradient[k], result[k]);
            hold.store(gradient, dx + row * columns, j);
        }
        hold.store_single(slope(single_gradient, single_result), dx + row * columns);
    }
}

// Compute the losses of rows of logits, and the gradient of the logits, as in cross_entropy_rows_long
// (losses/triton_kernels.py), but without class weights. dx may be x. inverse: factor of a mean's gradients, or null.
// kept: 1 - smoothing. spread: smoothing / N. Rows whose target is `ignored` are not read. A row whose target is not a
// class gets NaN.
template <typename T, bool SMOOTH, int THREADS, int HELD, int BLOCKS, int STAGES, bool ODD>
__global__ void __launch_bounds__(THREADS, RESIDENT<THREADS>) cross_entropy_cluster(
    const T* x, const long long* target, const float* inverse, float* losses, T* dx,  // (M, N), (M,), (), (M,), (M, N)
    long long rows, int columns, long long x_stride, long long dx_stride, int part_groups, int* counter,
    long long ignored, float kept, float spread, float z_loss) {
    constexpr int NONE = -1, NO_CLASS = -2;  // labels of ignored rows, and of invalid targets
    const Ring<T, 1, BLOCKS, STAGES> ring(part_groups, counter);
    int* const labels = ring.arrivals->labels;
    float* const picked = ring.arrivals->picked;
    const float given = inverse == nullptr ? 1.0f : *inverse;
    // One thread calls `ask_for_target` and `fetch`. A target is requested one row ahead of its logits.
    const auto ask_for_target = [&](int number) {
        const long long row = ring.row_of(number);
        if (row < rows) copy_eight(&ring.arrivals->target, target + row);
    };
    const auto fetch = [&](int number) {
        const long long row = ring.row_of(number);
        if (row >= rows) return;
        await_eights();
        const long long target = ring.arrivals->target;
        const bool is_class = target >= 0 && target < columns;
        labels[number % 8] = target == ignored ? NONE : is_class ? static_cast<int>(target) : NO_CLASS;
        const T* const source[] = {target == ignored ? nullptr : x + row * x_stride};
        ring.fetch(number, source, ring.part_of(x + row * x_stride, columns));
    };
    if (threadIdx.x == 0) {
        for (int number = 0; number < STAGES; ++number) {
            ask_for_target(number);
            fetch(number);
        }
        ask_for_target(STAGES);
    }
    __syncthreads();
    // If the target's logit is infinite or NaN, the loss is infinite or NaN as well, and the sum is relative to 0.
    const auto base_of = [](float picked) { return fabsf(picked) < INFINITY ? picked : 0.0f; };
    // Whether this thread writes the loss. If there is a target, the thread with the target's logit writes the loss;
    // otherwise the first thread of the cluster writes the loss.
    const auto tells = [&](const Hold<T, THREADS, HELD, ODD>& hold, int label) {
        return label < 0 ? ring.rank == 0 && threadIdx.x == 0 : hold.has(label);
    };
    Group groups[HELD];
    float top = -INFINITY, single = -INFINITY, sum = 0.0f;
    Hold<T, THREADS, HELD, ODD> following(ring.part_of(x + ring.row_of(0) * x_stride, columns));
    const auto take = [&](int number) {
        ring.wait(number);
        following = Hold<T, THREADS, HELD, ODD>(ring.part_of(x + ring.row_of(number) * x_stride, columns));
        const Part& part = following.part;
        const int label = labels[number % 8];
        if (label == NONE) return;
        const T* const elements = reinterpret_cast<const T*>(ring.groups(number));
        if (label >= 0 && tells(following, label)) {
            picked[number % 2] = static_cast<float>(elements[label - part.first]);
        }
        if constexpr (SMOOTH) {  // a separate loop, because it needs registers
            const T* const row = x + ring.row_of(number) * x_stride;
            const float base = label >= 0 ? base_of(static_cast<float>(row[label])) : 0.0f;
            sum = 0.0f;
#pragma unroll 1
            for (int i = threadIdx.x; i < following.end; i += THREADS) {
                if (i < following.begin) continue;
                float values[WIDTH<T>];
                widen<T>(ring.groups(number) + i, values);
#pragma unroll
                for (int k = 0; k < WIDTH<T>; ++k) sum += values[k] - base;
            }
            if (following.has_single()) sum += static_cast<float>(elements[following.single - part.first]) - base;
        }
        top = taken<T>(following, ring.groups(number), 0, groups, single);
    };
    take(0);
#pragma unroll 1
    for (int number = 0; ring.row_of(number) < rows; ++number) {
        const int asked = ring.ask();
        const Hold<T, THREADS, HELD, ODD> hold = following;
        float values[HELD][WIDTH<T>];
        Share share(ring.template largest_of_block<THREADS / 32>(top), LOG2_E);
        share.sum = sum;
        if (threadIdx.x == 0) fetch(number + STAGES);  // all threads have read this stage
        float single_power = 0.0f;
        if (labels[number % 8] != NONE) {
            if constexpr (ODD) share.total = single_power = share.power(single);
#pragma unroll
            for (int j = 0; j < HELD; ++j) {
                widen<T>(groups + j, values[j]);
#pragma unroll
                for (int k = 0; k < WIDTH<T>; ++k) {
                    values[j][k] = share.power(values[j][k]);
                    share.total += values[j][k];
                }
            }
        }
        ring.template send<THREADS / 32, true, SMOOTH>(share, number, asked);
        if (ring.row_of(number + 1) < rows) take(number + 1);
        const Share whole = ring.template received<true, SMOOTH>(share, number);
        if (threadIdx.x == 0) ask_for_target(number + STAGES + 1);
        const long long row = ring.row_of(number);
        T* const gradient = dx + row * dx_stride;
        const int label = labels[number % 8];
        if (label == NONE) {  // the same for the whole cluster
            for (int k = 0; k < WIDTH<T>; ++k) values[0][k] = 0.0f;
#pragma unroll
            for (int j = 0; j < HELD; ++j) hold.store(values[0], gradient, j);
            hold.store_single(0.0f, gradient);
            if (tells(hold, label)) losses[row] = 0.0f;
            continue;
        }
        const float maximum = whole.largest, logarithm = logf(whole.total), log_sum_exp = maximum + logarithm;
        const float row_weight = label >= 0 ? 1.0f : INFINITY - INFINITY;
        const float at_target = given * (row_weight * kept), share_of_each = SMOOTH ? given * spread : 0.0f;
        const float squared = given * (2.0f * z_loss * row_weight * log_sum_exp);
        const float density = (at_target + share_of_each * columns + squared) / whole.total * whole.from(share.largest);
#pragma unroll
        for (int j = 0; j < HELD; ++j) {
#pragma unroll
            for (int k = 0; k < WIDTH<T>; ++k) values[j][k] = values[j][k] * density - share_of_each;
            hold.store(values[j], gradient, j);
        }
        hold.store_single(single_power * density - share_of_each, gradient);
        if (tells(hold, label)) {
            const float below = picked[number % 2] - maximum, power = exponential(below - logarithm);
            float loss = row_weight * (kept * (logarithm - below));
            if constexpr (SMOOTH) loss += spread * (columns * (logarithm + (maximum - base_of(picked[number % 2]))) - whole.sum);
            losses[row] = loss + row_weight * z_loss * log_sum_exp * log_sum_exp;
            // Overwrite the target's element, which this thread stored. Each term is computed separately, so that
            // subtracting 1 from a probability near 1 is exact.
            const float of_target =
                (power - 1.0f) * at_target + share_of_each * (power * columns - 1.0f) + power * squared;
            if (label >= 0) gradient[label] = T(of_target);
        }
    }
}
