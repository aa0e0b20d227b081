// Stage 3 in one launch: warps that stay, and take nodes from one queue and groups from one list until both are empty.
// The portable twin is level_cull.py, in Warp; what is computed of a box or an error is the same, operation by operation
// (compiled without fused multiply-adds), so the same clusters are found, in another order.
//
// Counters, each with who changes it:
//   nodes_written    how many nodes were put into the queue; whoever appends
//   nodes_claimed    how many of them some warp has taken; the warp, four at most at a time
//   nodes_finished   how many of them have appended all that they lead to; the warp that took them
//   groups_written, groups_claimed   likewise of groups, which append nothing to either list
// An entry is written after its place was counted: EMPTY says that it is on its way. Nothing is left when as many nodes
// are finished as were written, and as many groups claimed; read in that order, since each number only grows.

typedef long long Entry;  // pair << 32 | what

#ifdef __CUDACC__
__device__ __forceinline__ void wait_a_little() { __nanosleep(64); }
#else
inline void wait_a_little() { let_others_run(); }
#endif

constexpr Entry EMPTY = -1;
constexpr float ROUNDING = 1e-6f;
constexpr int NODE_BATCH = 4;  // nodes of a warp at a time: 32 children
constexpr int PASS = 64;
constexpr int GROUPS = 0, VISIBLE = 1, HIDDEN_CHILDREN = 3, HIDDEN_CLUSTERS = 4, NODES_WRITTEN = 16;
constexpr int NODES_CLAIMED = 10, NODES_FINISHED = 11, GROUPS_CLAIMED = 12;
constexpr int FX = 0, FY = 1, CX = 2, CY = 3, NEAR = 4, ORTHOGRAPHIC = 5, TANGENT = 6, LENS = 8;
constexpr int CHILDREN = 8, CHILD_WORDS = 16, CHILD_SPHERE = 6, CHILD_ERROR = 10, CHILD_KIND = 11, CHILD_AT = 12, CHILD_FIRST = 13;
constexpr int PAGE_WORDS = 4, PAGE_GROUPS = 1, GROUP_WORDS = 8, CLUSTER_WORDS = 21;
constexpr int CLUSTER_SPHERE = 0, CLUSTER_ERROR = 4, CLUSTER_BASE = 5, CLUSTER_EXTENT = 8, CLUSTER_INDEX_BITS = 11;
constexpr int INNER = -1;

struct Vector { float x, y, z; };
struct List { Entry* items; int room; int* count; };

struct Scene {
    const int *words, *nodes, *mesh, *instance_mesh;
    const long long* page_at;
    const float *steps, *scale;
};
struct View {  // one camera, its pictures' depths, and transforms to it
    const float *lens, *matrices, *hzb;
};
struct Frame {
    int width, height, instances, hzb_levels, hzb_stride;
    const int* hzb_at;
    float pixel_error;
    bool history;
};

__device__ __forceinline__ float real(int word) {
    union { int word; float value; } bits = {word};
    return bits.value;
}
__device__ __forceinline__ Vector three(const int* words) { return {real(words[0]), real(words[1]), real(words[2])}; }
__device__ __forceinline__ float larger_of(float a, float b) { return a < b ? b : a; }
__device__ __forceinline__ float smaller_of(float a, float b) { return a < b ? a : b; }
__device__ __forceinline__ int pair_of(Entry entry) { return int(entry >> 32); }
__device__ __forceinline__ int what_of(Entry entry) { return int(entry & 0xffffffffll); }
__device__ __forceinline__ Entry entry_of(int pair, int what) { return (Entry(pair) << 32) | Entry(what); }

__device__ __forceinline__ int now_at(const int* count) { return *(volatile const int*)count; }

__device__ __forceinline__ void append(const List& list, Entry entry) {
    const int at = atomicAdd(list.count, 1);
    if (at < list.room) *(volatile Entry*)&list.items[at] = entry;
}

// ---- projections, as in projections.py ----

