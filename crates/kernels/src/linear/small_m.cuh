// Linear layers for few tokens: out[m][n] = x[m][k] · w[n][k]ᵀ + bias[n], m <= 32, bound by one reading of `w`.
//
// A CTA owns a range of rows of `w`, so many that all CTAs have the same share, and walks it in tiles of 8 * RT rows, each tile
// in chunks of `lines` lines; a line is 128 bytes of a row of `w`. Chunks (rows of `w`, then the same columns of `x`) go
// through a ring in shared memory; eight warps share each chunk's lines, with tensor-core products whose 16-row side holds
// tokens and whose 8-column side holds rows of `w`. Their partial sums meet in shared memory in a fixed order at a tile's
// end, so a token's result is the same bits whatever m, RT, `lines`, `stages` and the grid are.
//
// `w` never changes, so the ring is asked for before the wait for the previous kernel, and the next kernel may start once all
// but a ring's worth of chunks are asked for: its reads then fill the gap between both.
#pragma once
#include "../cuda/common.cuh"
#include <cuda.h>

typedef __nv_fp8_e4m3 e4m3;

struct SmallM {
    const void* w;        // [n][k], or [2n][k] (gate rows, then up rows) with GATED
    const void* x;        // [m][k]
    const float* bias;    // [n] or null; [2n] with GATED
    const void* residual; // [m][n] or null: added to the result; may be `out`
    void* out;            // [m][n]
    const float* norm;    // NORM: [k], weight of the RMS norm of x's rows
    const float* scale;   // e4m3 weights: [n] (2n with GATED), or with BLOCKS [n / 128][k / 128], rounded up
    float eps;            // NORM
    int m, n, k;          // n: a multiple of 8; k: of 64, for e4m3 weights of 128
    int lines;            // of a chunk
    int stages;           // chunks in the ring, at most 16
    int act;              // GATED: 0 silu, 1 gelu with tanh, 2 gelu
};

enum : int {
    GATED = 1,  // out = act(gate) * up
    NORM = 2,   // x is the residual stream: out = w · (x * norm) / rms(x). x * norm is rounded to T.
    BLOCKS = 4, // e4m3 weights have a scale for each 128 rows and 128 columns
};

// From sm_90 on the tensor copy engine copies, asked by one thread; before, four warps do, 16 bytes a lane.
#ifndef BULK_COPIES
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
#define BULK_COPIES 1
#else
#define BULK_COPIES 0
#endif
#endif
static const int MMA_WARPS = 8;
#if BULK_COPIES
static const int COPY_WARPS = 1;
#else
static const int COPY_WARPS = 4;
#endif
static const int MAX_STAGES = 16;
static const int THREADS = (MMA_WARPS + COPY_WARPS) * 32;

__device__ __forceinline__ void barrier_init(uint32_t bar, int arrivals) {
    asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(bar), "r"(arrivals) : "memory");
}
__device__ __forceinline__ void barrier_arrive(uint32_t bar) {
    asm volatile("{ .reg .b64 t; mbarrier.arrive.shared.b64 t, [%0]; }" ::"r"(bar) : "memory");
}
__device__ __forceinline__ void barrier_wait(uint32_t bar, uint32_t parity) {
    uint32_t done;
    do {
#if __CUDA_ARCH__ >= 900
        asm volatile(
            "{ .reg .pred p; mbarrier.try_wait.parity.shared.b64 p, [%1], %2; selp.u32 %0, 1, 0, p; }"
            : "=r"(done) : "r"(bar), "r"(parity) : "memory");
#else
        asm volatile(
            "{ .reg .pred p; mbarrier.test_wait.parity.shared.b64 p, [%1], %2; selp.u32 %0, 1, 0, p; }"
            : "=r"(done) : "r"(bar), "r"(parity) : "memory");
#endif
    } while (!done);
}

