// Decode attention over a paged cache: rows with few query tokens, whose cost is reading keys and values once.
//
// A CTA takes the pieces that `plan.rs` gave it. The last warp loads: tiles of 16 tokens go to a ring of stages in shared
// memory, by TMA or, before Hopper, by cp.async. The others take stages in turns, each always the same ones: a stage that
// changed hands between warps could be one phase further than its barrier can tell. They compute the transposed products
// S' = K Q' and O' = V' P', so that up to 8 (16) packed queries, all that read the same KV head, fill the narrow side of
// mma.m16n8k16. At the end of a piece the warps' results are merged; where a (row, KV head) was cut into several pieces,
// the last CTA to finish one merges them, in the order of the context.
//
// An fp8 cache is multiplied as f16, which holds its numbers exactly.
#include <type_traits>

#include "attention.cuh"

static const int WARPS = 4;    // that compute
static const int TOKENS = 16;  // in a tile

template <typename T, typename KV, int D, int NQ> struct Decode {
    static const bool FP8 = sizeof(KV) == 1;
    typedef typename std::conditional<FP8, f16, T>::type C;
    static const int ROW = D * sizeof(KV);
    typedef Tile<ROW> Layout;
    static const int TILE = TOKENS * ROW;
    static const int SUB = ROW <= 128 ? 2 : 1;  // tiles in a stage: small ones in pairs, for work to overlap
    static const int STAGE = 2 * SUB * TILE;
    static const int QUERIES = 8 * NQ;
    static const int ITEMS = 4;      // in flight between the warps
    static const int K_STEPS = D / 16;
    static const int PITCH = (D + 31) / 32 * 32;  // floats of a merged row, which its swizzle needs
    static const int MERGE = WARPS * QUERIES * (PITCH + 2) * 4;
    // Bytes of shared memory: two CTAs on a multiprocessor, where registers allow it.
#if __CUDA_ARCH__ >= 900
    static const int SHARED = D * NQ == 512 ? 232448 : 115712;
#else
    static const int SHARED = D * NQ == 512 ? 135168 : D == 256 ? 101376 : 82944;
#endif
    static const int FIT = (SHARED - MERGE - 16 - ITEMS * (48 + 16)) / (STAGE + 16) / WARPS * WARPS;
    static const int STAGES = FIT < 24 ? FIT : 24;
    static_assert(STAGES >= WARPS, "no room for a stage a warp");

    // Shared memory: stages of SUB tiles of keys and SUB of values, merge buffers, barriers.
    uint32_t stages, full, empty, item_full, item_empty;
    Item* items;           // [ITEMS]
    float* merge_out;      // [WARPS][QUERIES][PITCH], swizzled against bank conflicts
    float2* merge_stats;   // [WARPS][QUERIES]: maximum, sum
    uint32_t* is_last;     // whether this CTA merges the pieces of a pair

    __device__ __forceinline__ Decode(char* shared) {
        stages = shared_address(shared);
        if (stages % 1024) __trap();
        merge_out = reinterpret_cast<float*>(shared + STAGES * STAGE);
        merge_stats = reinterpret_cast<float2*>(merge_out + WARPS * QUERIES * PITCH);
        items = reinterpret_cast<Item*>(merge_stats + WARPS * QUERIES);
        is_last = reinterpret_cast<uint32_t*>(items + ITEMS);
        full = shared_address(is_last + 4);
        empty = full + STAGES * 8;
        item_full = empty + STAGES * 8;
        item_empty = item_full + ITEMS * 8;
    }
    __device__ __forceinline__ float* merged(uint32_t warp, uint32_t query, uint32_t dim) const {
        return merge_out + (warp * QUERIES + query) * PITCH + (dim ^ query / 2 % 4 * 8);
    }
};

