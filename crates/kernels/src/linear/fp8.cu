// FP8 (e4m3): activations to fp8 with a scale per token or per 128 columns, and small_m for fp8 weights.
#include "small_m.cuh"

static const float E4M3_MAX = 448;

template <typename T> __device__ __forceinline__ float largest(const Vec<T, 8>& v) {
    float max = 0;
#pragma unroll
    for (int i = 0; i < 8; i++) max = fmaxf(max, fabsf(to_f32(v.at[i])));
    return max;
}
template <typename T> __device__ __forceinline__ void store_quantized(e4m3* at, const Vec<T, 8>& v, float inverse) {
    uint32_t out[4];
#pragma unroll
    for (int i = 0; i < 4; i++)
        out[i] = __nv_cvt_float2_to_fp8x2(make_float2(to_f32(v.at[2 * i]) * inverse, to_f32(v.at[2 * i + 1]) * inverse),
                                          __NV_SATFINITE, __NV_E4M3);
    *(uint2*)at = make_uint2(out[0] | out[1] << 16, out[2] | out[3] << 16);
}
// A scale of 0 would make 0 / 0 of a row of zeros.
__device__ __forceinline__ float scale_of(float max) { return fmaxf(max / E4M3_MAX, 1e-12f); }

// out[m][k] = x[m][k] / scale[m], scale[token] = (largest magnitude) / 448. Grid: m. Block: 256. k % 8 == 0.
template <typename T> __device__ void quantize_token(const T* x, e4m3* out, float* scale, int k) {
    __shared__ float maxima[8];
    pdl_trigger();
    pdl_wait();
    const T* row = x + (int64_t)blockIdx.x * k;
    float max = 0;
    for (int i = threadIdx.x * 8; i < k; i += 2048) max = fmaxf(max, largest(load_vec<T, 8>(row + i)));
    max = warp_max(max);
    if (threadIdx.x % 32 == 0) maxima[threadIdx.x / 32] = max;
    __syncthreads();
#pragma unroll
    for (int i = 0; i < 8; i++) max = fmaxf(max, maxima[i]);
    float s = scale_of(max);
    if (threadIdx.x == 0) scale[blockIdx.x] = s;
    for (int i = threadIdx.x * 8; i < k; i += 2048) store_quantized(out + (int64_t)blockIdx.x * k + i, load_vec<T, 8>(row + i), 1 / s);
}

// As quantize_token, for each 128 columns: scale[k / 128][stride], the token innermost (as cuBLASLt's VEC128_32F wants it, with
// stride = m). Grid: m. Block: 256. k % 128 == 0.
template <typename T> __device__ void quantize_group(const T* x, e4m3* out, float* scale, int k, int stride) {
    pdl_trigger();
    pdl_wait();
    for (int i = threadIdx.x * 8; i < k; i += 2048) { // 16 lanes hold a group; a group's lanes leave the loop together
        Vec<T, 8> v = load_vec<T, 8>(x + (int64_t)blockIdx.x * k + i);
        float max = largest(v);
        uint32_t lanes = 0xffffu << (threadIdx.x & 16);
#pragma unroll
        for (int d = 8; d > 0; d /= 2) max = fmaxf(max, __shfl_xor_sync(lanes, max, d));
        float s = scale_of(max);
        if (threadIdx.x % 16 == 0) scale[(int64_t)(i / 128) * stride + blockIdx.x] = s;
        store_quantized(out + (int64_t)blockIdx.x * k + i, v, 1 / s);
    }
}

#define QUANTIZE(T)                                                                                             \
    extern "C" __global__ void __launch_bounds__(256) quantize_token_##T(const T* x, e4m3* out, float* scale, int k) { \
        quantize_token(x, out, scale, k);                                                                       \
    }                                                                                                           \
    extern "C" __global__ void __launch_bounds__(256)                                                           \
        quantize_group_##T(const T* x, e4m3* out, float* scale, int k, int stride) {                            \
        quantize_group(x, out, scale, k, stride);                                                               \
    }
QUANTIZE(bf16)
QUANTIZE(f16)

// small_m_fp8[_blocks][_gated]_T_tTOKENS_rRT: e4m3 weights with a scale per row, or per 128 rows and 128 columns.
#define FP8(T, tokens, rt) SMALL_M(small_m_fp8_##T##_t##tokens##_r##rt, e4m3, T, T, tokens, rt, 0)
#define FP8_GATED(T, tokens, rt) SMALL_M(small_m_fp8_gated_##T##_t##tokens##_r##rt, e4m3, T, T, tokens, rt, GATED)
#define FP8_ALL(T, tokens)                                                                        \
    FP8(T, tokens, 2)                                                                             \
    FP8(T, tokens, 4)                                                                             \
    FP8(T, tokens, 8)                                                                             \
    FP8_GATED(T, tokens, 4)                                                                       \
    FP8_GATED(T, tokens, 8)                                                                       \
    SMALL_M(small_m_fp8_blocks_##T##_t##tokens##_r4, e4m3, T, T, tokens, 4, BLOCKS)               \
    SMALL_M(small_m_fp8_blocks_gated_##T##_t##tokens##_r4, e4m3, T, T, tokens, 4, BLOCKS | GATED)
FP8_ALL(bf16, 8)
FP8_ALL(bf16, 16)
FP8_ALL(f16, 8)
FP8_ALL(f16, 16)
