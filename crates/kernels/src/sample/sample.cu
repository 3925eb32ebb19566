// Drawing tokens from logits: the operation of `mod.rs` on the device, one cluster of blocks a request.
//
// Each block of the cluster holds a run of the row's logits in its shared memory, so that the row is read once; what the
// blocks find (best token, mass, histograms) they exchange through each other's shared memory. Masses of tokens are integers
// (the weight exp((x - max) / temperature), at most 1, times 2^44), so that sums do not depend on their order: the filters
// and the draw agree exactly on what is kept, and the size of the cluster changes no result.
//
// Differences to the CPU for equal logits: weights are within some 1e-6 of its f32 ones, and those below 2^-45 (more than
// 31 * temperature below the best logit) are 0. A draw or the end of top-p differs only where that moves a boundary across the
// random number. Counts of the frequency penalty stop at 28,672.
//
// Without clusters (before sm_90) one block takes the row and keeps its copy in `scratch`.
#include "row.cuh"

namespace {

constexpr uint32_t ID_BITS = 18;  // vocabularies up to 262,144
constexpr float GREEDY_BELOW = 1e-5f, LOWEST = -3.402823466e38f;

// Bits of Request::flags.
constexpr uint32_t SET_LAST_TOKEN = 1, APPEND = 2, LOGPROBS = 4;

// One request, as the host writes it: 80 bytes.
struct Request {
    uint64_t seed;
    uint64_t position;     // in the sequence, of the token that is drawn
    uint32_t logit;        // row of the logits, or NONE: padding, nothing is written
    uint32_t slot;         // of last_token and history
    uint32_t forced;       // this token instead of a draw, or NONE
    uint32_t flags;
    float temperature;
    float top_p;
    float min_p;
    float repetition_penalty;
    float presence_penalty;
    float frequency_penalty;
    uint32_t top_k;
    uint32_t n_top;        // best tokens to report, at most MAX_TOP and what the result has room for
    uint32_t mask;         // row of the masks, or NONE
    uint32_t first_bias;   // of n_bias entries
    uint32_t n_bias;
    uint32_t pad;
};

struct Bias {
    uint32_t token;
    float value;
};

// What all requests share.
struct Batch {
    const float* logits;        // rows of `stride` elements (a multiple of 4), the first n_vocab valid; 16-byte aligned
    uint64_t stride;
    const Request* requests;
    const uint32_t* masks;      // rows of ceil(n_vocab / 32) words: bit t % 32 of word t / 32 allows token t
    const Bias* biases;
    uint32_t* history;          // [n_slots][history_stride]: tokens of the prompt, then of the output
    const uint32_t* prompt_len; // [n_slots]
    uint32_t* output_len;       // [n_slots]
    uint32_t* last_token;       // [n_slots]
    // Result of request i, `result_stride` words: token, corrupt (0 or 1), log-probability (f32), rank, then
    // (result_stride - 4) / 2 ids of the best tokens and as many log-probabilities; id NONE where there are fewer.
    uint32_t* results;
    uint8_t* scratch;           // (6 * n_vocab + 255) / 128 * 128 bytes a request; before sm_90 only
    uint64_t history_stride;
    uint32_t result_stride;
    uint32_t n_vocab;
};

// The weight of a token times 2^44, rounded to the nearest, as two parts of 22 bits: full-rate instructions, where a conversion
// to a 64-bit integer is not.
struct Weigh {
    float max, factor;  // log2(e) / temperature
    __device__ __forceinline__ void parts(float x, uint32_t& high, int32_t& low) const {
        constexpr float MAGIC = 12582912.0f, UNIT = 4194304.0f;  // 1.5 * 2^23, whose last bit is 1; 2^22
        float w;
        asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(w) : "f"((x - max) * factor));
        const float a = __fmaf_rn(w, UNIT, MAGIC);
        const float rest = __fmaf_rn(w, UNIT, -__fsub_rn(a, MAGIC));
        high = __float_as_uint(a) - 0x4B400000u;
        low = int32_t(__float_as_uint(__fmaf_rn(rest, UNIT, MAGIC)) - 0x4B400000u);
    }
    __device__ __forceinline__ u64 operator()(float x) const {
        uint32_t high;
        int32_t low;
        parts(x, high, low);
        return (u64(high) << 22) + int64_t(low);
    }
};

