// Latency and rate of each level of a GPU's memory. Addresses come as numbers, so that the host's page-locked memory can
// be read, too. Chains: each address is the result of the load before. Streams: all loads of a thread are independent.

enum Place { THROUGH_L1, FROM_L2 };  // loads that L1 may serve; loads that pass it by

#ifdef __CUDACC__
// volatile: a load is neither left out nor taken out of a loop.
template <int PLACE> __device__ __forceinline__ int load(const int* from) {
    int value;
    if constexpr (PLACE == THROUGH_L1) asm volatile("ld.global.ca.s32 %0, [%1];" : "=r"(value) : "l"(from));
    else asm volatile("ld.global.cg.s32 %0, [%1];" : "=r"(value) : "l"(from));
    return value;
}
template <int PLACE> __device__ __forceinline__ float4 load(const float4* from) {
    float4 v;
    if constexpr (PLACE == THROUGH_L1)
        asm volatile("ld.global.ca.v4.f32 {%0, %1, %2, %3}, [%4];" : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w) : "l"(from));
    else
        asm volatile("ld.global.cg.v4.f32 {%0, %1, %2, %3}, [%4];" : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w) : "l"(from));
    return v;
}
__device__ __forceinline__ float4 load_shared(const float4* from) {
    float4 v;
    const unsigned place = static_cast<unsigned>(__cvta_generic_to_shared(from));
    asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];" : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w) : "r"(place));
    return v;
}
#else
template <int PLACE> int load(const int* from) { return *from; }
template <int PLACE> float4 load(const float4* from) { return *from; }
inline float4 load_shared(const float4* from) { return *from; }
#endif

__device__ __forceinline__ float sum_of(float4 v) { return (v.x + v.y) + (v.z + v.w); }

// One thread multiplies and adds `hops` times, each time to the result of the time before. With a factor of 1 the result
// is start + hops * step.
__global__ void chain_registers(float* out, float start, float factor, float step, int hops) {
    float value = start;
    #pragma unroll 16
    for (int hop = 0; hop < hops; ++hop) value = value * factor + step;
    out[0] = value;
}

// One thread in memory of `count` elements, each of which says which is next. It goes on where out[0] says and leaves
// there how far it came: a launch after another finds nothing in a cache that only the one before has brought there.
constexpr int MOST_SHARED = 4096;  // elements: 16 KB
__global__ void chain_shared(const int* following, int* out, int count, int hops) {
    __shared__ int kept[MOST_SHARED];
    for (int i = threadIdx.x; i < count; i += blockDim.x) kept[i] = following[i];
    __syncthreads();
    if (threadIdx.x) return;
    int place = out[0];
    for (int hop = 0; hop < hops; ++hop) place = kept[place];
    out[0] = place;
}

template <int PLACE> __global__ void chain(unsigned long long address, int* out, int hops) {
    const int* following = reinterpret_cast<const int*>(address);
    int place = out[0];
    for (int hop = 0; hop < hops; ++hop) place = load<PLACE>(following + place);
    out[0] = place;
}

// Each thread keeps CHAINS sums of products going, which begin at 0, 1, 2, ...: were they alike, a compiler could make one
// of them all. A factor of 1 adds step * times to each. A multiply-add reads three registers and writes one.
template <int CHAINS> __global__ void stream_registers(float* out, float factor, float step, int times) {
    float sums[CHAINS];
    #pragma unroll
    for (int c = 0; c < CHAINS; ++c) sums[c] = static_cast<float>(c);
    for (int turn = 0; turn < times; ++turn) {
        #pragma unroll
        for (int c = 0; c < CHAINS; ++c) sums[c] = sums[c] * factor + step;
    }
    float total = 0.0f;
    #pragma unroll
    for (int c = 0; c < CHAINS; ++c) total += sums[c];
    out[blockIdx.x * static_cast<long long>(blockDim.x) + threadIdx.x] = total;
}

// Each block copies `vectors` of 16 bytes to shared memory, which its threads then read `times` times.
constexpr int MOST_VECTORS = 1024;  // 16 KB
__global__ void stream_shared(const float4* values, float* out, int vectors, int times) {
    __shared__ float4 kept[MOST_VECTORS];
    for (int i = threadIdx.x; i < vectors; i += blockDim.x) kept[i] = values[i];
    __syncthreads();
    float sum = 0.0f;
    for (int turn = 0; turn < times; ++turn) {
        #pragma unroll 4
        for (int i = threadIdx.x; i < vectors; i += blockDim.x) sum += sum_of(load_shared(kept + i));
    }
    out[blockIdx.x * static_cast<long long>(blockDim.x) + threadIdx.x] = sum;
}

// Blocks read `vectors` of 16 bytes `times` times; a thread has FLIGHT loads on their way. Each block reads its own
// piece, of `vectors`, of which `apart` says how far one lies from the next; or, with apart = 0, all blocks share one.
template <int PLACE, int FLIGHT>
__global__ void stream(unsigned long long address, float* out, long long vectors, long long apart, int times) {
    const float4* values = reinterpret_cast<const float4*>(address) + blockIdx.x * apart;
    const long long threads = apart ? blockDim.x : gridDim.x * static_cast<long long>(blockDim.x);
    const long long mine = apart ? threadIdx.x : blockIdx.x * static_cast<long long>(blockDim.x) + threadIdx.x;
    float sum = 0.0f;
    for (int turn = 0; turn < times; ++turn) {
        for (long long first = mine; first < vectors; first += FLIGHT * threads) {
            float4 loaded[FLIGHT];
            #pragma unroll
            for (int k = 0; k < FLIGHT; ++k) {
                const long long i = first + k * threads;
                loaded[k] = i < vectors ? load<PLACE>(values + i) : float4{0.0f, 0.0f, 0.0f, 0.0f};
            }
            #pragma unroll
            for (int k = 0; k < FLIGHT; ++k) sum += sum_of(loaded[k]);
        }
    }
    out[blockIdx.x * static_cast<long long>(blockDim.x) + threadIdx.x] = sum;
}