__device__ __forceinline__ Vector transformed(const float* m, Vector p) {
    return {m[0] * p.x + m[1] * p.y + m[2] * p.z + m[3], m[4] * p.x + m[5] * p.y + m[6] * p.z + m[7],
            m[8] * p.x + m[9] * p.y + m[10] * p.z + m[11]};
}
__device__ __forceinline__ float half_size(const float* row, Vector center, Vector half) {
    float size = 0.0f, terms = fabsf(row[3]);
    size += fabsf(row[0]) * half.x;
    terms += fabsf(row[0]) * (fabsf(center.x) + half.x);
    size += fabsf(row[1]) * half.y;
    terms += fabsf(row[1]) * (fabsf(center.y) + half.y);
    size += fabsf(row[2]) * half.z;
    terms += fabsf(row[2]) * (fabsf(center.z) + half.z);
    return size + ROUNDING * terms;
}
__device__ __forceinline__ Vector half_sizes(const float* m, Vector center, Vector half) {
    return {half_size(m, center, half), half_size(m + 4, center, half), half_size(m + 8, center, half)};
}

__device__ bool too_coarse(const Scene& scene, const Frame& frame, const View& view, int instance, Vector center, float radius, float error) {
    const float* lens = view.lens;
    const float scale = fabsf(scene.scale[instance]), focal = larger_of(lens[FX], lens[FY]), reach = radius * scale;
    const Vector at = transformed(view.matrices, center);
    if (lens[ORTHOGRAPHIC] > 0.0f) return focal * error * scale > frame.pixel_error;
    const float depth = larger_of(at.z - reach, lens[NEAR]);
    float aside = (sqrtf(at.x * at.x + at.y * at.y) + reach) / depth;
    aside = smaller_of(aside, lens[TANGENT]);
    return focal * error * scale * sqrtf(1.0f + aside * aside) / depth > frame.pixel_error;
}

__device__ bool is_outside(const Frame& frame, const float* lens, Vector center, Vector half) {
    const float right = float(frame.width) - 0.5f - lens[CX], left = -0.5f - lens[CX];
    const float bottom = float(frame.height) - 0.5f - lens[CY], top = -0.5f - lens[CY], fx = lens[FX], fy = lens[FY];
    if (center.z + half.z < lens[NEAR]) return true;
    if (lens[ORTHOGRAPHIC] > 0.0f) {
        const float x = fx * center.x, y = fy * center.y;
        return x + fx * half.x < left || x - fx * half.x > right || y + fy * half.y < top || y - fy * half.y > bottom;
    }
    return fx * center.x - left * center.z + fx * half.x + fabsf(left) * half.z < 0.0f ||
           right * center.z - fx * center.x + fx * half.x + fabsf(right) * half.z < 0.0f ||
           fy * center.y - top * center.z + fy * half.y + fabsf(top) * half.z < 0.0f ||
           bottom * center.z - fy * center.y + fy * half.y + fabsf(bottom) * half.z < 0.0f;
}

__device__ __forceinline__ int clamped(float pixels, int size) {
    return int(smaller_of(larger_of(0.0f, pixels), float(size - 1)));
}
__device__ bool is_hidden(const Frame& frame, const float* lens, const float* hzb, Vector center, Vector half) {
    const float near = lens[NEAR], nearest = center.z - half.z, farthest = center.z + half.z;
    if (nearest < near || frame.hzb_levels < 2) return false;
    float over_left = 1.0f, over_right = 1.0f, over_top = 1.0f, over_bottom = 1.0f;
    if (!(lens[ORTHOGRAPHIC] > 0.0f)) {
        over_left = center.x - half.x < 0.0f ? nearest : farthest;
        over_right = center.x + half.x > 0.0f ? nearest : farthest;
        over_top = center.y - half.y < 0.0f ? nearest : farthest;
        over_bottom = center.y + half.y > 0.0f ? nearest : farthest;
    }
    const float left = lens[FX] * (center.x - half.x) / over_left + lens[CX];
    const float right = lens[FX] * (center.x + half.x) / over_right + lens[CX];
    const float top = lens[FY] * (center.y - half.y) / over_top + lens[CY];
    const float bottom = lens[FY] * (center.y + half.y) / over_bottom + lens[CY];
    const int x0 = clamped(floorf(left - 1.0f), frame.width), x1 = clamped(ceilf(right + 1.0f), frame.width);
    const int y0 = clamped(floorf(top - 1.0f), frame.height), y1 = clamped(ceilf(bottom + 1.0f), frame.height);
    int level = 1;
    while (((x1 >> level) - (x0 >> level) > 2 || (y1 >> level) - (y0 >> level) > 2) && level + 1 < frame.hzb_levels) ++level;
    const int columns = ((frame.width - 1) >> level) + 1;
    const float in_front = near / nearest * (1.0f + ROUNDING);
    for (int y = y0 >> level; y <= y1 >> level; ++y)
        for (int x = x0 >> level; x <= x1 >> level; ++x)
            if (hzb[frame.hzb_at[level] + y * columns + x] <= in_front) return false;
    return true;
}

