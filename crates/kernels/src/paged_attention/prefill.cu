// Prefill attention over a paged cache on Hopper: wgmma fed by TMA, heads of 64 and 128, 16-bit caches, no softcap.
//
// The loops are FlashAttention-3's (Shah et al. 2024). A CTA computes 64 * GROUPS packed queries (token-major, the heads of
// one KV head): one warpgroup loads, GROUPS warpgroups compute 64 rows each. A warpgroup takes the weights of one tile
// while the tensor cores run its scores of the next tile and its product of the last with the values; a token passed
// around orders the warpgroups, so that one's products run beside another's exponentials. Tiles are taken from the last to
// the first: those that need masks come first. Cache blocks of 16 tokens are TMA boxes, so pages cost nothing.
#include <type_traits>

#include "attention.cuh"

static const int KEYS = 128;  // in a tile
static const int BOX = 16;    // tokens a TMA box

#if __CUDA_ARCH_FEAT_SM90_ALL

#define REGS_32 "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27," \
                "%28,%29,%30,%31}"
#define REGS_64 "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27," \
                "%28,%29,%30,%31,%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,%48,%49,%50,%51,%52,%53," \
                "%54,%55,%56,%57,%58,%59,%60,%61,%62,%63}"
#define ACC_8(d, i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]), "+f"(d[i + 6]), "+f"(d[i + 7])
#define ACC_32(d, i) ACC_8(d, i), ACC_8(d, i + 8), ACC_8(d, i + 16), ACC_8(d, i + 24)

// One step of 16 along the sum: `scores` (+)= a b' with both in shared memory, `values` += a b with a in registers.
template <typename T> struct Wgmma;
#define WGMMA(T, name)                                                                                                    \
    template <> struct Wgmma<T> {                                                                                         \
        __device__ static __forceinline__ void scores(float (&d)[64], uint64_t a, uint64_t b, int add) {                  \
            asm volatile("{ .reg .pred p; setp.ne.b32 p, %66, 0;\n"                                                       \
                         "wgmma.mma_async.sync.aligned.m64n128k16.f32." name "." name " " REGS_64 ", %64, %65, p, 1, 1, 0, 0; }" \
                         : ACC_32(d, 0), ACC_32(d, 32) : "l"(a), "l"(b), "r"(add));                                       \
        }                                                                                                                 \
        __device__ static __forceinline__ void values(float (&d)[64], const uint32_t* a, uint64_t b) {                    \
            asm volatile("wgmma.mma_async.sync.aligned.m64n128k16.f32." name "." name " " REGS_64                         \
                         ", {%64,%65,%66,%67}, %68, 1, 1, 1, 1;"                                                          \
                         : ACC_32(d, 0), ACC_32(d, 32) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));             \
        }                                                                                                                 \
        __device__ static __forceinline__ void values(float (&d)[32], const uint32_t* a, uint64_t b) {                    \
            asm volatile("wgmma.mma_async.sync.aligned.m64n64k16.f32." name "." name " " REGS_32                          \
                         ", {%32,%33,%34,%35}, %36, 1, 1, 1, 1;"                                                          \
                         : ACC_32(d, 0) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));                            \
        }                                                                                                                 \
    };
WGMMA(bf16, "bf16")
WGMMA(f16, "f16")

__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int N> __device__ __forceinline__ void wgmma_wait() { asm volatile("wgmma.wait_group.sync.aligned %0;" :: "n"(N) : "memory"); }
// Keeps the compiler from moving reads of `x` before the wait above it.
template <typename X, int N> __device__ __forceinline__ void pin(X (&x)[N]) {
#pragma unroll
    for (int i = 0; i < N; ++i) {
        if constexpr (std::is_same<X, float>::value) asm volatile("" : "+f"(x[i]) :: "memory");
        else asm volatile("" : "+r"(x[i]) :: "memory");
    }
}

// Descriptor of a matrix in columns of 128 swizzled bytes; `columns`: bytes between two columns, read for values only.
__device__ __forceinline__ uint64_t descriptor(uint32_t addr, uint32_t columns) {
    return (uint64_t)((addr & 0x3ffff) >> 4) | (uint64_t)(columns >> 4) << 16 | (uint64_t)(1024 >> 4) << 32 | 1ull << 62;
}