// Chunks lie in shared memory as [line][row][128 bytes], from a multiple of 1024 bytes on; with l = line * rows + row, the
// 16-byte vector v of a line's row is at v ^ (l % 8), so that lanes which read one column of vectors hit different banks.
//
// Copies with 16 bytes a thread of the copying warps: `n_rows` rows of the layout, of which `valid_rows` exist (the others
// become zeros); same for lines.
__device__ __forceinline__ void copy_rows(uint32_t to, const char* from, int64_t pitch, int n_rows, int valid_rows, int lines,
                                          int valid_lines, int thread) {
    for (int i = thread; i < lines * n_rows * 8; i += COPY_WARPS * 32) {
        int l = i / 8, line = l / n_rows, row = l - line * n_rows, v = i % 8;
        int bytes = row < valid_rows && line < valid_lines ? 16 : 0;
        const char* src = bytes ? from + row * pitch + line * 128 + v * 16 : from;
        asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to + l * 128 + (v ^ l % 8) * 16), "l"(src), "r"(bytes)
                     : "memory");
    }
}

#if BULK_COPIES
// Copies by the tensor copy engine, from one thread: `map` sees its matrix as [line][row][128 bytes].
__device__ __forceinline__ void bulk_expect(uint32_t bar, int bytes) {
    asm volatile("{ .reg .b64 t; mbarrier.arrive.expect_tx.shared.b64 t, [%0], %1; }" ::"r"(bar), "r"(bytes) : "memory");
}
__device__ __forceinline__ uint64_t read_once() {
    uint64_t policy;
    asm("createpolicy.fractional.L2::evict_first.b64 %0;" : "=l"(policy));
    return policy;
}
__device__ __forceinline__ void bulk_copy(uint32_t to, const CUtensorMap* map, int row, int line, uint32_t bar, uint64_t policy) {
    asm volatile("cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.L2::cache_hint "
                 "[%0], [%1, {%2, %3, %4}], [%5], %6;" ::"r"(to), "l"(map), "r"(0), "r"(row), "r"(line), "r"(bar), "l"(policy)
                 : "memory");
}
__device__ __forceinline__ void bulk_copy(uint32_t to, const CUtensorMap* map, int row, int line, uint32_t bar) {
    asm volatile("cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes "
                 "[%0], [%1, {%2, %3, %4}], [%5];" ::"r"(to), "l"(map), "r"(0), "r"(row), "r"(line), "r"(bar)
                 : "memory");
}
__device__ __forceinline__ void bulk_vector(uint32_t to, const float* from, int bytes, uint32_t bar) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to), "l"(from),
                 "r"(bytes), "r"(bar)
                 : "memory");
}
__device__ __forceinline__ void fetch_map(const CUtensorMap* map) {
    asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}
#endif

// c[16 tokens][8 rows] += a[16][16] · b[16][8]
__device__ __forceinline__ void mma(float (&c)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0, uint32_t b1,
                                    bf16) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]) : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}
__device__ __forceinline__ void mma(float (&c)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0, uint32_t b1,
                                    f16) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]) : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

