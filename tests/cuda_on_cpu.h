// The parts of CUDA that this project's CUDA C++ kernels use, for a C++ compiler of the CPU. The threads of a block are
// fibers of one CPU thread. Each fiber runs until it waits. Fibers that can continue do so in random order, so that a
// kernel with a missing barrier meets threads that are behind it and threads that are ahead. Blocks run one after
// another; the blocks of a cluster run together (they share __shared__ variables: see shared_memory below). Names are
// CUDA's. Half precision rounds like the hardware (to nearest, ties to even).
#pragma once
#include <sched.h>
#include <ucontext.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <utility>
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
struct alignas(16) int4 { int x, y, z, w; };
inline dim3 threadIdx, blockIdx, blockDim, gridDim;  // threadIdx and blockIdx are those of the running fiber
inline int rank_in_cluster;                          // of the running fiber

struct Fiber {
    ucontext_t context;
    dim3 thread, block;
    int rank;
};
constexpr size_t STACK_BYTES = 128 << 10;
inline std::vector<Fiber> fibers;
inline std::unique_ptr<char[]> stacks;
inline size_t stacks_held = 0;
inline std::vector<unsigned> ready;  // fibers that can continue
inline unsigned running;
inline ucontext_t host;  // the context that launched
inline unsigned long long launches = 0;
inline uint32_t drawn = 1;  // keeps its state between launches, so that runs differ in their order

inline void switch_to_another(ucontext_t* from) {
    if (ready.empty()) {
        std::fputs("cuda_on_cpu.h: all threads wait, and nobody is left to arrive\n", stderr);
        std::abort();
    }
    drawn ^= drawn << 13, drawn ^= drawn >> 17, drawn ^= drawn << 5;  // Marsaglia 2003, "Xorshift RNGs"
    std::swap(ready[drawn % ready.size()], ready.back());
    const unsigned next = ready.back(), before = running;
    ready.pop_back();
    const Fiber& fiber = fibers[running = next];
    threadIdx = fiber.thread, blockIdx = fiber.block, rank_in_cluster = fiber.rank;
    if (from == &host || next != before) swapcontext(from, &fiber.context);
}
inline void let_others_run() {
    ready.push_back(running);
    switch_to_another(&fibers[running].context);
}

class Barrier {
    unsigned expected;
    std::vector<unsigned> waiting;
    void release_if_all_are_here() {
        if (waiting.size() < expected) return;
        ready.insert(ready.end(), waiting.begin(), waiting.end());
        waiting.clear();
    }

public:
    explicit Barrier(unsigned threads) : expected(threads) {}
    void arrive_and_wait() {
        waiting.push_back(running);
        release_if_all_are_here();
        switch_to_another(&fibers[running].context);
    }
    void leave() {  // no other thread waits for a thread that has left
        --expected;
        release_if_all_are_here();
    }
};

struct Warp {
    Barrier arrived;
    double values[32];
    unsigned registers[32][8];
    const void* rows[32];
    explicit Warp(unsigned threads) : arrived(threads) {}
};
struct Block {
    Barrier arrived;
    std::vector<std::unique_ptr<Warp>> warps;
    std::vector<float4> memory;  // dynamic shared memory
    Block(unsigned threads, unsigned bytes) : arrived(threads), memory(bytes / 16 + 1) {
        for (unsigned first = 0; first < threads; first += 32) warps.push_back(std::make_unique<Warp>(std::min(32u, threads - first)));
    }
};
inline std::vector<std::unique_ptr<Block>> cluster;  // the running cluster
inline std::unique_ptr<Barrier> cluster_barrier;
inline Block& this_block() { return *cluster[rank_in_cluster]; }
inline int linear_thread() { return threadIdx.x + blockDim.x * (threadIdx.y + blockDim.y * threadIdx.z); }

