// Stage 3 in two launches. In the first, persistent warps take nodes from one queue until it is empty, and list the
// groups that they find. In the second, more warps test the clusters of these groups. level_cull.py is the portable
// version, in Warp. Tests of boxes and errors use the same operations in the same order (compiled without fused
// multiply-add), so both find the same clusters, in different order. With STREAMED, pages may be absent, and groups are
// processed as in streaming/streamed_cull.py.
//
// Counters of the queue, and the warps that increase each:
//   nodes_written    number of nodes that were appended to the queue. Increased by any warp that appends nodes.
//   nodes_claimed    number of queue entries that have an owner. A warp claims four entries at a time, which may not be
//                    written yet.
//   nodes_finished   number of nodes whose children have been tested and appended to their lists. Increased by the
//                    warp that owns the nodes.
// A warp claims entries before they are written, and polls only its own entries, so warps never compete for one. An
// entry is written after nodes_written has counted it; until then it is EMPTY. If nodes_finished equals nodes_written
// (read in that order, since both only grow), no more nodes will be appended, and warps that own entries beyond the end
// of the queue exit.

#ifdef __CUDACC__
__device__ __forceinline__ void wait_a_little(int nanoseconds) { __nanosleep(nanoseconds); }
#else
inline void wait_a_little(int) { let_others_run(); }
#endif

constexpr Entry EMPTY = -1;
constexpr float ROUNDING = 1e-6f;
constexpr int NODE_BATCH = 4;  // nodes per warp and step: 32 children
constexpr int NODES_WRITTEN = 16, NODES_CLAIMED = 10, NODES_FINISHED = 11;  // indices of the queue's counters
constexpr int CHILDREN = 8, CHILD_WORDS = 16, CHILD_SPHERE = 6, CHILD_ERROR = 10, CHILD_KIND = 11, CHILD_AT = 12, CHILD_FIRST = 13;
constexpr int INNER = -1;
constexpr int SHORTEST_NAP = 64, LONGEST_NAP = 1024;  // waiting times between two polls, in nanoseconds

struct Scene {
    const int *nodes, *mesh, *instance_mesh;
    const float* scale;
};
struct Pages {
    const int* words;
    const long long* at;
    const float* steps;
    const int *group_page, *first_group;  // only used if pages may be absent
    int* wanted;                          // requests, one number per page; only used if pages may be absent
};
// one camera or shadow map: its lens, its row of `pictures`, the starts of its hierarchical z levels, and the transform
// from the instance's mesh to the view
struct View {
    const float* lens;
    const int *picture, *hzb_at;
    const float *matrices, *hzb;
    bool history;  // whether to test against the previous frame
};
struct Frame {
    int instances, cameras, hzb_stride;
    float pixel_error;
    bool history;
};

__device__ __forceinline__ int now_at(const int* count) { return *(volatile const int*)count; }

constexpr unsigned ALL_LANES = 0xffffffffu;
// Called by a whole warp: append the entries of the lanes that have one, with one atomic addition per warp.
__device__ void append(const List& list, bool has_one, Entry entry) {
    const unsigned lanes = __ballot_sync(ALL_LANES, has_one);
    if (lanes == 0) return;
    const int lane = threadIdx.x % 32;
    int first = 0;
    if (lane == 0) first = atomicAdd(list.count, __popc(lanes));
    const int at = __shfl_sync(ALL_LANES, first, 0) + __popc(lanes & ((1u << lane) - 1));
    if (has_one && at < list.room) *(volatile Entry*)&list.items[at] = entry;
}

// ---- projections, as in projections.py ----

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

// Convert an error in the mesh's units to pixels, for a surface that lies in the given sphere.
__device__ float pixels_off(const Scene& scene, const View& view, int instance, Vector center, float radius, float error) {
    const float* lens = view.lens;
    const float scale = fabsf(scene.scale[instance]), focal = larger_of(lens[FX], lens[FY]), reach = radius * scale;
    const Vector at = transformed(view.matrices, center);
    if (lens[ORTHOGRAPHIC] > 0.0f) return focal * error * scale;
    const float depth = larger_of(at.z - reach, lens[NEAR]);
    float aside = (sqrtf(at.x * at.x + at.y * at.y) + reach) / depth;
    aside = smaller_of(aside, lens[TANGENT]);
    return focal * error * scale * sqrtf(1.0f + aside * aside) / depth;
}
__device__ bool too_coarse(const Scene& scene, const Frame& frame, const View& view, int instance, Vector center, float radius, float error) {
    return pixels_off(scene, view, instance, center, radius, error) > frame.pixel_error;
}

