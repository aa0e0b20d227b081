// Functions that the norms' CUDA C++ kernels share. This file must precede cuda_norms.cu and clusters.cu.

#include <cuda_bf16.h>
#include <cuda_fp16.h>

// ---- elements in memory -------------------------------------------------------------------------------------------

// Neighbouring elements, stored as words, because the compiler would store a struct of elements one element at a time.
template <typename T, int WIDTH, int BYTES = sizeof(T) * WIDTH>
struct alignas(BYTES < 16 ? BYTES : 16) Pack {
    unsigned words[BYTES / 4];
};
template <typename T, int WIDTH>
struct alignas(2) Pack<T, WIDTH, 2> {
    T element;
};

__device__ float wide(float element) { return element; }
__device__ float wide(__half element) { return __half2float(element); }
__device__ float wide(__nv_bfloat16 element) { return __bfloat162float(element); }

__device__ void narrow(float value, float* to) { *to = value; }
__device__ void narrow(float value, __half* to) { *to = __float2half_rn(value); }
__device__ void narrow(float value, __nv_bfloat16* to) { *to = __float2bfloat16_rn(value); }

// The two elements of a word.
__device__ float2 wide_pair(unsigned word, __half) {
    __half2 pair;
    memcpy(&pair, &word, 4);
    return __half22float2(pair);
}
__device__ float2 wide_pair(unsigned word, __nv_bfloat16) {
    __nv_bfloat162 pair;
    memcpy(&pair, &word, 4);
    return __bfloat1622float2(pair);
}
__device__ unsigned narrow_pair(float2 values, __half) {
    const __half2 pair = __float22half2_rn(values);
    unsigned word;
    memcpy(&word, &pair, 4);
    return word;
}
__device__ unsigned narrow_pair(float2 values, __nv_bfloat16) {
    const __nv_bfloat162 pair = __float22bfloat162_rn(values);
    unsigned word;
    memcpy(&word, &pair, 4);
    return word;
}

template <typename T, int WIDTH>
__device__ Pack<T, WIDTH> load(const T* from) {
    return *reinterpret_cast<const Pack<T, WIDTH>*>(from);
}

template <typename T, int WIDTH>
__device__ Pack<T, WIDTH> narrowed(const float (&values)[WIDTH]) {
    Pack<T, WIDTH> pack;
    if constexpr (sizeof(T) == 4) {
        memcpy(pack.words, values, sizeof(values));
    } else if constexpr (WIDTH == 1) {
        narrow(values[0], &pack.element);
    } else {
#pragma unroll
        for (int i = 0; i < WIDTH; i += 2) pack.words[i / 2] = narrow_pair({values[i], values[i + 1]}, T());
    }
    return pack;
}

// Inline PTX for 16-byte stores, because the compiler would split such a store into four stores.
template <typename T, int WIDTH>
__device__ void store_pack(const Pack<T, WIDTH>& pack, T* to) {
#ifdef __CUDACC__
    if constexpr (sizeof(pack) % 16 == 0) {
#pragma unroll
        for (int i = 0; i < sizeof(pack) / 4; i += 4) {
            asm volatile("st.global.v4.b32 [%0], {%1, %2, %3, %4};"
                         :: "l"(__cvta_generic_to_global(reinterpret_cast<unsigned*>(to) + i)), "r"(pack.words[i]),
                            "r"(pack.words[i + 1]), "r"(pack.words[i + 2]), "r"(pack.words[i + 3]));
        }
        return;
    }
#endif
    *reinterpret_cast<Pack<T, WIDTH>*>(to) = pack;
}

template <typename T, int WIDTH>
__device__ void store(const float (&values)[WIDTH], T* to) {
    store_pack<T, WIDTH>(narrowed<T, WIDTH>(values), to);
}

template <typename T, int WIDTH>
__device__ void widen(const Pack<T, WIDTH> pack, float (&values)[WIDTH]) {
    if constexpr (sizeof(T) == 4) {
        memcpy(values, pack.words, sizeof(values));
    } else if constexpr (WIDTH == 1) {
        values[0] = wide(pack.element);
    } else {
#pragma unroll
        for (int i = 0; i < WIDTH; i += 2) {
            const float2 pair = wide_pair(pack.words[i / 2], T());
            values[i] = pair.x;
            values[i + 1] = pair.y;
        }
    }
}

// Store the values, and replace them by the rounded values in memory, so that the kernel normalizes the values that
// backward will read.
template <typename T, int WIDTH>
__device__ void store_rounded(float (&values)[WIDTH], T* to) {
    const Pack<T, WIDTH> pack = narrowed<T, WIDTH>(values);
    store_pack<T, WIDTH>(pack, to);
    widen(pack, values);
}

template <typename T, int WIDTH>
__device__ void add(const Pack<T, WIDTH> pack, float (&values)[WIDTH]) {
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

// The sum over the WARPS warps of a row. Every thread gets the sum. `scratch`: WARPS floats that no other sum uses.
template <int WARPS>
__device__ float row_sum(float value, float* scratch) {
    value = warp_sum(value);
    if constexpr (WARPS == 1) return value;
    const int lane = threadIdx.x % 32;
    if (lane == 0) scratch[threadIdx.x / 32] = value;
    __syncthreads();
    return warp_sum(lane < WARPS ? scratch[lane] : 0.0f);
}
