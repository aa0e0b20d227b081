// Functions that the cluster kernels of several families share: PTX for clusters and bulk copies, and reductions over the warps of a block.
// In the text for NVRTC, this file must precede the kernels that call its functions.

#ifdef __CUDACC__
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 900
#error "clusters and bulk copies need sm_90"
#endif

__device__ __forceinline__ unsigned shared_address(const void* pointer) {
    return static_cast<unsigned>(__cvta_generic_to_shared(pointer));
}

__device__ __forceinline__ void* shared_memory() {
    extern __shared__ float4 dynamic_memory[];
    return dynamic_memory;
}

__device__ __forceinline__ int block_rank() {
    unsigned rank;
    asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    return rank;
}

// Barrier of all threads of a cluster. The threads' earlier writes become visible to all threads of the cluster.
__device__ __forceinline__ void cluster_wait() {
    asm volatile("barrier.cluster.arrive.release;\nbarrier.cluster.wait.acquire;" ::: "memory");
}

// Initialize a barrier on which one thread arrives, by `expect_copies`.
__device__ __forceinline__ void prepare_copies(unsigned long long* barrier) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" :: "r"(shared_address(barrier)) : "memory");
}

// Make the initialized barriers visible to the copy engine.
__device__ __forceinline__ void prepared() {
    asm volatile("fence.mbarrier_init.release.cluster;\nfence.proxy.async.shared::cta;" ::: "memory");
}

// Arrive on the barrier, whose phase then also waits for copies of `bytes` bytes in total.
__device__ __forceinline__ void expect_copies(unsigned long long* barrier, int bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;"
                 :: "r"(shared_address(barrier)), "r"(bytes) : "memory");
}

// Start a bulk copy; addresses and `bytes` must be multiples of 16.
__device__ __forceinline__ void copy_bulk(void* to, const void* from, int bytes, unsigned long long* barrier) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
                 :: "r"(shared_address(to)), "l"(__cvta_generic_to_global(from)), "r"(bytes), "r"(shared_address(barrier))
                 : "memory");
}

// Wait until the barrier's phase with this parity is complete.
__device__ __forceinline__ void await_copies(unsigned long long* barrier, unsigned parity) {
    asm volatile("{\n.reg .pred done;\n"
                 "again:\nmbarrier.try_wait.parity.acquire.cta.shared::cta.b64 done, [%0], %1;\n@!done bra again;\n}"
                 :: "r"(shared_address(barrier)), "r"(parity) : "memory");
}

// Copy 8 bytes asynchronously, without a register. `await_eights` waits for all such copies of this thread.
__device__ __forceinline__ void copy_eight(void* to, const void* from) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 8;"
                 :: "r"(shared_address(to)), "l"(__cvta_generic_to_global(from)) : "memory");
}
__device__ __forceinline__ void await_eights() { asm volatile("cp.async.wait_all;" ::: "memory"); }

// Store 16 bytes at the same address in the shared memory of another block, and count these bytes at that block's
// barrier. Unlike a cluster barrier, this function does not wait for outstanding stores to global memory.
__device__ __forceinline__ void send_to_block(float4* place, int rank, float4 value, unsigned long long* barrier) {
    unsigned there, signal;
    asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(shared_address(place)), "r"(rank));
    asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(signal) : "r"(shared_address(barrier)), "r"(rank));
    asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0], {%1, %2, %3, %4}, [%5];"
                 :: "r"(there), "f"(value.x), "f"(value.y), "f"(value.z), "f"(value.w), "r"(signal) : "memory");
}

// The same as `await_copies`, for bytes that other blocks of the cluster sent.
__device__ __forceinline__ void await_blocks(unsigned long long* barrier, unsigned parity) {
    asm volatile("{\n.reg .pred done;\n"
                 "again:\nmbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 done, [%0], %1;\n@!done bra again;\n}"
                 :: "r"(shared_address(barrier)), "r"(parity) : "memory");
}
#endif

// Load floats 16 bytes at a time, because a warp would wait for each load of a single float.
template <int COUNT>
__device__ void load_fours(const float* from, float (&values)[COUNT]) {
#pragma unroll
    for (int i = 0; i < COUNT; i += 4) {
        const float4 four = *reinterpret_cast<const float4*>(from + i);
        values[i] = four.x;
        values[i + 1] = four.y;
        values[i + 2] = four.z;
        values[i + 3] = four.w;
    }
}

template <int WARPS>
constexpr int IN_FOURS = (WARPS + 3) / 4 * 4;

// The sum of one value per warp, always in the same order.
template <int WARPS>
__device__ float sum_of(const float* of_warps) {
    float values[IN_FOURS<WARPS>], sums[4] = {};
    load_fours(of_warps, values);
#pragma unroll
    for (int i = 0; i < WARPS; ++i) sums[i % 4] += values[i];
    return (sums[0] + sums[1]) + (sums[2] + sums[3]);
}

// The largest of one value per warp.
template <int WARPS>
__device__ float largest_of(const float* of_warps) {
    float values[IN_FOURS<WARPS>], largest = of_warps[0];
    load_fours(of_warps, values);
#pragma unroll
    for (int i = 1; i < WARPS; ++i) largest = fmaxf(largest, values[i]);
    return largest;
}