__device__ bool is_outside(const View& view, Vector center, Vector half) {
    const float* lens = view.lens;
    const float right = float(view.picture[WIDTH]) - 0.5f - lens[CX], left = -0.5f - lens[CX];
    const float bottom = float(view.picture[HEIGHT]) - 0.5f - lens[CY], top = -0.5f - lens[CY], fx = lens[FX], fy = lens[FY];
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
__device__ bool is_hidden(const View& view, Vector center, Vector half) {
    const float* lens = view.lens;
    const int width = view.picture[WIDTH], height = view.picture[HEIGHT], levels = view.picture[LEVELS];
    const float near = lens[NEAR], nearest = center.z - half.z, farthest = center.z + half.z;
    if (nearest < near || levels < 2) return false;
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
    const int x0 = clamped(floorf(left - 1.0f), width), x1 = clamped(ceilf(right + 1.0f), width);
    const int y0 = clamped(floorf(top - 1.0f), height), y1 = clamped(ceilf(bottom + 1.0f), height);
    int level = 1;
    while (((x1 >> level) - (x0 >> level) > 2 || (y1 >> level) - (y0 >> level) > 2) && level + 1 < levels) ++level;
    const int columns = ((width - 1) >> level) + 1;
    const float in_front = near / nearest * (1.0f + ROUNDING);
    for (int y = y0 >> level; y <= y1 >> level; ++y)
        for (int x = x0 >> level; x <= x1 >> level; ++x)
            if (view.hzb[view.hzb_at[level] + y * columns + x] <= in_front) return false;
    return true;
}

enum State { SHOWN, HIDDEN, UNSEEN };
__device__ State box_state(const View& now, const View& before, Vector center, Vector half) {
    if (is_outside(now, transformed(now.matrices, center), half_sizes(now.matrices, center, half))) return UNSEEN;
    if (!before.history) return SHOWN;
    const Vector at = transformed(before.matrices, center), sizes = half_sizes(before.matrices, center, half);
    return is_hidden(before, at, sizes) ? HIDDEN : SHOWN;
}

// ---- nodes and groups ----

// Claim `places` consecutive entries of a list for this warp; return the first.
__device__ __forceinline__ int claim(int* claimed, int places) {
    int first = 0;
    if (threadIdx.x % 32 == 0) first = atomicAdd(claimed, places);
    return __shfl_sync(ALL_LANES, first, 0);
}
__device__ __forceinline__ Entry what_is_at(const Entry* items, int place, int room) {
    return place < room ? *(volatile const Entry*)&items[place] : EMPTY;
}

struct Views {
    const float *lens, *lens_before;
    const int *pictures, *hzb_at;
    const float *to_view, *before, *hzb_before;
};
__device__ __forceinline__ View view_of(const Frame& frame, const Views& views, const float* lens, const float* matrices, int pair) {
    const int view = pair / frame.instances;
    return {lens + LENS * view, views.pictures + PICTURE * view, views.hzb_at + frame.hzb_stride * view, matrices + 12ll * pair,
            views.hzb_before, frame.history && view < frame.cameras};
}

enum Lead { NOWHERE, TO_NODE, TO_GROUP, TO_HIDDEN };
__device__ Lead ask_child(const Scene& scene, const Frame& frame, const Views& views, Entry node_entry, int slot, Entry& found) {
    const int pair = pair_of(node_entry), node = what_of(node_entry), instance = pair % frame.instances;
    const long long row = scene.mesh[4 * scene.instance_mesh[instance]] + node;
    const int* child = scene.nodes + (row * CHILDREN + slot) * CHILD_WORDS;
    if (child[CHILD_KIND] == 0) return NOWHERE;
    const View now = view_of(frame, views, views.lens, views.to_view, pair);
    if (!too_coarse(scene, frame, now, instance, three(child + CHILD_SPHERE), real(child[CHILD_SPHERE + 3]), real(child[CHILD_ERROR])))
        return NOWHERE;
    const View before = view_of(frame, views, views.lens_before, views.before, pair);
    const State state = box_state(now, before, three(child), three(child + 3));
    if (state == UNSEEN) return NOWHERE;
    const bool inner = state == SHOWN && child[CHILD_KIND] == INNER;
    found = inner ? entry_of(pair, child[CHILD_AT]) : entry_of(pair, node * CHILDREN + slot);
    return state == HIDDEN ? TO_HIDDEN : inner ? TO_NODE : TO_GROUP;
}

// Request the page of a child's group.
__device__ void ask_for(const Scene& scene, const Pages& pages, const Frame& frame, const Views& views, int pair, const int* child, int page) {
    const View now = view_of(frame, views, views.lens, views.to_view, pair);
    union { float value; int word; } pixels = {
        pixels_off(scene, now, pair % frame.instances, three(child + CHILD_SPHERE), real(child[CHILD_SPHERE + 3]), real(child[CHILD_ERROR]))};
    // floats >= 0 have the same order as their bits
    if (now_at(pages.wanted + page) < pixels.word) atomicMax(pages.wanted + page, pixels.word);
}
__device__ __forceinline__ bool finer_is_there(const Pages& pages, int mesh, const Head& head) {
    const int source = head.words[head.is_short ? HEAD_SOURCE : CLUSTER_SOURCE];
    return source >= 0 && pages.at[pages.group_page[pages.first_group[mesh] + source]] >= 0;
}

// The width of the box around a cluster, in steps of the grid; the same as `extent_of` in clusters.py.
__device__ __forceinline__ int extent_of(const Head& head, int axis) {
    if (!head.is_short) return head.words[CLUSTER_EXTENT + axis];
    const int box = head.words[HEAD_BOX], length = box_length(box, axis);
    const int mantissa = box >> (axis * BOX_BITS + LENGTH_BITS) & ((1 << MANTISSA_BITS) - 1);
    return length ? (1 << (length - 1)) + (((mantissa + 1) << max(length - 1 - MANTISSA_BITS, 0)) - 1) : 0;
}

template <bool STREAMED>
__device__ State ask_cluster(const Scene& scene, const Pages& pages, const Frame& frame, const Views& views, int pair, int page, int index, Entry& found) {
    const int instance = pair % frame.instances, mesh = scene.instance_mesh[instance];
    const Head head = head_of(pages.words + pages.at[scene.mesh[4 * mesh + 1] + page], index);
    const View now = view_of(frame, views, views.lens, views.to_view, pair);
    if (head.replaces) {  // if false, the cluster belongs to the finest level
        const int* sphere = head.words + (head.is_short ? HEAD_SPHERE : CLUSTER_SPHERE);
        const float error = real(head.words[head.is_short ? HEAD_ERROR : CLUSTER_ERROR]);
        if (too_coarse(scene, frame, now, instance, three(sphere), real(sphere[3]), error)) {
            if (!STREAMED || finer_is_there(pages, mesh, head)) return UNSEEN;
        }
    }
    const float step = pages.steps[2 * mesh], half_step = 0.5f * step;
    const int* base = head.words + (head.is_short ? HEAD_BASE : CLUSTER_BASE);
    const Vector half = {half_step * float(extent_of(head, 0)), half_step * float(extent_of(head, 1)), half_step * float(extent_of(head, 2))};
    const Vector center = {step * float(base[0]) + half.x, step * float(base[1]) + half.y, step * float(base[2]) + half.z};
    const View before = view_of(frame, views, views.lens_before, views.before, pair);
    found = entry_of(pair, (page << CLUSTER_INDEX_BITS) | index);
    return box_state(now, before, center, half);
}

// Called by a whole warp: test the clusters of a group, one per lane.
template <bool STREAMED>
__device__ __forceinline__ void ask_group(const Scene& scene, const Pages& pages, const Frame& frame, const Views& views, Entry group, const List& visible, const List& hidden_clusters) {
    const int lane = threadIdx.x % 32;
    const int pair = pair_of(group), child_number = what_of(group);
    const long long row = scene.mesh[4 * scene.instance_mesh[pair % frame.instances]] + child_number / CHILDREN;
    const int* child = scene.nodes + (row * CHILDREN + child_number % CHILDREN) * CHILD_WORDS;
    int clusters = child[CHILD_KIND];
    if (STREAMED) {
        const int page = scene.mesh[4 * scene.instance_mesh[pair % frame.instances] + 1] + child[CHILD_AT];
        if (lane == 0) ask_for(scene, pages, frame, views, pair, child, page);
        if (pages.at[page] < 0) clusters = 0;
    }
    for (int first = 0; first < clusters; first += 32) {
        Entry found = EMPTY;
        State state = UNSEEN;
        if (first + lane < clusters)
            state = ask_cluster<STREAMED>(scene, pages, frame, views, pair, child[CHILD_AT], child[CHILD_FIRST] + first + lane, found);
        append(visible, state == SHOWN, found);
        append(hidden_clusters, state == HIDDEN, found);
    }
}

__global__ void persistent_cull(const int* nodes, const int* mesh, const int* instance_mesh, const float* instance_scale, const float* lens,
                                const float* lens_before, const int* pictures, const float* to_view, const float* before, const float* hzb_before,
                                const int* hzb_at, int* counters, Entry* group_items, Entry* queue_items, Entry* hidden_child_items, int group_room,
                                int queue_room, int hidden_child_room, int instances, int cameras, int hzb_stride, float pixel_error, int history,
                                int second) {
    int* mine = counters + second * PASS;
    const Scene scene = {nodes, mesh, instance_mesh, instance_scale};
    const Frame frame = {instances, cameras, hzb_stride, pixel_error, history != 0};
    const Views views = {lens, lens_before, pictures, hzb_at, to_view, before, hzb_before};
    const List queue = {queue_items, queue_room, mine + NODES_WRITTEN}, groups = {group_items, group_room, mine + GROUPS};
    const List hidden_children = {hidden_child_items, hidden_child_room, counters + HIDDEN_CHILDREN};
    const int lane = threadIdx.x % 32;
    int nodes_at = claim(mine + NODES_CLAIMED, NODE_BATCH), nap = SHORTEST_NAP;
    bool taken = false;  // whether this lane has tested its child
    for (;;) {
        const Entry node = taken ? EMPTY : what_is_at(queue.items, nodes_at + lane / CHILDREN, queue.room);
        const unsigned seen = __ballot_sync(ALL_LANES, node != EMPTY);
        const bool ask = (seen >> lane / CHILDREN * CHILDREN & 0xffu) == 0xffu;  // all 8 lanes of this node have read the entry
        const int asked = __popc(__ballot_sync(ALL_LANES, ask)) / CHILDREN;
        if (asked) {
            Entry found = EMPTY;
            Lead lead = NOWHERE;
            if (ask) lead = ask_child(scene, frame, views, node, lane % CHILDREN, found);
            append(queue, lead == TO_NODE, found);
            append(groups, lead == TO_GROUP, found);
            append(hidden_children, lead == TO_HIDDEN, found);
            __threadfence();  // appended nodes must be counted before these nodes count as finished
            taken |= ask;
            if (__ballot_sync(ALL_LANES, taken) == ALL_LANES) {
                nodes_at = claim(mine + NODES_CLAIMED, NODE_BATCH);
                taken = false;
            }
            if (lane == 0) atomicAdd(mine + NODES_FINISHED, asked);
            nap = SHORTEST_NAP;
            continue;
        }
        int done = 0;
        if (lane == 0) {
            const int finished = now_at(mine + NODES_FINISHED);
            __threadfence();
            done = finished >= min(now_at(mine + NODES_WRITTEN), queue_room);
        }
        if (__shfl_sync(ALL_LANES, done, 0)) return;
        wait_a_little(nap);
        nap = min(2 * nap, LONGEST_NAP);
    }
}

// Test the clusters of all groups in the list, one warp per group.
template <bool STREAMED>
__global__ void __launch_bounds__(128) cull_groups(
    const int* words, const long long* page_at, const float* mesh_steps, const int* group_page, const int* first_group, int* wanted, const int* nodes,
    const int* mesh, const int* instance_mesh, const float* instance_scale, const float* lens, const float* lens_before, const int* pictures,
    const float* to_view, const float* before, const float* hzb_before, const int* hzb_at, int* counters, const Entry* group_items,
    Entry* visible_items, Entry* hidden_cluster_items, int group_room, int visible_room, int hidden_cluster_room, int instances, int cameras,
    int hzb_stride, float pixel_error, int history, int second) {
    int* mine = counters + second * PASS;
    const Scene scene = {nodes, mesh, instance_mesh, instance_scale};
    const Pages pages = {words, page_at, mesh_steps, group_page, first_group, wanted};
    const Frame frame = {instances, cameras, hzb_stride, pixel_error, history != 0};
    const Views views = {lens, lens_before, pictures, hzb_at, to_view, before, hzb_before};
    const List visible = {visible_items, visible_room, mine + VISIBLE};
    const List hidden_clusters = {hidden_cluster_items, hidden_cluster_room, counters + HIDDEN_CLUSTERS};
    const int count = min(mine[GROUPS], group_room), warps = gridDim.x * blockDim.x / 32;
    for (int at = (blockIdx.x * blockDim.x + threadIdx.x) / 32; at < count; at += warps)
        ask_group<STREAMED>(scene, pages, frame, views, group_items[at], visible, hidden_clusters);
}