// A sum of up to 512 weights.
struct Mass {
    uint32_t high = 0;
    int32_t low = 0;
    __device__ __forceinline__ void add(const Weigh& weigh, float x) {
        uint32_t h;
        int32_t l;
        weigh.parts(x, h, l);
        high += h, low += l;
    }
    __device__ __forceinline__ u64 total() const { return (u64(high) << 22) + int64_t(low); }
};

// Tokens that a filter keeps: all of better bins, and those of `bin` that are at least `least`. Bins are equal steps of value
// below the maximum.
struct Cut {
    float max, scale;
    uint32_t bin;
    float bottom, top;  // bounds of the bin's values, a little wider than rounding can make them
    u64 least;

    __device__ __forceinline__ uint32_t bin_of(float x) const { return uint32_t(fminf((max - x) * scale, float(BINS - 1))); }
    // Value, then lower id, as one number of 50 bits.
    static __device__ __forceinline__ u64 rank_of(float x, uint32_t id) {
        return u64(key_of(x)) << ID_BITS | (((1u << ID_BITS) - 1) - id);
    }
    __device__ void set_bin(uint32_t b, float low) {
        bin = b;
        const float near = float(b) / scale, far = float(b + 1) / scale, slack = (fabsf(max) + far) * 0x1p-21f;
        top = fminf(max, max - near + slack);
        bottom = b == BINS - 1 ? low : fmaxf(low, max - far - slack);
    }
    __device__ __forceinline__ bool keeps(float x, uint32_t id) const {
        if (x > top || x < bottom) return x > top;
        const uint32_t b = bin_of(x);
        return b < bin || (b == bin && rank_of(x, id) >= least);
    }
};

// 64-bit addition in shared memory, which the hardware has for 32 bits only. The final value does not depend on the order.
__device__ __forceinline__ void add64(uint32_t* low, uint32_t* high, u64 x) {
    const uint32_t old = atomicAdd(low, uint32_t(x));
    const uint32_t carry = uint32_t(x >> 32) + (old + uint32_t(x) < old ? 1 : 0);
    if (carry) atomicAdd(high, carry);
}

// Finds the best tokens, in order, whose number (or with MASS weight) reaches `target`, among those of at least `low`, which
// may miss some that do not matter. Each round sorts what is in question into bins, sums them over the cluster, and goes on
// with the bin in which the target lies: first by steps of value, then by bits of value and id.
template <bool MASS>
__device__ Cut find_cut(Row& row, float max, float scale, float low, const Weigh& weigh, u64 target) {
    Shared& s = row.s;
    Cut cut = {max, scale, BINS - 1, low, low, 0};
    u64 from = 0, above = 0;
    uint32_t shift = 0, n_steps = BINS;  // of 2^shift each, from `from`
    for (bool by_value = true;; by_value = false) {
        s.count[threadIdx.x] = 0, s.mass_low[threadIdx.x] = 0, s.mass_high[threadIdx.x] = 0;
        __syncthreads();
        // Not before the barrier: the threads have read the last round's.
        if (threadIdx.x == 0) s.crossed = 0;
        if (by_value) {
            row.each([&](uint32_t, float x) {
                if (x < low) return;
                const uint32_t bin = cut.bin_of(x);
                if (!MASS) atomicAdd(&s.count[bin], 1);
                if (MASS) add64(&s.mass_low[bin], &s.mass_high[bin], weigh(x));
            });
        } else {
            row.each([&](uint32_t i, float x) {
                if (x < cut.bottom || x > cut.top || cut.bin_of(x) != cut.bin) return;
                const u64 step = (Cut::rank_of(x, row.first + i) - from) >> shift;
                if (step >= n_steps) return;
                const uint32_t bin = n_steps - 1 - uint32_t(step);
                atomicAdd(&s.count[bin], 1);
                if (MASS) add64(&s.mass_low[bin], &s.mass_high[bin], weigh(x));
            });
        }
        __syncthreads();
        row.sum_bins<MASS>();
        // Bin i of the whole row in thread i, and the sum of the bins up to it.
        const uint32_t n = s.total_count[threadIdx.x];
        const u64 mine = MASS ? s.total_mass[threadIdx.x] : n;
        u64 sum = mine;
        const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
#pragma unroll
        for (int d = 1; d < 32; d *= 2) {
            const u64 other = shuffle_up(sum, d);
            if (lane >= d) sum += other;
        }
        if (lane == 31) s.warp[warp] = sum;
        __syncthreads();
#pragma unroll
        for (int w = 0; w < WARPS - 1; w++) sum += w < warp ? s.warp[w] : 0;
        sum += above;
        if (sum - mine < target && sum >= target) s.above = sum - mine, s.bin = threadIdx.x, s.bin_count = n, s.crossed = 1;
        __syncthreads();
        // Fewer tokens than asked for: all are kept.
        if (!s.crossed) return cut;
        above = s.above;
        const uint32_t bin = s.bin, n_in_bin = s.bin_count;
        if (by_value) {
            cut.set_bin(bin, low);
            from = u64(key_of(cut.bottom)) << ID_BITS;
            const u64 range = (u64(key_of(cut.top) - key_of(cut.bottom)) + 1) << ID_BITS;
            const int bits = 64 - __clzll(range - 1);
            shift = bits > 9 ? bits - 9 : 0;
        } else {
            from += u64(n_steps - 1 - bin) << shift;
            cut.least = from;
            if (shift == 0) return cut;
            n_steps = 1 << min(shift, 9u);
            shift -= min(shift, 9u);
        }
        // The whole bin is kept: it has one token, or ends at the target.
        if (n_in_bin == 1 || (!MASS && above + n_in_bin == target)) return cut;
    }
}