// Starts the copies of one tile of keys and one of values.
template <typename T, typename KV, int D, int NQ>
__device__ __forceinline__ void copy_tile(const AttentionArgs& args, const TensorMap* k_map, const TensorMap* v_map, uint32_t k,
                                          uint32_t v, uint32_t row, uint32_t full) {
    typedef Decode<T, KV, D, NQ> Self;
    typedef typename Self::Layout Layout;
    const uint32_t lane = threadIdx.x % 32;
#if __CUDA_ARCH__ >= 900
    if (lane != 0) return;
    const int column = TOKENS * Layout::CHUNK;
#pragma unroll
    for (int c = 0; c < Layout::CHUNKS; ++c) tma_load_3d(k + c * column, k_map, full, 0, c, row);
#pragma unroll
    for (int c = 0; c < Layout::CHUNKS; ++c) tma_load_3d(v + c * column, v_map, full, 0, c, row);
#else
    for (int u = lane; u < Self::TILE / 16; u += 32) {
        const uint32_t to = Layout::offset(TOKENS, u / (Self::ROW / 16), u % (Self::ROW / 16) * 16);
        const size_t from = (size_t)row * Self::ROW + u * 16;
        cp_async_16(k + to, static_cast<const char*>(args.k) + from);
        cp_async_16(v + to, static_cast<const char*>(args.v) + from);
    }
#endif
}

// What the last warp does: hands the CTA's items to the others and loads all their tiles, in order, as stages become free.
template <typename T, typename KV, int D, int NQ>
__device__ __forceinline__ void load_tiles(const Decode<T, KV, D, NQ>& at, const AttentionArgs& args, const TensorMap* k_map,
                                           const TensorMap* v_map) {
    typedef Decode<T, KV, D, NQ> Self;
    const uint32_t lane = threadIdx.x % 32, group = args.heads / args.kv_heads;
    uint32_t stage = 0, parity = 1, n_items = 0;
    bool waited = false;
    const auto hand_over = [&](const Item& item) {
        const uint32_t slot = n_items % Self::ITEMS;
        mbarrier_wait(at.item_empty + slot * 8, n_items / Self::ITEMS % 2 ^ 1);
        if (lane == 0) {
            at.items[slot] = item;
            mbarrier_arrive(at.item_full + slot * 8);
        }
        ++n_items;
    };
    Item item = load_item(args.items, blockIdx.x);
    for (;;) {
        if (item.first_pair != item.end_pair) hand_over(item);
        const uint32_t query_tiles = (item.n_tokens * group + Self::QUERIES - 1) / Self::QUERIES;
        for (uint32_t pair = item.first_pair; pair < item.end_pair; ++pair) {
            const uint32_t head = pair / query_tiles;
            for (uint32_t first = item.first_tile; first < item.end_tile; first += 32) {
                // Each lane looks up one tile's place in the cache.
                const uint32_t token = (first + lane) * TOKENS;
                uint32_t place = 0;
                if (first + lane < item.end_tile) {
                    uint32_t block = __ldg(args.tables + (size_t)item.slot * args.max_blocks + token / args.block_len);
                    place = (block * args.kv_heads + head) * args.block_len + token % args.block_len;
                }
                const uint32_t n = min(32u, item.end_tile - first);
                for (uint32_t i = 0; i < n; i += Self::SUB) {
                    const uint32_t n_sub = min(n - i, (uint32_t)Self::SUB);
                    // Tokens before the row's first were written by earlier steps; only the others need the wait.
                    if (!waited && (first + i + n_sub) * TOKENS > item.first_position) {
                        pdl_wait();
                        waited = true;
                    }
                    const uint32_t full = at.full + stage * 8, k = at.stages + stage * Self::STAGE, v = k + Self::SUB * Self::TILE;
                    mbarrier_wait(at.empty + stage * 8, parity);
#if __CUDA_ARCH__ >= 900
                    if (lane == 0) mbarrier_expect(full, n_sub * 2 * Self::TILE);
#endif
#pragma unroll
                    for (uint32_t sub = 0; sub < Self::SUB; ++sub) {
                        const uint32_t row = __shfl_sync(~0u, place, (i + sub) % 32);
                        if (sub < n_sub) copy_tile<T, KV, D, NQ>(args, k_map, v_map, k + sub * Self::TILE, v + sub * Self::TILE, row, full);
                    }
#if __CUDA_ARCH__ >= 900
                    __syncwarp();
#else
                    asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];" :: "r"(full) : "memory");
#endif
                    if (++stage == Self::STAGES) stage = 0, parity ^= 1;
                }
            }
        }
        if (item.next == 0) break;
        item = load_item(args.items, item.next);
    }
    item.end_pair = item.first_pair;  // no more
    hand_over(item);
}

