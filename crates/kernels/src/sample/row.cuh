// A row of logits in the shared memory of a cluster of blocks, and what the blocks tell each other about it.
#pragma once

#include "../cuda/common.cuh"

namespace {

typedef unsigned long long u64;

constexpr int THREADS = 512;
constexpr int WARPS = THREADS / 32;
constexpr int BINS = 512;
constexpr int MAX_TOP = 128;
constexpr int MAX_CLUSTER = 16;

constexpr uint32_t NONE = ~0u;
constexpr uint32_t POSITIVE_INFINITY = 0xFF800000u;  // keys, see key_of
constexpr uint32_t NEGATIVE_INFINITY = 0x007FFFFFu;

// Order of floats as order of integers; -0 is +0, and a NaN of either sign is above everything.
__device__ __forceinline__ uint32_t key_of(float x) {
    const uint32_t bits = __float_as_uint(__fadd_rn(x, 0.0f));
    return bits ^ (uint32_t(int32_t(bits) >> 31) | 0x80000000u);
}
__device__ __forceinline__ float value_of(uint32_t key) {
    return __uint_as_float(key & 0x80000000u ? key ^ 0x80000000u : ~key);
}

// Four tokens that cannot be drawn.
__device__ __forceinline__ float4 nothing4() { return make_float4(-INFINITY, -INFINITY, -INFINITY, -INFINITY); }

__device__ __forceinline__ uint32_t cluster_rank() {
    uint32_t rank = 0;
#if __CUDA_ARCH__ >= 900
    asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
#endif
    return rank;
}
__device__ __forceinline__ uint32_t cluster_size() {
    uint32_t n = 1;
#if __CUDA_ARCH__ >= 900
    asm volatile("mov.u32 %0, %%cluster_nctarank;" : "=r"(n));
#endif
    return n;
}
// Blocks write to each other's shared memory only by asynchronous stores that complete on a barrier (mbarrier) of the receiving
// block. A barrier of the whole cluster would cost a fence over all memory and the L1 cache each time.

// Sends a value to `to` of another block, whose instance of `barrier` counts the bytes.
__device__ __forceinline__ void send(uint32_t rank, u64* to, u64 x, u64* barrier) {
#if __CUDA_ARCH__ >= 900
    asm volatile("{\n.reg .b32 to, bar;\nmapa.shared::cluster.u32 to, %0, %3;\nmapa.shared::cluster.u32 bar, %2, %3;\n"
                 "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.b64 [to], %1, [bar];\n}" ::"r"(shared_address(to)),
                 "l"(x), "r"(shared_address(barrier)), "r"(rank) : "memory");
#else
    *to = x;
#endif
}
__device__ __forceinline__ void send(uint32_t rank, uint32_t* to, uint32_t x, u64* barrier) {
#if __CUDA_ARCH__ >= 900
    asm volatile("{\n.reg .b32 to, bar;\nmapa.shared::cluster.u32 to, %0, %3;\nmapa.shared::cluster.u32 bar, %2, %3;\n"
                 "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.b32 [to], %1, [bar];\n}" ::"r"(shared_address(to)),
                 "r"(x), "r"(shared_address(barrier)), "r"(rank) : "memory");
#else
    *to = x;
#endif
}
// Called by all threads: waits until this block has received `bytes` in the barrier's present phase.
__device__ __forceinline__ void receive(u64* barrier, uint32_t phase, uint32_t bytes) {
#if __CUDA_ARCH__ >= 900
    if (threadIdx.x == 0)
        asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(barrier)), "r"(bytes)
                     : "memory");
    asm volatile("{\n.reg .pred done;\nagain:\nmbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
                 "@!done bra again;\n}" ::"r"(shared_address(barrier)), "r"(phase % 2) : "memory");
#else
    __syncthreads();
#endif
}

struct Shared {
    // The block's own histogram; its share of the bins, from all blocks; all bins, summed.
    uint32_t count[BINS], mass_low[BINS], mass_high[BINS];
    uint32_t part_count[BINS], total_count[BINS];
    u64 part_mass[BINS], total_mass[BINS];
    // Two values from each block; used in turns, as a block may be one exchange behind.
    u64 exchange[2][MAX_CLUSTER][2];
    u64 warp[WARPS];
    u64 top[MAX_TOP];
    // Where a search crossed its target.
    u64 above;
    uint32_t bin, bin_count, crossed;
    uint32_t n_top;
    u64 token;
    // Barriers that count what other blocks have sent.
    u64 exchanged[2], parts_sent, totals_sent, top_sent;
};