// The random number of (seed, position), as 64 bits of which the upper 53 are random: see random.rs.
__device__ u64 random_bits(u64 seed, u64 position) {
    uint32_t c[4] = {uint32_t(position), uint32_t(position >> 32), 0, 0};
    uint32_t k[2] = {uint32_t(seed), uint32_t(seed >> 32)};
#pragma unroll
    for (int i = 0; i < 10; i++) {
        const u64 a = u64(c[0]) * 0xD2511F53u, b = u64(c[2]) * 0xCD9E8D57u;
        const uint32_t next[4] = {uint32_t(b >> 32) ^ c[1] ^ k[0], uint32_t(b), uint32_t(a >> 32) ^ c[3] ^ k[1], uint32_t(a)};
#pragma unroll
        for (int j = 0; j < 4; j++) c[j] = next[j];
        k[0] += 0x9E3779B9u, k[1] += 0xBB67AE85u;
    }
    return (u64(c[0]) << 32 | c[1]) & ~0x7FFull;
}

// The first token, in the order of ids, at which the running sum of weights exceeds u times the whole.
__device__ uint32_t draw(Row& row, float low, const Weigh& weigh, u64 random) {
    Shared& s = row.s;
    const uint32_t warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    // Each warp has a run of its own.
    const uint32_t run = (row.slice + 128 * WARPS - 1) / (128 * WARPS) * 128;
    const uint32_t begin = warp * run, end = min(begin + run, row.slice);
    const auto in = [&](float x) { return x >= low ? x : -INFINITY; };
    Mass mass;
    for (uint32_t i = begin + lane * 4; i < end; i += 128) {
        const float4 v = *reinterpret_cast<const float4*>(row.values + i);
        mass.add(weigh, in(v.x)), mass.add(weigh, in(v.y)), mass.add(weigh, in(v.z)), mass.add(weigh, in(v.w));
    }
    u64 sum = warp_sum(mass.total());
    if (lane == 0) s.warp[warp] = sum;
    __syncthreads();
    if (warp == 0) sum = warp_sum(lane < WARPS ? s.warp[lane] : 0);
    const auto all = row.exchange(sum);
    u64 total = 0;
    for (uint32_t r = 0; r < row.n_blocks; r++) total += all[r][0];
    u64 target = __umul64hi(random, total);
    uint32_t owner = 0;
    for (; owner + 1 < row.n_blocks && target >= all[owner][0]; owner++) target -= all[owner][0];
    if (row.rank == owner) {
        uint32_t w = 0;
        for (; w < WARPS - 1 && target >= s.warp[w]; w++) target -= s.warp[w];
        // The piece of 128 tokens, four at once as their sums wait long for the other lanes; then the token.
        const auto piece = [&](uint32_t at) {
            const uint32_t i = at + lane * 4;
            return i < end ? *reinterpret_cast<const float4*>(row.values + i) : nothing4();
        };
        uint32_t found = begin;
        for (uint32_t at = begin; w == warp && at < end; at += 512) {
            u64 sums[4];
#pragma unroll
            for (int c = 0; c < 4; c++) {
                const float4 v = piece(at + c * 128);
                Mass mass;
                mass.add(weigh, in(v.x)), mass.add(weigh, in(v.y)), mass.add(weigh, in(v.z)), mass.add(weigh, in(v.w));
                sums[c] = mass.total();
            }
#pragma unroll
            for (int d = 16; d > 0; d /= 2) {
#pragma unroll
                for (int c = 0; c < 4; c++) sums[c] += __shfl_xor_sync(~0u, sums[c], d);
            }
            int c = 0;
#pragma unroll
            for (int next = 1; next < 4; next++)
                if (c == next - 1 && target >= sums[next - 1]) target -= sums[next - 1], c = next;
            found = at + c * 128;
            if (c < 3 || target < sums[3]) break;
            target -= sums[3];
        }
        if (w == warp) {
            const float4 v = piece(found);
            const u64 mine[4] = {weigh(in(v.x)), weigh(in(v.y)), weigh(in(v.z)), weigh(in(v.w))};
            const u64 here = mine[0] + mine[1] + mine[2] + mine[3];
            u64 upto = here;
#pragma unroll
            for (int d = 1; d < 32; d *= 2) {
                const u64 other = shuffle_up(upto, d);
                if (lane >= d) upto += other;
            }
            u64 sum = upto - here;
#pragma unroll
            for (int j = 0; j < 4; j++) {
                // True of one token of all: the difference wraps for those behind it.
                if (target - sum < mine[j]) s.token = row.first + found + lane * 4 + j;
                sum += mine[j];
            }
        }
    }
    __syncthreads();
    return uint32_t(row.exchange(s.token)[owner][0]);
}