template <typename T, int D, int GROUPS> struct Prefill {
    static const int ROWS = 64 * GROUPS;
    static const int COLUMNS = D / 64;             // of 128 bytes
    static const int TILE = KEYS * D * 2;          // bytes
    static const int Q_TILE = ROWS * D * 2;
    static const int STAGES = D == 128 ? 2 : 4;    // for keys, and for values
    static const int Q_STAGES = 2;
    static const int SHARED = Q_STAGES * Q_TILE + 2 * STAGES * TILE + 1024 + 512;

    // Shared memory: queries, keys, values, the queries' items, barriers.
    uint32_t q, k, v, q_full, q_empty, k_full, k_empty, v_full, v_empty;
    Item* items;

    __device__ __forceinline__ Prefill(char* shared) {
        char* base = shared + (1024 - (shared_address(shared) & 1023)) % 1024;
        q = shared_address(base);
        k = q + Q_STAGES * Q_TILE;
        v = k + STAGES * TILE;
        char* rest = base + Q_STAGES * Q_TILE + 2 * STAGES * TILE;
        items = reinterpret_cast<Item*>(rest);
        q_full = shared_address(rest) + Q_STAGES * sizeof(Item);
        q_empty = q_full + Q_STAGES * 8;
        k_full = q_empty + Q_STAGES * 8;
        k_empty = k_full + STAGES * 8;
        v_full = k_empty + STAGES * 8;
        v_empty = v_full + STAGES * 8;
    }
};

// Position in a ring of `n` stages.
template <int N> struct Ring {
    uint32_t stage = 0, parity = 0;
    __device__ __forceinline__ void advance() {
        if (++stage == N) stage = 0, parity ^= 1;
    }
};

// One warp that loads all tiles of keys, or of values, in the order of use; lane = 16-token box and column.
template <typename T, int D, int GROUPS>
__device__ __forceinline__ void load_tiles(const AttentionArgs& args, const TensorMap* map, uint32_t tiles, uint32_t full,
                                           uint32_t empty) {
    typedef Prefill<T, D, GROUPS> Self;
    const uint32_t lane = threadIdx.x % 32, box = lane % (KEYS / BOX), column = lane / (KEYS / BOX);
    Ring<Self::STAGES> ring;
    for (uint32_t idx = blockIdx.x;;) {
        const Item item = load_item(args.items, idx);
        if (item.first_pair != item.end_pair) {
            const uint32_t* table = args.tables + (size_t)item.slot * args.max_blocks;
            const uint32_t end = item.first_position + item.n_tokens;
            const auto place = [&](uint32_t tile) -> int {
                const uint32_t token = tile * KEYS + box * BOX;
                if (token >= end || tile < item.first_tile) return -BOX;  // outside the map: zeros
                // A block wholly before the window may be gone.
                if (args.window && token + BOX + args.window <= item.first_position + 1) return -BOX;
                return (__ldg(table + token / args.block_len) * args.kv_heads + item.first_pair) * args.block_len + token % args.block_len;
            };
            int row = place(item.end_tile - 1);
            for (uint32_t tile = item.end_tile; tile-- > item.first_tile;) {
                mbarrier_wait(empty + ring.stage * 8, ring.parity ^ 1);
                if (lane == 0) mbarrier_expect(full + ring.stage * 8, Self::TILE);
                __syncwarp();
                if (column < Self::COLUMNS)
                    tma_load_3d(tiles + ring.stage * Self::TILE + column * (KEYS * 128) + box * (BOX * 128), map,
                                full + ring.stage * 8, 0, column, row);
                row = place(tile - 1);
                ring.advance();
            }
        }
        if ((idx = item.next) == 0) break;
    }
}

// One thread that loads the queries of every item, and leaves the item beside them.
template <typename T, int D, int GROUPS>
__device__ __forceinline__ void load_queries(const Prefill<T, D, GROUPS>& at, const AttentionArgs& args, const TensorMap* map) {
    typedef Prefill<T, D, GROUPS> Self;
    const uint32_t group = args.heads / args.kv_heads, rows = Self::ROWS / group * group;
    Ring<Self::Q_STAGES> ring;
    for (uint32_t idx = blockIdx.x;;) {
        const Item item = load_item(args.items, idx);
        mbarrier_wait(at.q_empty + ring.stage * 8, ring.parity ^ 1);
        at.items[ring.stage] = item;
        const uint32_t full = at.q_full + ring.stage * 8;
        mbarrier_expect(full, rows * D * 2);
        for (int column = 0; column < Self::COLUMNS; ++column)
            tma_load_3d(at.q + ring.stage * Self::Q_TILE + column * (Self::ROWS * 128), map, full, column * 64,
                        item.first_pair * group, item.q_start);
        ring.advance();
        if ((idx = item.next) == 0) break;
    }
}

