// Stage 3, continued: the small triangles of visible clusters, a block for each cluster, from its record (records.py).
// Its threads first place the vertices on the screen, each once, and then take a triangle each. The portable twin is
// `rasterize` in rasterize.py, in Warp: the same operations on the same numbers, so the same pixels. What is not a small
// triangle goes to the same list.

constexpr int THREADS = 128, MOST_VERTICES = 256;
constexpr int SUBPIXEL_BITS = 8, SMALL_EXTENT = 64 << SUBPIXEL_BITS, SMALL_PIXELS = 256;
constexpr float SUBPIXELS = 256.0f, GUARD = 1 << 20;
constexpr int FAR_ASIDE = 0x7fffffff, BEHIND = -FAR_ASIDE;  // in place of a column
constexpr unsigned ALL_LANES = 0xffffffffu;

struct Vertex { int x, y; float depth; };  // 1/256 pixels, and what is linear on the screen
__device__ __forceinline__ Vertex placed(const float* lens, Vector point) {
    if (point.z < lens[NEAR]) return {BEHIND, 0, 0.0f};
    const bool parallel = lens[ORTHOGRAPHIC] > 0.0f;
    const float over = parallel ? 1.0f : point.z;
    const float x = lens[FX] * point.x / over + lens[CX], y = lens[FY] * point.y / over + lens[CY];
    if (larger_of(larger_of(-x, x), larger_of(-y, y)) >= GUARD) return {FAR_ASIDE, 0, 0.0f};
    return {int(rintf(x * SUBPIXELS)), int(rintf(y * SUBPIXELS)), parallel ? point.z : lens[NEAR] / point.z};
}

__device__ __forceinline__ int tie(int dx, int dy) { return dy > 0 || (dy == 0 && dx < 0) ? 0 : -1; }

// A small triangle of positive area, its box, and its edges at the centre of the box's first pixel.
struct alignas(16) Small {
    int row_a, row_b, row_c;
    float over_area;
    int ax, ay, bx, by;
    float a, b, c;  // depths
    int corner;     // column and row << 16 of the first pixel
    int start;      // of its pixels among those of the warp
    int shape;      // 65536 / columns rounded up, columns << 17, ties << 24
    int number, none;
};

__device__ __forceinline__ Small small_of(Vertex a, Vertex b, Vertex c, int area, int x0, int y0, int number) {
    const int ax = c.x - b.x, ay = c.y - b.y, bx = a.x - c.x, by = a.y - c.y, cx = b.x - a.x, cy = b.y - a.y;
    const int px = x0 << SUBPIXEL_BITS, py = y0 << SUBPIXEL_BITS;
    Small small;
    small.row_a = ax * (py - b.y) - ay * (px - b.x), small.row_b = bx * (py - c.y) - by * (px - c.x);
    small.row_c = cx * (py - a.y) - cy * (px - a.x);
    small.over_area = 1.0f / float(area);
    small.ax = ax, small.ay = ay, small.bx = bx, small.by = by, small.a = a.depth, small.b = b.depth, small.c = c.depth;
    small.corner = x0 | y0 << 16;
    small.shape = (-tie(ax, ay) | -tie(bx, by) << 1 | -tie(cx, cy) << 2) << 24;
    small.number = number;
    return small;
}

struct Picture {
    long long* pixels;
    int* fragments;  // or null
    int width;
    bool parallel;
    float near;
};

template <bool COUNTED>
__device__ __forceinline__ void put(const Picture& picture, int at, float nearest, float farthest, float depth, long long low) {
    depth = smaller_of(larger_of(farthest, depth), nearest);
    if (picture.parallel) depth = picture.near / depth;
    const long long value = ((long long)word_of(smaller_of(depth, 1.0f)) << DEPTH_SHIFT) | low;
#if TRIAL_EARLY
    if (picture.pixels[at] < value)  // what it reads may be old, and pixels only grow
#endif
        atomicMax(picture.pixels + at, value);
    if (COUNTED) atomicAdd(picture.fragments + at, 1);
}

