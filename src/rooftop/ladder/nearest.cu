// The squared distance of each point to the nearest of some centres. Points are stored as all x, all y, all z, so that
// neighbouring threads read neighbouring addresses. Each thread holds POINTS points in registers, so that a centre that
// it reads from shared memory serves all these points.

constexpr int MOST_CENTRES = 1024;  // 12 KB; further centres are ignored

template <int POINTS>
__global__ void nearest(const float* points, const float* centres, float* distances, long long n, int count) {
    __shared__ float kept[3 * MOST_CENTRES];
    const int here = count < MOST_CENTRES ? count : MOST_CENTRES;
    for (int i = threadIdx.x; i < 3 * here; i += blockDim.x) kept[i] = centres[i];
    __syncthreads();
    const long long first = blockIdx.x * static_cast<long long>(POINTS) * blockDim.x + threadIdx.x;
    float x[POINTS], y[POINTS], z[POINTS], best[POINTS];
    #pragma unroll
    for (int p = 0; p < POINTS; ++p) {
        const long long i = first + p * static_cast<long long>(blockDim.x);
        const bool inside = i < n;
        x[p] = inside ? points[i] : 0.0f;
        y[p] = inside ? points[n + i] : 0.0f;
        z[p] = inside ? points[2 * n + i] : 0.0f;
        best[p] = 3.4e38f;
    }
    for (int c = 0; c < here; ++c) {
        const float cx = kept[3 * c], cy = kept[3 * c + 1], cz = kept[3 * c + 2];
        #pragma unroll
        for (int p = 0; p < POINTS; ++p) {
            const float dx = x[p] - cx, dy = y[p] - cy, dz = z[p] - cz;
            const float distance = dx * dx + dy * dy + dz * dz;
            best[p] = distance < best[p] ? distance : best[p];
        }
    }
    #pragma unroll
    for (int p = 0; p < POINTS; ++p) {
        const long long i = first + p * static_cast<long long>(blockDim.x);
        if (i < n) distances[i] = best[p];
    }
}
