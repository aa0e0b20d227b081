// Stage 3, continued: the small triangles of visible clusters, a block for each cluster. Its threads first place the
// vertices on the screen, each once, and then take a triangle each. The portable twin is `rasterize` in rasterize.py, in
// Warp: the same operations on the same numbers, so the same pixels. What is no small triangle goes to the same list.

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

// The vertices of a triangle, as `corners_of` in clusters.py: those used before come first, new ones last.
__device__ void corners_of(const int* masks, int triangle, int reference_bits, int vertices, int (&corners)[3]) {
    const int own = triangle >> 5, bit = triangle & 31;
    const unsigned below = (1u << bit) - 1;
    int before = 0;
    for (int word = 0; word < 4; ++word) {
        const unsigned mask = word < own ? ~0u : word == own ? below : 0u;
        before += __popc(masks[word] & mask) + 2 * __popc(masks[word + 4] & mask);
    }
    const int old = 3 - (masks[own] >> bit & 1) - 2 * (masks[own + 4] >> bit & 1);
    for (int corner = 0; corner < 3; ++corner) {
        int vertex = before + corner - old;
        if (corner < old) vertex = before - 1 - bits(masks + NEW_WORDS, (3 * triangle - before + corner) * reference_bits, reference_bits);
        corners[corner] = min(max(vertex, 0), vertices - 1);
    }
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
        const int* head = head_of(page, what_of(item) & ((1 << CLUSTER_INDEX_BITS) - 1));
        const int counts = head[CLUSTER_COUNTS], triangles = (counts & 255) + 1, vertices = (counts >> 8 & 255) + 1;
        const int reference_bits = counts >> 16 & 255;
        const int* masks = page + head[CLUSTER_STREAMS];
        const int *size = pictures + PICTURE * view, width = size[WIDTH], height = size[HEIGHT], first = size[PICTURE_AT];
        const bool counted = fragments && view < cameras;
        const Picture picture = {lens + LENS * view, pixels + first, counted ? fragments + first : nullptr, width};

        const int* positions = masks + NEW_WORDS + (((3 * triangles - vertices) * reference_bits + 31) >> 5);
        const float* matrix = to_view + 12ll * pair;
        const float step = mesh_steps[2 * its_mesh];
        int widths[3], together = 0;
        for (int axis = 0; axis < 3; ++axis) together += widths[axis] = bit_length(head[CLUSTER_EXTENT + axis]);
        for (int vertex = threadIdx.x; vertex < vertices; vertex += blockDim.x) {
            float position[3];
            for (int axis = 0, bit = vertex * together; axis < 3; bit += widths[axis++])
                position[axis] = step * float(int(unsigned(head[CLUSTER_BASE + axis]) + unsigned(bits(positions, bit, widths[axis]))));
            placed_vertices[vertex] = placed(picture, transformed(matrix, {position[0], position[1], position[2]}));
        }
        __syncthreads();

        for (int number = threadIdx.x; number < triangles; number += blockDim.x) {
            int corners[3];
            corners_of(masks, number, reference_bits, vertices, corners);
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
                            if (area > 0) draw_small(picture, a, b, c, area, low, x0, x1, y0, y1);
                            else draw_small(picture, a, c, b, -area, low, x0, x1, y0, y1);
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
