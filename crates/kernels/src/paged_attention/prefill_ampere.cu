// Prefill attention over a paged cache with mma.sync and cp.async: any head size, fp8 caches, every GPU since Ampere.
//
// The loops are FlashAttention-2's (Dao 2023). A CTA computes 64 packed queries (token-major, the heads of one KV head), 16
// rows a warp, and reads keys and values in tiles of KEYS tokens, two stages deep. An fp8 cache is multiplied as f16, which
// holds its numbers exactly.
#include <type_traits>

#include "attention.cuh"

static const int WARPS = 4;
static const int QUERIES = 64;

template <typename T, typename KV, int D> struct Prefill {
    static const bool FP8 = sizeof(KV) == 1;
    typedef typename std::conditional<FP8, f16, T>::type C;
    static const int KEYS = D > 128 ? 32 : 64;
    static const int ROW = D * sizeof(KV);
    typedef Tile<ROW> Layout;
    typedef Tile<D * 2> QLayout;
    static const int TILE = KEYS * ROW;
    static const int SHARED = QUERIES * D * 2 + 4 * TILE + 1024;
};

// What a warp copies of each tile: 16 tokens of keys or of values at a time, which lie together in the cache.
template <typename T, typename KV, int D> struct Loader {
    typedef Prefill<T, KV, D> Self;
    static const int PARTS = Self::KEYS / 16;  // of a tile
    static const int TASKS = 2 * PARTS / WARPS;
    const AttentionArgs& args;
    const uint32_t* table;
    uint32_t head, end;
    size_t places[TASKS];  // byte offsets of the next tile's parts

    __device__ __forceinline__ uint32_t part(int task) const { return (threadIdx.x / 32 + task * WARPS) % PARTS; }

    // Looks the tile up; done one tile ahead, so that nothing waits for the table.
    __device__ __forceinline__ void find(uint32_t first) {
#pragma unroll
        for (int t = 0; t < TASKS; ++t) {
            const uint32_t token = first + part(t) * 16;
            places[t] = 0;
            if (token < end) {
                const uint32_t in_table = token / args.block_len;
                const size_t block = __ldg(table + in_table);
                places[t] = ((block * args.kv_heads + head) * args.block_len + (token - in_table * args.block_len)) * Self::ROW;
            }
        }
    }
    // Starts the copies of the tile that was found; tokens from `end` on become zero.
    __device__ __forceinline__ void start(uint32_t stage, uint32_t first) {
        const int units = Self::ROW / 16;
        const uint32_t lane = threadIdx.x % 32;
#pragma unroll
        for (int t = 0; t < TASKS; ++t) {
            const bool value = threadIdx.x / 32 + t * WARPS >= PARTS;
            const char* src = static_cast<const char*>(value ? args.v : args.k) + places[t] + lane * 16;
            const uint32_t dst = stage + (value ? Self::TILE : 0);
#pragma unroll
            for (int i = 0; i < units / 2; ++i) {
                const uint32_t u = i * 32 + lane, row = part(t) * 16 + u / units;
                const uint32_t bytes = first + row < end ? 16 : 0;
                asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;"
                             :: "r"(dst + Self::Layout::offset(Self::KEYS, row, u % units * 16)), "l"(src + i * 512), "r"(bytes) : "memory");
            }
            if (units % 2 && lane < 16) {  // 80 elements of fp8
                const uint32_t u = units / 2 * 32 + lane, row = part(t) * 16 + u / units;
                const uint32_t bytes = first + row < end ? 16 : 0;
                asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;"
                             :: "r"(dst + Self::Layout::offset(Self::KEYS, row, u % units * 16)), "l"(src + units / 2 * 512), "r"(bytes) : "memory");
            }
        }
        asm volatile("cp.async.commit_group;" ::: "memory");
    }
};

