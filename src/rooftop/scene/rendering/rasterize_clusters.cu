// Stage 3, continued: draw the small triangles of visible clusters. Each block draws one cluster, which it reads through
// the cluster's record (records.py). The threads of a block first project each vertex to the screen once; then each
// thread draws one triangle. The portable version is `rasterize` in rasterize.py, in Warp. Both use the same operations
// on the same numbers, so they write the same pixels. Both append triangles that are not small to the list of large
// triangles.

constexpr int THREADS = 128, MOST_VERTICES = 256;
constexpr int SUBPIXEL_BITS = 8, SMALL_EXTENT = 64 << SUBPIXEL_BITS, SMALL_PIXELS = 256;
constexpr float SUBPIXELS = 256.0f, GUARD = 1 << 20;
// values of x for a vertex that is too far outside the picture (FAR_ASIDE), or nearer than the near plane (BEHIND)
constexpr int FAR_ASIDE = 0x7fffffff, BEHIND = -FAR_ASIDE;

struct Vertex { int x, y; float depth; };  // position in 1/256 pixel; depth as a value that is linear on the screen
__device__ __forceinline__ Vertex placed(const float* lens, Vector point) {
    if (point.z < lens[NEAR]) return {BEHIND, 0, 0.0f};
    const bool parallel = lens[ORTHOGRAPHIC] > 0.0f;
    const float over = parallel ? 1.0f : point.z;
    const float x = lens[FX] * point.x / over + lens[CX], y = lens[FY] * point.y / over + lens[CY];
    if (larger_of(larger_of(-x, x), larger_of(-y, y)) >= GUARD) return {FAR_ASIDE, 0, 0.0f};
    return {int(rintf(x * SUBPIXELS)), int(rintf(y * SUBPIXELS)), parallel ? point.z : lens[NEAR] / point.z};
}

__device__ __forceinline__ int tie(int dx, int dy) { return dy > 0 || (dy == 0 && dx < 0) ? 0 : -1; }

// A small triangle of positive area, with its edge functions at the centre of the first pixel of its box.
struct Small {
    int row_a, row_b, row_c, ax, ay, bx, by, tie_a, tie_b, tie_c;
    float over_area, a, b, c;  // 1 / (twice the area); depths of the corners
    int at;                    // index in the picture of the box's first pixel
};

__device__ __forceinline__ Small small_of(Vertex a, Vertex b, Vertex c, int area, int x0, int y0, int width) {
    const int ax = c.x - b.x, ay = c.y - b.y, bx = a.x - c.x, by = a.y - c.y, cx = b.x - a.x, cy = b.y - a.y;
    const int px = x0 << SUBPIXEL_BITS, py = y0 << SUBPIXEL_BITS;
    Small small;
    small.row_a = ax * (py - b.y) - ay * (px - b.x), small.row_b = bx * (py - c.y) - by * (px - c.x);
    small.row_c = cx * (py - a.y) - cy * (px - a.x);
    small.ax = ax, small.ay = ay, small.bx = bx, small.by = by;
    small.tie_a = tie(ax, ay), small.tie_b = tie(bx, by), small.tie_c = tie(cx, cy);
    small.over_area = 1.0f / float(area), small.a = a.depth, small.b = b.depth, small.c = c.depth;
    small.at = y0 * width + x0;
    return small;
}

struct Picture {
    long long* pixels;
    int* fragments;  // number of writes to each pixel; null if writes are not counted
    int width;
    bool parallel;
    float near;
};

template <bool COUNTED>
__device__ __forceinline__ void put(const Picture& picture, int at, float nearest, float farthest, float depth, long long low) {
    depth = smaller_of(larger_of(farthest, depth), nearest);
    if (picture.parallel) depth = picture.near / depth;
    const long long value = ((long long)word_of(smaller_of(depth, 1.0f)) << DEPTH_SHIFT) | low;
    atomicMax(picture.pixels + at, value);
    if (COUNTED) atomicAdd(picture.fragments + at, 1);
}

// Draw all pixels of a box whose centres are in a triangle.
template <bool COUNTED>
__device__ __forceinline__ void draw(const Picture& picture, const Small& small, long long low, int columns, int rows) {
    const float nearest = larger_of(larger_of(small.a, small.b), small.c), farthest = smaller_of(smaller_of(small.a, small.b), small.c);
    const int ay = small.ay << SUBPIXEL_BITS, by = small.by << SUBPIXEL_BITS, cy = -ay - by;
    const int down_a = (small.ax << SUBPIXEL_BITS) + columns * ay, down_b = (small.bx << SUBPIXEL_BITS) + columns * by;
    // step from beyond the last column to the start of the next row
    const int down_c = (-small.ax - small.bx << SUBPIXEL_BITS) + columns * cy;
    int of_a = small.row_a, of_b = small.row_b, of_c = small.row_c;
    int at = small.at, left_in_row = columns;
#pragma unroll 1
    // a single loop, so that lanes with boxes of different shapes do not diverge
    for (int left = columns * rows; left > 0; --left) {
        if (((of_a + small.tie_a) | (of_b + small.tie_b) | (of_c + small.tie_c)) >= 0) {
            const float sum = float(of_a) * small.a + float(of_b) * small.b + float(of_c) * small.c;
            put<COUNTED>(picture, at, nearest, farthest, sum * small.over_area, low);
        }
        of_a -= ay, of_b -= by, of_c -= cy, ++at;
        if (--left_in_row == 0) {
            left_in_row = columns, at += picture.width - columns;
            of_a += down_a, of_b += down_b, of_c += down_c;
        }
    }
}

