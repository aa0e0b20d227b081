// Norm of a sum over ranks (rooftop.kernels.norms.rank_sums). A rank sends its partial row to the mailboxes of all
// other ranks, and reads their rows from its own mailbox. The rank adds all rows in the order of the ranks, and
// normalizes the sum. pieces.cu and cuda_norms.cu must precede this file.
//
// A word in a mailbox has 8 bytes: the lower 4 bytes are data, and the upper 4 bytes are the number of the call that
// sent the word. A word arrives atomically, so if the number of a word has arrived, the data has arrived as well. This
// needs no fence and no second trip.
//
//     mailbox of a rank    unsigned long long [2: call % 2][ranks: sender][rows][words of a row]
//
// Call n writes half n % 2, which call n - 2 used. The sender has finished call n - 1, so it has received the rows that
// every other rank sent in call n - 1. Before a rank sent these rows, it had finished call n - 2, and had read this
// half. So two halves suffice, and no rank acknowledges the words that it has read. Call numbers are counted in `state`
// on the device, so each replay of a graph is a new call.

// ---- words -----------------------------------------------------------------------------------------------------------

using Word = unsigned long long;  // number of the call << 32 | data

#ifdef __CUDACC__
__device__ void send_word(Word* to, Word word) {
    asm volatile("st.relaxed.sys.global.b64 [%0], %1;" :: "l"(__cvta_generic_to_global(to)), "l"(word) : "memory");
}
__device__ void send_words(Word* to, Word first, Word second) {  // each word is atomic
    asm volatile("st.relaxed.sys.global.v2.b64 [%0], {%1, %2};"
                 :: "l"(__cvta_generic_to_global(to)), "l"(first), "l"(second) : "memory");
}
__device__ Word take_word(const Word* from) {
    Word word;
    asm volatile("ld.relaxed.sys.global.b64 %0, [%1];" : "=l"(word) : "l"(__cvta_generic_to_global(from)) : "memory");
    return word;
}
__device__ void take_words(const Word* from, Word& first, Word& second) {
    asm volatile("ld.relaxed.sys.global.v2.b64 {%0, %1}, [%2];"
                 : "=l"(first), "=l"(second) : "l"(__cvta_generic_to_global(from)) : "memory");
}
__device__ void wait_for_ranks() {}
#endif

template <typename T, int WIDTH>
constexpr int words_of_pack = sizeof(T) * WIDTH < 4 ? 1 : sizeof(T) * WIDTH / 4;

template <typename T, int WIDTH>
__device__ void send(const Pack<T, WIDTH>& pack, unsigned call, Word* to) {
    constexpr int WORDS = words_of_pack<T, WIDTH>;
    unsigned data[WORDS] = {};
    memcpy(data, &pack, sizeof(T) * WIDTH);
    const Word number = static_cast<Word>(call) << 32;
    if constexpr (WORDS == 1) {
        send_word(to, number | data[0]);
    } else {
#pragma unroll
        for (int i = 0; i < WORDS; i += 2) send_words(to + i, number | data[i], number | data[i + 1]);
    }
}

template <int WORDS>
__device__ void take(const Word* from, Word (&words)[WORDS]) {
    if constexpr (WORDS == 1) {
        words[0] = take_word(from);
    } else {
#pragma unroll
        for (int i = 0; i < WORDS; i += 2) take_words(from + i, words[i], words[i + 1]);
    }
}

template <typename T, int WIDTH, int WORDS>
__device__ Pack<T, WIDTH> data_of(const Word (&words)[WORDS]) {
    unsigned data[WORDS];
#pragma unroll
    for (int i = 0; i < WORDS; ++i) data[i] = static_cast<unsigned>(words[i]);
    Pack<T, WIDTH> pack;
    memcpy(&pack, data, sizeof(T) * WIDTH);
    return pack;
}

template <typename T, int WIDTH>
__device__ void multiply(const Pack<T, WIDTH> pack, float (&values)[WIDTH]) {
    float factors[WIDTH];
    widen(pack, factors);
#pragma unroll
    for (int i = 0; i < WIDTH; ++i) values[i] *= factors[i];
}

// ---- kernel ----------------------------------------------------------------------------------------------------------

constexpr unsigned LOOKS = 1024;  // polls of the mailbox for each read of `stop`, which is in host memory