template <typename T, typename KV, int D>
__device__ __forceinline__ void prefill_pair(const AttentionArgs& args, const Item& item, uint32_t head, uint32_t first_query,
                                             uint32_t shared) {
    typedef Prefill<T, KV, D> Self;
    typedef typename Self::C C;
    const int KEYS = Self::KEYS, K_STEPS = D / 16, N_TILES = KEYS / 8;
    const uint32_t warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, c = lane % 4;
    const uint32_t group = args.heads / args.kv_heads, n_queries = item.n_tokens * group;
    const uint32_t q_tile = shared, stages = shared + QUERIES * D * 2;
    const uint32_t* table = args.tables + (size_t)item.slot * args.max_blocks;
    const uint32_t last_query = min(first_query + QUERIES, n_queries) - 1;
    const uint32_t end = item.first_position + last_query / group + 1;
    // A tile may begin anywhere; blocks wholly before the window may be gone.
    const uint32_t position = item.first_position + first_query / group;
    const uint32_t visible = args.window && position + 1 > args.window ? position + 1 - args.window : 0;
    uint32_t first = visible / 16 * 16;

    Loader<T, KV, D> loader{args, table, head, end};
    loader.find(first);
    loader.start(stages, first);
    loader.find(first + KEYS);

    // Queries to shared memory; with 8-bit keys, in the order in which those reach the lanes.
    const size_t pitch = (size_t)(args.heads + 2 * args.kv_heads) * D;
    for (int i = threadIdx.x; i < QUERIES * D / 2; i += WARPS * 32) {
        const uint32_t row = i / (D / 2), pair = i % (D / 2), query = first_query + row;
        uint32_t x = 0;
        if (query < n_queries) {
            const T* src = static_cast<const T*>(args.qkv) + (item.q_start + query / group) * pitch + (head * group + query % group) * D;
            x = convert_pair<T, C>(*reinterpret_cast<const uint32_t*>(src + pair * 2));
        }
        const uint32_t in16 = pair % 8, at = Self::FP8 ? pair - in16 + in16 / 2 + in16 % 2 * 4 : pair;
        asm volatile("st.shared.b32 [%0], %1;" :: "r"(q_tile + Self::QLayout::offset(QUERIES, row, at * 4)), "r"(x) : "memory");
    }
    __syncthreads();
    // Up to 128 dimensions the queries stay in registers.
    uint32_t q[D > 128 ? 1 : K_STEPS][4];
    const auto load_q = [&](int step, uint32_t (&a)[4]) {
        ldmatrix(a, q_tile + Self::QLayout::offset(QUERIES, warp * 16 + lane % 16, step * 32 + lane / 16 * 16));
    };
    if constexpr (D <= 128) {
#pragma unroll
        for (int s = 0; s < K_STEPS; ++s) load_q(s, q[s]);
    }

    // From scores to base 2; a softcap leaves base 2 itself.
    const float unit = args.scale * args.k_scale, scale = args.softcap != 0 ? 1.f : unit * LOG2E;
    float out[D / 8][4];
#pragma unroll
    for (int j = 0; j < D / 8; ++j)
#pragma unroll
        for (int i = 0; i < 4; ++i) out[j][i] = 0;
    float top[2] = {-INFINITY, -INFINITY}, sum[2] = {0, 0};
    int see_to[2], see_from[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        see_to[r] = item.first_position + (first_query + warp * 16 + g + 8 * r) / group;
        see_from[r] = args.window ? see_to[r] - (int)args.window + 1 : 0;
    }
    // Tiles within these bounds are seen whole by every query.
    const int clear_to = position;
    const int clear_from = args.window ? (int)end - (int)args.window : 0;

    for (uint32_t stage = 0; first < end; first += KEYS, stage ^= 1) {
        if (first + KEYS < end) {
            loader.start(stages + (stage ^ 1) * 2 * Self::TILE, first + KEYS);
            loader.find(first + 2 * KEYS);
            asm volatile("cp.async.wait_group 1;" ::: "memory");
        } else {
            asm volatile("cp.async.wait_group 0;" ::: "memory");
        }
        __syncthreads();
        const uint32_t k = stages + stage * 2 * Self::TILE, v = k + Self::TILE;
        float s[N_TILES][4];
#pragma unroll
        for (int n = 0; n < N_TILES; ++n)
#pragma unroll
            for (int i = 0; i < 4; ++i) s[n][i] = 0;
#pragma unroll
        for (int byte = 0; byte < Self::ROW; byte += 32) {
            const bool half = byte + 16 == Self::ROW;  // 80 elements of fp8
            const int n_steps = Self::FP8 && !half ? 2 : 1;
#pragma unroll
            for (int h = 0; h < n_steps; ++h) {
                const int step = byte / (16 * (int)sizeof(KV)) + h;
                uint32_t fresh[4];
                if constexpr (D > 128) load_q(step, fresh);
                const uint32_t(&a)[4] = D > 128 ? fresh : q[D > 128 ? 0 : step];
#pragma unroll
                for (int n = 0; n < N_TILES; n += 2) {
                    uint32_t b[4];
                    ldmatrix(b, k + Self::Layout::offset(KEYS, n * 8 + lane % 16, byte + (half ? 0 : lane / 16 * 16)));
                    if constexpr (Self::FP8) {
                        mma<C>(s[n], a, e4m3_to_f16(b[2 * h]), e4m3_to_f16(b[2 * h] >> 16));
                        mma<C>(s[n + 1], a, e4m3_to_f16(b[2 * h + 1]), e4m3_to_f16(b[2 * h + 1] >> 16));
                    } else {
                        mma<C>(s[n], a, b[0], b[2]);
                        mma<C>(s[n + 1], a, b[1], b[3]);
                    }
                }
            }
        }

        if (args.softcap != 0) {
#pragma unroll
            for (int n = 0; n < N_TILES; ++n)
#pragma unroll
                for (int i = 0; i < 4; ++i) s[n][i] = args.softcap * LOG2E * tanh_fast(s[n][i] * (unit / args.softcap));
        }
        if ((int)first + KEYS - 1 > clear_to || (int)first < clear_from) {
#pragma unroll
            for (int n = 0; n < N_TILES; ++n)
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    const int at = first + n * 8 + 2 * c + i % 2;
                    if (at > see_to[i / 2] || at < see_from[i / 2]) s[n][i] = -INFINITY;
                }
        }
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            float m = top[r];
#pragma unroll
            for (int n = 0; n < N_TILES; ++n) m = fmaxf(m, fmaxf(s[n][2 * r], s[n][2 * r + 1]));
            m = fmaxf(m, __shfl_xor_sync(~0u, m, 1));
            m = fmaxf(m, __shfl_xor_sync(~0u, m, 2));
            const float base = m == -INFINITY ? 0.f : m * scale, factor = exp2_fast(top[r] * scale - base);
            top[r] = m;
            sum[r] *= factor;
#pragma unroll
            for (int j = 0; j < D / 8; ++j) out[j][2 * r] *= factor, out[j][2 * r + 1] *= factor;
#pragma unroll
            for (int n = 0; n < N_TILES; ++n)
#pragma unroll
                for (int i = 2 * r; i < 2 * r + 2; ++i) {
                    s[n][i] = exp2_fast(fmaf(s[n][i], scale, -base));
                    sum[r] += s[n][i];
                }
        }
