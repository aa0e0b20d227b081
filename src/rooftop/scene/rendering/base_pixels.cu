// Stage 5 for scenes without lights and materials, if all cameras have the same size: one block per 16 x 16 pixels. The
// operations are those of `base_pass` in base_pass.py, in the same order, so results have the same bits. ATTRIBUTES:
// whether any mesh has vertex attributes.

constexpr float AMBIENT = 0.25f, MATERIAL_STEP = 1.0f / 65536.0f;
constexpr int RANK_MASK = (1 << 26) - 1, TRIANGLE_MASK = (1 << TRIANGLE_BITS) - 1, MATERIAL_BITS = 16, MIXED = -1;

__device__ __forceinline__ Vector operator+(Vector a, Vector b) { return {a.x + b.x, a.y + b.y, a.z + b.z}; }
__device__ __forceinline__ Vector operator-(Vector a, Vector b) { return {a.x - b.x, a.y - b.y, a.z - b.z}; }
__device__ __forceinline__ Vector operator-(Vector a) { return {-a.x, -a.y, -a.z}; }
__device__ __forceinline__ Vector operator*(float s, Vector a) { return {s * a.x, s * a.y, s * a.z}; }
__device__ __forceinline__ Vector operator/(Vector a, float s) { return {a.x / s, a.y / s, a.z / s}; }
__device__ __forceinline__ float dot(Vector a, Vector b) { return a.x * b.x + a.y * b.y + a.z * b.z; }
__device__ __forceinline__ Vector cross(Vector a, Vector b) {
    return {a.y * b.z - a.z * b.y, a.z * b.x - a.x * b.z, a.x * b.y - a.y * b.x};
}
__device__ __forceinline__ Vector normalized(Vector a) {
    const float length = sqrtf(dot(a, a));
    return length > 0.0f ? a / length : Vector{0.0f, 0.0f, 0.0f};
}
__device__ __forceinline__ float largest(Vector a) { return larger_of(larger_of(fabsf(a.x), fabsf(a.y)), fabsf(a.z)); }
__device__ __forceinline__ float within(float x, float low, float high) { return smaller_of(larger_of(low, x), high); }
__device__ __forceinline__ Vector shortened(Vector vector, float longest) {
    const int exponent = word_of(longest) >> 23 & 255;
    return real(max(254 - exponent, 1) << 23) * vector;
}

struct Matrix { float4 x, y, z; };
__device__ __forceinline__ Matrix matrix_at(const float* matrices, int row) {
    const float4* m = (const float4*)(matrices + 12ll * row);
    return {m[0], m[1], m[2]};
}
__device__ __forceinline__ Vector moved(const Matrix& m, Vector p) {
    return {m.x.x * p.x + m.x.y * p.y + m.x.z * p.z + m.x.w, m.y.x * p.x + m.y.y * p.y + m.y.z * p.z + m.y.w,
            m.z.x * p.x + m.z.y * p.y + m.z.z * p.z + m.z.w};
}

__device__ __forceinline__ Vector parts_of(bool parallel, Vector direction, Vector a, Vector b, Vector c) {
    const float longest = larger_of(largest(b - a), largest(c - a));
    if (longest == 0.0f) return {1.0f, 0.0f, 0.0f};
    const Vector u = shortened(b - a, longest), v = shortened(c - a, longest), normal = cross(u, v);
    Vector from_a;
    if (parallel) {
        from_a = {direction.x - a.x, direction.y - a.y, 0.0f};
        if (normal.z != 0.0f) from_a.z = -(normal.x * from_a.x + normal.y * from_a.y) / normal.z;
    } else {
        const float along = dot(normal, direction);
        float depth = a.z;
        if (along != 0.0f) depth = dot(normal, a) / along;
        from_a = depth * direction - a;
    }
    from_a = shortened(from_a, longest);
    const float square = dot(normal, normal);
    float of_b = 0.0f, of_c = 0.0f;
    if (square > 0.0f) {
        of_b = within(dot(cross(from_a, v), normal) / square, 0.0f, 1.0f);
        of_c = within(dot(cross(u, from_a), normal) / square, 0.0f, 1.0f);
    }
    const float total = larger_of(of_b + of_c, 1.0f);
    of_b = of_b / total, of_c = of_c / total;
    return {1.0f - of_b - of_c, of_b, of_c};
}