// The state of one thread of a computing warpgroup: two rows, `lane / 4` and 8 further, of its warp's 16.
template <typename T, int D, int GROUPS> struct Rows {
    typedef Prefill<T, D, GROUPS> Self;
    float out[D / 2];
    uint32_t weights[KEYS / 4];
    float top[2], sum[2];
    int position[2];

    __device__ __forceinline__ void mask(float (&s)[64], uint32_t tile, uint32_t window) {
        const int first = tile * KEYS + threadIdx.x % 4 * 2;
        const int to[2] = {position[0] - first, position[1] - first};
#pragma unroll
        for (int i = 0; i < 64; ++i)
            if (i / 4 * 8 + i % 2 > to[i / 2 % 2]) s[i] = -INFINITY;
        if (window) {
#pragma unroll
            for (int i = 0; i < 64; ++i)
                if (i / 4 * 8 + i % 2 + (int)window <= to[i / 2 % 2]) s[i] = -INFINITY;
        }
    }
    // Turns scores into weights relative to the greatest so far; returns what older sums are to be multiplied by.
    __device__ __forceinline__ void softmax(float (&s)[64], float scale, float (&factor)[2]) {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            float m = top[r];
#pragma unroll
            for (int j = 0; j < 16; ++j) m = fmaxf(m, fmaxf(s[4 * j + 2 * r], s[4 * j + 2 * r + 1]));
            m = fmaxf(m, __shfl_xor_sync(~0u, m, 1));
            m = fmaxf(m, __shfl_xor_sync(~0u, m, 2));
            const float base = m == -INFINITY ? 0.f : m * scale;
            factor[r] = exp2_fast(top[r] * scale - base);
            top[r] = m;
            float part = 0;
#pragma unroll
            for (int j = 0; j < 16; ++j) {
                float &x = s[4 * j + 2 * r], &y = s[4 * j + 2 * r + 1];
                x = exp2_fast(fmaf(x, scale, -base));
                y = exp2_fast(fmaf(y, scale, -base));
                part += x + y;
            }
            sum[r] = sum[r] * factor[r] + part;
        }
    }
    __device__ __forceinline__ void pack_weights(const float (&s)[64]) {
#pragma unroll
        for (int i = 0; i < 32; ++i) weights[i] = pack<T>(s[2 * i], s[2 * i + 1]);
    }
    __device__ __forceinline__ void start_scores(float (&s)[64], uint32_t q, uint32_t k) {
#pragma unroll
        for (int step = 0; step < D / 16; ++step) {
            const int column = step / 4, in = step % 4 * 32;
            Wgmma<T>::scores(s, descriptor(q + column * (Self::ROWS * 128) + in, 16), descriptor(k + column * (KEYS * 128) + in, 16), step > 0);
        }
        wgmma_commit();
    }
    __device__ __forceinline__ void start_values(uint32_t v) {
#pragma unroll
        for (int step = 0; step < KEYS / 16; ++step) Wgmma<T>::values(out, weights + 4 * step, descriptor(v + step * (16 * 128), KEYS * 128));
        wgmma_commit();
    }
    __device__ __forceinline__ void write(const AttentionArgs& args, const Item& item, uint32_t first_row) {
        const uint32_t lane = threadIdx.x % 32, c = lane % 4, group = args.heads / args.kv_heads;
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const uint32_t query = first_row + lane / 4 + 8 * r, head = item.first_pair * group + query % group;
            const bool valid = query < item.n_tokens * group;
            sum[r] += __shfl_xor_sync(~0u, sum[r], 1);
            sum[r] += __shfl_xor_sync(~0u, sum[r], 2);
            // The sink may be far above all scores: everything is taken relative to the greater.
            const float sink = args.sinks && valid ? __ldg(args.sinks + head) * LOG2E : -INFINITY;
            const float m = top[r] * args.scale * LOG2E, both = fmaxf(m, sink), factor = exp2_fast(m - both);
            const float f = factor / (sum[r] * factor + exp2_fast(sink - both));
            T* dst = static_cast<T*>(args.out) + ((size_t)(item.q_start + query / group) * args.heads + head) * D;
#pragma unroll
            for (int j = 0; j < D / 8; j += 4) {
                // Transposes four pieces of four lanes, so that each lane writes 16 bytes.
                uint32_t x[4];
#pragma unroll
                for (int i = 0; i < 4; ++i) x[i] = pack<T>(out[4 * (j + i) + 2 * r] * f, out[4 * (j + i) + 2 * r + 1] * f);
#pragma unroll
                for (int i = 0; i < 4; i += 2) {
                    const uint32_t y = __shfl_xor_sync(~0u, c & 1 ? x[i] : x[i + 1], 1);
                    if (c & 1) x[i] = y;
                    else x[i + 1] = y;
                }
#pragma unroll
                for (int i = 0; i < 2; ++i) {
                    const uint32_t y = __shfl_xor_sync(~0u, c & 2 ? x[i] : x[i + 2], 2);
                    if (c & 2) x[i] = y;
                    else x[i + 2] = y;
                }
                if (valid) *reinterpret_cast<uint4*>(dst + (j + c) * 8) = make_uint4(x[0], x[1], x[2], x[3]);
            }
        }
    }
};

