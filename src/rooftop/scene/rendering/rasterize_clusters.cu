// Stage 3, continued: the small triangles of visible clusters, a block for each cluster. Its threads first place the
// vertices on the screen, each once, and then take a triangle each. The portable twin is `rasterize` in rasterize.py, in
// Warp: the same operations on the same numbers, so the same pixels. What is not a small triangle goes to the same list.

constexpr int MOST_VERTICES = 256;
constexpr int SUBPIXEL_BITS = 8, SMALL_EXTENT = 64 << SUBPIXEL_BITS, SMALL_PIXELS = 256;
constexpr float SUBPIXELS = 256.0f, GUARD = 1 << 20;
constexpr int DEPTH_SHIFT = 33, TRIANGLE_BITS = 7;
constexpr int FAR_ASIDE = 0x7fffffff, BEHIND = -FAR_ASIDE;  // in place of a column

struct Vertex { int x, y; float depth; };  // 1/256 pixels, and what is linear on the screen
struct Picture {
    const float* lens;
    long long* pixels;
    int* fragments;  // or null
    int width;
};

__device__ __forceinline__ int bits(const int* words, int bit, int count) {
    const int* word = words + (bit >> 5);
    return int(__funnelshift_r(unsigned(word[0]), unsigned(word[1]), bit & 31) & (count == 32 ? ~0u : (1u << count) - 1));
}
__device__ __forceinline__ int bit_length(int number) { return 32 - __clz(number); }

// A cluster as its head says, and where its streams are: `read_cluster` in clusters.py.
enum Kind { SEPARATE, FANS, FANS_AND_EXPLICIT };  // how its corners are stored
struct Cluster {
    int triangles, vertices, kind, reference_bits, widths[3];
    const int *base, *masks, *references, *positions;
};

__device__ Cluster read_cluster(const int* page, const Head& head) {
    Cluster cluster;
    int reference_count;
    if (head.is_short) {
        const int counts = head.words[HEAD_COUNTS], box = head.words[HEAD_BOX];
        cluster.triangles = (counts & 127) + 1, cluster.vertices = (counts >> 7 & 255) + 1;
        cluster.reference_bits = (box >> HEAD_REFERENCE_AT & 7) + 1, reference_count = counts >> 23 & 511;
        cluster.kind = FANS + (box >> HEAD_EXPLICIT_AT & 1);
        for (int axis = 0; axis < 3; ++axis) cluster.widths[axis] = box_length(box, axis);
        cluster.base = head.words + HEAD_BASE, cluster.masks = page + (head.words[HEAD_STREAMS] & 32767);
    } else {
        const int counts = head.words[CLUSTER_COUNTS];
        cluster.triangles = (counts & 255) + 1, cluster.vertices = (counts >> 8 & 255) + 1;
        cluster.reference_bits = counts >> 16 & 255, reference_count = 3 * cluster.triangles - cluster.vertices;
        cluster.kind = SEPARATE;
        for (int axis = 0; axis < 3; ++axis) cluster.widths[axis] = bit_length(head.words[CLUSTER_EXTENT + axis]);
        cluster.base = head.words + CLUSTER_BASE, cluster.masks = page + head.words[CLUSTER_STREAMS];
    }
    cluster.references = cluster.masks + NEW_WORDS + (cluster.kind == FANS_AND_EXPLICIT ? EXPLICIT_WORDS : 0);
    cluster.positions = cluster.references + ((reference_count * cluster.reference_bits + 31) >> 5);
    return cluster;
}

__device__ __forceinline__ int mask_bit(const int* mask, int triangle) { return mask[triangle >> 5] >> (triangle & 31) & 1; }
__device__ __forceinline__ int reference(const Cluster& cluster, int number) {
    return bits(cluster.references, number * cluster.reference_bits, cluster.reference_bits);
}

