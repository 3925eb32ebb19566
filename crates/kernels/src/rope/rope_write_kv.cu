// Norm and rotation of q and k in place in the merged rows, and writing k and v to the paged cache of one layer.
#include "../cuda/quantize.cuh"

// Arguments of all variants. Fields named as in `Backend::rope_write_kv`.
struct RopeWriteKv {
    void* qkv;               // [n_tokens][(heads + 2 * kv_heads) * dim] of T
    const float2* cos_sin;   // [max_positions][rotary_dim / 2] of (cos, sin); null: no rotation
    const float* q_norm;     // f32[dim]; `..._norm_...` only
    const float* k_norm;     // f32[dim]
    const int32_t* positions;    // [n_tokens]; negative: padding, the cache is left alone
    const int32_t* token_slot;   // [n_tokens]
    const uint32_t* tables;  // [n_slots][max_blocks]: block of every `block_len` positions
    void* k_cache;           // [n_blocks][kv_heads][block_len][dim] of T or fp8
    void* v_cache;           // likewise
    float eps;
    float k_factor;          // 1 / k_scale; fp8 only
    float v_factor;          // 1 / v_scale; fp8 only
    uint32_t heads;
    uint32_t kv_heads;
    uint32_t dim;            // 8 * LANES at most, a multiple of 8
    uint32_t rotary_dim;     // a multiple of 8, at most dim
    uint32_t interleaved;    // pairs (2i, 2i + 1) instead of (i, i + rotary_dim / 2)
    uint32_t block_len;
    uint32_t max_blocks;
};

static const uint32_t NO_BLOCK = ~0u;

template <typename T> __device__ __forceinline__ float saturate(float x) { return x; }
// An infinity in the cache would make NaN of a masked token's zero weight; NaN stays, so that a broken model is noticed.
template <> __device__ __forceinline__ float saturate<f16>(float x) {
    return x != x ? x : fminf(fmaxf(x, -65504.0f), 65504.0f);
}

template <typename T> __device__ __forceinline__ void store4(T* to, const float* x, float) {
    Vec<T, 4> v;
#pragma unroll
    for (int j = 0; j < 4; j++) v.at[j] = from_f32<T>(saturate<T>(x[j]));
    store_vec(to, v);
}
template <> __device__ __forceinline__ void store4<fp8>(fp8* to, const float* x, float factor) {
    *reinterpret_cast<uint32_t*>(to) = to_fp8x4(x[0] * factor, x[1] * factor, x[2] * factor, x[3] * factor);
}

