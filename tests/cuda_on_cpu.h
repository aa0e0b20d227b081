// What the CUDA C++ kernels of this project use of CUDA, for a C++ compiler of the CPU: threads of a block are threads,
// blocks run one after another. Names as in CUDA; half precision rounds as the hardware does (to nearest, ties to even).
#pragma once
#include <atomic>
#include <barrier>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <memory>
#include <thread>
#include <vector>

#define __global__
#define __forceinline__ inline
#define __device__
#define __shared__ static
#define __restrict__
#define __launch_bounds__(...)

struct dim3 { unsigned x = 1, y = 1, z = 1; };
struct float2 { float x, y; };
struct alignas(16) float4 { float x, y, z, w; };
inline thread_local dim3 threadIdx, blockIdx;
inline dim3 blockDim, gridDim;

struct Warp {
    std::barrier<> arrived;
    double values[32];
    unsigned registers[32][8];
    const void* rows[32];
    explicit Warp(int threads) : arrived(threads) {}
};
inline std::unique_ptr<std::barrier<>> block_barrier;
inline std::vector<std::unique_ptr<Warp>> warps;
inline int linear_thread() { return threadIdx.x + blockDim.x * (threadIdx.y + blockDim.y * threadIdx.z); }

inline void __syncthreads() { block_barrier->arrive_and_wait(); }
inline void __syncwarp() { warps[linear_thread() / 32]->arrived.arrive_and_wait(); }
inline void __threadfence() { std::atomic_thread_fence(std::memory_order_seq_cst); }
inline int atomicAdd(int* address, int value) { return std::atomic_ref<int>(*address).fetch_add(value); }
inline float __expf(float value) { return std::exp(value); }
template <typename T> T __shfl_xor_sync(unsigned mask, T value, int lanes) {
    Warp& warp = *warps[linear_thread() / 32];
    if (mask != 0xffffffffu) std::abort();
    warp.values[linear_thread() % 32] = value;
    warp.arrived.arrive_and_wait();
    T result = static_cast<T>(warp.values[(linear_thread() % 32) ^ lanes]);
    warp.arrived.arrive_and_wait();
    return result;
}

struct __half {
    _Float16 bits;
    __half() = default;
    explicit __half(float value) : bits(value) {}
    explicit operator float() const { return bits; }
};
struct __nv_bfloat16 {
    uint16_t bits;
    __nv_bfloat16() = default;
    explicit __nv_bfloat16(float value) {
        uint32_t all;
        std::memcpy(&all, &value, 4);
        bits = std::isnan(value) ? 0x7fff : (all + 0x7fff + (all >> 16 & 1)) >> 16;
    }
    explicit operator float() const {
        uint32_t all = uint32_t(bits) << 16;
        float value;
        std::memcpy(&value, &all, 4);
        return value;
    }
};
struct __half2 { __half x, y; };
struct __nv_bfloat162 { __nv_bfloat16 x, y; };
inline float __half2float(__half value) { return float(value); }
inline float __bfloat162float(__nv_bfloat16 value) { return float(value); }
inline __half __float2half_rn(float value) { return __half(value); }
inline __nv_bfloat16 __float2bfloat16_rn(float value) { return __nv_bfloat16(value); }
inline float2 __half22float2(__half2 pair) { return {float(pair.x), float(pair.y)}; }
inline float2 __bfloat1622float2(__nv_bfloat162 pair) { return {float(pair.x), float(pair.y)}; }
inline __half2 __float22half2_rn(float2 pair) { return {__half(pair.x), __half(pair.y)}; }
inline __nv_bfloat162 __float22bfloat162_rn(float2 pair) { return {__nv_bfloat16(pair.x), __nv_bfloat16(pair.y)}; }

template <typename Kernel> void run_blocks(const unsigned* sizes, Kernel kernel) {
    gridDim = {sizes[0], sizes[1], sizes[2]};
    blockDim = {sizes[3], sizes[4], sizes[5]};
    const unsigned count = blockDim.x * blockDim.y * blockDim.z, blocks = gridDim.x * gridDim.y * gridDim.z;
    const auto fresh = [count]() noexcept {
        block_barrier = std::make_unique<std::barrier<>>(count);
        warps.clear();
        for (unsigned first = 0; first < count; first += 32) warps.push_back(std::make_unique<Warp>(std::min(32u, count - first)));
    };
    fresh();
    std::barrier between(count, fresh);  // blocks, which run one after another
    std::vector<std::thread> threads;
    for (unsigned i = 0; i < count; ++i) {
        threads.emplace_back([=, &between] {
            threadIdx = {i % blockDim.x, i / blockDim.x % blockDim.y, i / blockDim.x / blockDim.y};
            for (unsigned block = 0; block < blocks; ++block) {
                blockIdx = {block % gridDim.x, block / gridDim.x % gridDim.y, block / gridDim.x / gridDim.y};
                kernel();
                block_barrier->arrive_and_drop();  // a thread that has left holds nobody up
                warps[i / 32]->arrived.arrive_and_drop();
                between.arrive_and_wait();
            }
        });
    }
    for (auto& thread : threads) thread.join();
}

// What kernels wrap in PTX (`#ifdef __CUDACC__`), by the layouts of the PTX manual: ldmatrix, mma.m16n8k16, cp.async.

inline __half half_at(const Warp& warp, int lane, int place, int part) {
    __half value;
    std::memcpy(&value, reinterpret_cast<const char*>(&warp.registers[lane][place]) + 2 * part, 2);
    return value;
}
inline void load_matrices(unsigned (&to)[4], const void* row, bool transposed) {
    Warp& warp = *warps[linear_thread() / 32];
    const int lane = linear_thread() % 32;
    warp.rows[lane] = row;
    warp.arrived.arrive_and_wait();
    for (int matrix = 0; matrix < 4; ++matrix) {
        for (int part = 0; part < 2; ++part) {
            const int along = 2 * (lane % 4) + part, across = lane / 4;
            const int line = transposed ? along : across, column = transposed ? across : along;
            const char* from = static_cast<const char*>(warp.rows[8 * matrix + line]) + 2 * column;
            std::memcpy(reinterpret_cast<char*>(&to[matrix]) + 2 * part, from, 2);
        }
    }
    warp.arrived.arrive_and_wait();
}
inline void load_matrices(unsigned (&to)[4], const void* row) { load_matrices(to, row, false); }
inline void load_matrices_transposed(unsigned (&to)[4], const void* row) { load_matrices(to, row, true); }
inline void multiply_add(float (&c)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
    Warp& warp = *warps[linear_thread() / 32];
    const int lane = linear_thread() % 32;
    for (int i = 0; i < 4; ++i) warp.registers[lane][i] = a[i];
    warp.registers[lane][4] = b0;
    warp.registers[lane][5] = b1;
    warp.arrived.arrive_and_wait();
    for (int i = 0; i < 4; ++i) {
        const int row = lane / 4 + 8 * (i / 2), column = 2 * (lane % 4) + i % 2;
        for (int k = 0; k < 16; ++k) {
            const int of_a = row % 8 * 4 + k % 8 / 2, of_b = column * 4 + k % 8 / 2;
            const __half left = half_at(warp, of_a, row / 8 + 2 * (k / 8), k % 2);
            c[i] += float(left) * float(half_at(warp, of_b, 4 + k / 8, k % 2));
        }
    }
    warp.arrived.arrive_and_wait();
}
inline void copy_ahead(void* to, const void* from, bool inside) {
    if (inside) std::memcpy(to, from, 16);
    else std::memset(to, 0, 16);
}
inline void commit_copies() {}
template <int LEFT> void wait_for_copies() {}
