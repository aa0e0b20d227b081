// Hierarchical z in two launches. Each level has the farthest depths in squares of pixels, which are twice as wide as
// those of the previous level. In the first launch, a block reduces a tile of 64 x 64 pixels to levels 1 to 6. In the
// second launch, one block per view computes the few texels of higher levels. The portable version is hzb.py, in Warp,
// with a launch for every second level. Texels outside the picture have the nearest depth, so they do not affect the
// result.

constexpr int DEPTH_SHIFT = 33;
constexpr int SIDE = 16, THREADS = SIDE * SIDE;  // SIDE: texels of level 2 along a tile's side; one thread per texel
constexpr int TILE_LEVEL = 6;
constexpr float NEAREST = 1.0f;

struct Levels {  // the hierarchical z levels of one view
    float* texels;  // texels of all views
    const int* at;  // start of each level
    int count, width, height;
    __device__ int columns(int level) const { return ((width - 1) >> level) + 1; }
    __device__ int rows(int level) const { return ((height - 1) >> level) + 1; }
    __device__ bool has(int level, int y, int x) const { return level < count && x < columns(level) && y < rows(level); }
    __device__ float* place(int level, int y, int x) const { return texels + at[level] + (long long)y * columns(level) + x; }
};

__device__ __forceinline__ Levels levels_of(float* hzb, const int* hzb_at, int stride, const int* pictures, int view) {
    const int* picture = pictures + PICTURE * view;
    return {hzb, hzb_at + stride * view, picture[LEVELS], picture[WIDTH], picture[HEIGHT]};
}

__global__ void __launch_bounds__(THREADS) reduce_tiles(const long long* pixels, float* hzb, const int* hzb_at, int stride,
                                                        const int* pictures, int tiles_across) {
    __shared__ float texels[SIDE][SIDE + 1];
    const int view = blockIdx.x / tiles_across, x = threadIdx.x % SIDE, y = threadIdx.x / SIDE;
    const Levels all = levels_of(hzb, hzb_at, stride, pictures, view);
    const int width = all.width, height = all.height;
    // origin of the tile, in texels of level 2
    const int tile_x = blockIdx.x % tiles_across * SIDE, tile_y = blockIdx.y * SIDE;
    if (4 * tile_x >= width || 4 * tile_y >= height) return;  // this tile exists only in larger views
    const long long* picture = pixels + pictures[PICTURE * view + PICTURE_AT];
    float farthest = NEAREST;
    for (int part = 0; part < 4; ++part) {
        const int u = 2 * (tile_x + x) + part % 2, v = 2 * (tile_y + y) + part / 2;
        if (!all.has(1, v, u)) continue;
        float of_part = NEAREST;
        for (int pixel = 0; pixel < 4; ++pixel) {
            const int column = 2 * u + pixel % 2, row = 2 * v + pixel / 2;
            if (column < width && row < height)
                of_part = smaller_of(of_part, real(int(picture[(long long)row * width + column] >> DEPTH_SHIFT)));
        }
        *all.place(1, v, u) = of_part;
        farthest = smaller_of(farthest, of_part);
    }
    if (all.has(2, tile_y + y, tile_x + x)) *all.place(2, tile_y + y, tile_x + x) = farthest;
    texels[y][x] = farthest;
    for (int level = 3, side = SIDE / 2; level <= TILE_LEVEL; ++level, side /= 2) {
        __syncthreads();
        const bool works = x < side && y < side;
        if (works)
            farthest = smaller_of(smaller_of(texels[2 * y][2 * x], texels[2 * y][2 * x + 1]),
                                  smaller_of(texels[2 * y + 1][2 * x], texels[2 * y + 1][2 * x + 1]));
        __syncthreads();
        if (works) {
            texels[y][x] = farthest;
            const int u = (tile_x >> (level - 2)) + x, v = (tile_y >> (level - 2)) + y;
            if (all.has(level, v, u)) *all.place(level, v, u) = farthest;
        }
    }
}

__global__ void __launch_bounds__(THREADS) reduce_rest(float* hzb, const int* hzb_at, int stride, const int* pictures) {
    const Levels all = levels_of(hzb, hzb_at, stride, pictures, blockIdx.x);
    for (int level = TILE_LEVEL + 1; level < all.count; ++level) {
        const int columns = all.columns(level), texels = columns * all.rows(level);
        for (int texel = threadIdx.x; texel < texels; texel += THREADS) {
            const int x = texel % columns, y = texel / columns;
            float farthest = NEAREST;
            for (int part = 0; part < 4; ++part) {
                const int u = 2 * x + part % 2, v = 2 * y + part / 2;
                if (all.has(level - 1, v, u)) farthest = smaller_of(farthest, *all.place(level - 1, v, u));
            }
            *all.place(level, y, x) = farthest;
        }
        __syncthreads();
    }
}