__device__ __forceinline__ Vector palette(int number) {
    if (number == 0) return {0.86f, 0.85f, 0.82f};
    const float turns = 0.6180339887f * float(number), hue = 6.0f * (turns - truncf(turns));
    return {0.35f + 0.6f * within(fabsf(hue - 3.0f) - 1.0f, 0.0f, 1.0f), 0.35f + 0.6f * within(2.0f - fabsf(hue - 2.0f), 0.0f, 1.0f),
            0.35f + 0.6f * within(2.0f - fabsf(hue - 4.0f), 0.0f, 1.0f)};
}

// The attributes of a cluster's vertices (normal, uv, colour), read as in clusters.py.
struct Attributes {
    const int *words, *head;  // words of the attribute stream; attribute fields of the cluster's head
    int has, normal_base[2], normal_bits[2], uv_base[2], uv_bits[2], color_bits;
    __device__ int bit(int vertex) const { return vertex * (normal_bits[0] + normal_bits[1] + uv_bits[0] + uv_bits[1] + color_bits); }
};
constexpr int HAS_NORMALS = 1, HAS_UV = 2, HAS_COLORS = 4;
constexpr int NORMAL_BITS = 10, NORMAL_WIDTH_BITS = 4, NORMAL_MIDDLE = 511, NORMAL_WORDS = 1, UV_WIDTH_BITS = 5, COLOR_BITS = 8;
constexpr int CLUSTER_UV_BASE = 17, CLUSTER_UV_EXTENT = 19;

__device__ __forceinline__ Attributes read_attributes(const int* words, const int* head, int has, bool old) {
    Attributes all = {words, head, has};
    if (has & HAS_NORMALS) {
        for (int axis = 0; axis < 2; ++axis) {
            all.normal_base[axis] = old ? 0 : head[0] >> axis * NORMAL_BITS & ((1 << NORMAL_BITS) - 1);
            all.normal_bits[axis] = old ? NORMAL_BITS : head[0] >> (2 * NORMAL_BITS + axis * NORMAL_WIDTH_BITS) & ((1 << NORMAL_WIDTH_BITS) - 1);
        }
    }
    if (has & HAS_UV) {
        const int* own = old ? head + CLUSTER_UV_BASE : head + (has & HAS_NORMALS ? NORMAL_WORDS : 0);
        for (int axis = 0; axis < 2; ++axis) {
            all.uv_base[axis] = own[axis];
            all.uv_bits[axis] = old ? 32 - __clz(head[CLUSTER_UV_EXTENT + axis]) : own[2] >> axis * UV_WIDTH_BITS & ((1 << UV_WIDTH_BITS) - 1);
        }
    }
    all.color_bits = has & HAS_COLORS ? 3 * COLOR_BITS : 0;
    return all;
}
__device__ __forceinline__ Vector normal_of(const Attributes& all, int vertex) {
    const int bit = all.bit(vertex);
    float x = float(all.normal_base[0] + bits(all.words, bit, all.normal_bits[0]) - NORMAL_MIDDLE) / float(NORMAL_MIDDLE);
    float y = float(all.normal_base[1] + bits(all.words, bit + all.normal_bits[0], all.normal_bits[1]) - NORMAL_MIDDLE) / float(NORMAL_MIDDLE);
    const float z = 1.0f - fabsf(x) - fabsf(y);
    if (z < 0.0f) {
        const float folded = (1.0f - fabsf(y)) * (x < 0.0f ? -1.0f : 1.0f);
        y = (1.0f - fabsf(x)) * (y < 0.0f ? -1.0f : 1.0f);
        x = folded;
    }
    return normalized({x, y, z});
}
__device__ __forceinline__ float uv_of(const Attributes& all, int vertex, int axis, float step) {
    const int bit = all.bit(vertex) + all.normal_bits[0] + all.normal_bits[1] + axis * all.uv_bits[0];
    return step * float(all.uv_base[axis] + bits(all.words, bit, all.uv_bits[axis]));
}
__device__ __forceinline__ Vector color_of(const Attributes& all, int vertex) {
    const int packed = bits(all.words, all.bit(vertex + 1) - all.color_bits, 3 * COLOR_BITS), most = (1 << COLOR_BITS) - 1;
    return {float(packed & most) / float(most), float(packed >> COLOR_BITS & most) / float(most), float(packed >> 2 * COLOR_BITS & most) / float(most)};
}

__device__ __forceinline__ Vector to_world(const float* turn, Vector normal) {
    return normalized({0.0f + turn[0] * normal.x + turn[1] * normal.y + turn[2] * normal.z, 0.0f + turn[3] * normal.x + turn[4] * normal.y + turn[5] * normal.z,
                       0.0f + turn[6] * normal.x + turn[7] * normal.y + turn[8] * normal.z});
}

__device__ __forceinline__ void put3(float* target, int at, Vector value) {
    if (target) target[3 * (long long)at] = value.x, target[3 * (long long)at + 1] = value.y, target[3 * (long long)at + 2] = value.z;
}