// Makes the values of tokens from `end` to the end of its box zero: what lies there may be NaN, which no zero weight undoes.
template <int D> __device__ __forceinline__ void clear_behind(uint32_t v, uint32_t tile, uint32_t end, uint32_t warpgroup) {
    const uint32_t first = end - tile * KEYS, n = (BOX - end % BOX) % BOX;
    for (uint32_t u = threadIdx.x % 128; u < n * (D / 8); u += 128) {
        const uint32_t row = first + u / (D / 8), byte = u % (D / 8) * 16;
        asm volatile("st.shared.v4.b32 [%0], {%1, %1, %1, %1};" :: "r"(v + byte / 128 * (KEYS * 128) + row * 128 + byte % 128), "r"(0) : "memory");
    }
    fence_async();
    named_barrier(1 + warpgroup, 128);
}

template <typename T, int D, int GROUPS>
__device__ __forceinline__ void compute(const Prefill<T, D, GROUPS>& at, const AttentionArgs& args, uint32_t warpgroup) {
    typedef Prefill<T, D, GROUPS> Self;
    const uint32_t lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4, group = args.heads / args.kv_heads;
    const uint32_t first_row = warpgroup * 64 + warp * 16;
    const float scale = args.scale * LOG2E;
    // Named barriers 1..: one warpgroup; 8..: the token that lets a warpgroup start its products.
    const uint32_t own_token = 8 + warpgroup, next_token = 8 + (warpgroup + 1) % GROUPS;
    const auto arrive = [&](uint32_t bar) {
        if (lane == 0) mbarrier_arrive(bar);
    };
    const auto pass_token = [&] { asm volatile("bar.arrive %0, 256;" :: "r"(next_token) : "memory"); };
    if (warpgroup == GROUPS - 1) pass_token();
    Rows<T, D, GROUPS> rows;
    Ring<Self::Q_STAGES> q_ring;
    Ring<Self::STAGES> k_ring, v_ring;
    for (;;) {
        mbarrier_wait(at.q_full + q_ring.stage * 8, q_ring.parity);
        const Item item = at.items[q_ring.stage];
        const uint32_t q = at.q + q_ring.stage * Self::Q_TILE + warpgroup * (64 * 128), q_empty = at.q_empty + q_ring.stage * 8;
        q_ring.advance();
        if (item.first_pair == item.end_pair) return;

        const uint32_t end = item.first_position + item.n_tokens;
        const int clear_from = args.window ? (int)end - (int)args.window : 0;
        const auto masked = [&](uint32_t tile) {
            return (int)(tile * KEYS + KEYS - 1) > (int)item.first_position || (int)(tile * KEYS) < clear_from;
        };
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            rows.position[r] = item.first_position + (first_row + lane / 4 + 8 * r) / group;
            rows.top[r] = -INFINITY;
            rows.sum[r] = 0;
        }
#pragma unroll
        for (int i = 0; i < D / 2; ++i) rows.out[i] = 0;
        float s[64], factor[2];

        uint32_t tile = item.end_tile - 1;
        mbarrier_wait(at.k_full + k_ring.stage * 8, k_ring.parity);
        wgmma_fence();
        rows.start_scores(s, q, at.k + k_ring.stage * Self::TILE);
        wgmma_wait<0>();
        pin(s);
        arrive(at.k_empty + k_ring.stage * 8);
        k_ring.advance();
        rows.mask(s, tile, args.window);
        rows.softmax(s, scale, factor);
        rows.pack_weights(s);
        if (end % BOX) {
            mbarrier_wait(at.v_full + v_ring.stage * 8, v_ring.parity);
            clear_behind<D>(at.v + v_ring.stage * Self::TILE, tile, end, warpgroup);
        }
        while (tile-- > item.first_tile) {
            named_barrier(own_token, 256);
            mbarrier_wait(at.k_full + k_ring.stage * 8, k_ring.parity);
            wgmma_fence();
            rows.start_scores(s, q, at.k + k_ring.stage * Self::TILE);
            mbarrier_wait(at.v_full + v_ring.stage * 8, v_ring.parity);
            rows.start_values(at.v + v_ring.stage * Self::TILE);
            pass_token();
            wgmma_wait<1>();
            pin(s);
            arrive(at.k_empty + k_ring.stage * 8);
            k_ring.advance();
            if (masked(tile)) rows.mask(s, tile, args.window);
            rows.softmax(s, scale, factor);
            wgmma_wait<0>();
            pin(rows.out);
            pin(rows.weights);
            arrive(at.v_empty + v_ring.stage * 8);
            v_ring.advance();
#pragma unroll
            for (int i = 0; i < D / 2; ++i) rows.out[i] *= factor[i / 2 % 2];
            rows.pack_weights(s);
        }
        mbarrier_wait(at.v_full + v_ring.stage * 8, v_ring.parity);
        wgmma_fence();
        rows.start_values(at.v + v_ring.stage * Self::TILE);
        // All scores are taken: the queries may go.
        arrive(q_empty);
        wgmma_wait<0>();
        pin(rows.out);
        arrive(at.v_empty + v_ring.stage * 8);
        v_ring.advance();
        rows.write(args, item, first_row);
        if (item.next == 0) return;
    }
}