// The token that the temperature and the filters lead to; the row is lost.
__device__ uint32_t choose(Row& row, const Request& r, const Best& best, uint32_t n_vocab) {
    const float max = best.logit(), inv_t = 1.0f / r.temperature, scale = 16.0f * inv_t;
    const Weigh weigh = {max, inv_t * 1.44269504f};
    const float floor = r.min_p > 0.0f ? __fadd_rn(max, __fmul_rn(r.temperature, logf(fminf(r.min_p, 1.0f)))) : -INFINITY;
    const float low = fmaxf(floor, LOWEST);
    const auto keep = [&](const Cut& cut) {
        row.each([&](uint32_t i, float x) {
            if (x >= low && !cut.keeps(x, row.first + i)) row.values[i] = -INFINITY;
        });
    };
    if (r.top_k > 0 && r.top_k < n_vocab) {
        keep(find_cut<false>(row, max, scale, row.at_least(r.top_k, best, low), weigh, r.top_k));
    }
    if (r.top_p < 1.0f) {
        Mass mass;
        row.each([&](uint32_t, float x) { mass.add(weigh, x >= low ? x : -INFINITY); });
        const u64 total = row.sum(mass.total());
        u64 wanted = __double2ull_ru(double(fmaxf(r.top_p, 0.0f)) * double(total));
        wanted = wanted < 1 ? 1 : wanted > total ? total : wanted;
        // All tokens of less than this weight together have less than what may be left out; twice that for rounding.
        const float least = float(total - wanted) * 0x1p-45f / float(n_vocab);
        const float from = fmaxf(low, max + r.temperature * logf(least));
        keep(find_cut<true>(row, max, scale, from, weigh, wanted));
    }
    __syncthreads();
    return draw(row, low, weigh, random_bits(r.seed, r.position));
}