// One warp's running result for the packed queries: lane `4 g + c` holds queries `8 n + 2 c` and the next.
template <typename T, typename KV, int D, int NQ> struct Running {
    typedef Decode<T, KV, D, NQ> Self;
    typedef typename Self::C C;
    uint32_t q[NQ][Self::K_STEPS][2];
    float out[NQ][D / 16][4];
    float top[NQ][2], sum[NQ][2];  // maximum of the scores (base 2), this lane's part of the sum
    int see_from[NQ][2], see_to[NQ][2];

    __device__ __forceinline__ void begin(const AttentionArgs& args, const Item& item, uint32_t group, uint32_t head,
                                          uint32_t first_query) {
        const uint32_t lane = threadIdx.x % 32, g = lane / 4, c = lane % 4;
        const size_t pitch = (size_t)(args.heads + 2 * args.kv_heads) * D;
        const uint32_t n_queries = item.n_tokens * group;
#pragma unroll
        for (int n = 0; n < NQ; ++n) {
            const uint32_t query = first_query + 8 * n + g;
            const bool valid = query < n_queries;
            const T* src = static_cast<const T*>(args.qkv) + (item.q_start + query / group) * pitch + (head * group + query % group) * D;
#pragma unroll
            for (int s = 0; s < Self::K_STEPS; ++s) {
                // 8-bit keys reach a lane four in a row, and q follows their order.
                const int i0 = Self::FP8 ? 4 * c : 2 * c, i1 = Self::FP8 ? 4 * c + 2 : 2 * c + 8;
                const uint32_t x0 = valid ? *reinterpret_cast<const uint32_t*>(src + s * 16 + i0) : 0;
                const uint32_t x1 = valid ? *reinterpret_cast<const uint32_t*>(src + s * 16 + i1) : 0;
                q[n][s][0] = convert_pair<T, C>(x0);
                q[n][s][1] = convert_pair<T, C>(x1);
            }
#pragma unroll
            for (int e = 0; e < 2; ++e) {
                const int position = item.first_position + (first_query + 8 * n + 2 * c + e) / group;
                see_to[n][e] = position;
                see_from[n][e] = args.window ? position - (int)args.window + 1 : 0;
                top[n][e] = -INFINITY;
                sum[n][e] = 0;
            }
#pragma unroll
            for (int m = 0; m < D / 16; ++m)
#pragma unroll
                for (int i = 0; i < 4; ++i) out[n][m][i] = 0;
        }
    }

    // Adds a stage whose first token has position `first`; `masked`: some query doesn't see all of it; `last`: the piece's
    // last position.
    __device__ __forceinline__ void add(uint32_t k, uint32_t v, int first, bool masked, int last, float scale, float softcap) {
        const uint32_t lane = threadIdx.x % 32;
        const int SUB = Self::SUB;
        const int CHAINS = SUB * NQ == 1 ? 2 : 1;  // sums that don't wait for each other
        float s[NQ][SUB][4], chain[CHAINS][NQ][SUB][4];
#pragma unroll
        for (int i = 0; i < CHAINS * NQ * SUB * 4; ++i) (&chain[0][0][0][0])[i] = 0;
#pragma unroll
        for (int byte = 0; byte < Self::ROW; byte += 32) {
#pragma unroll
            for (int sub = 0; sub < SUB; ++sub) {
                uint32_t a[4];
                const bool half = byte + 16 == Self::ROW;  // 80 elements of fp8
                ldmatrix(a, k + sub * Self::TILE + Self::Layout::offset(TOKENS, lane % 16, byte + (half ? 0 : lane / 16 * 16)));
                if constexpr (Self::FP8) {
#pragma unroll
                    for (int h = 0; h < (half ? 1 : 2); ++h) {
                        const uint32_t x = a[2 * h], y = a[2 * h + 1];
                        const uint32_t b[4] = {e4m3_to_f16(x), e4m3_to_f16(y), e4m3_to_f16(x >> 16), e4m3_to_f16(y >> 16)};
#pragma unroll
                        for (int n = 0; n < NQ; ++n) mma<C>(chain[h % CHAINS][n][sub], b, q[n][byte / 16 + h][0], q[n][byte / 16 + h][1]);
                    }
                } else {
#pragma unroll
                    for (int n = 0; n < NQ; ++n) mma<C>(chain[byte / 32 % CHAINS][n][sub], a, q[n][byte / 32][0], q[n][byte / 32][1]);
                }
            }
        }
#pragma unroll
        for (int i = 0; i < NQ * SUB * 4; ++i) (&s[0][0][0])[i] = (&chain[0][0][0][0])[i] + (CHAINS > 1 ? (&chain[CHAINS - 1][0][0][0])[i] : 0.f);

        // Where registers allow, the values are on their way while the weights are taken.
        const int STEPS = (Self::ROW + 31) / 32;
        const bool EARLY = NQ == 1 && SUB * STEPS <= 8;
        uint32_t early[EARLY ? SUB * STEPS : 1][4];
        const auto load_values = [&](int sub, int byte, uint32_t (&a)[4]) {
            const bool half = byte + 16 == Self::ROW;
            ldmatrix_trans(a, v + sub * Self::TILE + Self::Layout::offset(TOKENS, lane % 8 + lane / 16 * 8, byte + (half ? 0 : lane / 8 % 2 * 16)));
        };
        if constexpr (EARLY) {
#pragma unroll
            for (int i = 0; i < SUB * STEPS; ++i) load_values(i / STEPS, i % STEPS * 32, early[i]);
        }
        uint32_t p[NQ][SUB][2];
#pragma unroll
        for (int n = 0; n < NQ; ++n) softmax(n, s[n], p[n], first + lane / 4, masked, last, scale, softcap);
#pragma unroll
        for (int i = 0; i < SUB * STEPS; ++i) {
            const int sub = i / STEPS, byte = i % STEPS * 32;
            uint32_t late[4];
            if constexpr (!EARLY) load_values(sub, byte, late);
            const uint32_t(&a)[4] = EARLY ? early[EARLY ? i : 0] : late;
            if constexpr (Self::FP8) {
#pragma unroll
                for (int h = 0; h < (byte + 16 == Self::ROW ? 1 : 2); ++h) {
                    const uint32_t x = a[h], y = a[2 + h];
                    const uint32_t b[4] = {e4m3_to_f16(__byte_perm(x, 0, 0x4420)), e4m3_to_f16(__byte_perm(x, 0, 0x4431)),
                                           e4m3_to_f16(__byte_perm(y, 0, 0x4420)), e4m3_to_f16(__byte_perm(y, 0, 0x4431))};
#pragma unroll
                    for (int n = 0; n < NQ; ++n) mma<C>(out[n][byte / 16 + h], b, p[n][sub][0], p[n][sub][1]);
                }
            } else {
#pragma unroll
                for (int n = 0; n < NQ; ++n) mma<C>(out[n][byte / 32], a, p[n][sub][0], p[n][sub][1]);
            }
        }
    }

    // Turns the scores of tokens `token` and `token + 8` (of each tile) into weights, packed as the second product wants them.
    __device__ __forceinline__ void softmax(int n, float (&s)[Self::SUB][4], uint32_t (&p)[Self::SUB][2], int token, bool masked,
                                            int last, float scale, float softcap) {
        const int SUB = Self::SUB;
#pragma unroll
        for (int sub = 0; sub < SUB; ++sub)
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                s[sub][i] *= scale;
                if (softcap != 0) s[sub][i] = softcap * tanh_fast(s[sub][i]);
            }
        if (masked) {
#pragma unroll
            for (int sub = 0; sub < SUB; ++sub)
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    const int at = token + sub * TOKENS + i / 2 * 8;
                    if (at > min(last, see_to[n][i % 2]) || at < see_from[n][i % 2]) s[sub][i] = -INFINITY;
                }
        }
        float m[2] = {-INFINITY, -INFINITY};