__device__ __forceinline__ uint4 load_shared(uint32_t at) {
    uint4 v;
    asm volatile("ld.shared.v4.u32 {%0,%1,%2,%3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(at) : "memory");
    return v;
}

__device__ __forceinline__ float activate(float x, int act) {
    if (act == 0) return x / (1 + __expf(-x));
    if (act == 1) {
        float u = 0.7978845608f * (x + 0.044715f * x * x * x);
        return x / (1 + __expf(-2 * u));
    }
    return 0.5f * x * (1 + erff(x * 0.7071067812f));
}

// The rows of one CTA and how they fall into tiles and chunks; 8 rows are a unit.
struct Share {
    int first, end, tile_units, n_tiles, n_chunks;
    __device__ Share(const SmallM& p, int tile_units, int line_cols) : tile_units(tile_units) {
        int64_t units = p.n / 8;
        first = (int)(units * blockIdx.x / gridDim.x);
        end = (int)(units * (blockIdx.x + 1) / gridDim.x);
        n_tiles = (end - first + tile_units - 1) / tile_units;
        n_chunks = (p.k / line_cols + p.lines - 1) / p.lines;
    }
    __device__ int unit(int tile) const { return first + tile * tile_units; }
    __device__ int units(int tile) const { return min(tile_units, end - unit(tile)); }
};

// e4m3 weights and what they meet become f16: exactly for the weights; x, rounded to f16, must stay below 65504 and saturates.
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 890
static const float UNWIDEN = 1;
__device__ __forceinline__ uint2 widen(uint32_t four) {
    uint2 v;
    asm("{ .reg .b16 lo, hi; mov.b32 {lo, hi}, %2; cvt.rn.f16x2.e4m3x2 %0, lo; cvt.rn.f16x2.e4m3x2 %1, hi; }"
        : "=r"(v.x), "=r"(v.y) : "r"(four));
    return v;
}
#else
// The bits fit; the exponents' biases differ by 8, which the sums make up for.
static const float UNWIDEN = 256;
__device__ __forceinline__ uint2 widen(uint32_t four) {
    uint32_t a = __byte_perm(four, 0, 0x1404), b = __byte_perm(four, 0, 0x3424);
    return {(a & 0x80008000) | (a >> 1 & 0x3f803f80), (b & 0x80008000) | (b >> 1 & 0x3f803f80)};
}
#endif
__device__ __forceinline__ uint32_t saturated(float low, float high) {
    uint32_t v;
    asm("cvt.rn.satfinite.f16x2.f32 %0, %1, %2;" : "=r"(v) : "f"(high), "f"(low));
    return v;
}

template <typename T, bool FP8> struct Factor { typedef T type; };
template <typename T> struct Factor<T, true> { typedef f16 type; };

// TOKENS (8 or 16): upper bound of m. RT: units of 8 rows of `w` in a tile; half of them gate, half up if GATED.
template <typename W, typename T, typename Out, int TOKENS, int RT, int FLAGS> struct Kernel {
    static constexpr bool IS_GATED = FLAGS & GATED, IS_NORM = FLAGS & NORM, IS_BLOCKS = FLAGS & BLOCKS, IS_FP8 = sizeof(W) == 1;
    static constexpr int TILE_UNITS = IS_GATED ? RT / 2 : RT;
    static constexpr int COLS = 128 / sizeof(W);           // columns of a line of w
    static constexpr int X_LINES = sizeof(T) / sizeof(W);  // lines of x for one of w
    static constexpr int GROUPS = TOKENS / 8;              // lane (g, t) holds tokens g, g + 8, ...
    static constexpr int A_TILES = (TOKENS + 15) / 16;

    typedef typename Factor<T, IS_FP8>::type M; // what the tensor cores multiply
    typedef float Acc[A_TILES][RT][4];

    const SmallM& p;
    const CUtensorMap *w_map, *x_map;
    Share share;
    uint32_t full, empty, ring, zeros;
    float *sums, *squares;
    int x_rows;                                         // of a group
    int block_bytes, group_bytes, norm_at, stage_bytes; // of a chunk: 8 rows of w, a group of x, before `norm`, all

    __device__ Kernel(const SmallM& p, const CUtensorMap* w_map, const CUtensorMap* x_map, char* shared)
        : p(p), w_map(w_map), x_map(x_map), share(p, TILE_UNITS, COLS) {
        x_rows = GROUPS == 1 ? p.m : 8;
        block_bytes = p.lines * 1024;
        group_bytes = (p.lines * X_LINES * x_rows + 7) / 8 * 1024;
        norm_at = RT * block_bytes + GROUPS * group_bytes;
        stage_bytes = norm_at + (IS_NORM ? (p.lines * COLS * 4 + 1023) / 1024 * 1024 : 0);
        ring = (shared_address(shared) + 1023) / 1024 * 1024;
        char* after = shared + (ring - shared_address(shared)) + p.stages * stage_bytes;
        full = shared_address(after);
        empty = full + 8 * MAX_STAGES;
        zeros = shared_address(after) + 16 * MAX_STAGES;
        squares = (float*)(after + 16 * MAX_STAGES + 16); // [warp][TOKENS]
        sums = squares + MMA_WARPS * TOKENS;              // [warp][unit][token][row of 8]
    }

    __device__ void run() {
        if (threadIdx.x == 0) {
            asm volatile("st.shared.v4.u32 [%0], {%1, %1, %1, %1};" ::"r"(zeros), "r"(0) : "memory");
            for (int s = 0; s < p.stages; s++) {
                barrier_init(full + 8 * s, BULK_COPIES ? 1 : COPY_WARPS * 32);
                barrier_init(empty + 8 * s, MMA_WARPS);
            }
        }
#if BULK_COPIES
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
#endif
        __syncthreads();
        int warp = threadIdx.x / 32;
        if (warp < MMA_WARPS)
            consume(warp, threadIdx.x % 32);
#if BULK_COPIES
        else if (threadIdx.x == MMA_WARPS * 32)
            produce(0);
#else
        else
            produce(threadIdx.x - MMA_WARPS * 32);
#endif
    }

    // A chunk's place in `w`.
    struct Chunk { int unit, units, line; };
    __device__ Chunk chunk(int i) const {
        int tile = i / share.n_chunks, c = i - tile * share.n_chunks;
        return {share.unit(tile), share.units(tile), c * p.lines};
    }
    // Calls f(first row in w, unit of the tile) for each 8 rows of a chunk.
    template <class F> __device__ void each_block(const Chunk& c, F f) const {
        for (int u = 0; u < c.units; u++) {
            f(8 * (c.unit + u), u);
            if (IS_GATED) f(8 * (c.unit + u) + p.n, u + RT / 2);
        }
    }
    __device__ uint32_t x_at(int stage, int group) const { return ring + stage * stage_bytes + RT * block_bytes + group * group_bytes; }
    __device__ int norm_bytes(const Chunk& c) const { return min(p.lines * COLS, p.k - c.line * COLS) * 4; }

#if BULK_COPIES
    __device__ void ask_w(const Chunk& c, int stage, uint64_t policy) const {
        uint32_t bar = full + 8 * stage, to = ring + stage * stage_bytes;
        int bytes = c.units * (IS_GATED ? 2 : 1) * block_bytes + GROUPS * X_LINES * p.lines * x_rows * 128;
        if (IS_NORM) bytes += norm_bytes(c);
        bulk_expect(bar, bytes);
        each_block(c, [&](int row, int unit) { bulk_copy(to + unit * block_bytes, w_map, row, c.line, bar, policy); });
        if (IS_NORM) bulk_vector(to + norm_at, p.norm + c.line * COLS, norm_bytes(c), bar);
    }
    __device__ void ask_x(const Chunk& c, int stage) const {
        for (int j = 0; j < GROUPS; j++)
            bulk_copy(x_at(stage, j), x_map, 8 * j, c.line * X_LINES, full + 8 * stage);
    }
    // One thread.
    __device__ void produce(int) {
        int total = share.n_tiles * share.n_chunks, early = min(total, p.stages), stage = 0;
        uint32_t parity = 0;
        uint64_t policy = read_once();
        fetch_map(x_map);
        for (int i = 0; i < early; i++) ask_w(chunk(i), i, policy);
        int trigger_at = max(early, total - p.stages);
        if (trigger_at == early) pdl_trigger();
        pdl_wait();
        for (int i = 0; i < early; i++) ask_x(chunk(i), i);
        for (int i = early; i < total; i++) {
            if (i == trigger_at && i > early) pdl_trigger();
            Chunk c = chunk(i);
            barrier_wait(empty + 8 * stage, parity);
            ask_w(c, stage, policy);
            ask_x(c, stage);
            if (++stage == p.stages) stage = 0, parity ^= 1;
        }
    }
#else
    __device__ void ask_w(const Chunk& c, int stage, int thread) const {
        uint32_t to = ring + stage * stage_bytes;
        int64_t pitch = (int64_t)p.k * sizeof(W);
        each_block(c, [&](int row, int unit) {
            const char* from = (const char*)p.w + row * pitch + c.line * 128;
            copy_rows(to + unit * block_bytes, from, pitch, 8, 8, p.lines, p.k / COLS - c.line, thread);
        });
        if (IS_NORM)
            for (int at = thread * 16; at < norm_bytes(c); at += COPY_WARPS * 512)
                asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to + norm_at + at), "l"(p.norm + c.line * COLS + at / 4)
                             : "memory");
    }
    __device__ void ask_x(const Chunk& c, int stage, int thread) const {
        int64_t pitch = (int64_t)p.k * sizeof(T);
        for (int j = 0; j < GROUPS; j++) {
            const char* from = (const char*)p.x + 8 * j * pitch + c.line * X_LINES * 128;
            copy_rows(x_at(stage, j), from, pitch, x_rows, p.m - 8 * j, p.lines * X_LINES, (p.k / COLS - c.line) * X_LINES, thread);
        }
        asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];" ::"r"(full + 8 * stage) : "memory");
    }
    __device__ void produce(int thread) {
        int total = share.n_tiles * share.n_chunks, early = min(total, p.stages), stage = 0;
        uint32_t parity = 0;
        for (int i = 0; i < early; i++) ask_w(chunk(i), i, thread);
        pdl_wait();
        for (int i = 0; i < early; i++) ask_x(chunk(i), i, thread);
        for (int i = early; i < total; i++) {
            barrier_wait(empty + 8 * stage, parity);
            ask_w(chunk(i), stage, thread);
            ask_x(chunk(i), stage, thread);
            if (++stage == p.stages) stage = 0, parity ^= 1;
        }
    }
