// Trilinear interpolation between the eight corners of a point's cell (rooftop.kernels.lookups.cuda_interpolations).
//
// A row of threads computes one point, WIDTH channels per thread at a time. Neighbouring threads read neighbouring
// addresses, and each thread loads all eight corners at the same time.

#include <cuda_bf16.h>
#include <cuda_fp16.h>

template <typename T, int WIDTH>
struct alignas(sizeof(T) * WIDTH) Pack {
    T elements[WIDTH];
};

template <typename T>
struct Accumulator {
    using type = float;
};
template <>
struct Accumulator<double> {
    using type = double;
};

template <typename T, int WIDTH>
__device__ Pack<T, WIDTH> load(const T* from) {
    return *reinterpret_cast<const Pack<T, WIDTH>*>(from);
}

// Corner 4 i + 2 j + k is at (i, j, k) of the cell. A point (u, v, w) in [-1, 1] has weight (1 + u) / 2 at i = 1.
template <typename A, typename P>
struct Corners {
    A along[3][2];  // weights of both ends in each dimension

    __device__ explicit Corners(const P* point) {
#pragma unroll
        for (int axis = 0; axis < 3; ++axis) {
            along[axis][1] = (static_cast<A>(point[axis]) + A(1)) * A(0.5);
            along[axis][0] = A(1) - along[axis][1];
        }
    }

    __device__ A weight(int corner) const { return along[0][corner / 4] * along[1][corner / 2 % 2] * along[2][corner % 2]; }

    // The derivative of a corner's weight along one coordinate of the point.
    __device__ A slope(int corner, int axis) const {
        const int bits[3] = {corner / 4, corner / 2 % 2, corner % 2};
        A product = bits[axis] ? A(0.5) : A(-0.5);
#pragma unroll
        for (int other = 0; other < 3; ++other) {
            if (other != axis) product *= along[other][bits[other]];
        }
        return product;
    }
};

// A block is (lanes of a point, points of a block). C is a multiple of WIDTH.
template <typename T, typename P, int WIDTH>
__global__ void trilinear_forward(
    const T* __restrict__ features, const P* __restrict__ points, T* __restrict__ out,  // (B, 8, C), (B, 3), (B, C)
    long long count, int channels) {
    using A = typename Accumulator<T>::type;
    const long long point = blockIdx.x * static_cast<long long>(blockDim.y) + threadIdx.y;
    if (point >= count) return;
    const Corners<A, P> corners(points + 3 * point);
    features += point * 8 * channels;
    for (int channel = threadIdx.x * WIDTH; channel < channels; channel += blockDim.x * WIDTH) {
        Pack<T, WIDTH> loaded[8];
#pragma unroll
        for (int corner = 0; corner < 8; ++corner) {
            loaded[corner] = load<T, WIDTH>(features + static_cast<long long>(corner) * channels + channel);
        }
        Pack<T, WIDTH> result;
#pragma unroll
        for (int i = 0; i < WIDTH; ++i) {
            A sum = A(0);
#pragma unroll
            for (int corner = 0; corner < 8; ++corner) {
                sum += corners.weight(corner) * static_cast<A>(loaded[corner].elements[i]);
            }
            result.elements[i] = static_cast<T>(sum);
        }
        *reinterpret_cast<Pack<T, WIDTH>*>(out + point * channels + channel) = result;
    }
}

// Compute the gradients of the features and of the points; the pointer of a gradient that is not needed is null. The
// lanes of a point (a power of two, up to 32) sum over the point's channels by shuffles, so results are deterministic.
template <typename T, typename P, int WIDTH>
__global__ void trilinear_backward(
    const T* __restrict__ gradient, const T* __restrict__ features, const P* __restrict__ points,  // (B, C), (B, 8, C), (B, 3)
    T* __restrict__ dfeatures, P* __restrict__ dpoints,                                            // (B, 8, C), (B, 3)
    long long count, int channels) {
    using A = typename Accumulator<T>::type;
    const long long asked = blockIdx.x * static_cast<long long>(blockDim.y) + threadIdx.y;
    const long long point = asked < count ? asked : count - 1;  // all lanes of a warp must take part in the shuffles
    const int last = asked < count ? channels : 0;
    const Corners<A, P> corners(points + 3 * point);
    const long long first = point * 8 * channels;
    A products[8] = {};  // for each corner, gradient * features summed over channels
    for (int channel = threadIdx.x * WIDTH; channel < last; channel += blockDim.x * WIDTH) {
        const Pack<T, WIDTH> dout = load<T, WIDTH>(gradient + point * channels + channel);
#pragma unroll
        for (int corner = 0; corner < 8; ++corner) {
            const long long at = first + static_cast<long long>(corner) * channels + channel;
            if (dfeatures != nullptr) {
                Pack<T, WIDTH> result;
#pragma unroll
                for (int i = 0; i < WIDTH; ++i) {
                    result.elements[i] = static_cast<T>(corners.weight(corner) * static_cast<A>(dout.elements[i]));
                }
                *reinterpret_cast<Pack<T, WIDTH>*>(dfeatures + at) = result;
            }
            if (dpoints != nullptr) {
                const Pack<T, WIDTH> loaded = load<T, WIDTH>(features + at);
#pragma unroll
                for (int i = 0; i < WIDTH; ++i) {
                    products[corner] += static_cast<A>(dout.elements[i]) * static_cast<A>(loaded.elements[i]);
                }
            }
        }
    }
    if (dpoints == nullptr) return;
#pragma unroll
    for (int axis = 0; axis < 3; ++axis) {
        A sum = A(0);
#pragma unroll
        for (int corner = 0; corner < 8; ++corner) sum += corners.slope(corner, axis) * products[corner];
        for (int offset = blockDim.x / 2; offset > 0; offset /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, offset);
        if (threadIdx.x == 0 && asked < count) dpoints[3 * point + axis] = static_cast<P>(sum);
    }
}
