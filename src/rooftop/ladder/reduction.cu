// The sum of n elements. All kernels except the last write a sum for each block, sums[blockIdx.x]. These kernels
// are launched again on the sums, until one sum is left. The kernels differ in how the threads of a block add their
// values.

constexpr int WARP = 32;

// The active threads of each step are spread over all warps, so every warp runs every step, mostly idle.
template <int BLOCK> __global__ void divergent(const float* x, float* sums, long long n) {
    __shared__ float kept[BLOCK];
    const int t = threadIdx.x;
    const long long i = blockIdx.x * static_cast<long long>(BLOCK) + t;
    kept[t] = i < n ? x[i] : 0.0f;
    __syncthreads();
    for (int step = 1; step < BLOCK; step *= 2) {
        if (t % (2 * step) == 0) kept[t] += kept[t + step];
        __syncthreads();
    }
    if (t == 0) sums[blockIdx.x] = kept[0];
}

// The same pairs as in `divergent`, but neighbouring threads add them. Whole warps become idle, but the active threads
// have bank conflicts.
template <int BLOCK> __global__ void neighboured(const float* x, float* sums, long long n) {
    __shared__ float kept[BLOCK];
    const int t = threadIdx.x;
    const long long i = blockIdx.x * static_cast<long long>(BLOCK) + t;
    kept[t] = i < n ? x[i] : 0.0f;
    __syncthreads();
    for (int step = 1; step < BLOCK; step *= 2) {
        const int at = 2 * step * t;
        if (at < BLOCK) kept[at] += kept[at + step];
        __syncthreads();
    }
    if (t == 0) sums[blockIdx.x] = kept[0];
}

// Each thread loads every BLOCK-th of UNROLL * BLOCK elements. All loads of a thread are in flight at the same time.
template <int UNROLL, int BLOCK> __device__ float loaded(const float* x, long long n) {
    const long long first = blockIdx.x * static_cast<long long>(UNROLL * BLOCK) + threadIdx.x;
    float values[UNROLL], sum = 0.0f;
    #pragma unroll
    for (int k = 0; k < UNROLL; ++k) values[k] = first + k * BLOCK < n ? x[first + k * BLOCK] : 0.0f;
    #pragma unroll
    for (int k = 0; k < UNROLL; ++k) sum += values[k];
    return sum;
}

// Each step adds the upper half to the lower half: neighbouring threads access neighbouring addresses. The block size
// is known only at the launch, so the loop is not unrolled. With UNROLL > 1, each thread first adds UNROLL elements.
template <int UNROLL, int BLOCK> __global__ void sequential(const float* x, float* sums, long long n) {
    __shared__ float kept[BLOCK];
    const int t = threadIdx.x;
    kept[t] = loaded<UNROLL, BLOCK>(x, n);
    __syncthreads();
    for (int step = blockDim.x / 2; step > 0; step /= 2) {
        if (t < step) kept[t] += kept[t + step];
        __syncthreads();
    }
    if (t == 0) sums[blockIdx.x] = kept[0];
}

// The steps of `sequential`, unrolled by the compiler. The last warp needs no block-wide barrier.
template <int UNROLL, int BLOCK> __global__ void unrolled(const float* x, float* sums, long long n) {
    __shared__ float kept[BLOCK];
    const int t = threadIdx.x;
    kept[t] = loaded<UNROLL, BLOCK>(x, n);
    __syncthreads();
    #pragma unroll
    for (int step = BLOCK / 2; step >= WARP; step /= 2) {
        if (t < step) kept[t] += kept[t + step];
        __syncthreads();
    }
    if (t < WARP) {
        #pragma unroll
        for (int step = WARP / 2; step > 0; step /= 2) {
            const float other = kept[t + step];
            __syncwarp();
            kept[t] += other;
            __syncwarp();
        }
    }
    if (t == 0) sums[blockIdx.x] = kept[0];
}

__device__ float sum_of_warp(float value) {
    #pragma unroll
    for (int lanes = WARP / 2; lanes > 0; lanes /= 2) value += __shfl_xor_sync(0xffffffffu, value, lanes);
    return value;
}

// The result is valid in every thread of the first warp.
template <int BLOCK> __device__ float sum_of_block(float value) {
    __shared__ float kept[BLOCK / WARP];
    value = sum_of_warp(value);
    if (threadIdx.x % WARP == 0) kept[threadIdx.x / WARP] = value;
    __syncthreads();
    return sum_of_warp(threadIdx.x % WARP < BLOCK / WARP ? kept[threadIdx.x % WARP] : 0.0f);
}

// Threads of a warp add by shuffles between registers. Shared memory holds one value per warp.
template <int UNROLL, int BLOCK> __global__ void shuffled(const float* x, float* sums, long long n) {
    const float sum = sum_of_block<BLOCK>(loaded<UNROLL, BLOCK>(x, n));
    if (threadIdx.x == 0) sums[blockIdx.x] = sum;
}

// A single launch of as many blocks as the GPU holds at a time. The blocks read x in 16-byte accesses, and each thread
// has FLIGHT accesses in flight. The block that finishes last adds the sums of all blocks, always in the same order.
// `done` is 0 before and after the launch.
template <int FLIGHT, int BLOCK>
__global__ void one_pass(const float4* x, float* sums, float* result, int* done, long long n) {
    __shared__ bool last;
    const long long vectors = n / 4, step = gridDim.x * static_cast<long long>(FLIGHT * BLOCK);
    float sum = 0.0f;
    for (long long first = blockIdx.x * static_cast<long long>(FLIGHT * BLOCK) + threadIdx.x; first < vectors; first += step) {
        float4 values[FLIGHT];
        #pragma unroll
        for (int k = 0; k < FLIGHT; ++k) {
            const long long i = first + k * BLOCK;
            values[k] = i < vectors ? x[i] : float4{0.0f, 0.0f, 0.0f, 0.0f};
        }
        #pragma unroll
        for (int k = 0; k < FLIGHT; ++k) sum += (values[k].x + values[k].y) + (values[k].z + values[k].w);
    }
    const long long rest = 4 * vectors + threadIdx.x;
    if (blockIdx.x == 0 && rest < n) sum += reinterpret_cast<const float*>(x)[rest];
    sum = sum_of_block<BLOCK>(sum);
    if (threadIdx.x == 0) {
        sums[blockIdx.x] = sum;
        __threadfence();  // other blocks must see the sum before the count
        last = atomicAdd(done, 1) == static_cast<int>(gridDim.x) - 1;
    }
    __syncthreads();
    if (!last) return;
    __threadfence();
    sum = 0.0f;
    for (int block = threadIdx.x; block < static_cast<int>(gridDim.x); block += BLOCK)
        sum += *const_cast<volatile float*>(sums + block);  // volatile: not from L1, which other blocks do not write
    sum = sum_of_block<BLOCK>(sum);
    if (threadIdx.x == 0) {
        result[0] = sum;
        *done = 0;
    }
}