// The vertices of a triangle, as `corners_of` in clusters.py.
__device__ void corners_of(const Cluster& cluster, int triangle, int (&corners)[3]) {
    const int *masks = cluster.masks, *third = masks + NEW_WORDS;
    const int own = triangle >> 5;
    const unsigned below = (1u << (triangle & 31)) - 1;
    int ones = 0, twos = 0, both = 0, explicit_before = 0;
    for (int word = 0; word < 4; ++word) {
        const unsigned mask = word < own ? ~0u : word == own ? below : 0u;
        const unsigned low = masks[word] & mask, high = masks[word + 4] & mask;
        ones += __popc(low), twos += __popc(high), both += __popc(low & high);
        if (cluster.kind == FANS_AND_EXPLICIT) explicit_before += __popc(third[word] & mask);
    }
    const int n = ones + 2 * twos - 3 * explicit_before;
    int new_corners = mask_bit(masks, triangle) + 2 * mask_bit(masks + 4, triangle);
    if (cluster.kind == FANS_AND_EXPLICIT && mask_bit(third, triangle)) new_corners = -1;
    const int first = cluster.kind == SEPARATE ? 3 * triangle - n : triangle + ones - 2 * both + 3 * explicit_before;
    if (new_corners > 0 || cluster.kind == SEPARATE) {
        const int old = 3 - new_corners;
        for (int corner = 0; corner < 3; ++corner)
            corners[corner] = corner < old ? n - 1 - reference(cluster, first + corner) : n + corner - old;
    } else if (new_corners == 0) {
        const int previous = max(triangle - 1, 0);
        bool after_new = mask_bit(masks + 4, previous);
        if (cluster.kind == FANS_AND_EXPLICIT && mask_bit(third, previous)) after_new = false;
        corners[0] = n - 1;
        corners[1] = after_new ? n - 2 : n - 2 - reference(cluster, first - 1);  // the corner before the newest vertex
        corners[2] = n - 2 - reference(cluster, first);
    } else {
        corners[0] = n - 1 - reference(cluster, first);
        corners[1] = n - 2 - reference(cluster, first + 1);
        corners[2] = n - 2 - reference(cluster, first + 2);
    }
    for (int corner = 0; corner < 3; ++corner) corners[corner] = min(max(corners[corner], 0), cluster.vertices - 1);
}

__device__ Vertex placed(const Picture& picture, Vector point) {
    const float* lens = picture.lens;
    if (point.z < lens[NEAR]) return {BEHIND, 0, 0.0f};
    const bool parallel = lens[ORTHOGRAPHIC] > 0.0f;
    const float over = parallel ? 1.0f : point.z;
    const float x = lens[FX] * point.x / over + lens[CX], y = lens[FY] * point.y / over + lens[CY];
    if (larger_of(larger_of(-x, x), larger_of(-y, y)) >= GUARD) return {FAR_ASIDE, 0, 0.0f};
    return {int(rintf(x * SUBPIXELS)), int(rintf(y * SUBPIXELS)), parallel ? point.z : lens[NEAR] / point.z};
}

__device__ __forceinline__ int tie(int dx, int dy) { return dy > 0 || (dy == 0 && dx < 0) ? 0 : -1; }

// All pixels of a box whose centre is in a triangle of positive area.
__device__ void draw_small(const Picture& picture, Vertex a, Vertex b, Vertex c, int area, long long low, int x0, int x1, int y0, int y1) {
    const float nearest = larger_of(larger_of(a.depth, b.depth), c.depth), farthest = smaller_of(smaller_of(a.depth, b.depth), c.depth);
    const float over_area = 1.0f / float(area);
    const bool parallel = picture.lens[ORTHOGRAPHIC] > 0.0f;
    const int ax = c.x - b.x, ay = c.y - b.y, bx = a.x - c.x, by = a.y - c.y, cx = b.x - a.x, cy = b.y - a.y;
    const int tie_a = tie(ax, ay), tie_b = tie(bx, by), tie_c = tie(cx, cy);
    const int px = x0 << SUBPIXEL_BITS, py = y0 << SUBPIXEL_BITS;
    int row_a = ax * (py - b.y) - ay * (px - b.x), row_b = bx * (py - c.y) - by * (px - c.x), row_c = cx * (py - a.y) - cy * (px - a.x);
    int of_a = row_a, of_b = row_b, of_c = row_c, x = x0, y = y0;
    for (int left = (x1 - x0 + 1) * (y1 - y0 + 1); left > 0; --left) {  // one loop: lanes with boxes of any shape stay together
        if (((of_a + tie_a) | (of_b + tie_b) | (of_c + tie_c)) >= 0) {
            const float sum = float(of_a) * a.depth + float(of_b) * b.depth + float(of_c) * c.depth;
            const float depth = smaller_of(larger_of(farthest, sum * over_area), nearest);
            const float near = smaller_of(parallel ? picture.lens[NEAR] / depth : depth, 1.0f);
            union { float value; int word; } of_near = {near};
            const int at = y * picture.width + x;
            const long long value = ((long long)of_near.word << DEPTH_SHIFT) | low;
#if TRIAL_EARLY
            if (picture.pixels[at] < value)  // what it reads may be old, and pixels only grow
#endif
                atomicMax(picture.pixels + at, value);
            if (picture.fragments) atomicAdd(picture.fragments + at, 1);
        }
        of_a -= ay << SUBPIXEL_BITS, of_b -= by << SUBPIXEL_BITS, of_c -= cy << SUBPIXEL_BITS;
        if (++x > x1) {
            x = x0, ++y;
            of_a = row_a += ax << SUBPIXEL_BITS, of_b = row_b += bx << SUBPIXEL_BITS, of_c = row_c += cx << SUBPIXEL_BITS;
        }
    }
}