#pragma unroll
        for (int sub = 0; sub < SUB; ++sub)
#pragma unroll
            for (int e = 0; e < 2; ++e) m[e] = fmaxf(m[e], fmaxf(s[sub][e], s[sub][e + 2]));
#pragma unroll
        for (int d = 4; d < 32; d *= 2) {
            m[0] = fmaxf(m[0], __shfl_xor_sync(~0u, m[0], d));
            m[1] = fmaxf(m[1], __shfl_xor_sync(~0u, m[1], d));
        }
        if (__any_sync(~0u, m[0] > top[n][0] || m[1] > top[n][1])) {
#pragma unroll
            for (int e = 0; e < 2; ++e) {
                const float grown = fmaxf(top[n][e], m[e]);
                const float factor = grown == -INFINITY ? 0.f : exp2_fast(top[n][e] - grown);
                top[n][e] = grown;
                sum[n][e] *= factor;
#pragma unroll
                for (int j = 0; j < D / 16; ++j) out[n][j][e] *= factor, out[n][j][e + 2] *= factor;
            }
        }
        const float base[2] = {top[n][0] == -INFINITY ? 0.f : top[n][0], top[n][1] == -INFINITY ? 0.f : top[n][1]};
#pragma unroll
        for (int sub = 0; sub < SUB; ++sub) {
#pragma unroll
            for (int i = 0; i < 4; ++i) s[sub][i] = exp2_fast(s[sub][i] - base[i % 2]);
            sum[n][0] += s[sub][0] + s[sub][2];
            sum[n][1] += s[sub][1] + s[sub][3];
            p[sub][0] = movmatrix(pack<C>(s[sub][0], s[sub][1]));
            p[sub][1] = movmatrix(pack<C>(s[sub][2], s[sub][3]));
        }
    }

    // Leaves the warp's result for the merge, in the order of the warps' first tiles.
    __device__ __forceinline__ void end(const Self& at, uint32_t turn, uint32_t n_valid) {
        const uint32_t lane = threadIdx.x % 32, g = lane / 4, c = lane % 4;
#pragma unroll
        for (int n = 0; n < NQ; ++n)
#pragma unroll
            for (int e = 0; e < 2; ++e) {
#pragma unroll
                for (int d = 4; d < 32; d *= 2) sum[n][e] += __shfl_xor_sync(~0u, sum[n][e], d);
                const uint32_t query = 8 * n + 2 * c + e;
                if (query >= n_valid) continue;
#pragma unroll
                for (int m = 0; m < D / 16; ++m) {
                    *at.merged(turn, query, m * 16 + (Self::FP8 ? 2 * g : g)) = out[n][m][e];
                    *at.merged(turn, query, m * 16 + (Self::FP8 ? 2 * g + 1 : g + 8)) = out[n][m][e + 2];
                }
                if (g == 0) at.merge_stats[turn * Self::QUERIES + query] = make_float2(top[n][e], sum[n][e]);
            }
    }
};

