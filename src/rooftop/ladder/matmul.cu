// C = A B for square row-major matrices in half precision, with float32 sums. n is a multiple of 8.
#include <cuda_fp16.h>

// Each thread computes one element, for which it reads a row of A and a column of B. Neighbouring threads take
// neighbouring columns: their reads of B are coalesced, and their reads of A are the same address.
__global__ void one_each(const __half* a, const __half* b, __half* c, int n) {
    const int row = blockIdx.y * blockDim.y + threadIdx.y, column = blockIdx.x * blockDim.x + threadIdx.x;
    if (row >= n || column >= n) return;
    float sum = 0.0f;
    for (int k = 0; k < n; ++k)
        sum += __half2float(a[row * static_cast<long long>(n) + k]) * __half2float(b[k * static_cast<long long>(n) + column]);
    c[row * static_cast<long long>(n) + column] = __float2half_rn(sum);
}

// The block loads tiles of A and B into shared memory. Each element of a tile serves TILE threads.
template <int TILE> __global__ void tiled(const __half* a, const __half* b, __half* c, int n) {
    __shared__ float of_a[TILE][TILE], of_b[TILE][TILE];
    const int x = threadIdx.x, y = threadIdx.y;
    const long long row = blockIdx.y * TILE + y, column = blockIdx.x * TILE + x;
    float sum = 0.0f;
    for (int first = 0; first < n; first += TILE) {
        of_a[y][x] = row < n && first + x < n ? __half2float(a[row * n + first + x]) : 0.0f;
        of_b[y][x] = first + y < n && column < n ? __half2float(b[static_cast<long long>(first + y) * n + column]) : 0.0f;
        __syncthreads();
        #pragma unroll
        for (int k = 0; k < TILE; ++k) sum += of_a[y][k] * of_b[k][x];
        __syncthreads();
    }
    if (row < n && column < n) c[row * n + column] = __float2half_rn(sum);
}

struct alignas(8) Four {
    __half at[4];
};

// Each of 256 threads computes 8 x 8 elements of a tile of 128 x 128. For 64 products, a thread reads 16 values
// from shared memory; without registers, it would read 128.
__global__ void __launch_bounds__(256) register_blocked(const __half* a, const __half* b, __half* c, int n) {
    constexpr int TILE = 128, DEPTH = 8, HALF = TILE / 2;
    __shared__ float of_a[DEPTH][TILE + 4], of_b[DEPTH][TILE];  // of_a holds A transposed
    const int t = threadIdx.x;
    const long long top = blockIdx.y * TILE, left = blockIdx.x * TILE;
    const int a_row = t / 2, a_column = t % 2 * 4, b_row = t / 32, b_column = t % 32 * 4;
    const int y = t / 16 * 4, x = t % 16 * 4;  // four rows each from y and 64 + y; columns likewise
    float sums[8][8] = {};
    for (int first = 0; first < n; first += DEPTH) {
        Four loaded = {};
        if (top + a_row < n) loaded = *reinterpret_cast<const Four*>(a + (top + a_row) * n + first + a_column);
        #pragma unroll
        for (int i = 0; i < 4; ++i) of_a[a_column + i][a_row] = top + a_row < n ? __half2float(loaded.at[i]) : 0.0f;
        const bool inside = left + b_column < n;
        if (inside) loaded = *reinterpret_cast<const Four*>(b + static_cast<long long>(first + b_row) * n + left + b_column);
        #pragma unroll
        for (int i = 0; i < 4; ++i) of_b[b_row][b_column + i] = inside ? __half2float(loaded.at[i]) : 0.0f;
        __syncthreads();
        #pragma unroll
        for (int k = 0; k < DEPTH; ++k) {
            float rows[8], columns[8];
            #pragma unroll
            for (int i = 0; i < 8; ++i) rows[i] = of_a[k][i / 4 * HALF + y + i % 4];
            #pragma unroll
            for (int j = 0; j < 8; ++j) columns[j] = of_b[k][j / 4 * HALF + x + j % 4];
            #pragma unroll
            for (int i = 0; i < 8; ++i)
                #pragma unroll
                for (int j = 0; j < 8; ++j) sums[i][j] += rows[i] * columns[j];
        }
        __syncthreads();
    }
    #pragma unroll
    for (int i = 0; i < 8; ++i) {
        const long long row = top + i / 4 * HALF + y + i % 4;
        #pragma unroll
        for (int part = 0; part < 2; ++part) {
            const long long column = left + part * HALF + x;
            if (row >= n || column >= n) continue;
            Four out;
            #pragma unroll
            for (int j = 0; j < 4; ++j) out.at[j] = __float2half_rn(sums[i][4 * part + j]);
            *reinterpret_cast<Four*>(c + row * n + column) = out;
        }
    }
}

#ifdef __CUDACC__
__device__ __forceinline__ unsigned shared_address(const void* pointer) {
    return static_cast<unsigned>(__cvta_generic_to_shared(pointer));
}