template <bool COUNTED>
__global__ void __launch_bounds__(THREADS) rasterize_clusters(
    const int* words, const float* lenses, const int* pictures, const float* to_view, const int* records, const int* ranks,
    int* counters, long long* pixels, int* fragments, Entry* large_items, int visible_room, int large_room,
    int cameras, int second, int one_sided) {
    __shared__ Vertex placed_vertices[MOST_VERTICES];
    const List large = {large_items, large_room, counters + second * PASS + LARGE};
    const int count = min(counters[second * PASS + VISIBLE], visible_room);
    for (int at = blockIdx.x; at < count; at += gridDim.x) {
        const int rank = ranks[at];
        const int4* record = (const int4*)records + (long long)RECORD_QUARTERS * rank;
        const int4 r0 = record[0], r1 = record[1], r2 = record[2];
        const int view = r2.w;
        const int *masks = words + ((long long)r0.z << 32 | unsigned(r0.y)), *size = pictures + PICTURE * view;
        const float *lens = lenses + LENS * view, *matrix = to_view + 12ll * r0.x;
        const int triangles = (r0.w & 127) + 1, vertices = (r0.w >> 7 & 255) + 1, kind = r0.w >> 15 & 3;
        const int width = size[WIDTH], height = size[HEIGHT], first = size[PICTURE_AT];
        {
            const int* positions = masks + (r1.z >> 18 & 8191);
            const int widths[3] = {r1.z & 63, r1.z >> 6 & 63, r1.z >> 12 & 63}, base[3] = {r2.x, r2.y, r2.z};
            const int together = widths[0] + widths[1] + widths[2];
            const float step = real(r1.w);
            for (int vertex = threadIdx.x; vertex < vertices; vertex += THREADS) {
                float position[3];
                for (int axis = 0, bit = vertex * together; axis < 3; bit += widths[axis++])
                    position[axis] = step * float(int(unsigned(base[axis]) + unsigned(bits(positions, bit, widths[axis]))));
                placed_vertices[vertex] = placed(lens, transformed(matrix, {position[0], position[1], position[2]}));
            }
        }
        __syncthreads();

        const int number = threadIdx.x;
        int columns = 0, rows = 0;  // size of the triangle's box in pixels; 0 if this thread draws nothing
        Small small;
        if (number < triangles) {
            const Streams streams = {masks, masks + NEW_WORDS + (kind == FANS_AND_EXPLICIT ? EXPLICIT_WORDS : 0), kind, r1.x >> 24 & 255, vertices, r1.x, r1.y};
            int corners[3];
            corners_of(streams, number, corners);
            const Vertex a = placed_vertices[corners[0]];
            Vertex b = placed_vertices[corners[1]], c = placed_vertices[corners[2]];
            const int first_x = min(a.x, min(b.x, c.x)), last_x = max(a.x, max(b.x, c.x));
            const int first_y = min(a.y, min(b.y, c.y)), last_y = max(a.y, max(b.y, c.y));
            bool is_large = first_x == BEHIND || last_x == FAR_ASIDE;
            if (is_large) {
                is_large = last_x != BEHIND;  // if false, the whole triangle is nearer than the near plane
            } else {
                const int x0 = max((first_x + 255) >> SUBPIXEL_BITS, 0), x1 = min(last_x >> SUBPIXEL_BITS, width - 1);
                const int y0 = max((first_y + 255) >> SUBPIXEL_BITS, 0), y1 = min(last_y >> SUBPIXEL_BITS, height - 1);
                if (x0 <= x1 && y0 <= y1) {
                    const bool fits = last_x - first_x <= SMALL_EXTENT && last_y - first_y <= SMALL_EXTENT;
                    if (fits && (x1 - x0 + 1) * (y1 - y0 + 1) <= SMALL_PIXELS) {
                        int area = (b.x - a.x) * (c.y - a.y) - (b.y - a.y) * (c.x - a.x);
                        const bool mirrored = r1.y >> 30 & 1, away = mirrored ? area < 0 : area > 0;
                        if (area != 0 && !(away && one_sided)) {
                            if (area < 0) {
                                const Vertex other = b;
                                b = c, c = other, area = -area;
                            }
                            columns = x1 - x0 + 1, rows = y1 - y0 + 1;
                            small = small_of(a, b, c, area, x0, y0, width);
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
        const bool counted = COUNTED && view < cameras;
        const Picture picture = {pixels + first, counted ? fragments + first : nullptr, width, lens[ORTHOGRAPHIC] > 0.0f, lens[NEAR]};
        const long long low = ((long long)rank << TRIANGLE_BITS) | number;
        if (counted) draw<true>(picture, small, low, columns, rows);
        else draw<false>(picture, small, low, columns, rows);
        __syncthreads();  // the next cluster overwrites the vertices
    }
}