#endif

    __device__ void consume(int warp, int lane) {
        pdl_wait();
        int stage = 0;
        uint32_t parity = 0;
        for (int tile = 0; tile < share.n_tiles; tile++) {
            Acc acc = {};
            float squares[GROUPS][4] = {};
            Output first = output(tile, threadIdx.x); // read early: it comes from far
            for (int c = 0; c < share.n_chunks; c++) {
                barrier_wait(full + 8 * stage, parity);
                multiply(acc, squares, tile, c * p.lines, ring + stage * stage_bytes, warp, lane);
                __syncwarp();
                if (lane == 0) barrier_arrive(empty + 8 * stage);
                if (++stage == p.stages) stage = 0, parity ^= 1;
            }
            meet(acc, squares, warp, lane);
            if (first.token < p.m) write(first);
            for (int i = threadIdx.x + MMA_WARPS * 32; i < p.m * 8 * share.units(tile); i += MMA_WARPS * 32) write(output(tile, i));
        }
    }

    // 8 columns of a token for one lane, as the products want them.
    __device__ __forceinline__ uint4 load_x(uint32_t at, uint32_t norm_at, float (&squares)[4]) const {
        uint4 v = load_shared(at);
        if (IS_NORM) { // the product of the 8 tokens with themselves has their sums of squares on its diagonal
            mma(squares, v.x, 0, v.y, 0, v.x, v.y, T());
            mma(squares, v.z, 0, v.w, 0, v.z, v.w, T());
        }
        if (IS_NORM || IS_FP8) {
            Vec<T, 8>& x = reinterpret_cast<Vec<T, 8>&>(v);
            Vec<float, 8> f, norm;
            if (IS_NORM) {
                uint4 half[2] = {load_shared(norm_at), load_shared(norm_at + 16)};
                norm = reinterpret_cast<Vec<float, 8>&>(half);
            }
#pragma unroll
            for (int i = 0; i < 8; i++) f.at[i] = to_f32(x.at[i]) * (IS_NORM ? norm.at[i] : 1);
            if constexpr (IS_FP8)
                v = make_uint4(saturated(f.at[0], f.at[1]), saturated(f.at[2], f.at[3]), saturated(f.at[4], f.at[5]),
                               saturated(f.at[6], f.at[7]));
            else
#pragma unroll
                for (int i = 0; i < 8; i++) x.at[i] = from_f32<T>(f.at[i]);
        }
        return v;
    }

    // Warp i takes the lines of k with index % 8 == i, whatever chunk they are in. Lane (g, t) reads vectors 2t and 2t + 1 of
    // each line of row g, and the same columns of token g: the products' order of columns differs from memory's, in the same
    // way on both sides.
    __device__ void multiply(Acc& acc, float (&squares)[GROUPS][4], int tile, int first_line, uint32_t at, int warp, int lane) const {
        int g = lane / 4, t = lane % 4, n_lines = min(p.lines, p.k / COLS - first_line);
        uint32_t w = at + g * 128, x = at + RT * block_bytes, norm = at + norm_at;
        bool is_token = GROUPS > 1 || g < p.m;
        for (int line = (warp - first_line) & (MMA_WARPS - 1); line < n_lines; line += MMA_WARPS)
#pragma unroll
            for (int half = 0; half < 2; half++) {
                uint4 a[2 * A_TILES][X_LINES] = {}; // [token group][8 columns]
#pragma unroll
                for (int j = 0; j < GROUPS; j++)
#pragma unroll
                    for (int v = 0; v < X_LINES; v++) {
                        int vec = (2 * t + half) * X_LINES + v; // 8 columns each, from the line's start
                        int l = (line * X_LINES + vec / 8) * x_rows + g;
                        uint32_t from = is_token ? x + j * group_bytes + l * 128 + (vec % 8 ^ l % 8) * 16 : zeros;
                        a[j][v] = load_x(from, norm + (line * COLS + vec * 8) * 4, squares[j]);
                    }
#pragma unroll
                for (int r = 0; r < RT; r++) {
                    uint4 b = load_shared(w + r * block_bytes + line * 1024 + ((2 * t + half) ^ g) * 16);
                    if (IS_BLOCKS) {
                        Acc part = {};
                        products(part, r, a, b);
                        float scale = block_scale(tile, r, (first_line + line) * COLS);
#pragma unroll
                        for (int i = 0; i < A_TILES; i++)
#pragma unroll
                            for (int c = 0; c < 4; c++) acc[i][r][c] += scale * part[i][r][c];
                    } else
                        products(acc, r, a, b);
                }
            }
    }
    __device__ __forceinline__ void products(Acc& acc, int r, const uint4 (&a)[2 * A_TILES][X_LINES], const uint4& b) const {
#pragma unroll
        for (int i = 0; i < A_TILES; i++) {
            const uint4(&low)[X_LINES] = a[2 * i], (&high)[X_LINES] = a[2 * i + 1];
            if constexpr (IS_FP8) {
                uint2 w0 = widen(b.x), w1 = widen(b.y), w2 = widen(b.z), w3 = widen(b.w);
                mma(acc[i][r], low[0].x, high[0].x, low[0].y, high[0].y, w0.x, w0.y, M());
                mma(acc[i][r], low[0].z, high[0].z, low[0].w, high[0].w, w1.x, w1.y, M());
                mma(acc[i][r], low[1].x, high[1].x, low[1].y, high[1].y, w2.x, w2.y, M());
                mma(acc[i][r], low[1].z, high[1].z, low[1].w, high[1].w, w3.x, w3.y, M());
            } else {
                mma(acc[i][r], low[0].x, high[0].x, low[0].y, high[0].y, b.x, b.y, M());
                mma(acc[i][r], low[0].z, high[0].z, low[0].w, high[0].w, b.z, b.w, M());
            }
        }
    }
    // Scale of the block that has unit r of the tile and this column.
    __device__ float block_scale(int tile, int r, int col) const {
        int row = 8 * (share.unit(tile) + (IS_GATED ? r % (RT / 2) : r));
        row = min(row, p.n - 1) + (IS_GATED && r >= RT / 2 ? p.n : 0);
        return p.scale[(int64_t)(row / 128) * (p.k / 128) + col / 128];
    }

    __device__ static void consumers_sync() { asm volatile("bar.sync 1, %0;" ::"n"(MMA_WARPS * 32) : "memory"); }

    // Each warp's partial sums go to `sums`.
    __device__ void meet(const Acc& acc, const float (&squared)[GROUPS][4], int warp, int lane) {
        int g = lane / 4, t = lane % 4;
        consumers_sync(); // the last tile's sums are read
#pragma unroll
        for (int j = 0; j < GROUPS; j++) {
#pragma unroll
            for (int r = 0; r < RT; r++) {
                const float(&c)[4] = acc[j / 2][r];
                float* at = sums + ((warp * RT + r) * TOKENS + 8 * j + g) * 8 + 2 * t;
                *(float2*)at = make_float2(c[2 * (j % 2)], c[2 * (j % 2) + 1]);
            }
            // (columns of tokens that don't exist hold another's values; their diagonal is not read)
            if (IS_NORM && g / 2 == t) squares[warp * TOKENS + 8 * j + g] = g % 2 ? squared[j][1] : squared[j][0];
        }
        consumers_sync();
    }
    // Row `row` of w (in unit `unit` of the tile) times a token.
    __device__ float product(int unit, int token, int row, float scale) const {
        float total = 0, square = 0;
#pragma unroll
        for (int warp = 0; warp < MMA_WARPS; warp++) {
            total += sums[((warp * RT + unit) * TOKENS + token) * 8 + row % 8];
            if (IS_NORM) square += squares[warp * TOKENS + token];
        }
        if (IS_FP8) total *= UNWIDEN * scale;
        if (IS_NORM) total *= rsqrtf(square / p.k + p.eps);
        return total;
    }

    // An output of a tile, and what joins its sum.
    struct Output {
        int token, col, n;
        int64_t at;
        float scale[2], bias[2], residual; // [1]: of the row of `up`
    };
    __device__ Output output(int tile, int i) const {
        int cols = 8 * share.units(tile);
        Output o = {};
        o.token = i / cols, o.col = i - o.token * cols, o.n = 8 * share.unit(tile) + o.col;
        o.at = (int64_t)o.token * p.n + o.n;
        if (o.token >= p.m) return o;
#pragma unroll
        for (int up = 0; up < (IS_GATED ? 2 : 1); up++) {
            o.scale[up] = IS_FP8 && !IS_BLOCKS ? p.scale[up * p.n + o.n] : 1;
            if (p.bias) o.bias[up] = p.bias[up * p.n + o.n];
        }
        if (p.residual) o.residual = to_f32(((const Out*)p.residual)[o.at]);
        return o;
    }
    __device__ void write(const Output& o) const {
        float result = product(o.col / 8, o.token, o.n, o.scale[0]) + o.bias[0];
        if (IS_GATED) {
            float up = product(o.col / 8 + RT / 2, o.token, p.n + o.n, o.scale[1]) + o.bias[1];
            result = activate(result, p.act) * up;
        }
        ((Out*)p.out)[o.at] = from_f32<Out>(result + o.residual);
    }
};

