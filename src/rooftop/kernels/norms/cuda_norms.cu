// Layer norm of x + input_bias + residual; a block computes one or several rows (rooftop.kernels.norms.cuda_norms).
//
// The registers of a thread contain CHUNKS packs of WIDTH neighbouring elements of a row, in float32. Half precision is
// converted in pairs (__half2, __nv_bfloat162), with one instruction for two elements. A row is summed by warp shuffles
// and then in shared memory, always in the same order. pieces.cu must precede this file.

// The mean of a row as the sum of two floats. If the values of a row are far from zero, the rounding error of a single
// float would be in all deviations. For half precision, `low` stays 0, because this error is far smaller than the
// rounding of the results.
struct Mean {
    float high, low;

    __device__ float apart(float value) const { return (value - high) - low; }
};

// ---- statistics of a row in registers ------------------------------------------------------------------------------

// Compute the mean of a row from the sum of this thread's values. Only for float32, a second sum computes `low`.
template <typename T, int WARPS, int CHUNKS, int WIDTH>
__device__ Mean mean_of_row(
    const float (&values)[CHUNKS][WIDTH], float sum, int columns, float* scratch, float* more_scratch) {
    Mean average = {row_sum<WARPS>(sum, scratch) / columns, 0.0f};
    if constexpr (sizeof(T) == 4) {
        float rest = 0.0f;
#pragma unroll
        for (int chunk = 0; chunk < CHUNKS; ++chunk) {
            if ((chunk * 32 * WARPS + threadIdx.x) * WIDTH < columns) {
#pragma unroll
                for (int i = 0; i < WIDTH; ++i) rest += average.apart(values[chunk][i]);
            }
        }
        average.low = row_sum<WARPS>(rest, more_scratch) / columns;
    }
    return average;
}

// 1 / the standard deviation of a row.
template <int WARPS, int CHUNKS, int WIDTH>
__device__ float scale_of_row(
    const float (&values)[CHUNKS][WIDTH], Mean average, int columns, float eps, float* scratch) {
    float squares = 0.0f;
#pragma unroll
    for (int chunk = 0; chunk < CHUNKS; ++chunk) {
        if ((chunk * 32 * WARPS + threadIdx.x) * WIDTH < columns) {
#pragma unroll
            for (int i = 0; i < WIDTH; ++i) {
                const float centred = average.apart(values[chunk][i]);
                squares += centred * centred;
            }
        }
    }
    return 1.0f / sqrtf(row_sum<WARPS>(squares, scratch) / columns + eps);
}

// ---- kernels -------------------------------------------------------------------------------------------------------

// Compute and store y of one pack: normalized values times weight plus bias.
template <typename P, int WIDTH, typename Y>
__device__ void finish(float (&values)[WIDTH], Mean average, float scale, const P* weight, const P* bias, Y* y) {
#pragma unroll
    for (int i = 0; i < WIDTH; ++i) values[i] = average.apart(values[i]) * scale;
    if (weight != nullptr) {
        float factors[WIDTH];
        widen(load<P, WIDTH>(weight), factors);
#pragma unroll
        for (int i = 0; i < WIDTH; ++i) values[i] *= factors[i];
    }
    if (bias != nullptr) add(load<P, WIDTH>(bias), values);
    store(values, y);
}

