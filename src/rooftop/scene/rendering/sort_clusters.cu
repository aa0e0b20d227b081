// Sort a moderate number of visible clusters. First, each block sorts a tile. Then the final index of each entry is the
// number of smaller entries, found in every tile by binary search. Torch's sort takes ten launches for this, and sorts
// the whole capacity of the list, because only the device knows how many entries the list has.

constexpr int TILE = 2048, THREADS = 1024;
constexpr int OF_A_WARP = 64;  // entries per warp; two entries that are less than this apart belong to the same warp
constexpr int AT_ONCE = 4;  // tiles that a thread searches at once, so that the latencies of their loads overlap
constexpr Entry LAST = 0x7fffffffffffffffll;  // sorts after every entry

// Batcher's bitonic sort (1968), in shared memory: a thread compares two entries in each step.
__global__ void __launch_bounds__(THREADS) sort_tiles(Entry* items, const int* counters, int counter, int room) {
    __shared__ Entry tile[TILE];
    const int count = min(counters[counter], room), first = blockIdx.x * TILE;
    if (first >= count) return;
    int size = OF_A_WARP;  // a power of two, not less than the number of entries in the tile
    while (size < min(count - first, TILE)) size *= 2;
    for (int i = threadIdx.x; i < size; i += THREADS) tile[i] = first + i < count ? items[first + i] : LAST;
    __syncthreads();
    for (int run = 2; run <= size; run *= 2) {
        for (int apart = run / 2; apart > 0; apart /= 2) {
            for (int pair = threadIdx.x; pair < size / 2; pair += THREADS) {
                const int low = 2 * pair - (pair & (apart - 1)), high = low + apart;
                const Entry a = tile[low], b = tile[high];
                if ((a > b) == ((low & run) == 0)) tile[low] = b, tile[high] = a;
            }
            const int next = apart > 1 ? apart / 2 : run;
            if (max(apart, next) < OF_A_WARP) __syncwarp();
            else __syncthreads();
        }
    }
    for (int i = threadIdx.x; i < size; i += THREADS)
        if (first + i < count) items[first + i] = tile[i];
}

// Each thread finds the final index of one entry. Neighbouring entries have nearby positions in the other tiles too, so
// a warp reads few cache lines per step. If each lane searched a different tile, every lane would read a different
// line.
__global__ void merge_tiles(const Entry* items, Entry* sorted, const int* counters, int counter, int room) {
    const int count = min(counters[counter], room), threads = gridDim.x * blockDim.x;
    for (int at = blockIdx.x * blockDim.x + threadIdx.x; at < count; at += threads) {
        const Entry item = items[at];
        int rank = 0;  // number of smaller entries in all tiles
        for (int first = 0; first < count; first += AT_ONCE * TILE) {
            int smaller[AT_ONCE] = {};
            for (int step = TILE; step > 0; step /= 2) {
#pragma unroll
                for (int k = 0; k < AT_ONCE; ++k) {
                    const int more = smaller[k] + step, last = first + k * TILE + more - 1;
                    if (more <= TILE && last < count && items[last] < item) smaller[k] = more;
                }
            }
#pragma unroll
            for (int k = 0; k < AT_ONCE; ++k) rank += smaller[k];
        }
        sorted[rank] = item;
    }
}