enum State { SHOWN, HIDDEN, UNSEEN };
__device__ State box_state(const Frame& frame, const View& now, const View& before, Vector center, Vector half) {
    if (is_outside(frame, now.lens, transformed(now.matrices, center), half_sizes(now.matrices, center, half))) return UNSEEN;
    if (!frame.history) return SHOWN;
    const Vector at = transformed(before.matrices, center), sizes = half_sizes(before.matrices, center, half);
    return is_hidden(frame, before.lens, before.hzb, at, sizes) ? HIDDEN : SHOWN;
}

// ---- what a warp does with what it has taken ----

// Up to `most` of what is written of a list and not yet claimed; for the whole warp: the first, or -1. `taken`: how many.
__device__ int claim(int* claimed, const int* written, int room, int most, int& taken) {
    int first = -1;
    taken = 0;
    if (threadIdx.x % 32 == 0) {
        const int there = min(now_at(written), room), next = now_at(claimed);
        if (next < there && atomicCAS(claimed, next, next + min(most, there - next)) == next) {
            first = next;
            taken = min(most, there - next);
        }
    }
    taken = __shfl_sync(0xffffffffu, taken, 0);
    return __shfl_sync(0xffffffffu, first, 0);
}
__device__ __forceinline__ Entry arrived(const Entry* place) {
    Entry entry;
    while ((entry = *(volatile const Entry*)place) == EMPTY) wait_a_little();
    return entry;
}

struct Views { const float *lens, *lens_before, *to_view, *before, *hzb_before; };
__device__ __forceinline__ View view_of(const Frame& frame, const float* lens, const float* matrices, const float* hzb, int pair) {
    const int view = pair / frame.instances;
    return {lens + LENS * view, matrices + 12ll * pair, hzb + (long long)frame.hzb_stride * view};
}

__device__ void ask_child(const Scene& scene, const Frame& frame, const Views& views, Entry node_entry, int slot,
                          const List& queue, const List& groups, const List& hidden_children) {
    const int pair = pair_of(node_entry), node = what_of(node_entry), instance = pair % frame.instances;
    const long long row = scene.mesh[4 * scene.instance_mesh[instance]] + node;
    const int* child = scene.nodes + (row * CHILDREN + slot) * CHILD_WORDS;
    if (child[CHILD_KIND] == 0) return;
    const View now = view_of(frame, views.lens, views.to_view, views.hzb_before, pair);
    if (!too_coarse(scene, frame, now, instance, three(child + CHILD_SPHERE), real(child[CHILD_SPHERE + 3]), real(child[CHILD_ERROR]))) return;
    const View before = view_of(frame, views.lens_before, views.before, views.hzb_before, pair);
    const State state = box_state(frame, now, before, three(child), three(child + 3));
    if (state == UNSEEN) return;
    const Entry as_child = entry_of(pair, node * CHILDREN + slot);
    if (state == HIDDEN) append(hidden_children, as_child);
    else if (child[CHILD_KIND] == INNER) append(queue, entry_of(pair, child[CHILD_AT]));
    else append(groups, as_child);
}

