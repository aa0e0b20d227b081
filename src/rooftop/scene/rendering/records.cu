// Shared by the kernels that read records of visible clusters; included after pieces.cu. This file is
// equivalent to records.py.

constexpr int RECORD_QUARTERS = 4;  // number of quarters of a record, of 16 bytes each
constexpr int DEPTH_SHIFT = 33, TRIANGLE_BITS = 7;

enum Kind { SEPARATE, FANS, FANS_AND_EXPLICIT };  // how a cluster's corners are stored
struct Streams {
    const int *masks, *references;
    int kind, reference_bits, vertices, vertices_before, references_before;
};

__device__ __forceinline__ int bits(const int* words, int bit, int count) {
    const int* word = words + (bit >> 5);
    return int(__funnelshift_r(unsigned(word[0]), unsigned(word[1]), bit & 31) & (count == 32 ? ~0u : (1u << count) - 1));
}
__device__ __forceinline__ int word_of(float value) {
    union { float value; int word; } bits = {value};
    return bits.word;
}

// Decode the vertices of a triangle, as `corners_of` in records.py does. All lanes of a warp read the same words of the
// masks.
__device__ __forceinline__ void corners_of(const Streams& cluster, int triangle, int (&corners)[3]) {
    const int own = triangle >> 5, bit = triangle & 31;
    const unsigned below = (1u << bit) - 1;
    const unsigned low = cluster.masks[own], high = cluster.masks[4 + own];
    const unsigned third = cluster.kind == FANS_AND_EXPLICIT ? cluster.masks[NEW_WORDS + own] : 0u;
    int n = 0, first = bit;
    if (own > 0) {
        n = cluster.vertices_before >> (8 * own - 8) & 255;
        first += cluster.references_before >> (10 * own - 10) & 1023;
    }
    const int ones = __popc(low & below), earlier = __popc(third & below);
    n += ones + 2 * __popc(high & below) - 3 * earlier;
    first += ones - 2 * __popc(low & high & below) + 3 * earlier;
    if (cluster.kind == SEPARATE) first = 3 * triangle - n;
    const int new_corners = (low >> bit & 1) + 2 * (high >> bit & 1);
    const bool is_explicit = third >> bit & 1, fan = new_corners == 0 && cluster.kind != SEPARATE;
    const int old = is_explicit ? 3 : 3 - new_corners;
    bool after_new = false;  // if true, a fan's second corner is the vertex before the newest
    if (fan) {
        const int previous = max(triangle - 1, 0);
        after_new = unsigned(cluster.masks[4 + (previous >> 5)]) >> (previous & 31) & 1;
        if (cluster.kind == FANS_AND_EXPLICIT && unsigned(cluster.masks[NEW_WORDS + (previous >> 5)]) >> (previous & 31) & 1) after_new = false;
    }
    // For each corner: the vertex from which its reference counts down, the index of the reference, and whether the
    // corner has a reference.
    const int second = is_explicit || fan ? n - 2 : n - 1;
    const int back[3] = {n - 1, second, second};
    const int at[3] = {first, fan ? first - 1 : first + 1, fan ? first : first + 2};
    const bool has[3] = {!fan && old > 0, fan ? !after_new : old > 1, old > 2};
#pragma unroll
    for (int corner = 0; corner < 3; ++corner) {
        int vertex = fan || corner < old ? back[corner] : n + corner - old;
        if (has[corner]) vertex -= bits(cluster.references, at[corner] * cluster.reference_bits, cluster.reference_bits);
        corners[corner] = min(max(vertex, 0), cluster.vertices - 1);
    }
}
