// z = x + y for n elements. All kernels give the same result. They differ in which thread takes which elements.

__global__ void one_block(const float* x, const float* y, float* z, long long n) {
    for (long long i = threadIdx.x; i < n; i += blockDim.x) z[i] = x[i] + y[i];
}

__global__ void one_each(const float* x, const float* y, float* z, long long n) {
    const long long i = blockIdx.x * static_cast<long long>(blockDim.x) + threadIdx.x;
    if (i < n) z[i] = x[i] + y[i];
}

__global__ void grid_stride(const float* x, const float* y, float* z, long long n) {
    const long long step = gridDim.x * static_cast<long long>(blockDim.x);
    for (long long i = blockIdx.x * static_cast<long long>(blockDim.x) + threadIdx.x; i < n; i += step)
        z[i] = x[i] + y[i];
}

// Accesses of 16 bytes. A thread has FLIGHT loads from each input in flight before it uses the first. In each load,
// neighbouring threads read neighbouring addresses. The last n % 4 elements are added one by one.
template <int FLIGHT> __global__ void wide(const float4* x, const float4* y, float4* z, long long n) {
    const long long vectors = n / 4;
    const long long first = blockIdx.x * static_cast<long long>(FLIGHT) * blockDim.x + threadIdx.x;
    float4 a[FLIGHT], b[FLIGHT];
    #pragma unroll
    for (int k = 0; k < FLIGHT; ++k) {
        const long long i = first + k * blockDim.x;
        if (i < vectors) {
            a[k] = x[i];
            b[k] = y[i];
        }
    }
    #pragma unroll
    for (int k = 0; k < FLIGHT; ++k) {
        const long long i = first + k * blockDim.x;
        if (i < vectors) z[i] = float4{a[k].x + b[k].x, a[k].y + b[k].y, a[k].z + b[k].z, a[k].w + b[k].w};
    }
    const long long rest = 4 * vectors + threadIdx.x;
    if (blockIdx.x == 0 && rest < n) {
        const float* one = reinterpret_cast<const float*>(x);
        const float* other = reinterpret_cast<const float*>(y);
        reinterpret_cast<float*>(z)[rest] = one[rest] + other[rest];
    }
}