// Mask, bias and penalties, in this order.
__device__ void adjust(Row& row, const Request& r, const Batch& b) {
    const uint32_t first = row.first;
    if (r.mask != NONE) {
        const uint32_t n_words = (b.n_vocab + 31) / 32;
        const uint32_t* mask = b.masks + size_t(r.mask) * n_words;
        row.each4([&](uint32_t i, const float4& v) {
            // Four tokens of one word, as `first` and i are multiples of 32 and 4.
            const uint32_t word = (first + i) / 32, bits = word < n_words ? mask[word] >> i % 32 : 0;
            float4 kept = v;
            if (!(bits & 1)) kept.x = -INFINITY;
            if (!(bits & 2)) kept.y = -INFINITY;
            if (!(bits & 4)) kept.z = -INFINITY;
            if (!(bits & 8)) kept.w = -INFINITY;
            *reinterpret_cast<float4*>(row.values + i) = kept;
        });
    }
    __syncthreads();
    for (uint32_t i = threadIdx.x; i < r.n_bias; i += THREADS) {
        const Bias* biases = b.biases + r.first_bias;
        const uint32_t at = biases[i].token - first;
        if (at >= row.slice || biases[i].token >= b.n_vocab) continue;
        // Entries of one token are added in their order, by the thread of the first.
        bool is_first = true;
        for (uint32_t j = 0; j < i; j++) is_first &= biases[j].token != biases[i].token;
        for (uint32_t j = i; is_first && j < r.n_bias; j++)
            if (biases[j].token == biases[i].token) row.values[at] += biases[j].value;
    }
    __syncthreads();
    const bool repeats = r.repetition_penalty != 1.0f;
    if (!repeats && r.presence_penalty == 0.0f && r.frequency_penalty == 0.0f) return;

    // Per token: occurrences in the output, and bit 15 for the prompt.
    constexpr uint32_t IN_PROMPT = 0x8000, MOST = 0x7000;
    for (uint32_t i = threadIdx.x * 4; i < row.slice / 2; i += THREADS * 4)
        *reinterpret_cast<uint4*>(row.counts + i) = make_uint4(0, 0, 0, 0);
    __syncthreads();
    const uint32_t* history = b.history + size_t(r.slot) * b.history_stride;
    const uint32_t n_prompt = b.prompt_len[r.slot], n_all = n_prompt + b.output_len[r.slot];
    for (uint32_t i = (repeats ? 0 : n_prompt) + threadIdx.x; i < n_all; i += THREADS) {
        const uint32_t at = history[i] - first;
        if (at >= row.slice) continue;
        uint32_t *word = row.counts + at / 2, half = at % 2 * 16;
        if (i < n_prompt) {
            atomicOr(word, IN_PROMPT << half);
        } else if ((*reinterpret_cast<volatile uint32_t*>(word) >> half & 0x7FFF) < MOST) {
            // The threads that pass this test at once are too few to overflow.
            atomicAdd(word, 1u << half);
        }
    }
    __syncthreads();
    for (uint32_t i = threadIdx.x * 2; i < row.slice / 2; i += THREADS * 2) {
        const uint2 words = *reinterpret_cast<const uint2*>(row.counts + i);
        if (!(words.x | words.y)) continue;
        for (uint32_t j = 0; j < 4; j++) {
            const uint32_t state = (j < 2 ? words.x : words.y) >> j % 2 * 16 & 0xFFFF, count = min(state & 0x7FFF, MOST);
            if (!state) continue;
            float x = row.values[2 * i + j];
            if (repeats) x = x > 0.0f ? x / r.repetition_penalty : x * r.repetition_penalty;
            if (count) x = __fsub_rn(__fsub_rn(x, __fmul_rn(r.frequency_penalty, float(count))), r.presence_penalty);
            row.values[2 * i + j] = x;
        }
    }
}

// Log-probabilities, by the sum of the raw weights.
struct LogSum {
    double max, log_sum;
    __device__ float of(float x) const { return float(double(x) - max - log_sum); }
};