// Load four matrices of 8 x 8 halves. Lanes 8 * i to 8 * i + 7 hold the addresses of the rows of matrix i.
__device__ __forceinline__ void load_matrices(unsigned (&to)[4], const void* row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
                 : "r"(shared_address(row)) : "memory");
}

__device__ __forceinline__ void load_matrices_transposed(unsigned (&to)[4], const void* row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
                 : "r"(shared_address(row)) : "memory");
}

// c (16 x 8) += a (16 x 16) times b (16 x 8), as one tensor core instruction of the whole warp.
__device__ __forceinline__ void multiply_add(float (&c)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
                 "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// Copy 16 bytes to shared memory asynchronously, without a register. Outside the matrix, fill with zeros.
__device__ __forceinline__ void copy_ahead(void* to, const void* from, bool inside) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;"
                 :: "r"(shared_address(to)), "l"(from), "r"(inside ? 16 : 0) : "memory");
}
__device__ __forceinline__ void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int LEFT> __device__ __forceinline__ void wait_for_copies() {
    asm volatile("cp.async.wait_group %0;" :: "n"(LEFT) : "memory");
}
#endif

// A block computes 128 x 128 elements of C, in steps of 32 along k. Each of its eight warps computes 64 x 32 elements.
// With two STAGES, the tiles of the next step are loaded while the tensor cores multiply the tiles of this step. Rows of
// shared memory are padded, so that the eight rows of an 8 x 8 matrix are in different banks.
template <int STAGES> __global__ void __launch_bounds__(256) tensor_cores(const __half* a, const __half* b, __half* c, int n) {
    constexpr int TILE = 128, DEPTH = 32, PAD = 8;
    alignas(16) __shared__ __half of_a[STAGES][TILE][DEPTH + PAD], of_b[STAGES][DEPTH][TILE + PAD];
    const int t = threadIdx.x, lane = t % 32, warp_row = t / 32 / 4 * 64, warp_column = t / 32 % 4 * 32;
    const long long top = blockIdx.y * TILE, left = blockIdx.x * TILE;

    const auto fetch = [&](int stage, int first) {  // 512 pieces of 8 halves from each matrix: two per thread
        #pragma unroll
        for (int piece = t; piece < 512; piece += 256) {
            const int row = piece / 4, k = piece % 4 * 8;
            const bool inside = top + row < n && first + k < n;
            copy_ahead(&of_a[stage][row][k], inside ? a + (top + row) * n + first + k : a, inside);
        }
        #pragma unroll
        for (int piece = t; piece < 512; piece += 256) {
            const int k = piece / 16, column = piece % 16 * 8;
            const bool inside = first + k < n && left + column < n;
            copy_ahead(&of_b[stage][k][column], inside ? b + static_cast<long long>(first + k) * n + left + column : b, inside);
        }
        commit_copies();
    };

    float sums[4][4][4] = {};  // 4 x 4 tiles of 16 x 8
    if (STAGES == 2) fetch(0, 0);
    int stage = 0;
    for (int first = 0; first < n; first += DEPTH) {
        if (STAGES == 1) {
            fetch(0, first);
            wait_for_copies<0>();
        } else if (first + DEPTH < n) {
            fetch(1 - stage, first + DEPTH);
            wait_for_copies<1>();  // these tiles have arrived; the next tiles may still be loading
        } else {
            wait_for_copies<0>();
        }
        __syncthreads();
        #pragma unroll
        for (int k = 0; k < DEPTH; k += 16) {
            unsigned left_parts[4][4], right_parts[2][4];
            #pragma unroll
            for (int i = 0; i < 4; ++i)
                load_matrices(left_parts[i], &of_a[stage][warp_row + 16 * i + lane % 16][k + lane / 16 * 8]);
            #pragma unroll
            for (int j = 0; j < 2; ++j)
                load_matrices_transposed(right_parts[j], &of_b[stage][k + lane % 16][warp_column + 16 * j + lane / 16 * 8]);
            #pragma unroll
            for (int i = 0; i < 4; ++i)
                #pragma unroll
                for (int j = 0; j < 4; ++j)
                    multiply_add(sums[i][j], left_parts[i], right_parts[j / 2][j % 2 * 2], right_parts[j / 2][j % 2 * 2 + 1]);
        }
        __syncthreads();
        if (STAGES == 2) stage = 1 - stage;
    }
    #pragma unroll
    for (int i = 0; i < 4; ++i)
        #pragma unroll
        for (int j = 0; j < 4; ++j)
            #pragma unroll
            for (int half = 0; half < 2; ++half) {
                const long long row = top + warp_row + 16 * i + 8 * half + lane / 4;
                const long long column = left + warp_column + 8 * j + lane % 4 * 2;
                if (row >= n || column >= n) continue;
                *reinterpret_cast<__half2*>(c + row * n + column) =
                    __float22half2_rn(float2{sums[i][j][2 * half], sums[i][j][2 * half + 1]});
            }
}
