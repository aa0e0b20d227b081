// C = A + B for row-major matrices of rows x columns. The kernels differ in how grid and block are laid over the
// matrix: which element each thread takes, and so which addresses the 32 threads of a warp access at the same time.

// 1-D grid, one thread per column. The thread loops down its column: a warp accesses 32 neighbours in one row.
__global__ void each_column(const float* a, const float* b, float* c, int rows, int columns) {
    const int column = blockIdx.x * blockDim.x + threadIdx.x;
    if (column >= columns) return;
    for (int row = 0; row < rows; ++row) {
        const long long at = row * static_cast<long long>(columns) + column;
        c[at] = a[at] + b[at];
    }
}

// 1-D grid, one thread per row. The thread loops along its row: a warp accesses 32 rows, far apart in memory.
__global__ void each_row(const float* a, const float* b, float* c, int rows, int columns) {
    const int row = blockIdx.x * blockDim.x + threadIdx.x;
    if (row >= rows) return;
    for (int column = 0; column < columns; ++column) {
        const long long at = row * static_cast<long long>(columns) + column;
        c[at] = a[at] + b[at];
    }
}

// 1-D grid, one thread per element: the matrix is treated as one long vector.
__global__ void each_element(const float* a, const float* b, float* c, int rows, int columns) {
    const long long at = blockIdx.x * static_cast<long long>(blockDim.x) + threadIdx.x;
    if (at < rows * static_cast<long long>(columns)) c[at] = a[at] + b[at];
}

// 2-D grid: x along the columns, y down the rows.
__global__ void grid_2d(const float* a, const float* b, float* c, int rows, int columns) {
    const int column = blockIdx.x * blockDim.x + threadIdx.x, row = blockIdx.y * blockDim.y + threadIdx.y;
    if (row >= rows || column >= columns) return;
    const long long at = row * static_cast<long long>(columns) + column;
    c[at] = a[at] + b[at];
}

// A 2-D grid as in `grid_2d`, but with x down the rows: the index that changes fastest within a warp has the large
// stride in memory.
__global__ void grid_2d_swapped(const float* a, const float* b, float* c, int rows, int columns) {
    const int row = blockIdx.x * blockDim.x + threadIdx.x, column = blockIdx.y * blockDim.y + threadIdx.y;
    if (row >= rows || column >= columns) return;
    const long long at = row * static_cast<long long>(columns) + column;
    c[at] = a[at] + b[at];
}

// 3-D grid: z counts slabs of `slab` rows, y counts the rows within a slab.
__global__ void grid_3d(const float* a, const float* b, float* c, int rows, int columns, int slab) {
    const int column = blockIdx.x * blockDim.x + threadIdx.x, within = blockIdx.y * blockDim.y + threadIdx.y;
    const int row = blockIdx.z * slab + within;
    if (within >= slab || row >= rows || column >= columns) return;
    const long long at = row * static_cast<long long>(columns) + column;
    c[at] = a[at] + b[at];
}