// Writes the `n` best tokens of the raw row, best first, to the result.
__device__ void report_top(Row& row, uint32_t n, const Best& best, const LogSum& log_sum, uint32_t* ids, float* logprobs) {
    Shared& s = row.s;
    const float max = best.logit(), low = row.at_least(n, best, LOWEST);
    const Cut cut = find_cut<false>(row, max, 16.0f, low, Weigh{max, 1.0f}, n);
    if (threadIdx.x == 0) s.n_top = 0;
    __syncthreads();
    row.each([&](uint32_t i, float x) {
        if (x >= low && cut.keeps(x, row.first + i)) {
            const uint32_t at = atomicAdd(&s.n_top, 1);
            s.top[at] = u64(key_of(x)) << 32 | uint32_t(~(row.first + i));
        }
    });
    __syncthreads();
    const uint32_t n_mine = s.n_top;
    const u64 mine = threadIdx.x < n_mine ? s.top[threadIdx.x] : 0;
    __syncthreads();
    const auto counts = row.exchange(n_mine);
    uint32_t before = 0, total = 0;
    for (uint32_t r = 0; r < row.n_blocks; r++) {
        before += r < row.rank ? uint32_t(counts[r][0]) : 0;
        total += uint32_t(counts[r][0]);
    }
    // All blocks have read their lists, and the first one's now takes all.
    if (threadIdx.x < n_mine) send(0, &s.top[before + threadIdx.x], mine, &s.top_sent);
    if (row.rank != 0) return;
    receive(&s.top_sent, 0, total * 8);
    if (threadIdx.x < total) {
        const u64 mine = s.top[threadIdx.x];
        uint32_t better = 0;
        for (uint32_t i = 0; i < total; i++) better += s.top[i] > mine;
        ids[better] = uint32_t(~mine);
        logprobs[better] = log_sum.of(value_of(uint32_t(mine >> 32)));
    } else if (threadIdx.x < n) {
        ids[threadIdx.x] = NONE;
        logprobs[threadIdx.x] = -INFINITY;
    }
}

struct Answer {
    uint32_t token, corrupt;
    float logprob;
    uint32_t rank;
};

__device__ void finish(const Row& row, const Request& r, const Batch& b, uint32_t index, const Answer& answer) {
    if (row.rank != 0 || threadIdx.x != 0) return;
    uint32_t* result = b.results + size_t(index) * b.result_stride;
    result[0] = answer.token, result[1] = answer.corrupt;
    result[2] = __float_as_uint(answer.logprob), result[3] = answer.rank;
    if (r.flags & SET_LAST_TOKEN) b.last_token[r.slot] = answer.token;
    if (r.flags & APPEND) {
        const uint32_t n = b.prompt_len[r.slot] + b.output_len[r.slot];
        if (n < b.history_stride) {
            b.history[size_t(r.slot) * b.history_stride + n] = answer.token;
            b.output_len[r.slot] += 1;
        }
    }
}