// One block per row; a thread holds CHUNKS packs of WIDTH elements. residual, input_bias, weight and bias may be null.
template <typename T, typename P, int WIDTH, int CHUNKS, int WARPS, int RANKS, bool RMS>
__global__ void __launch_bounds__(32 * WARPS, 1) norm_of_rank_sum(
    const T* __restrict__ partial, const T* __restrict__ residual,                               // (M, N), (M, N)
    const P* __restrict__ input_bias, const P* __restrict__ weight, const P* __restrict__ bias,  // (N,) each
    T* __restrict__ y, T* __restrict__ total,                                                    // (M, N), (M, N)
    const long long* __restrict__ mailboxes,  // (RANKS + 1,), addresses on this GPU; the last is the address of `stop`
    int* state,                               // (2,): number of earlier calls; blocks of this call that have read it
    int rank, int columns, long long half_words, float eps) {
    constexpr int WORDS = words_of_pack<T, WIDTH>;
    __shared__ float scratch[3][WARPS];
    const long long row = blockIdx.x;
    const int packs = columns / WIDTH;
    const unsigned call = static_cast<unsigned>(*static_cast<volatile int*>(state)) + 1;
    // The offset of a sender's row, which is the same in every mailbox.
    const auto place = [&](int sender) {
        return call % 2 * half_words + ((sender * static_cast<long long>(gridDim.x)) + row) * packs * WORDS;
    };

    Pack<T, WIDTH> own[CHUNKS], added[CHUNKS];
#pragma unroll
    for (int chunk = 0; chunk < CHUNKS; ++chunk) {
        const int pack = chunk * 32 * WARPS + threadIdx.x;
        if (pack < packs) own[chunk] = load<T, WIDTH>(partial + row * columns + pack * WIDTH);
    }
#pragma unroll
    for (int step = 1; step < RANKS; ++step) {  // each rank begins with its neighbour, to spread the traffic
        const int other = (rank + step) % RANKS;
        Word* mailbox = reinterpret_cast<Word*>(mailboxes[other]) + place(rank);
#pragma unroll
        for (int chunk = 0; chunk < CHUNKS; ++chunk) {
            const int pack = chunk * 32 * WARPS + threadIdx.x;
            if (pack < packs) send(own[chunk], call, mailbox + pack * WORDS);
        }
    }
    // Load residual and parameters while the words of other ranks arrive. Weights come from DRAM, and are loaded ahead
    // if registers suffice.
    constexpr bool AHEAD = CHUNKS <= 2;
    Pack<P, WIDTH> scales[AHEAD ? CHUNKS : 1], shifts[AHEAD ? CHUNKS : 1];
#pragma unroll
    for (int chunk = 0; chunk < CHUNKS; ++chunk) {
        const int column = (chunk * 32 * WARPS + threadIdx.x) * WIDTH;
        if (column >= columns) continue;
        if (residual != nullptr) added[chunk] = load<T, WIDTH>(residual + row * columns + column);
        if constexpr (AHEAD) {
            if (weight != nullptr) scales[chunk] = load<P, WIDTH>(weight + column);
            if (bias != nullptr) shifts[chunk] = load<P, WIDTH>(bias + column);
        }
    }

    const Word* mailbox = reinterpret_cast<const Word*>(mailboxes[rank]);
    const auto stop = reinterpret_cast<const volatile int*>(mailboxes[RANKS]);  // not 0: stop waiting
    float values[CHUNKS][WIDTH];
    float sum = 0.0f;
#pragma unroll
    for (int chunk = 0; chunk < CHUNKS; ++chunk) {
        const int pack = chunk * 32 * WARPS + threadIdx.x;
        if (pack >= packs) continue;
        Word words[RANKS][WORDS];
        unsigned looks = 0;
        for (bool here = false; !here;) {
#pragma unroll
            for (int sender = 0; sender < RANKS; ++sender) {
                if (sender != rank) take(mailbox + place(sender) + pack * WORDS, words[sender]);
            }
            here = true;
#pragma unroll
            for (int sender = 0; sender < RANKS; ++sender) {
#pragma unroll
                for (int i = 0; i < WORDS; ++i) here = here && (sender == rank || words[sender][i] >> 32 == call);
            }
            if (!here) wait_for_ranks();
            if (++looks % LOOKS == 0 && *stop != 0) here = true;
        }
        // Add in the order of the ranks, so that all ranks get identical bits.
#pragma unroll
        for (int i = 0; i < WIDTH; ++i) values[chunk][i] = 0.0f;
#pragma unroll
        for (int sender = 0; sender < RANKS; ++sender) {
            add(sender == rank ? own[chunk] : data_of<T, WIDTH>(words[sender]), values[chunk]);
        }
        const int column = pack * WIDTH;
        if (input_bias != nullptr) add(load<P, WIDTH>(input_bias + column), values[chunk]);
        if (residual != nullptr) add(added[chunk], values[chunk]);
        store_rounded(values[chunk], total + row * columns + column);
#pragma unroll
        for (int i = 0; i < WIDTH; ++i) sum += values[chunk][i];
    }

    Mean average = {0.0f, 0.0f};
    if constexpr (!RMS) average = mean_of_row<T, WARPS>(values, sum, columns, scratch[0], scratch[2]);
    const float scale = scale_of_row<WARPS>(values, average, columns, eps, scratch[1]);
#pragma unroll
    for (int chunk = 0; chunk < CHUNKS; ++chunk) {
        const int column = (chunk * 32 * WARPS + threadIdx.x) * WIDTH;
        if (column >= columns) continue;
#pragma unroll
        for (int i = 0; i < WIDTH; ++i) values[chunk][i] = average.apart(values[chunk][i]) * scale;
        if (weight != nullptr) {
            multiply(AHEAD ? scales[AHEAD ? chunk : 0] : load<P, WIDTH>(weight + column), values[chunk]);
        }
        if (bias != nullptr) add(AHEAD ? shifts[AHEAD ? chunk : 0] : load<P, WIDTH>(bias + column), values[chunk]);
        store(values[chunk], y + row * columns + column);
    }
    // All threads of this block read `state` before the sum over the row. The last block increments the number of
    // calls.
    if (threadIdx.x == 0 && atomicAdd(state + 1, 1) == static_cast<int>(gridDim.x) - 1) {
        state[1] = 0;
        state[0] = static_cast<int>(call);
    }
}