// All pixels of a box whose centre is in a triangle.
template <bool COUNTED>
__device__ __forceinline__ void draw(const Picture& picture, const Small& small, long long low, int columns, int rows) {
    const float nearest = larger_of(larger_of(small.a, small.b), small.c), farthest = smaller_of(smaller_of(small.a, small.b), small.c);
    const int tie_a = -(small.shape >> 24 & 1), tie_b = -(small.shape >> 25 & 1), tie_c = -(small.shape >> 26 & 1);
    const int ay = small.ay << SUBPIXEL_BITS, by = small.by << SUBPIXEL_BITS, cy = -ay - by;
    const int down_a = (small.ax << SUBPIXEL_BITS) + columns * ay, down_b = (small.bx << SUBPIXEL_BITS) + columns * by;
    const int down_c = (-small.ax - small.bx << SUBPIXEL_BITS) + columns * cy;  // from behind the last column to the next row
    int of_a = small.row_a, of_b = small.row_b, of_c = small.row_c;
    int at = (small.corner >> 16) * picture.width + (small.corner & 0xffff), left_in_row = columns;
#pragma unroll 1
    for (int left = columns * rows; left > 0; --left) {  // one loop: lanes with boxes of any shape stay together
        if (((of_a + tie_a) | (of_b + tie_b) | (of_c + tie_c)) >= 0) {
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

// The same in two steps, 32 pixels at a time: which are in the triangle, and then the depth of those alone. So lanes wait
// for the one that covers most pixels, and not for the one with the largest box.
template <bool COUNTED>
__device__ __forceinline__ void draw_covered(const Picture& picture, const Small& small, long long low, int columns, int rows) {
    const int ax = small.ax << SUBPIXEL_BITS, ay = small.ay << SUBPIXEL_BITS, bx = small.bx << SUBPIXEL_BITS, by = small.by << SUBPIXEL_BITS;
    const int cx = -ax - bx, cy = -ay - by, count = columns * rows, x0 = small.corner & 0xffff, y0 = small.corner >> 16;
    const int down_a = ax + columns * ay, down_b = bx + columns * by, down_c = cx + columns * cy;  // to the next row
    int of_a = small.row_a - (small.shape >> 24 & 1), of_b = small.row_b - (small.shape >> 25 & 1), of_c = small.row_c - (small.shape >> 26 & 1);
    int left = columns;
    const int over_columns = int(65535.0f / float(columns)) + 1;
#pragma unroll 1
    for (int begin = 0; begin < count; begin += 32) {
        unsigned covered = 0u;
        unsigned bit = 1;
#pragma unroll 1
        for (int n = min(count - begin, 32); n > 0; --n, bit += bit) {
            if ((of_a | of_b | of_c) >= 0) covered |= bit;
            of_a -= ay, of_b -= by, of_c -= cy;
            if (--left == 0) {
                left = columns;
                of_a += down_a, of_b += down_b, of_c += down_c;
            }
        }
#pragma unroll 1
        for (; covered; covered &= covered - 1) {
            const int pixel = begin + __ffs(covered) - 1, y = pixel * over_columns >> 16, x = pixel - y * columns;
            const float a = float(small.row_a - x * ay + y * ax), b = float(small.row_b - x * by + y * bx), c = float(small.row_c - x * cy + y * cx);
            const float nearest = larger_of(larger_of(small.a, small.b), small.c), farthest = smaller_of(smaller_of(small.a, small.b), small.c);
            put<COUNTED>(picture, (y0 + y) * picture.width + x0 + x, nearest, farthest, (a * small.a + b * small.b + c * small.c) * small.over_area, low);
        }
    }
}

// For a whole warp: the pixels of the boxes of its lanes, spread evenly over the lanes.
template <bool COUNTED>
__device__ __forceinline__ void draw_shared(const Picture& picture, Small small, Small* shared, long long high, int columns, int rows) {
    const int lane = threadIdx.x % 32, count = columns * rows;
    const unsigned drawing = __ballot_sync(ALL_LANES, count > 0);
    if (drawing == 0) return;
    int end = count;
#pragma unroll
    for (int apart = 1; apart < 32; apart *= 2) {
        const int other = __shfl_sync(ALL_LANES, end, max(lane - apart, 0));
        if (lane >= apart) end += other;
    }
    const int total = __shfl_sync(ALL_LANES, end, 31), start = end - count;
    if (count > 0) {
        small.start = start;
        small.shape |= (65536 + columns - 1) / columns | columns << 17;
        shared[__popc(drawing & ((1u << lane) - 1))] = small;
    }
    __syncwarp();
    int before = -1;  // triangles whose pixels begin before these, and one less
#pragma unroll 1
    for (int first = 0; first < total; first += 32) {
        const unsigned begins = count > 0 && start >= first && start < first + 32 ? 1u << (start - first) : 0u;
        const unsigned starts = __reduce_or_sync(ALL_LANES, begins);
        if (first + lane < total) {
            const Small own = shared[before + __popc(starts & (2u << lane) - 1)];
            const int pixel = first + lane - own.start, y = pixel * (own.shape & 0x1ffff) >> 16, x = pixel - y * (own.shape >> 17 & 127);
            const int across = x << SUBPIXEL_BITS, down = y << SUBPIXEL_BITS;
            const int of_a = own.row_a - across * own.ay + down * own.ax, of_b = own.row_b - across * own.by + down * own.bx;
            const int of_c = own.row_c + across * (own.ay + own.by) - down * (own.ax + own.bx);
            const int tie_a = -(own.shape >> 24 & 1), tie_b = -(own.shape >> 25 & 1), tie_c = -(own.shape >> 26 & 1);
            if (((of_a + tie_a) | (of_b + tie_b) | (of_c + tie_c)) >= 0) {
                const float nearest = larger_of(larger_of(own.a, own.b), own.c), farthest = smaller_of(smaller_of(own.a, own.b), own.c);
                const float sum = float(of_a) * own.a + float(of_b) * own.b + float(of_c) * own.c;
                put<COUNTED>(picture, ((own.corner >> 16) + y) * picture.width + (own.corner & 0xffff) + x, nearest, farthest, sum * own.over_area, high | own.number);
            }
        }
        before += __popc(starts);
    }
    __syncwarp();  // the triangles are not needed any more
}

template <bool COUNTED>
__global__ void __launch_bounds__(THREADS) rasterize_clusters(
    const int* words, const float* lenses, const int* pictures, const float* to_view, const int* records, const int* ranks,
    int* counters, long long* pixels, int* fragments, Entry* large_items, int visible_room, int large_room,
    int cameras, int second, int one_sided) {
    __shared__ Vertex placed_vertices[MOST_VERTICES];
#if TRIAL_FLAT
    __shared__ Small shared[THREADS];
#endif
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
        int columns = 0, rows = 0;  // of its box, if it is drawn here
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
                is_large = last_x != BEHIND;  // else all of it is nearer than pictures begin
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
                            small = small_of(a, b, c, area, x0, y0, number);
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
        const Picture picture = {pixels + first, COUNTED && view < cameras ? fragments + first : nullptr, width, lens[ORTHOGRAPHIC] > 0.0f, lens[NEAR]};
        const long long high = (long long)rank << TRIANGLE_BITS;
        const bool counted = COUNTED && view < cameras;
#if TRIAL_FLAT
        if (counted) draw_shared<true>(picture, small, shared + threadIdx.x / 32 * 32, high, columns, rows);
        else draw_shared<false>(picture, small, shared + threadIdx.x / 32 * 32, high, columns, rows);
#elif TRIAL_COVERED
        if (counted) draw_covered<true>(picture, small, high | number, columns, rows);
        else draw_covered<false>(picture, small, high | number, columns, rows);
#else
        if (counted) draw<true>(picture, small, high | number, columns, rows);
        else draw<false>(picture, small, high | number, columns, rows);
#endif
        __syncthreads();  // the vertices are not needed any more
    }
}