// Makes the barriers ready. Other blocks may be sent to after `cluster_wait`.
__device__ __forceinline__ void cluster_arrive(Shared& s) {
#if __CUDA_ARCH__ >= 900
    if (threadIdx.x == 0) {
        u64* const barriers[] = {&s.exchanged[0], &s.exchanged[1], &s.parts_sent, &s.totals_sent, &s.top_sent};
#pragma unroll
        for (int i = 0; i < 5; i++)
            asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(shared_address(barriers[i])) : "memory");
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    asm volatile("barrier.cluster.arrive.relaxed;" ::: "memory");
#endif
}
__device__ __forceinline__ void cluster_wait() {
#if __CUDA_ARCH__ >= 900
    asm volatile("barrier.cluster.wait.acquire;" ::: "memory");
#endif
}

__device__ __forceinline__ u64 shuffle_up(u64 x, int d) { return __shfl_up_sync(~0u, x, d); }

__device__ __forceinline__ u64 warp_max64(uint32_t high, uint32_t low) {
    const uint32_t most = __reduce_max_sync(~0u, high);
    return u64(most) << 32 | __reduce_max_sync(~0u, high == most ? low : 0);
}

// The best token of a row, the same in all threads of the cluster.
struct Best {
    u64 packed;      // key in the upper half, ~id in the lower, so that the lowest id wins a tie
    uint32_t least;  // the worst of the warps' best keys: as many tokens as there are warps are at least this good

    __device__ uint32_t key() const { return uint32_t(packed >> 32); }
    __device__ uint32_t id() const { return ~uint32_t(packed); }
    __device__ float logit() const { return value_of(key()); }
    // A NaN or +inf, or nothing but -inf.
    __device__ bool is_corrupt() const { return key() >= POSITIVE_INFINITY || key() <= NEGATIVE_INFINITY; }
};

struct Argmax {
    uint32_t key = 0, id = NONE;
    __device__ __forceinline__ void take(uint32_t token, float x) {
        const uint32_t k = key_of(x);
        if (k > key) key = k, id = token;
    }
};

// Everything a block needs to take part in the steps below.
struct Row {
    Shared& s;
    float* values;     // this block's run, slice elements; beyond the vocabulary -inf
    uint32_t* counts;  // two 16-bit counters a word, for the same tokens; penalties only
    uint32_t slice;    // a multiple of 32
    uint32_t first;    // token of values[0]
    uint32_t rank;     // of the block in the cluster
    uint32_t n_blocks; // of the cluster
    uint32_t turn;     // of the exchanges
    uint32_t search;   // of the summed histograms

    // Gives two values that a block's first warp holds to all blocks. The returned array, by rank, is good until the exchange
    // after the next. All threads must have passed a block barrier since they read the last one.
    __device__ const u64 (*exchange(u64 a, u64 b = 0))[2] {
        const uint32_t t = turn % 2;
        if (threadIdx.x < n_blocks) {
            send(threadIdx.x, &s.exchange[t][rank][0], a, &s.exchanged[t]);
            send(threadIdx.x, &s.exchange[t][rank][1], b, &s.exchanged[t]);
        }
        receive(&s.exchanged[t], turn++ / 2, n_blocks * 16);
        return s.exchange[t];
    }

    // The sum over all threads of the cluster, the same in all of them.
    __device__ u64 sum(u64 x) {
        x = warp_sum(x);
        if (threadIdx.x % 32 == 0) s.warp[threadIdx.x / 32] = x;
        __syncthreads();
        if (threadIdx.x < 32) x = warp_sum(threadIdx.x < WARPS ? s.warp[threadIdx.x] : 0);
        const auto all = exchange(x);
        x = 0;
        for (uint32_t i = 0; i < n_blocks; i++) x += all[i][0];
        return x;
    }