// A sum of weighted value rows, four columns of it, that grows by parts with maxima of their own.
struct Merge {
    float top = -INFINITY, sum = 0;
    float4 out = {0, 0, 0, 0};
    __device__ __forceinline__ void add(float2 stats, float4 x) {
        const float grown = fmaxf(top, stats.x);
        if (grown == -INFINITY) return;
        const float a = exp2_fast(top - grown), b = exp2_fast(stats.x - grown);
        top = grown;
        sum = sum * a + stats.y * b;
        out = make_float4(out.x * a + x.x * b, out.y * a + x.y * b, out.z * a + x.z * b, out.w * a + x.w * b);
    }
    // Writes the row's four columns; `sink`: the head's extra logit, -inf if none.
    template <typename T> __device__ __forceinline__ void write(T* dst, float sink, float v_scale) {
        add(make_float2(sink * LOG2E, 1.f), make_float4(0, 0, 0, 0));
        const float f = sum > 0 ? v_scale / sum : 0.f;
        Vec<T, 4> y;
        y.at[0] = from_f32<T>(out.x * f);
        y.at[1] = from_f32<T>(out.y * f);
        y.at[2] = from_f32<T>(out.z * f);
        y.at[3] = from_f32<T>(out.w * f);
        store_vec(dst, y);
    }
};

