// Latency and rate of each level of a GPU's memory. Addresses are passed as integers, so that the kernels can also read
// the host's page-locked memory. In a chain, each address is the result of the previous load. In a stream, all loads of a
// thread are independent.

enum Place { THROUGH_L1, FROM_L2 };  // loads that L1 may serve; loads that bypass L1

#ifdef __CUDACC__
// volatile: the compiler may neither drop a load nor move it out of a loop.
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

// One thread does `hops` multiply-adds, each on the result of the previous one. With a factor of 1 the result is
// start + hops * step.
__global__ void chain_registers(float* out, float start, float factor, float step, int hops) {
    float value = start;
    #pragma unroll 16
    for (int hop = 0; hop < hops; ++hop) value = value * factor + step;
    out[0] = value;
}

// One thread follows a chain through `count` elements, each of which holds the index of the next. The thread starts at
// out[0] and stores the index that it reached there. So a second launch does not repeat loads that the first has left
// in a cache.
constexpr int MOST_SHARED = 4096;  // elements, which take 16 KB
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

// Each thread runs CHAINS independent chains of multiply-adds. They begin at 0, 1, 2, ...: a compiler could merge equal
// chains. With a factor of 1, each chain grows by step * times. A multiply-add reads three registers and writes one.
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

// Each block copies `vectors` vectors of 16 bytes to shared memory. Its threads then read them `times` times.
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

// Blocks read `vectors` vectors of 16 bytes `times` times. Each thread has FLIGHT loads in flight. With apart = 0, the
// blocks divide the vectors among them. With apart > 0, each block reads its own vectors, and starts
// `apart` vectors after the previous block.
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