// The kernel for rows that fit in registers. A block is (32 * WARPS, rows of a block); a row of several warps has a
// separate block. residual, input_bias, weight, bias and total may be null; the kernel then skips the operation with
// the null pointer.
template <typename T, typename P, int WIDTH, int CHUNKS, int WARPS, typename Y = T>
__global__ void __launch_bounds__(WARPS < 4 ? 128 : 32 * WARPS, 1) add_layer_norm(
    const T* __restrict__ x, const T* __restrict__ residual,                             // (M, N), (M, N)
    const P* __restrict__ input_bias, const P* __restrict__ weight, const P* __restrict__ bias,  // (N,) each
    Y* __restrict__ y, T* __restrict__ total, float* __restrict__ mean, float* __restrict__ rstd,  // (M, N) x 2, (M,) x 2
    long long rows, int columns, long long x_stride, long long residual_stride, float eps) {
    __shared__ float scratch[3][WARPS];
    const long long row = blockIdx.x * static_cast<long long>(blockDim.y) + threadIdx.y;
    if (row >= rows) return;  // whole warps exit, or whole blocks if a row has several warps

    Pack<T, WIDTH> loaded[CHUNKS], added[CHUNKS];  // all loads start before the first is used
    const T* source = x + row * x_stride;
#pragma unroll
    for (int chunk = 0; chunk < CHUNKS; ++chunk) {
        const int column = (chunk * 32 * WARPS + threadIdx.x) * WIDTH;
        if (column < columns) loaded[chunk] = load<T, WIDTH>(source + column);
    }
    if (residual != nullptr) {
        source = residual + row * residual_stride;
#pragma unroll
        for (int chunk = 0; chunk < CHUNKS; ++chunk) {
            const int column = (chunk * 32 * WARPS + threadIdx.x) * WIDTH;
            if (column < columns) added[chunk] = load<T, WIDTH>(source + column);
        }
    }

    float values[CHUNKS][WIDTH];
    float sum = 0.0f;
#pragma unroll
    for (int chunk = 0; chunk < CHUNKS; ++chunk) {
        const int column = (chunk * 32 * WARPS + threadIdx.x) * WIDTH;
        if (column < columns) {
            widen(loaded[chunk], values[chunk]);
            if (input_bias != nullptr) add(load<P, WIDTH>(input_bias + column), values[chunk]);
            if (residual != nullptr) add(added[chunk], values[chunk]);
            if (total != nullptr) store_rounded(values[chunk], total + row * columns + column);
#pragma unroll
            for (int i = 0; i < WIDTH; ++i) sum += values[chunk][i];
        }
    }
    const Mean average = mean_of_row<T, WARPS>(values, sum, columns, scratch[0], scratch[2]);
    const float scale = scale_of_row<WARPS>(values, average, columns, eps, scratch[1]);

#pragma unroll
    for (int chunk = 0; chunk < CHUNKS; ++chunk) {
        const int column = (chunk * 32 * WARPS + threadIdx.x) * WIDTH;
        if (column < columns) {
            finish<P, WIDTH>(values[chunk], average, scale, weight == nullptr ? nullptr : weight + column,
                                bias == nullptr ? nullptr : bias + column, y + row * columns + column);
        }
    }
    if (threadIdx.x == 0) {
        mean[row] = average.high;
        rstd[row] = scale;
    }
}

// x + input_bias + residual of one pack of a long row.
template <typename T, typename P, int WIDTH>
__device__ void add_up(const T* x, const T* residual, const P* input_bias, int column, float (&values)[WIDTH]) {
    widen(load<T, WIDTH>(x + column), values);
    if (input_bias != nullptr) add(load<P, WIDTH>(input_bias + column), values);
    if (residual != nullptr) add(load<T, WIDTH>(residual + column), values);
}

// The kernel for longer rows: a block reads its row twice, the second time mostly from L2. Each thread computes the
// mean and squared deviations of its own elements (Welford 1962). The statistics of all threads are merged at the end
// (Chan, Golub and LeVeque 1979).
template <typename T, typename P, int WIDTH, int WARPS, typename Y = T>
__global__ void __launch_bounds__(32 * WARPS) add_layer_norm_long(
    const T* __restrict__ x, const T* __restrict__ residual,  // shapes as above
    const P* __restrict__ input_bias, const P* __restrict__ weight, const P* __restrict__ bias,
    Y* __restrict__ y, T* __restrict__ total, float* __restrict__ mean, float* __restrict__ rstd,
    long long rows, int columns, long long x_stride, long long residual_stride, float eps) {
    __shared__ float scratch[3][WARPS];
    const long long row = blockIdx.x;
    x += row * x_stride;
    if (residual != nullptr) residual += row * residual_stride;

    const int first = threadIdx.x * WIDTH, step = 32 * WARPS * WIDTH;
    float values[WIDTH];
    float own_mean = 0.0f, own_squares = 0.0f, count = 0.0f;
    for (int column = first; column < columns; column += step) {
        add_up<T, P, WIDTH>(x, residual, input_bias, column, values);
        if (total != nullptr) store_rounded(values, total + row * columns + column);
#pragma unroll
        for (int i = 0; i < WIDTH; ++i) {
            count += 1.0f;
            const float apart = values[i] - own_mean;
            own_mean += apart / count;
            own_squares += apart * (values[i] - own_mean);
        }
    }
    Mean average = {row_sum<WARPS>(count * own_mean, scratch[0]) / columns, 0.0f};
    if constexpr (sizeof(T) == 4) average.low = row_sum<WARPS>(count * average.apart(own_mean), scratch[2]) / columns;
    const float apart = average.apart(own_mean);
    const float squares = row_sum<WARPS>(own_squares + count * apart * apart, scratch[1]);
    const float scale = 1.0f / sqrtf(squares / columns + eps);

    for (int column = first; column < columns; column += step) {
        if (total != nullptr) {
            widen(load<T, WIDTH>(total + row * columns + column), values);  // this thread stored these elements
        } else {
            add_up<T, P, WIDTH>(x, residual, input_bias, column, values);
        }
        finish<P, WIDTH>(values, average, scale, weight == nullptr ? nullptr : weight + column,
                            bias == nullptr ? nullptr : bias + column, y + row * columns + column);
    }
    if (threadIdx.x == 0) {
        mean[row] = average.high;
        rstd[row] = scale;
    }
}