// A head is taken by LANES threads of 8 elements each: pairs 4 * lane to 4 * lane + 3 where the head rotates, elements
// 8 * lane to 8 * lane + 7 beyond. A thread keeps N heads in flight, all with the same cosines and sines.
//
// grid (n_tokens, y), block 128 (any multiple of 32 up to 512): heads are dealt to y * block / LANES groups of threads; fastest:
// y = ceil((heads + 2 * kv_heads) * LANES / (block * N)), one round for all heads.
// Positions, slots and tables are read before the wait for earlier kernels of the stream: what writes them must be complete
// before the chain of overlapping kernels begins.
template <typename T, typename C, bool NORM, int LANES, int N> __device__ void rope_write_kv(const RopeWriteKv& a) {
    const uint32_t token = blockIdx.x, lane = threadIdx.x % LANES;
    const uint32_t n_groups = gridDim.y * (blockDim.x / LANES);
    const uint32_t group = blockIdx.y * (blockDim.x / LANES) + threadIdx.x / LANES;
    const uint32_t n_qk = a.heads + a.kv_heads, n_heads = n_qk + a.kv_heads;
    const bool in = lane * 8 < a.dim;
    const bool rotates = a.cos_sin && lane * 8 < a.rotary_dim;
    // The two runs of four elements.
    const bool split = rotates && !a.interleaved;
    const uint32_t first = split ? lane * 4 : lane * 8;
    const uint32_t second = split ? a.rotary_dim / 2 + lane * 4 : lane * 8 + 4;

    const int32_t position = a.positions[token];
    float cos[4], sin[4];
    if (rotates) {
        const float2* table = a.cos_sin + size_t(max(position, 0)) * (a.rotary_dim / 2) + lane * 4;
        const float4 x = reinterpret_cast<const float4*>(table)[0], y = reinterpret_cast<const float4*>(table)[1];
        cos[0] = x.x, sin[0] = x.y, cos[1] = x.z, sin[1] = x.w;
        cos[2] = y.x, sin[2] = y.y, cos[3] = y.z, sin[3] = y.w;
    }
    uint32_t block = NO_BLOCK;
    if (position >= 0) block = a.tables[size_t(a.token_slot[token]) * a.max_blocks + position / a.block_len];
    const size_t at = (size_t(block) * a.kv_heads * a.block_len + position % a.block_len) * a.dim;
    T* row = reinterpret_cast<T*>(a.qkv) + size_t(token) * n_heads * a.dim;

    pdl_wait();
    pdl_trigger();
    // The number of rounds is the same in all threads, as the norm needs whole warps.
    for (uint32_t base = 0; base < n_heads; base += n_groups * N) {
        Vec<T, 4> loaded[N][2];
#pragma unroll
        for (int n = 0; n < N; n++) {
            const uint32_t head = base + n * n_groups + group;
            if (in && head < n_heads) {
                loaded[n][0] = load_vec<T, 4>(row + head * a.dim + first);
                loaded[n][1] = load_vec<T, 4>(row + head * a.dim + second);
            }
        }
#pragma unroll
        for (int n = 0; n < N; n++) {
            const uint32_t head = base + n * n_groups + group;
            const bool has = in && head < n_heads;
            float x[8];
#pragma unroll
            for (int j = 0; j < 8; j++) x[j] = has ? to_f32(loaded[n][j / 4].at[j % 4]) : 0.0f;
            if (NORM) {
                const float* w = head < a.heads ? a.q_norm : a.k_norm;
                Vec<float, 4> weight[2];
                if (in) weight[0] = load_vec<float, 4>(w + first), weight[1] = load_vec<float, 4>(w + second);
                float sum = 0.0f;
#pragma unroll
                for (int j = 0; j < 8; j++) sum += x[j] * x[j];
#pragma unroll
                for (int d = LANES / 2; d > 0; d /= 2) sum += __shfl_xor_sync(~0u, sum, d);
                const float scale = rsqrtf(sum / float(a.dim) + a.eps);
                if (has && head < n_qk) {
#pragma unroll
                    for (int j = 0; j < 8; j++) x[j] *= scale * weight[j / 4].at[j % 4];
                }
            }
            if (!has) continue;
            if (head < n_qk) {
                if (rotates) {
#pragma unroll
                    for (int p = 0; p < 4; p++) {
                        // Both pairings are compile-time indices, so that x stays in registers.
                        const float c = cos[p], s = sin[p];
                        if (a.interleaved) {
                            const float u = x[2 * p], v = x[2 * p + 1];
                            x[2 * p] = u * c - v * s, x[2 * p + 1] = v * c + u * s;
                        } else {
                            const float u = x[p], v = x[4 + p];
                            x[p] = u * c - v * s, x[4 + p] = v * c + u * s;
                        }
                    }
                }
                Vec<T, 4> u, v;
#pragma unroll
                for (int j = 0; j < 4; j++) u.at[j] = from_f32<T>(x[j]), v.at[j] = from_f32<T>(x[4 + j]);
                store_vec(row + head * a.dim + first, u);
                store_vec(row + head * a.dim + second, v);
            }
            if (head >= a.heads && block != NO_BLOCK) {
                const bool key = head < n_qk;
                const uint32_t kv_head = head - (key ? a.heads : n_qk);
                C* to = reinterpret_cast<C*>(key ? a.k_cache : a.v_cache) + at + size_t(kv_head) * a.block_len * a.dim;
                store4<C>(to + first, x, key ? a.k_factor : a.v_factor);
                store4<C>(to + second, x + 4, key ? a.k_factor : a.v_factor);
            }
        }
    }
}

// dim <= 64: ..._64, <= 128: ..._128, <= 256: ..._256; with the norm of q and k ..._norm_64 and so on.
#define ROPE_DIM(NAME, T, C, NORM, DIM)                                                                              \
    extern "C" __global__ void __launch_bounds__(512) NAME##_##DIM(const RopeWriteKv a) {                             \
        rope_write_kv<T, C, NORM, DIM / 8, 2>(a);                                                                \
    }
#define ROPE(NAME, T, C, NORM) ROPE_DIM(NAME, T, C, NORM, 64) ROPE_DIM(NAME, T, C, NORM, 128) ROPE_DIM(NAME, T, C, NORM, 256)
#define ROPE_WRITE_KV(NAME, T, C) ROPE(NAME, T, C, false) ROPE(NAME##_norm, T, C, true)
ROPE_WRITE_KV(rope_write_kv_bf16, bf16, bf16)
ROPE_WRITE_KV(rope_write_kv_f16, f16, f16)
ROPE_WRITE_KV(rope_write_kv_bf16_fp8, bf16, fp8)
ROPE_WRITE_KV(rope_write_kv_f16_fp8, f16, fp8)