__global__ void __launch_bounds__(128) rasterize_clusters(
    const int* words, const long long* page_at, const int* mesh, const float* mesh_steps, const int* instance_mesh,
    const float* instance_scale, const float* lens, const int* pictures, const float* to_view, const Entry* visible, const int* ranks, int* counters,
    long long* pixels, int* fragments, Entry* large_items, int visible_room, int large_room, int instances,
    int cameras, int second, int one_sided) {
    __shared__ Vertex placed_vertices[MOST_VERTICES];
    const List large = {large_items, large_room, counters + second * PASS + LARGE};
    const int count = min(counters[second * PASS + VISIBLE], visible_room);
    for (int at = blockIdx.x; at < count; at += gridDim.x) {
        const Entry item = visible[at];
        const int pair = pair_of(item), view = pair / instances, instance = pair % instances, its_mesh = instance_mesh[instance];
        const int* page = words + page_at[mesh[4 * its_mesh + 1] + (what_of(item) >> CLUSTER_INDEX_BITS)];
        const Cluster cluster = read_cluster(page, head_of(page, what_of(item) & ((1 << CLUSTER_INDEX_BITS) - 1)));
        const int *size = pictures + PICTURE * view, width = size[WIDTH], height = size[HEIGHT], first = size[PICTURE_AT];
        const bool counted = fragments && view < cameras;
        const Picture picture = {lens + LENS * view, pixels + first, counted ? fragments + first : nullptr, width};

        const float* matrix = to_view + 12ll * pair;
        const float step = mesh_steps[2 * its_mesh];
        const int* widths = cluster.widths;
        const int together = widths[0] + widths[1] + widths[2];
        for (int vertex = threadIdx.x; vertex < cluster.vertices; vertex += blockDim.x) {
            float position[3];
            for (int axis = 0, bit = vertex * together; axis < 3; bit += widths[axis++])
                position[axis] = step * float(int(unsigned(cluster.base[axis]) + unsigned(bits(cluster.positions, bit, widths[axis]))));
            placed_vertices[vertex] = placed(picture, transformed(matrix, {position[0], position[1], position[2]}));
        }
        __syncthreads();

        for (int number = threadIdx.x; number < cluster.triangles; number += blockDim.x) {
            int corners[3];
            corners_of(cluster, number, corners);
            const Vertex a = placed_vertices[corners[0]], b = placed_vertices[corners[1]], c = placed_vertices[corners[2]];
            const int first_x = min(a.x, min(b.x, c.x)), last_x = max(a.x, max(b.x, c.x));
            const int first_y = min(a.y, min(b.y, c.y)), last_y = max(a.y, max(b.y, c.y));
            bool is_large = first_x == BEHIND || last_x == FAR_ASIDE;
            if (is_large) {
                is_large = last_x != BEHIND;  // else all of it is nearer than pictures begin
            } else {
                const int x0 = max((first_x + 255) >> SUBPIXEL_BITS, 0), x1 = min(last_x >> SUBPIXEL_BITS, width - 1);
                const int y0 = max((first_y + 255) >> SUBPIXEL_BITS, 0), y1 = min(last_y >> SUBPIXEL_BITS, height - 1);
                if (x0 <= x1 && y0 <= y1) {
                    const bool fits = last_x - first_x <= SMALL_EXTENT && last_y - first_y <= SMALL_EXTENT;
                    if (fits && (x1 - x0 + 1) * (y1 - y0 + 1) <= SMALL_PIXELS) {
                        const int area = (b.x - a.x) * (c.y - a.y) - (b.y - a.y) * (c.x - a.x);
                        const bool away = instance_scale[instance] < 0.0f ? area < 0 : area > 0;
                        const long long low = ((long long)ranks[at] << TRIANGLE_BITS) | number;
                        if (area != 0 && !(away && one_sided)) {
#if TRIAL_SIGNS
                            const bool turned = area < 0;
                            draw_small(picture, a, turned ? c : b, turned ? b : c, turned ? -area : area, low, x0, x1, y0, y1);
#else
                            if (area > 0) draw_small(picture, a, b, c, area, low, x0, x1, y0, y1);
                            else draw_small(picture, a, c, b, -area, low, x0, x1, y0, y1);
#endif
                        }
                    } else {
                        is_large = true;
                    }
                }
            }
            if (is_large) {
                const int place = atomicAdd(large.count, 1);
                if (place < large.room) large.items[place] = ((Entry)at << TRIANGLE_BITS) | number;
            }
        }
        __syncthreads();  // the vertices are not needed any more
    }
}