// A kernel of the family. Grid: any number of CTAs, one a multiprocessor is best. Block: 288 threads, before sm_90 384. Dynamic
// shared bytes: 1296 + (256 rt + 32) tokens + stages * (1024 lines rt + G + N); X = 2 with e4m3, else 1; G = 128 m lines X
// rounded up to 1024 if tokens is 8, else 128 tokens lines X; N = 256 lines X rounded up to 1024 with NORM, else 0.
// `w`, `x` and `norm` are aligned to 16 bytes; x is not `out`.
//
// From sm_90 on the maps are read instead of `w` and `x`: 3 dimensions (128 bytes of columns, rows, k's lines), strides (bytes of
// a row, 128), box (128 bytes of columns, 8, lines), for x (128 bytes of columns, m if tokens is 8, else 8, lines * X), 128-byte
// swizzle, 128-byte L2 promotion, zeros outside; `w` has n rows (2n with GATED), x has exactly m.
//
// What was fastest on an H200, with u = n / 8 / multiprocessors, rounded up, and r = u spread evenly over the fewest tiles of at
// most 4 units, at least 2:
//   m <= 8:  rt 2 (1 or 3 where u is), lines 16; gated rt 2, lines 16; logits rt 4, lines 16 (8 from m = 5 on);
//            norm: rt r, lines 8; norm gated and norm logits: rt 4, lines 16 (8 from m = 5 on).
//   m <= 16: rt r, gated and logits 4, lines 8.
//   e4m3:    rt 4 (2 where u is; 8 where u > 4, without BLOCKS), lines 8.
// `lines` is k's number of lines where that is less, or less than 2 * lines and no multiple of it. As many stages as fit 112 KiB
// of shared memory (so that the next kernel's CTAs fit beside) if a CTA's share of `w` is at most 128 KiB, else 220 KiB.
#define SMALL_M(name, W, T, Out, tokens, rt, flags)                                                                     \
    extern "C" __global__ void __launch_bounds__(THREADS, 1)                                                            \
        name(SmallM p, const __grid_constant__ CUtensorMap w_map, const __grid_constant__ CUtensorMap x_map) {          \
        extern __shared__ char shared[];                                                                                \
        Kernel<W, T, Out, tokens, rt, flags>(p, &w_map, &x_map, shared).run();                                          \
    }