    __device__ Best best(const Argmax& mine) {
        const u64 x = warp_max64(mine.key, ~mine.id);
        if (threadIdx.x % 32 == 0) s.warp[threadIdx.x / 32] = x;
        __syncthreads();
        u64 most = 0, least = 0;
        if (threadIdx.x < 32) {
            const u64 y = threadIdx.x < WARPS ? s.warp[threadIdx.x] : 0;
            most = warp_max64(uint32_t(y >> 32), uint32_t(y));
            least = __reduce_min_sync(~0u, threadIdx.x < WARPS ? uint32_t(y >> 32) : ~0u);
        }
        const auto all = exchange(most, least);
        Best best = {0, ~0u};
        for (uint32_t i = 0; i < n_blocks; i++) {
            if (all[i][0] > best.packed) best.packed = all[i][0];
            best.least = min(best.least, uint32_t(all[i][1]));
        }
        return best;
    }

    // Sums the blocks' histograms: each block sums a share of the bins, and gives the result to all.
    template <bool MASS> __device__ void sum_bins() {
        const uint32_t share = BINS / n_blocks, part = threadIdx.x / share, bin = threadIdx.x % share;
        constexpr uint32_t BYTES = BINS * (MASS ? 12 : 4);
        const u64 mass = (u64(s.mass_high[threadIdx.x]) << 32) + s.mass_low[threadIdx.x];
        send(part, &s.part_count[rank * share + bin], s.count[threadIdx.x], &s.parts_sent);
        if (MASS) send(part, &s.part_mass[rank * share + bin], mass, &s.parts_sent);
        receive(&s.parts_sent, search, BYTES);
        uint32_t count = 0;
        u64 total = 0;
        for (uint32_t r = 0; r < n_blocks; r++) {
            count += s.part_count[r * share + bin];
            if (MASS) total += s.part_mass[r * share + bin];
        }
        send(part, &s.total_count[rank * share + bin], count, &s.totals_sent);
        if (MASS) send(part, &s.total_mass[rank * share + bin], total, &s.totals_sent);
        receive(&s.totals_sent, search++, BYTES);
    }

    // `low`, or better a logit that n tokens surely reach.
    __device__ float at_least(uint32_t n, const Best& best, float low) const {
        return n <= WARPS * n_blocks && best.least > NEGATIVE_INFINITY ? fmaxf(low, value_of(best.least)) : low;
    }

    // Calls f(index, float4) for this block's tokens, each thread for its own, always the same ones.
    template <typename F> __device__ __forceinline__ void each4(F f) {
        for (uint32_t i = threadIdx.x * 4; i < slice; i += THREADS * 4) f(i, *reinterpret_cast<const float4*>(values + i));
    }
    template <typename F> __device__ __forceinline__ void each(F f) {
        each4([&](uint32_t i, const float4& v) { f(i, v.x), f(i + 1, v.y), f(i + 2, v.z), f(i + 3, v.w); });
    }
};

// Reads this block's run of the row, each thread what `each` gives it: calls f(index, float4), with -inf beyond the
// vocabulary.
template <int N, typename F>
__device__ __forceinline__ void read_run(const Row& row, const float* logits, uint32_t n_vocab, F f) {
    for (uint32_t base = threadIdx.x * 4; base < row.slice; base += N * THREADS * 4) {
        float4 v[N];
#pragma unroll
        for (int n = 0; n < N; n++) {
            const uint32_t i = base + n * THREADS * 4;
            const bool valid = i < row.slice && row.first + i < n_vocab;
            v[n] = valid ? __ldcs(reinterpret_cast<const float4*>(logits + row.first + i)) : nothing4();
        }
#pragma unroll
        for (int n = 0; n < N; n++) {
            const uint32_t i = base + n * THREADS * 4, token = row.first + i;
            if (token + 3 >= n_vocab) {
                if (token + 1 >= n_vocab) v[n].y = -INFINITY;
                if (token + 2 >= n_vocab) v[n].z = -INFINITY;
                v[n].w = -INFINITY;
            }
            if (i < row.slice) f(i, v[n]);
        }
    }
}

__device__ __forceinline__ Row row_of(Shared& s, uint8_t* memory, uint32_t n_vocab) {
    const uint32_t n_blocks = cluster_size(), rank = cluster_rank();
    const uint32_t slice = ((n_vocab + n_blocks - 1) / n_blocks + 31) / 32 * 32;
    float* values = reinterpret_cast<float*>(memory);
    return {s, values, reinterpret_cast<uint32_t*>(values + slice), slice, rank * slice, rank, n_blocks, 0, 0};
}

}  // namespace
