// Shared by the CUDA C++ kernels of a frame: the memory layout of the scene (as in layouts.py, buffers.py and
// clusters.py) and the arithmetic of projections.py. The operations are the same as there, compiled without fused
// multiply-add, so results have the same bits.

typedef long long Entry;  // pair << 32 | what

constexpr int PASS = 64;  // number of counters per pass
constexpr int GROUPS = 0, VISIBLE = 1, HIDDEN_CHILDREN = 3, HIDDEN_CLUSTERS = 4, LARGE = 5;
constexpr int FX = 0, FY = 1, CX = 2, CY = 3, NEAR = 4, ORTHOGRAPHIC = 5, TANGENT = 6, LENS = 8;
// columns of a row of `pictures`, one row per view: the picture's size, the index of its first pixel, and the number of
// hierarchical z levels
constexpr int PICTURE = 4, WIDTH = 0, HEIGHT = 1, PICTURE_AT = 2, LEVELS = 3;
constexpr int PAGE_WORDS = 4, PAGE_GROUPS = 1, PAGE_GROUP_BITS = 16, PAGE_REPLACES = 1 << 24, GROUP_WORDS = 8;
constexpr int CLUSTER_WORDS = 21, CLUSTER_INDEX_BITS = 11, NEW_WORDS = 8, EXPLICIT_WORDS = 4;
constexpr int BOX_BITS = 9, LENGTH_BITS = 5, MANTISSA_BITS = 4;  // fields of the word HEAD_BOX
// Positions of words in a cluster's head: CLUSTER_* in pages before version 4, HEAD_* in short heads (version 4).
constexpr int CLUSTER_SPHERE = 0, CLUSTER_ERROR = 4, CLUSTER_BASE = 5, CLUSTER_EXTENT = 8, CLUSTER_COUNTS = 12;
constexpr int CLUSTER_SOURCE = 16;
constexpr int HEAD_BASE = 0, HEAD_COUNTS = 3, HEAD_BOX = 4, HEAD_SPHERE = 6, HEAD_ERROR = 10, HEAD_SOURCE = 11;

struct Vector { float x, y, z; };
struct List { Entry* items; int room; int* count; };

__device__ __forceinline__ float real(int word) {
    union { int word; float value; } bits = {word};
    return bits.value;
}
__device__ __forceinline__ Vector three(const int* words) { return {real(words[0]), real(words[1]), real(words[2])}; }
__device__ __forceinline__ float larger_of(float a, float b) { return fmaxf(a, b); }
__device__ __forceinline__ float smaller_of(float a, float b) { return fminf(a, b); }
__device__ __forceinline__ int pair_of(Entry entry) { return int(entry >> 32); }
__device__ __forceinline__ int what_of(Entry entry) { return int(entry & 0xffffffffll); }
__device__ __forceinline__ Entry entry_of(int pair, int what) { return (Entry(pair) << 32) | Entry(what); }

__device__ __forceinline__ Vector transformed(const float* m, Vector p) {
    return {m[0] * p.x + m[1] * p.y + m[2] * p.z + m[3], m[4] * p.x + m[5] * p.y + m[6] * p.z + m[7],
            m[8] * p.x + m[9] * p.y + m[10] * p.z + m[11]};
}

struct Head {
    const int* words;
    bool is_short;  // a head of version 4
    bool replaces;  // whether the head includes the group that the cluster replaces
};

__device__ __forceinline__ Head head_of(const int* page, int index) {
    const int word = page[PAGE_GROUPS], own = word >> PAGE_GROUP_BITS & 255;
    const int groups = word & ((1 << PAGE_GROUP_BITS) - 1);
    return {page + PAGE_WORDS + groups * GROUP_WORDS + index * (own ? own : CLUSTER_WORDS), own != 0, !own || word & PAGE_REPLACES};
}
__device__ __forceinline__ int box_length(int box, int axis) { return box >> axis * BOX_BITS & ((1 << LENGTH_BITS) - 1); }
