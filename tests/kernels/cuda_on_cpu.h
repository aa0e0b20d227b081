// What the CUDA C++ kernels of this project use of CUDA, for a C++ compiler of the CPU: threads of a block are threads,
// blocks run one after another. Names as in CUDA; half precision rounds as the hardware does (to nearest, ties to even).
#pragma once
#include <barrier>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <memory>
#include <thread>
#include <vector>

#define __global__
#define __device__
#define __shared__ static
#define __restrict__
#define __launch_bounds__(...)

struct dim3 { unsigned x = 1, y = 1, z = 1; };
struct float2 { float x, y; };
inline thread_local dim3 threadIdx, blockIdx;
inline dim3 blockDim;

struct Warp {
    std::barrier<> arrived;
    double values[32];
    explicit Warp(int threads) : arrived(threads) {}
};
inline std::unique_ptr<std::barrier<>> block_barrier;
inline std::vector<std::unique_ptr<Warp>> warps;
inline int linear_thread() { return threadIdx.x + blockDim.x * threadIdx.y; }

inline void __syncthreads() { block_barrier->arrive_and_wait(); }
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

template <typename Kernel> void run_blocks(unsigned grid, unsigned x, unsigned y, Kernel kernel) {
    blockDim = {x, y, 1};
    const int count = x * y;
    for (unsigned block = 0; block < grid; ++block) {
        block_barrier = std::make_unique<std::barrier<>>(count);
        warps.clear();
        for (int first = 0; first < count; first += 32) warps.push_back(std::make_unique<Warp>(std::min(32, count - first)));
        std::vector<std::thread> threads;
        for (int i = 0; i < count; ++i) {
            threads.emplace_back([=] {
                threadIdx = {i % x, i / x, 0};
                blockIdx = {block, 0, 0};
                kernel();
                block_barrier->arrive_and_drop();  // a thread that has left holds nobody up
                warps[i / 32]->arrived.arrive_and_drop();
            });
        }
        for (auto& thread : threads) thread.join();
    }
}
