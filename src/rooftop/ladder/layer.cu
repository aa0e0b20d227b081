// y = sigmoid(x W^T + b), and the kernels for training this layer. All in float32, with float32 sums.

__device__ float sigmoid(float z) { return 1.0f / (1.0f + expf(-z)); }

// One thread computes each output, with bias and sigmoid.
__global__ void layer_each(const float* x, const float* weight, const float* bias, float* y, int rows, int columns, int depth) {
    const int row = blockIdx.y * blockDim.y + threadIdx.y, column = blockIdx.x * blockDim.x + threadIdx.x;
    if (row >= rows || column >= columns) return;
    float sum = bias[column];
    for (int k = 0; k < depth; ++k)
        sum += x[row * static_cast<long long>(depth) + k] * weight[column * static_cast<long long>(depth) + k];
    y[row * static_cast<long long>(columns) + column] = sigmoid(sum);
}

// The operation that the kernel applies to a sum before it writes the result to c.
constexpr int PLAIN = 0;     // the sum itself
constexpr int SIGMOID = 1;   // sigmoid(sum + extra[column])
constexpr int GRADIENT = 2;  // sum * h (1 - h), h = extra[row, column]: backward of a sigmoid whose result was h
constexpr int STEP = 3;      // c - rate * sum: a step of gradient descent

// a (rows, depth) times b (depth, columns). Each has its own strides, so a transposed operand needs no copy. A block of
// 256 threads computes 64 x 64 elements, each thread 4 x 4.
template <int EPILOGUE>
__global__ void __launch_bounds__(256) product(
    const float* a, const float* b, const float* extra, float* c, int rows, int columns, int depth,
    long long a_row, long long a_k, long long b_k, long long b_column, float rate) {
    constexpr int TILE = 64, DEPTH = 16, THREADS = 256, EACH = TILE * DEPTH / THREADS;
    __shared__ float of_a[DEPTH][TILE + 1], of_b[DEPTH][TILE + 1];
    const int t = threadIdx.x, y = t / 16 * 4, x = t % 16;  // rows y to y + 3, columns x, x + 16, x + 32, x + 48
    const int top = blockIdx.y * TILE, left = blockIdx.x * TILE;
    float sums[4][4] = {};
    for (int first = 0; first < depth; first += DEPTH) {
        #pragma unroll
        for (int i = 0; i < EACH; ++i) {  // neighbouring threads read neighbouring addresses
            const int place = t + i * THREADS;
            const int ak = a_k == 1 ? place % DEPTH : place / TILE, row = a_k == 1 ? place / DEPTH : place % TILE;
            const bool in_a = top + row < rows && first + ak < depth;
            of_a[ak][row] = in_a ? a[(top + row) * a_row + (first + ak) * a_k] : 0.0f;
            const int bk = b_k == 1 ? place % DEPTH : place / TILE, column = b_k == 1 ? place / DEPTH : place % TILE;
            const bool in_b = left + column < columns && first + bk < depth;
            of_b[bk][column] = in_b ? b[(first + bk) * b_k + (left + column) * b_column] : 0.0f;
        }
        __syncthreads();
        #pragma unroll
        for (int k = 0; k < DEPTH; ++k)
            #pragma unroll
            for (int i = 0; i < 4; ++i)
                #pragma unroll
                for (int j = 0; j < 4; ++j) sums[i][j] += of_a[k][y + i] * of_b[k][x + 16 * j];
        __syncthreads();
    }
    #pragma unroll
    for (int i = 0; i < 4; ++i)
        #pragma unroll
        for (int j = 0; j < 4; ++j) {
            const int row = top + y + i, column = left + x + 16 * j;
            if (row >= rows || column >= columns) continue;
            const long long at = row * static_cast<long long>(columns) + column;
            const float sum = sums[i][j];
            if (EPILOGUE == PLAIN) c[at] = sum;
            if (EPILOGUE == SIGMOID) c[at] = sigmoid(sum + extra[column]);
            if (EPILOGUE == GRADIENT) c[at] = sum * extra[at] * (1.0f - extra[at]);
            if (EPILOGUE == STEP) c[at] -= rate * sum;
        }
}

// Bias and sigmoid in a separate kernel, which reads y from memory and writes it back.
__global__ void bias_sigmoid(float* y, const float* bias, long long count, int columns) {
    const long long i = blockIdx.x * static_cast<long long>(blockDim.x) + threadIdx.x;
    if (i < count) y[i] = sigmoid(y[i] + bias[i % columns]);
}

// dz = (y - one_hot(target)) / rows: the gradient of the loss with respect to the last sigmoid's input. The loss is the
// cross entropy of the sigmoids, averaged over the rows.
__global__ void output_gradient(const float* y, const long long* target, float* dz, int rows, int columns) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < rows * columns) dz[i] = (y[i] - (target[i / columns] == i % columns ? 1.0f : 0.0f)) / rows;
}

// bias -= rate * the sum of dz over its rows, with one thread per column.
__global__ void bias_step(const float* dz, float* bias, int rows, int columns, float rate) {
    const int column = blockIdx.x * blockDim.x + threadIdx.x;
    if (column >= columns) return;
    float sum = 0.0f;
    for (int row = 0; row < rows; ++row) sum += dz[row * columns + column];
    bias[column] -= rate * sum;
}