// Merges what the warps left of a pair's piece, and the pieces of the pair if this CTA is the last to finish one.
template <typename T, typename KV, int D, int NQ>
__device__ __forceinline__ void finish_piece(const Decode<T, KV, D, NQ>& at, const AttentionArgs& args, const Item& item,
                                             uint32_t group, uint32_t head, uint32_t first_query, uint32_t n_valid) {
    typedef Decode<T, KV, D, NQ> Self;
    const uint32_t n_vecs = n_valid * (D / 4);
    const auto place = [&](uint32_t query) {
        return static_cast<T*>(args.out) + (size_t)(item.q_start + (first_query + query) / group) * args.heads * D +
               (head * group + (first_query + query) % group) * D;
    };
    const auto sink = [&](uint32_t query) {
        return args.sinks ? __ldg(args.sinks + head * group + (first_query + query) % group) : -INFINITY;
    };
    const bool whole = item.n_pieces == 1;
    for (uint32_t i = threadIdx.x; i < n_vecs; i += WARPS * 32) {
        const uint32_t query = i / (D / 4), column = i % (D / 4) * 4;
        Merge merge;
#pragma unroll
        for (int w = 0; w < WARPS; ++w) {
            merge.add(at.merge_stats[w * Self::QUERIES + query], *reinterpret_cast<const float4*>(at.merged(w, query, column)));
        }
        if (whole) {
            merge.write(place(query) + column, sink(query), args.v_scale);
        } else {
            const size_t row = (size_t)(item.partial + item.piece) * Self::QUERIES + query;
            __stcg(reinterpret_cast<float4*>(args.partial_out + row * D + column), merge.out);
            if (column == 0) __stcg(args.partial_max_sum + row, make_float2(merge.top, merge.sum));
        }
    }
    if (whole) return;
    named_barrier(1, WARPS * 32);
    if (threadIdx.x == 0) {
        // Releases what the barrier ordered before, acquires what the other pieces' CTAs released.
        uint32_t n_done;
        asm volatile("atom.add.acq_rel.gpu.global.u32 %0, [%1], 1;" : "=r"(n_done) : "l"(args.counters + item.partial) : "memory");
        *at.is_last = n_done == item.n_pieces - 1;
        if (n_done == item.n_pieces - 1) args.counters[item.partial] = 0;
    }
    named_barrier(1, WARPS * 32);
    if (!*at.is_last) return;
    for (uint32_t i = threadIdx.x; i < n_vecs; i += WARPS * 32) {
        const uint32_t query = i / (D / 4), column = i % (D / 4) * 4;
        Merge merge;
        const size_t row = (size_t)item.partial * Self::QUERIES + query;
        const uint32_t n = 8;  // loads in flight
        for (uint32_t first = 0; first < item.n_pieces; first += n) {
            float2 stats[n];
            float4 out[n];
#pragma unroll
            for (uint32_t j = 0; j < n; ++j) {
                const size_t r = row + (size_t)min(first + j, item.n_pieces - 1) * Self::QUERIES;
                stats[j] = __ldcg(args.partial_max_sum + r);
                out[j] = __ldcg(reinterpret_cast<const float4*>(args.partial_out + r * D + column));
            }
#pragma unroll
            for (uint32_t j = 0; j < n; ++j)
                if (first + j < item.n_pieces) merge.add(stats[j], out[j]);
        }
        merge.write(place(query) + column, sink(query), args.v_scale);
    }
}