__device__ void answer(const Batch& b, uint32_t index, Row& row) {
    cluster_arrive(row.s);
    pdl_wait();
    pdl_trigger();
    const Request& r = b.requests[index];
    if (r.logit == NONE) return cluster_wait();
    const float* logits = b.logits + r.logit * b.stride;
    const bool adjusted = r.mask != NONE || r.n_bias > 0 || r.repetition_penalty != 1.0f || r.presence_penalty != 0.0f ||
                          r.frequency_penalty != 0.0f;
    const bool greedy = r.temperature < GREEDY_BELOW || r.top_k == 1;
    Argmax mine;
    read_run<8>(row, logits, b.n_vocab, [&](uint32_t i, const float4& v) {
        const uint32_t token = row.first + i;
        mine.take(token, v.x), mine.take(token + 1, v.y), mine.take(token + 2, v.z), mine.take(token + 3, v.w);
        *reinterpret_cast<float4*>(row.values + i) = v;
    });
    cluster_wait();
    const Best raw = row.best(mine);
    Answer answer = {r.forced == NONE ? 0 : r.forced, raw.is_corrupt(), 0.0f, 0};
    LogSum log_sum = {};
    const bool wants_logprobs = r.flags & LOGPROBS;
    if (wants_logprobs && !answer.corrupt) {
        const Weigh weigh = {raw.logit(), 1.44269504f};
        Mass mass;
        row.each([&](uint32_t, float x) { mass.add(weigh, x); });
        log_sum = {raw.logit(), log(double(row.sum(mass.total())) * 0x1p-44)};
        uint32_t* top = b.results + size_t(index) * b.result_stride + 4;
        if (r.n_top > 0) {
            report_top(row, min(r.n_top, uint32_t(MAX_TOP)), raw, log_sum, top,
                       reinterpret_cast<float*>(top + (b.result_stride - 4) / 2));
        }
    }
    if (r.forced == NONE && !answer.corrupt) {
        Best best = raw;
        if (adjusted) {
            adjust(row, r, b);
            mine = Argmax();
            row.each([&](uint32_t i, float x) { mine.take(row.first + i, x); });
            best = row.best(mine);
            answer.corrupt = best.is_corrupt();
        }
        if (!answer.corrupt) answer.token = greedy ? best.id() : choose(row, r, best, b.n_vocab);
    }
    if (wants_logprobs && !answer.corrupt) {
        // A forced token may lie outside the vocabulary of the logits.
        const float logit = answer.token < b.n_vocab ? logits[answer.token] : -INFINITY;
        uint32_t above = 0;
        read_run<8>(row, logits, b.n_vocab, [&](uint32_t, const float4& v) {
            above += (v.x > logit) + (v.y > logit) + (v.z > logit) + (v.w > logit);
        });
        answer.rank = uint32_t(row.sum(above)) + 1;
        answer.logprob = log_sum.of(logit);
    }
    finish(row, r, b, index, answer);
}

__device__ void answer_greedy(const Batch& b, uint32_t index, Row& row) {
    cluster_arrive(row.s);
    pdl_wait();
    pdl_trigger();
    const Request& r = b.requests[index];
    if (r.logit == NONE) return cluster_wait();
    Argmax mine;
    read_run<4>(row, b.logits + r.logit * b.stride, b.n_vocab, [&](uint32_t i, const float4& v) {
        const uint32_t token = row.first + i;
        mine.take(token, v.x), mine.take(token + 1, v.y), mine.take(token + 2, v.z), mine.take(token + 3, v.w);
    });
    cluster_wait();
    const Best best = row.best(mine);
    finish(row, r, b, index, {best.is_corrupt() ? 0 : best.id(), best.is_corrupt(), 0.0f, 0});
}

}  // namespace

// Answers requests, each with a cluster of n = 1, 2, 4, 8 or 16 blocks; results do not depend on n. A slot may be in several
// requests, but only one of them may draw with APPEND or penalties.
// grid (n * n_requests), block 512, cluster (n) as a launch attribute (16 needs the function's attribute for non-portable
// sizes; fastest: 16 up to 4 requests, else 8); dynamic shared memory: slice * 4 bytes, slice = n_vocab / n rounded up, then to a
// multiple of 32, or slice * 6 where any request has penalties; 20 KB static come on top of it. Before sm_90: n = 1, no dynamic
// shared memory, `scratch` instead.
extern "C" __global__ void __launch_bounds__(THREADS, 2) sample(const Batch b) {
    __shared__ Shared s;
#if __CUDA_ARCH__ >= 900
    extern __shared__ __align__(16) uint8_t memory[];
    Row row = row_of(s, memory, b.n_vocab);
#else
    Row row = row_of(s, b.scratch + size_t(blockIdx.x) * ((size_t(b.n_vocab) * 6 + 255) / 128 * 128), b.n_vocab);
#endif
    answer(b, blockIdx.x / row.n_blocks, row);
}

// The same for requests that are greedy and have no mask, bias, penalty, log-probabilities or forced token. Launched as above,
// without dynamic shared memory; fastest: n = 16 up to 4 requests, 8 up to 64, else 4.
extern "C" __global__ void __launch_bounds__(THREADS, 3) sample_greedy(const Batch b) {
    __shared__ Shared s;
    Row row = row_of(s, nullptr, b.n_vocab);
    answer_greedy(b, blockIdx.x / row.n_blocks, row);
}