inline void __syncthreads() { this_block().arrived.arrive_and_wait(); }
inline void __syncwarp() { this_block().warps[linear_thread() / 32]->arrived.arrive_and_wait(); }
inline void __threadfence() {}
inline int atomicAdd(int* address, int value) { return std::exchange(*address, *address + value); }
inline int atomicCAS(int* address, int expected, int value) {
    return *address == expected ? std::exchange(*address, value) : *address;
}
inline int atomicMax(int* address, int value) { return std::exchange(*address, std::max(*address, value)); }
inline long long atomicMax(long long* address, long long value) { return std::exchange(*address, std::max(*address, value)); }
inline int __popc(unsigned bits) { return __builtin_popcount(bits); }
inline int __ffs(int bits) { return __builtin_ffs(bits); }
inline int __clz(int bits) { return bits ? __builtin_clz(bits) : 32; }
inline unsigned __funnelshift_r(unsigned low, unsigned high, unsigned shift) { return (uint64_t(high) << 32 | low) >> (shift & 31); }
using std::max;
using std::min;
inline float __expf(float value) { return std::exp(value); }
inline float exponential(float value) { return std::exp(value); }
inline float power_of_two(float exponent) { return std::exp2(exponent); }
template <typename T> T shuffled(unsigned mask, T value, int from) {
    Warp& warp = *this_block().warps[linear_thread() / 32];
    if (mask != 0xffffffffu) std::abort();
    warp.values[linear_thread() % 32] = value;
    warp.arrived.arrive_and_wait();
    T result = static_cast<T>(warp.values[from]);
    warp.arrived.arrive_and_wait();
    return result;
}
template <typename T> T __shfl_sync(unsigned mask, T value, int lane) { return shuffled(mask, value, lane); }
template <typename T> T __shfl_xor_sync(unsigned mask, T value, int lanes) {
    return shuffled(mask, value, (linear_thread() % 32) ^ lanes);
}
inline unsigned __ballot_sync(unsigned mask, bool vote) {
    Warp& warp = *this_block().warps[linear_thread() / 32];
    if (mask != 0xffffffffu) std::abort();
    warp.values[linear_thread() % 32] = vote;
    warp.arrived.arrive_and_wait();
    unsigned votes = 0;
    for (int lane = 0; lane < 32; ++lane) votes |= unsigned(warp.values[lane] != 0) << lane;
    warp.arrived.arrive_and_wait();
    return votes;
}
inline unsigned __reduce_or_sync(unsigned mask, unsigned value) {
    for (int lanes = 1; lanes < 32; lanes *= 2) value |= __shfl_xor_sync(mask, value, lanes);
    return value;
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

template <typename T> T larger(T a, T b) { return T(std::fmax(float(a), float(b))); }
inline __half2 __hmax2(__half2 a, __half2 b) { return {larger(a.x, b.x), larger(a.y, b.y)}; }
inline __nv_bfloat162 __hmax2(__nv_bfloat162 a, __nv_bfloat162 b) { return {larger(a.x, b.x), larger(a.y, b.y)}; }

inline void (*run_kernel)();  // the launched kernel
inline unsigned left;         // threads of the cluster that have not ended

inline void live() {
    run_kernel();
    this_block().arrived.leave();
    this_block().warps[linear_thread() / 32]->arrived.leave();
    cluster_barrier->leave();
    if (--left) switch_to_another(&fibers[running].context);
}  // returns to the host

// sizes: the grid, a block, the blocks of a cluster (in x), and the bytes of dynamic shared memory.
template <typename Kernel> void run_blocks(const unsigned* sizes, Kernel kernel) {
    ++launches;
    gridDim = {sizes[0], sizes[1], sizes[2]};
    blockDim = {sizes[3], sizes[4], sizes[5]};
    const unsigned count = blockDim.x * blockDim.y * blockDim.z, blocks = gridDim.x * gridDim.y * gridDim.z;
    const unsigned together = sizes[6], bytes = sizes[7];
    static Kernel* launched;
    launched = &kernel;
    run_kernel = [] { (*launched)(); };
    fibers.resize(count * together);
    if (stacks_held < fibers.size()) stacks.reset(new char[(stacks_held = fibers.size()) * STACK_BYTES]);
    for (unsigned first = 0; first < blocks; first += together) {
        cluster.clear();
        for (unsigned block = 0; block < together; ++block) cluster.push_back(std::make_unique<Block>(count, bytes));
        cluster_barrier = std::make_unique<Barrier>(count * together);
        for (unsigned thread = 0; thread < fibers.size(); ++thread) {
            Fiber& fiber = fibers[thread];
            const unsigned i = thread % count, block = first + thread / count;
            fiber.thread = {i % blockDim.x, i / blockDim.x % blockDim.y, i / blockDim.x / blockDim.y};
            fiber.block = {block % gridDim.x, block / gridDim.x % gridDim.y, block / gridDim.x / gridDim.y};
            fiber.rank = thread / count;
            getcontext(&fiber.context);
            fiber.context.uc_stack.ss_sp = stacks.get() + thread * STACK_BYTES;
            fiber.context.uc_stack.ss_size = STACK_BYTES;
            fiber.context.uc_link = &host;
            makecontext(&fiber.context, live, 0);
            ready.push_back(thread);
        }
        left = fibers.size();
        switch_to_another(&host);
    }
}

// Operations that kernels write in PTX (`#ifdef __CUDACC__`), with the layouts of the PTX manual: ldmatrix,
// mma.m16n8k16, cp.async, clusters, cp.async.bulk and the mbarrier that it completes.

inline __half half_at(const Warp& warp, int lane, int place, int part) {
    __half value;
    std::memcpy(&value, reinterpret_cast<const char*>(&warp.registers[lane][place]) + 2 * part, 2);
    return value;
}
inline void load_matrices(unsigned (&to)[4], const void* row, bool transposed) {
    Warp& warp = *this_block().warps[linear_thread() / 32];
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
    Warp& warp = *this_block().warps[linear_thread() / 32];
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

inline void* shared_memory() { return this_block().memory.data(); }
inline int block_rank() { return rank_in_cluster; }
inline void cluster_wait() { cluster_barrier->arrive_and_wait(); }

struct Copies {  // an mbarrier: completed phases, and the bytes that the current phase still waits for
    uint32_t phases;
    int bytes;
};
static_assert(sizeof(Copies) == sizeof(unsigned long long));
inline void prepare_copies(unsigned long long* barrier) { *reinterpret_cast<Copies*>(barrier) = {0, 0}; }
inline void prepared() {}
// Bytes may arrive before they are expected. `copies->bytes` becomes 0 only when all expected bytes have arrived.
inline void count_bytes(unsigned long long* barrier, int bytes) {
    Copies* copies = reinterpret_cast<Copies*>(barrier);
    if ((copies->bytes += bytes) == 0) ++copies->phases;
}
inline void expect_copies(unsigned long long* barrier, int bytes) { count_bytes(barrier, bytes); }
inline void copy_bulk(void* to, const void* from, int bytes, unsigned long long* barrier) {
    if (bytes % 16 || (reinterpret_cast<uintptr_t>(to) | reinterpret_cast<uintptr_t>(from)) % 16) std::abort();
    std::memcpy(to, from, bytes);
    count_bytes(barrier, -bytes);
}
inline void copy_eight(void* to, const void* from) {
    if ((reinterpret_cast<uintptr_t>(to) | reinterpret_cast<uintptr_t>(from)) % 8) std::abort();
    std::memcpy(to, from, 8);
}
inline void await_eights() {}
inline void send_to_block(float4* place, int rank, float4 value, unsigned long long* barrier) {
    char *here = reinterpret_cast<char*>(this_block().memory.data()), *there = reinterpret_cast<char*>(cluster[rank]->memory.data());
    std::memcpy(there + (reinterpret_cast<char*>(place) - here), &value, 16);
    count_bytes(reinterpret_cast<unsigned long long*>(there + (reinterpret_cast<char*>(barrier) - here)), -16);
}
inline void await_copies(unsigned long long* barrier, unsigned parity) {
    while (reinterpret_cast<Copies*>(barrier)->phases % 2 == parity) let_others_run();
}
inline void await_blocks(unsigned long long* barrier, unsigned parity) { await_copies(barrier, parity); }
// Memory that the GPUs of several ranks share. Here the ranks are CPU threads, each with its own copy of this library.
inline void send_word(unsigned long long* to, unsigned long long word) { __atomic_store_n(to, word, __ATOMIC_RELAXED); }
inline void send_words(unsigned long long* to, unsigned long long first, unsigned long long second) {
    if (reinterpret_cast<uintptr_t>(to) % 16) std::abort();
    send_word(to + 1, second);  // the order does not matter
    send_word(to, first);
}
inline unsigned long long take_word(const unsigned long long* from) { return __atomic_load_n(from, __ATOMIC_RELAXED); }
inline void take_words(const unsigned long long* from, unsigned long long& first, unsigned long long& second) {
    if (reinterpret_cast<uintptr_t>(from) % 16) std::abort();
    first = take_word(from);
    second = take_word(from + 1);
}
inline void wait_for_ranks() {
    static std::chrono::steady_clock::time_point began;
    static unsigned long long looks = 0, looks_of_launch = 0;
    if (looks_of_launch != launches) looks_of_launch = launches, looks = 0, began = std::chrono::steady_clock::now();
    if (++looks % 1024 == 0 && std::chrono::steady_clock::now() - began > std::chrono::seconds(100)) {
        std::fputs("cuda_on_cpu.h: a rank has waited 100 s for another\n", stderr);
        std::abort();
    }
    if (looks % 64 == 0) sched_yield();  // lets the other ranks run
    let_others_run();
}
inline void store_words(void* to, const unsigned (&words)[4]) {
    if (reinterpret_cast<uintptr_t>(to) % 16) std::abort();
    std::memcpy(to, words, 16);
}
