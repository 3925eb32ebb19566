// What the paged attention kernels share: arguments, work items, tiles in shared memory, mma.sync, mbarriers, TMA.
#pragma once

#include "../cuda/common.cuh"

// One CTA's piece of work, planned by `plan.rs`, which explains the fields.
struct alignas(16) Item {
    uint32_t q_start, n_tokens, first_position, slot;
    uint32_t first_pair, end_pair, first_tile, end_tile;
    uint32_t partial, piece, n_pieces, next;
};

// Arguments of all attention kernels.
struct AttentionArgs {
    const void* qkv;          // [T][(heads + 2 * kv_heads) * head_dim], q first
    void* out;                // [T][heads * head_dim]
    const void* k;            // the layer's cache, [n_blocks][kv_heads][block_len][head_dim]
    const void* v;
    const uint32_t* tables;   // [slot][max_blocks]
    const Item* items;
    const float* sinks;       // [heads] or null: extra logit of each head's softmax
    float* partial_out;       // decode: [partial][queries of a tile][head_dim]
    float2* partial_max_sum;  // decode: [partial][queries of a tile]
    uint32_t* counters;       // decode: [partial], zero before and after
    uint32_t max_blocks, heads, kv_heads, block_len;
    uint32_t window;          // tokens seen, 0: all
    float scale, softcap;     // softcap 0: none
    float k_scale, v_scale;   // value of 1.0 in an fp8 cache, else 1
};

// A CUtensorMap, without the driver's header.
struct alignas(64) TensorMap { uint64_t opaque[16]; };

static const float LOG2E = 1.4426950408889634f;

__device__ __forceinline__ Item load_item(const Item* items, uint32_t idx) {
    Item item;
    const uint4* src = reinterpret_cast<const uint4*>(items + idx);
    uint4* dst = reinterpret_cast<uint4*>(&item);
#pragma unroll
    for (int i = 0; i < 3; ++i) dst[i] = __ldg(src + i);
    return item;
}

// A tile of rows in shared memory is kept in columns of CHUNK bytes, [ROW / CHUNK][rows][CHUNK], and 16-byte units are
// swizzled within a column as TMA does for that width, so that ldmatrix meets no bank conflicts.
template <int ROW> struct Tile {
    static const int CHUNK = ROW % 128 == 0 ? 128 : ROW % 64 == 0 ? 64 : ROW % 32 == 0 ? 32 : 16;
    static const int CHUNKS = ROW / CHUNK;
    __device__ static __forceinline__ uint32_t offset(uint32_t n_rows, uint32_t row, uint32_t byte) {
        uint32_t at = row * CHUNK + byte % CHUNK;
        return byte / CHUNK * (n_rows * CHUNK) + (at ^ ((at >> 3) & (CHUNK - 16)));
    }
};

__device__ __forceinline__ void ldmatrix(uint32_t (&r)[4], uint32_t addr) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(addr) : "memory");
}
__device__ __forceinline__ void ldmatrix_trans(uint32_t (&r)[4], uint32_t addr) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(addr) : "memory");
}
// Transposes an 8 x 8 matrix of 16-bit elements that the warp holds two a lane.
__device__ __forceinline__ uint32_t movmatrix(uint32_t x) {
    uint32_t y;
    asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(y) : "r"(x));
    return y;
}