#pragma unroll
        for (int n = 0; n < N_TILES; n += 2) {
            const uint32_t p[4] = {pack<C>(s[n][0], s[n][1]), pack<C>(s[n][2], s[n][3]), pack<C>(s[n + 1][0], s[n + 1][1]),
                                   pack<C>(s[n + 1][2], s[n + 1][3])};
#pragma unroll
            for (int byte = 0; byte < Self::ROW; byte += 32) {
                const bool half = byte + 16 == Self::ROW;
                uint32_t b[4];
                ldmatrix_trans(b, v + Self::Layout::offset(KEYS, n * 8 + lane % 8 + lane / 16 * 8, byte + (half ? 0 : lane / 8 % 2 * 16)));
                if constexpr (Self::FP8) {
#pragma unroll
                    for (int h = 0; h < (half ? 1 : 2); ++h) {
                        float(&even)[4] = out[byte / 8 + 2 * h], (&odd)[4] = out[byte / 8 + 2 * h + 1];
                        mma<C>(even, p, e4m3_to_f16(__byte_perm(b[h], 0, 0x4420)), e4m3_to_f16(__byte_perm(b[2 + h], 0, 0x4420)));
                        mma<C>(odd, p, e4m3_to_f16(__byte_perm(b[h], 0, 0x4431)), e4m3_to_f16(__byte_perm(b[2 + h], 0, 0x4431)));
                    }
                } else {
                    mma<C>(out[byte / 16], p, b[0], b[2]);
                    mma<C>(out[byte / 16 + 1], p, b[1], b[3]);
                }
            }
        }
        __syncthreads();
    }