__device__ void ask_cluster(const Scene& scene, const Frame& frame, const Views& views, int pair, int page, int index,
                            const List& visible, const List& hidden_clusters) {
    const int instance = pair % frame.instances, mesh = scene.instance_mesh[instance];
    const long long at = scene.page_at[scene.mesh[4 * mesh + 1] + page];
    const int* head = scene.words + at + PAGE_WORDS + scene.words[at + PAGE_GROUPS] * GROUP_WORDS + index * CLUSTER_WORDS;
    const View now = view_of(frame, views.lens, views.to_view, views.hzb_before, pair);
    if (too_coarse(scene, frame, now, instance, three(head + CLUSTER_SPHERE), real(head[CLUSTER_SPHERE + 3]), real(head[CLUSTER_ERROR]))) return;
    const float step = scene.steps[2 * mesh], half_step = 0.5f * step;
    const int *base = head + CLUSTER_BASE, *extent = head + CLUSTER_EXTENT;
    const Vector half = {half_step * float(extent[0]), half_step * float(extent[1]), half_step * float(extent[2])};
    const Vector center = {step * float(base[0]) + half.x, step * float(base[1]) + half.y, step * float(base[2]) + half.z};
    const View before = view_of(frame, views.lens_before, views.before, views.hzb_before, pair);
    const State state = box_state(frame, now, before, center, half);
    const Entry entry = entry_of(pair, (page << CLUSTER_INDEX_BITS) | index);
    if (state == SHOWN) append(visible, entry);
    if (state == HIDDEN) append(hidden_clusters, entry);
}

__global__ void persistent_cull(const int* words, const long long* page_at, const int* nodes, const int* mesh, const float* mesh_steps,
                                const int* instance_mesh, const float* instance_scale, const float* lens, const float* lens_before,
                                const float* to_view, const float* before, const float* hzb_before, const int* hzb_at, int* counters,
                                Entry* queue_items, Entry* group_items, Entry* visible_items, Entry* hidden_child_items,
                                Entry* hidden_cluster_items, int queue_room, int group_room, int visible_room, int hidden_child_room,
                                int hidden_cluster_room, int width, int height, int instances, int hzb_levels, int hzb_stride,
                                float pixel_error, int history, int second) {
    int* mine = counters + second * PASS;
    const Scene scene = {words, nodes, mesh, instance_mesh, page_at, mesh_steps, instance_scale};
    const Frame frame = {width, height, instances, hzb_levels, hzb_stride, hzb_at, pixel_error, history != 0};
    const Views views = {lens, lens_before, to_view, before, hzb_before};
    const List queue = {queue_items, queue_room, mine + NODES_WRITTEN}, groups = {group_items, group_room, mine + GROUPS};
    const List visible = {visible_items, visible_room, mine + VISIBLE};
    const List hidden_children = {hidden_child_items, hidden_child_room, counters + HIDDEN_CHILDREN};
    const List hidden_clusters = {hidden_cluster_items, hidden_cluster_room, counters + HIDDEN_CLUSTERS};
    const int lane = threadIdx.x % 32;
    for (;;) {
        int taken;
        int first = claim(mine + NODES_CLAIMED, mine + NODES_WRITTEN, queue_room, NODE_BATCH, taken);
        if (taken) {
            if (lane / CHILDREN < taken) {
                const Entry node = arrived(queue_items + first + lane / CHILDREN);
                ask_child(scene, frame, views, node, lane % CHILDREN, queue, groups, hidden_children);
            }
            __syncwarp();  // all that these nodes lead to has been counted
            __threadfence();
            if (lane == 0) atomicAdd(mine + NODES_FINISHED, taken);
            continue;
        }
        first = claim(mine + GROUPS_CLAIMED, mine + GROUPS, group_room, 1, taken);
        if (taken) {
            const Entry group = arrived(group_items + first);
            const int pair = pair_of(group), child_number = what_of(group);
            const long long row = mesh[4 * instance_mesh[pair % instances]] + child_number / CHILDREN;
            const int* child = nodes + (row * CHILDREN + child_number % CHILDREN) * CHILD_WORDS;
            for (int k = lane; k < child[CHILD_KIND]; k += 32)
                ask_cluster(scene, frame, views, pair, child[CHILD_AT], child[CHILD_FIRST] + k, visible, hidden_clusters);
            continue;
        }
        int done = 0;
        if (lane == 0) {
            const int finished = now_at(mine + NODES_FINISHED);
            __threadfence();
            const int written = min(now_at(mine + NODES_WRITTEN), queue_room);
            __threadfence();
            const int claimed = now_at(mine + GROUPS_CLAIMED);
            done = finished >= written && claimed >= min(now_at(mine + GROUPS), group_room);
        }
        if (__shfl_sync(0xffffffffu, done, 0)) return;
        wait_a_little();
    }
}