template <typename T, typename KV, int D, int NQ>
__device__ __forceinline__ void decode(const TensorMap* k_map, const TensorMap* v_map, const AttentionArgs& args, char* shared) {
    typedef Decode<T, KV, D, NQ> Self;
    const Self at(shared);
    const uint32_t warp = threadIdx.x / 32, lane = threadIdx.x % 32, group = args.heads / args.kv_heads;
    if (threadIdx.x == WARPS * 32) {
#if __CUDA_ARCH__ >= 900
        prefetch_map(k_map);
        prefetch_map(v_map);
#endif
        for (int s = 0; s < Self::STAGES; ++s) {
            mbarrier_init(at.full + s * 8, __CUDA_ARCH__ >= 900 ? 1 : 32);
            mbarrier_init(at.empty + s * 8, 1);
        }
        for (int s = 0; s < Self::ITEMS; ++s) {
            mbarrier_init(at.item_full + s * 8, 1);
            mbarrier_init(at.item_empty + s * 8, WARPS);
        }
#if __CUDA_ARCH__ >= 900
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
#endif
    }
    __syncthreads();
    pdl_trigger();
    if (warp == WARPS) return load_tiles<T, KV, D, NQ>(at, args, k_map, v_map);

    // Scores in base 2; with a softcap, in units of it first.
    const float unit = args.scale * args.k_scale;
    const float scale = args.softcap != 0 ? unit / args.softcap : unit * LOG2E;
    const float softcap = args.softcap * LOG2E;
    Running<T, KV, D, NQ> run;
    uint32_t n_before = 0;  // stages of the pieces before this one
    for (uint32_t n_items = 0;; ++n_items) {
        const uint32_t slot = n_items % Self::ITEMS;
        mbarrier_wait(at.item_full + slot * 8, n_items / Self::ITEMS % 2);
        const Item item = at.items[slot];
        __syncwarp();
        if (lane == 0) mbarrier_arrive(at.item_empty + slot * 8);
        if (item.first_pair == item.end_pair) break;
        if (n_items == 0) pdl_wait();
        const uint32_t n_queries = item.n_tokens * group, query_tiles = (n_queries + Self::QUERIES - 1) / Self::QUERIES;
        // Tiles within these bounds are seen whole by every query.
        const int last_position = item.first_position + item.n_tokens - 1;
        const int clear_from = args.window ? last_position - (int)args.window + 1 : 0, piece_last = item.end_tile * TOKENS - 1;
        for (uint32_t pair = item.first_pair; pair < item.end_pair; ++pair) {
            const uint32_t head = pair / query_tiles, first_query = pair % query_tiles * Self::QUERIES;
            const uint32_t n_valid = min(n_queries - first_query, (uint32_t)Self::QUERIES);
            run.begin(args, item, group, head, first_query);
            const uint32_t n_stages = (item.end_tile - item.first_tile + Self::SUB - 1) / Self::SUB, turn = (warp - n_before) % WARPS;
            for (uint32_t i = turn; i < n_stages; i += WARPS) {
                const uint32_t stage = (n_before + i) % Self::STAGES, k = at.stages + stage * Self::STAGE, v = k + Self::SUB * Self::TILE;
                const int first = (item.first_tile + i * Self::SUB) * TOKENS, last = first + Self::SUB * TOKENS - 1;
                mbarrier_wait(at.full + stage * 8, (n_before + i) / Self::STAGES % 2);
                if (last > min(last_position, piece_last)) {
                    // What lies behind may be NaN, which no zero weight would undo.
                    for (uint32_t u = lane; u < Self::SUB * TOKENS * (Self::ROW / 16); u += 32) {
                        const uint32_t row = u / (Self::ROW / 16);
                        if (first + (int)row > min(last_position, piece_last)) {
                            const uint32_t tile = v + row / TOKENS * Self::TILE;
                            const uint32_t to = tile + Self::Layout::offset(TOKENS, row % TOKENS, u % (Self::ROW / 16) * 16);
                            asm volatile("st.shared.v4.b32 [%0], {%1, %1, %1, %1};" :: "r"(to), "r"(0) : "memory");
                        }
                    }
#if __CUDA_ARCH__ >= 900
                    fence_async();
#endif
                    __syncwarp();
                }
                const bool masked = last > min((int)item.first_position, piece_last) || first < clear_from;
                run.add(k, v, first, masked, piece_last, scale, softcap);
                __syncwarp();
                if (lane == 0) mbarrier_arrive(at.empty + stage * 8);
            }
            n_before += n_stages;
            run.end(at, turn, n_valid);
            named_barrier(1, WARPS * 32);
            finish_piece<T, KV, D, NQ>(at, args, item, group, head, first_query, n_valid);
            named_barrier(1, WARPS * 32);  // before the buffers are filled again
        }
    }
}