template <typename T> __device__ __forceinline__ void mma(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1);
template <> __device__ __forceinline__ void mma<bf16>(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
template <> __device__ __forceinline__ void mma<f16>(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

template <typename T> __device__ __forceinline__ uint32_t pack(float lo, float hi);
template <> __device__ __forceinline__ uint32_t pack<bf16>(float lo, float hi) {
    __nv_bfloat162 x = __floats2bfloat162_rn(lo, hi);
    return *reinterpret_cast<uint32_t*>(&x);
}
template <> __device__ __forceinline__ uint32_t pack<f16>(float lo, float hi) {
    __half2 x = __floats2half2_rn(lo, hi);
    return *reinterpret_cast<uint32_t*>(&x);
}
// Two fp8 e4m3 numbers, in the low half of `x`, as f16 (exact).
__device__ __forceinline__ uint32_t e4m3_to_f16(uint32_t x) {
    __half2_raw h = __nv_cvt_fp8x2_to_halfraw2((__nv_fp8x2_storage_t)x, __NV_E4M3);
    return (uint32_t)h.x | (uint32_t)h.y << 16;
}
// Two elements of q in the type that the products are taken in: f16 for an fp8 cache, whose numbers f16 holds exactly.
template <typename T, typename C> __device__ __forceinline__ uint32_t convert_pair(uint32_t x) {
    if constexpr (sizeof(T) == sizeof(C) && !std::is_same<T, C>::value) {
        Vec<T, 2> v = *reinterpret_cast<Vec<T, 2>*>(&x);
        return pack<C>(to_f32(v.at[0]), to_f32(v.at[1]));
    }
    return x;
}

__device__ __forceinline__ float exp2_fast(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
__device__ __forceinline__ float tanh_fast(float x) {
    // 1 - 2 / (e^2x + 1); exact enough at both ends, unlike tanh.approx.
    return 1.f - __fdividef(2.f, exp2_fast(x * (2.f * LOG2E)) + 1.f);
}

__device__ __forceinline__ void mbarrier_init(uint32_t bar, uint32_t count) {
    asm volatile("mbarrier.init.shared.b64 [%0], %1;" :: "r"(bar), "r"(count) : "memory");
}
__device__ __forceinline__ void mbarrier_arrive(uint32_t bar) {
    asm volatile("{ .reg .b64 t; mbarrier.arrive.shared.b64 t, [%0]; }" :: "r"(bar) : "memory");
}
__device__ __forceinline__ void mbarrier_wait(uint32_t bar, uint32_t parity) {
#if __CUDA_ARCH__ >= 900
    asm volatile("{ .reg .pred p;\n"
                 "again: mbarrier.try_wait.parity.shared.b64 p, [%0], %1;\n"
                 "@!p bra again; }" :: "r"(bar), "r"(parity) : "memory");
#else
    asm volatile("{ .reg .pred p;\n"
                 "again: mbarrier.test_wait.parity.shared.b64 p, [%0], %1;\n"
                 "@!p bra again; }" :: "r"(bar), "r"(parity) : "memory");
#endif
}
// A barrier among `threads` threads of the CTA; 0 is `__syncthreads`'s.
__device__ __forceinline__ void named_barrier(uint32_t id, uint32_t threads) {
    asm volatile("bar.sync %0, %1;" :: "r"(id), "r"(threads) : "memory");
}
__device__ __forceinline__ void cp_async_16(uint32_t dst, const void* src) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" :: "r"(dst), "l"(src) : "memory");
}

#if __CUDA_ARCH__ >= 900
__device__ __forceinline__ void mbarrier_expect(uint32_t bar, uint32_t bytes) {
    asm volatile("{ .reg .b64 t; mbarrier.arrive.expect_tx.shared.b64 t, [%0], %1; }" :: "r"(bar), "r"(bytes) : "memory");
}
__device__ __forceinline__ void tma_load_3d(uint32_t dst, const TensorMap* map, uint32_t bar, int x, int y, int z) {
    asm volatile("cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5}], [%2];"
                 :: "r"(dst), "l"(map), "r"(bar), "r"(x), "r"(y), "r"(z) : "memory");
}
__device__ __forceinline__ void prefetch_map(const TensorMap* map) {
    asm volatile("prefetch.tensormap [%0];" :: "l"(map) : "memory");
}
// Orders ordinary accesses to shared memory before later ones of the copy engine or the tensor cores.
__device__ __forceinline__ void fence_async() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
#endif