#pragma unroll
    for (int r = 0; r < 2; ++r) {
        sum[r] += __shfl_xor_sync(~0u, sum[r], 1);
        sum[r] += __shfl_xor_sync(~0u, sum[r], 2);
        const uint32_t query = first_query + warp * 16 + g + 8 * r;
        if (query >= n_queries) continue;
        const uint32_t q_head = head * group + query % group;
        // The sink may be far above all scores: everything is taken relative to the greater.
        const float sink = args.sinks ? __ldg(args.sinks + q_head) * LOG2E : -INFINITY;
        const float m = fmaxf(top[r] * scale, sink), factor = exp2_fast(top[r] * scale - m);
        const float f = args.v_scale * factor / (sum[r] * factor + exp2_fast(sink - m));
        T* dst = static_cast<T*>(args.out) + ((size_t)(item.q_start + query / group) * args.heads + q_head) * D;
        if constexpr (Self::FP8) {
#pragma unroll
            for (int j = 0; j < D / 8; j += 2) {
                *reinterpret_cast<uint2*>(dst + j * 8 + 4 * c) = make_uint2(pack<T>(out[j][2 * r] * f, out[j + 1][2 * r] * f),
                                                                           pack<T>(out[j][2 * r + 1] * f, out[j + 1][2 * r + 1] * f));
            }
        } else {
#pragma unroll
            for (int j = 0; j < D / 8; ++j)
                *reinterpret_cast<uint32_t*>(dst + j * 8 + 2 * c) = pack<T>(out[j][2 * r] * f, out[j][2 * r + 1] * f);
        }
    }
    __syncthreads();
}

template <typename T, typename KV, int D> __device__ __forceinline__ void prefill(const AttentionArgs& args, char* shared) {
    const uint32_t base = (shared_address(shared) + 1023) & ~1023u, group = args.heads / args.kv_heads;
    pdl_trigger();
    pdl_wait();
    for (uint32_t idx = blockIdx.x;;) {
        const Item item = load_item(args.items, idx);
        const uint32_t query_tiles = (item.n_tokens * group + QUERIES - 1) / QUERIES;
        for (uint32_t pair = item.first_pair; pair < item.end_pair; ++pair)
            prefill_pair<T, KV, D>(args, item, pair / query_tiles, pair % query_tiles * QUERIES, base);
        if ((idx = item.next) == 0) break;
    }
}

// Grid: CTAs of the plan (`plan_prefill` with 64 tile rows), best twice the multiprocessors; block: 128; dynamic shared
// bytes: 1024 + 128 * D + 4 * keys * D * (bytes of a cache element), keys = 64, for D = 256 32.
#define PREFILL(name, T, KV, D)                                                                                          \
    extern "C" __global__ void __launch_bounds__(128, 2) name(const __grid_constant__ AttentionArgs args) {              \
        extern __shared__ char shared[];                                                                                 \
        prefill<T, KV, D>(args, shared);                                                                                 \
    }
#define PREFILL_DIM(D)                                                                                                   \
    PREFILL(paged_prefill_bf16_d##D, bf16, bf16, D)                                                                      \
    PREFILL(paged_prefill_f16_d##D, f16, f16, D)                                                                         \
    PREFILL(paged_prefill_bf16_fp8_d##D, bf16, uint8_t, D)                                                               \
    PREFILL(paged_prefill_f16_fp8_d##D, f16, uint8_t, D)

PREFILL_DIM(64)
PREFILL_DIM(80)
PREFILL_DIM(96)
PREFILL_DIM(128)
PREFILL_DIM(256)