// Grid: CTAs of the plan, best twice the multiprocessors; block: 160; dynamic shared bytes: `Decode::SHARED`, on Hopper 115712,
// but 232448 for the _d256_q16 kernels. The maps are 3-D views of the layer's keys and values, {CHUNK / element size,
// ROW / CHUNK, all rows} with byte strides {CHUNK, ROW}, box {CHUNK / element size, 1, 16}, swizzle as wide as CHUNK (none
// for 16), where ROW is the bytes of a head and CHUNK the greatest of 128, 64, 32, 16 that divides it; before Hopper they
// are not read. Suffix _q16: 16 packed queries (tokens of a row times heads of a group), else 8.
#define DECODE(name, T, KV, D, NQ)                                                                                       \
    extern "C" __global__ void __launch_bounds__(32 * (WARPS + 1), D * NQ == 512 ? 1 : 2) name(                          \
        const __grid_constant__ TensorMap k_map, const __grid_constant__ TensorMap v_map,                                \
        const __grid_constant__ AttentionArgs args) {                                                                    \
        extern __shared__ __align__(1024) char shared[];                                                                 \
        decode<T, KV, D, NQ>(&k_map, &v_map, args, shared);                                                              \
    }
#define DECODE_KV(T, name, KV, kv_name, D)                                                                               \
    DECODE(paged_decode_##name##kv_name##_d##D, T, KV, D, 1)                                                             \
    DECODE(paged_decode_##name##kv_name##_d##D##_q16, T, KV, D, 2)
#define DECODE_DIM(D)                                                                                                    \
    DECODE_KV(bf16, bf16, bf16, , D)                                                                                     \
    DECODE_KV(f16, f16, f16, , D)                                                                                        \
    DECODE_KV(bf16, bf16, uint8_t, _fp8, D)                                                                              \
    DECODE_KV(f16, f16, uint8_t, _fp8, D)

#ifdef ONLY_DIM
DECODE_DIM(ONLY_DIM)
#else
DECODE_DIM(64)
DECODE_DIM(80)
DECODE_DIM(96)
DECODE_DIM(128)
DECODE_DIM(256)
#endif