template <bool ATTRIBUTES>
__global__ void __launch_bounds__(256) base_pass(
    const int* words, const long long* page_at, const int* meshes, const float* mesh_steps, const Entry* drawn, const float* instance_normals, const float* lenses, const float* lenses_before, const double* from_world,
    const int* pictures, const float* to_view, const float* before, const int* records, const long long* pixels,
    float* depths, float* normals, int* instances, int* materials, float* material_depths, float* velocities, float* colors,
    bool* coverages, int* triangles, float* uvs, float* vertex_colors, int* clusters, int* levels, float light_x, float light_y, float light_z) {
    const int width = pictures[WIDTH], height = pictures[HEIGHT], across = (width + 15) / 16, squares = across * ((height + 15) / 16);
    const int view = blockIdx.x / squares, square = blockIdx.x - view * squares, thread = threadIdx.x;
    const int column = square % across * 16 + (thread >> 5 & 1) * 8 + (thread & 7);
    const int row = square / across * 16 + (thread >> 6) * 4 + (thread >> 3 & 3);
    if (column >= width || row >= height) return;
    const int at = pictures[PICTURE * view + PICTURE_AT] + row * width + column;
    const long long pixel = pixels[at];
    const float *lens = lenses + LENS * view, *lens_before = lenses_before + LENS * view;
    if (pixel == 0) {
        if (depths) depths[at] = real(0x7f800000);
        if (instances) instances[at] = -1;
        if (materials) materials[at] = -1;
        if (material_depths) material_depths[at] = 0.0f;
        if (velocities) velocities[2ll * at] = 0.0f, velocities[2ll * at + 1] = 0.0f;
        if (coverages) coverages[at] = false;
        if (triangles) triangles[at] = -1;
        if (clusters) clusters[at] = -1;
        if (levels) levels[at] = -1;
        const float nan = real(0x7fc00000);
        if (uvs) uvs[2ll * at] = nan, uvs[2ll * at + 1] = nan;
        put3(vertex_colors, at, {nan, nan, nan});
        put3(normals, at, {0.0f, 0.0f, 0.0f}), put3(colors, at, {0.0f, 0.0f, 0.0f});
        return;
    }
    const int rank = int(pixel >> TRIANGLE_BITS) & RANK_MASK, triangle = int(pixel) & TRIANGLE_MASK;
    const int4* record = (const int4*)records + (long long)RECORD_QUARTERS * rank;
    const int4 r0 = record[0], r1 = record[1], r2 = record[2], r3 = record[3];
    const int *masks = words + ((long long)r0.z << 32 | unsigned(r0.y)), *positions = masks + (r1.z >> 18 & 8191);
    const int kind = r0.w >> 15 & 3, instance = r3.x;
    const Matrix matrix = matrix_at(to_view, r0.x);
    Vector corner[3];
    int corners[3];
    {
        const Streams streams = {masks, masks + NEW_WORDS + (kind == FANS_AND_EXPLICIT ? EXPLICIT_WORDS : 0), kind, r1.x >> 24 & 255,
                                 (r0.w >> 7 & 255) + 1, r1.x, r1.y};
        corners_of(streams, triangle, corners);
        const int widths[3] = {r1.z & 63, r1.z >> 6 & 63, r1.z >> 12 & 63}, base[3] = {r2.x, r2.y, r2.z};
        const int together = widths[0] + widths[1] + widths[2];
        const float step = real(r1.w);
#pragma unroll
        for (int k = 0; k < 3; ++k) {
            float position[3];
#pragma unroll
            for (int axis = 0, bit = corners[k] * together; axis < 3; bit += widths[axis++])
                position[axis] = step * float(int(unsigned(base[axis]) + unsigned(bits(positions, bit, widths[axis]))));
            corner[k] = {position[0], position[1], position[2]};
        }
    }
    const Vector a = corner[0], b = corner[1], c = corner[2];
    const bool parallel = lens[ORTHOGRAPHIC] > 0.0f;
    const Vector direction = {(float(column) - lens[CX]) / lens[FX], (float(row) - lens[CY]) / lens[FY], 1.0f};
    const Vector parts = parts_of(parallel, direction, moved(matrix, a), moved(matrix, b), moved(matrix, c));

    if (depths) depths[at] = lens[NEAR] / real(int(pixel >> DEPTH_SHIFT));
    if (coverages) coverages[at] = true;
    if (triangles) triangles[at] = triangle;
    if (instances) instances[at] = instance;
    Attributes all = {};
    if (ATTRIBUTES) all = read_attributes(positions + r3.y, masks - (r0.w >> 17 & 32767), meshes[4 * r3.w + 2], kind == SEPARATE);
    int material = r3.z;
    if (material == MIXED) {
        const int before_materials = ATTRIBUTES ? (all.bit((r0.w >> 7 & 255) + 1) + 31) >> 5 : 0;
        material = bits(positions + r3.y + before_materials, triangle * MATERIAL_BITS, MATERIAL_BITS);
    }
    if (clusters || levels) {
        const Entry item = drawn[rank];
        const int page = what_of(item) >> CLUSTER_INDEX_BITS, index = what_of(item) & ((1 << CLUSTER_INDEX_BITS) - 1);
        const int* first = words + page_at[meshes[4 * r3.w + 1] + page];
        const Head head = head_of(first, index);
        if (clusters) clusters[at] = first[2] + index;
        if (levels) levels[at] = head.words[head.is_short ? HEAD_COUNTS : CLUSTER_COUNTS] >> (head.is_short ? 15 : 24) & 255;
    }
    if (materials) materials[at] = material;
    if (material_depths) material_depths[at] = MATERIAL_STEP * float(material + 1);
    if (velocities) {
        const Vector point = parts.x * a + parts.y * b + parts.z * c, now = moved(matrix, point), was = moved(matrix_at(before, r0.x), point);
        const float over = parallel ? 1.0f : now.z, over_before = lens_before[ORTHOGRAPHIC] > 0.0f ? 1.0f : was.z;
        float then_x = lens_before[FX] * was.x / over_before + lens_before[CX], then_y = lens_before[FY] * was.y / over_before + lens_before[CY];
        if (was.z < lens_before[NEAR]) then_x = then_y = real(0x7fc00000);
        velocities[2ll * at] = lens[FX] * now.x / over + lens[CX] - then_x;
        velocities[2ll * at + 1] = lens[FY] * now.y / over + lens[CY] - then_y;
    }
    if (uvs) {
        const float step = mesh_steps[2 * r3.w + 1];
        for (int axis = 0; axis < 2; ++axis)
            uvs[2ll * at + axis] = ATTRIBUTES && all.has & HAS_UV ? parts.x * uv_of(all, corners[0], axis, step) + parts.y * uv_of(all, corners[1], axis, step) +
                                                                        parts.z * uv_of(all, corners[2], axis, step)
                                                                  : real(0x7fc00000);
    }
    Vector own = {real(0x7fc00000), real(0x7fc00000), real(0x7fc00000)};
    if (ATTRIBUTES && all.color_bits && (vertex_colors || colors))
        own = parts.x * color_of(all, corners[0]) + parts.y * color_of(all, corners[1]) + parts.z * color_of(all, corners[2]);
    put3(vertex_colors, at, own);
    if (!normals && !colors) return;
    Vector upright = {0.0f, 0.0f, 0.0f};
    const float longest = larger_of(largest(b - a), largest(c - a));
    if (longest != 0.0f) upright = cross(shortened(b - a, longest), shortened(c - a, longest));
    const float* turn = instance_normals + 9ll * instance;
    const Vector flat = to_world(turn, upright);
    const double* world = from_world + 12 * view;
    const Vector back = parallel ? Vector{0.0f, 0.0f, -1.0f} : -direction;
    const Vector toward = normalized({0.0f + float(world[0]) * back.x + float(world[4]) * back.y + float(world[8]) * back.z,
                                      0.0f + float(world[1]) * back.x + float(world[5]) * back.y + float(world[9]) * back.z,
                                      0.0f + float(world[2]) * back.x + float(world[6]) * back.y + float(world[10]) * back.z});
    Vector normal = flat;
    if (ATTRIBUTES && all.has & HAS_NORMALS)
        normal = to_world(turn, parts.x * normal_of(all, corners[0]) + parts.y * normal_of(all, corners[1]) + parts.z * normal_of(all, corners[2]));
    if (dot(normal, normal) == 0.0f) normal = toward;
    put3(normals, at, normal);
    if (colors) {
        if (dot(flat, toward) < 0.0f) normal = -normal;
        const float ambient = 0.5f + 0.5f * larger_of(dot(normal, toward), 0.0f);
        const float shone = larger_of(dot(normal, {light_x, light_y, light_z}), 0.0f);
        const float lit = smaller_of(AMBIENT * ambient + (1.0f - AMBIENT) * shone, 1.0f);
        const Vector color = ATTRIBUTES && all.color_bits ? own : palette(material);
        put3(colors, at, {color.x * lit, color.y * lit, color.z * lit});
    }
}