template <typename T, int D, int GROUPS>
__device__ __forceinline__ void prefill(const TensorMap* q_map, const TensorMap* k_map, const TensorMap* v_map,
                                        const AttentionArgs& args, char* shared) {
    typedef Prefill<T, D, GROUPS> Self;
    const Self at(shared);
    if (threadIdx.x == 0) {
        prefetch_map(q_map);
        prefetch_map(k_map);
        prefetch_map(v_map);
        for (int s = 0; s < Self::Q_STAGES; ++s) {
            mbarrier_init(at.q_full + s * 8, 1);
            mbarrier_init(at.q_empty + s * 8, 4 * GROUPS);
        }
        for (int s = 0; s < Self::STAGES; ++s) {
            mbarrier_init(at.k_full + s * 8, 1);
            mbarrier_init(at.v_full + s * 8, 1);
            mbarrier_init(at.k_empty + s * 8, 4 * GROUPS);
            mbarrier_init(at.v_empty + s * 8, 4 * GROUPS);
        }
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    __syncthreads();
    pdl_trigger();
    pdl_wait();
    const uint32_t warpgroup = threadIdx.x / 128;
    if (warpgroup == 0) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" :: "n"(GROUPS == 2 ? 24 : 32));
        const uint32_t warp = threadIdx.x / 32;
        if (warp == 0) load_tiles<T, D, GROUPS>(args, k_map, at.k, at.k_full, at.k_empty);
        if (warp == 1) load_tiles<T, D, GROUPS>(args, v_map, at.v, at.v_full, at.v_empty);
        if (threadIdx.x == 64) load_queries<T, D, GROUPS>(at, args, q_map);
    } else {
        asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" :: "n"(GROUPS == 2 ? 240 : 160));
        compute<T, D, GROUPS>(at, args, warpgroup - 1);
    }
}

// Grid: CTAs of the plan (`plan_prefill` with 64 * GROUPS tile rows), best one a multiprocessor; block: 128 * (GROUPS + 1);
// dynamic shared bytes: `Prefill::SHARED`, 198144 for D = 128 and 181760 for 64. k_map and v_map: as for decode. q_map: a
// 3-D view of qkv, {D, heads + 2 * kv_heads, T} with byte strides {2 * D, row bytes}, box {64, group, 64 * GROUPS / group},
// 128-byte swizzle. The group has at most 64 * GROUPS heads.
#define PREFILL(name, T, D, GROUPS)                                                                                      \
    extern "C" __global__ void __launch_bounds__(128 * (GROUPS + 1), 1) name(                                            \
        const __grid_constant__ TensorMap q_map, const __grid_constant__ TensorMap k_map,                                \
        const __grid_constant__ TensorMap v_map, const __grid_constant__ AttentionArgs args) {                           \
        extern __shared__ char shared[];                                                                                 \
        prefill<T, D, GROUPS>(&q_map, &k_map, &v_map, args, shared);                                                     \
    }
PREFILL(paged_prefill_hopper_bf16_d128, bf16, 128, 2)
PREFILL(paged_prefill_hopper_f16_d128, f16, 128, 2)
PREFILL(paged_prefill_hopper_bf16_d64, bf16, 64, 3)
PREFILL(paged_prefill_hopper_f16_d64, f16, 64, 3)
#endif
