// What the kernels of norms in CUDA C++ share: it stands in front of norm_kernels.cu and of norm_clusters.cu.

#include <cuda_bf16.h>
#include <cuda_fp16.h>

// ---- elements as they lie in memory ------------------------------------------------------------------------------

template <typename T, int WIDTH>
struct alignas(sizeof(T) * WIDTH < 16 ? sizeof(T) * WIDTH : 16) Pack {
    T elements[WIDTH];
};

__device__ float wide(float element) { return element; }
__device__ float wide(__half element) { return __half2float(element); }
__device__ float wide(__nv_bfloat16 element) { return __bfloat162float(element); }

__device__ float2 wide_pair(const float* pair) { return {pair[0], pair[1]}; }
__device__ float2 wide_pair(const __half* pair) { return __half22float2({pair[0], pair[1]}); }
__device__ float2 wide_pair(const __nv_bfloat16* pair) { return __bfloat1622float2({pair[0], pair[1]}); }

__device__ void narrow(float value, float* to) { *to = value; }
__device__ void narrow(float value, __half* to) { *to = __float2half_rn(value); }
__device__ void narrow(float value, __nv_bfloat16* to) { *to = __float2bfloat16_rn(value); }

__device__ void narrow_pair(float2 values, float* to) {
    to[0] = values.x;
    to[1] = values.y;
}
__device__ void narrow_pair(float2 values, __half* to) {
    const __half2 pair = __float22half2_rn(values);
    to[0] = pair.x;
    to[1] = pair.y;
}
__device__ void narrow_pair(float2 values, __nv_bfloat16* to) {
    const __nv_bfloat162 pair = __float22bfloat162_rn(values);
    to[0] = pair.x;
    to[1] = pair.y;
}

template <typename T, int WIDTH>
__device__ Pack<T, WIDTH> load(const T* from) {
    return *reinterpret_cast<const Pack<T, WIDTH>*>(from);
}

template <typename T, int WIDTH>
__device__ Pack<T, WIDTH> narrowed(const float (&values)[WIDTH]) {
    Pack<T, WIDTH> pack;
    if constexpr (WIDTH == 1) {
        narrow(values[0], pack.elements);
    } else {
#pragma unroll
        for (int i = 0; i < WIDTH; i += 2) narrow_pair({values[i], values[i + 1]}, pack.elements + i);
    }
    return pack;
}

template <typename T, int WIDTH>
__device__ void store(const float (&values)[WIDTH], T* to) {
    *reinterpret_cast<Pack<T, WIDTH>*>(to) = narrowed<T, WIDTH>(values);
}

template <typename T, int WIDTH>
__device__ void widen(const Pack<T, WIDTH>& pack, float (&values)[WIDTH]) {
    if constexpr (WIDTH == 1) {
        values[0] = wide(pack.elements[0]);
    } else {
#pragma unroll
        for (int i = 0; i < WIDTH; i += 2) {
            const float2 pair = wide_pair(pack.elements + i);
            values[i] = pair.x;
            values[i + 1] = pair.y;
        }
    }
}

// Stores the values and leaves in them what was stored: what is normalized is what backward will read.
template <typename T, int WIDTH>
__device__ void store_rounded(float (&values)[WIDTH], T* to) {
    const Pack<T, WIDTH> pack = narrowed<T, WIDTH>(values);
    *reinterpret_cast<Pack<T, WIDTH>*>(to) = pack;
    widen(pack, values);
}

template <typename T, int WIDTH>
__device__ void add(const Pack<T, WIDTH>& pack, float (&values)[WIDTH]) {
    float more[WIDTH];
    widen(pack, more);
#pragma unroll
    for (int i = 0; i < WIDTH; ++i) values[i] += more[i];
}

// ---- sums over a row -----------------------------------------------------------------------------------------------

__device__ float warp_sum(float value) {
#pragma unroll
    for (int offset = 16; offset > 0; offset /= 2) value += __shfl_xor_sync(0xffffffffu, value, offset);
    return value;
}

// Over the WARPS warps of a row; every thread gets it. `scratch`: WARPS floats that no other sum uses.
template <int WARPS>
__device__ float row_sum(float value, float* scratch) {
    value = warp_sum(value);
    if constexpr (WARPS == 1) return value;
    const int lane = threadIdx.x % 32;
    if (lane == 0) scratch[threadIdx.x / 32] = value;
    __syncthreads();
    return warp_sum(lane < WARPS ? scratch[lane] : 0.0f);
}
