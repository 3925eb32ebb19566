// Dynamic quantization to fp8 (e4m3): `q = x * 448 / amax`, `x ~ q * scale`, `scale = amax / 448`, where amax is the largest
// magnitude of a token's row or of 128 consecutive columns. amax is at least 1e-10, so that a row of zeros has a finite scale.
// Values are quantized from f32, without a rounding to bf16 or f16 between.
#pragma once

#include "common.cuh"

typedef __nv_fp8_storage_t fp8;

// What a kernel writes: its element type, or fp8 with one scale per token, `scales[row]`, or per 128 columns,
// `scales[row][cols / 128]`.
enum Output { PLAIN, FP8_TOKEN, FP8_GROUP };

static const float FP8_MAX = 448.0f;

__device__ __forceinline__ float fp8_amax(float amax) { return fmaxf(amax, 1e-10f); }

__device__ __forceinline__ uint32_t to_fp8x4(float a, float b, float c, float d) {
    const uint32_t low = __nv_cvt_float2_to_fp8x2(make_float2(a, b), __NV_SATFINITE, __NV_E4M3);
    const uint32_t high = __nv_cvt_float2_to_fp8x2(make_float2(c, d), __NV_SATFINITE, __NV_E4M3);
    return low | high << 16;
}

// Eight consecutive values, 8-byte aligned.
__device__ __forceinline__ void store_fp8x8(fp8* out, const float (&y)[8], float factor) {
    const uint2 q = make_uint2(to_fp8x4(y[0] * factor, y[1] * factor, y[2] * factor, y[3] * factor),
                               to_fp8x4(y[4] * factor, y[5] * factor, y[6] * factor, y[7] * factor));
    *reinterpret_cast<uint2*>(out) = q;
}

__device__ __forceinline__ float amax8(const float (&y)[8]) {
    float m = 0.0f;
#pragma unroll
    for (int i = 0; i < 8; i++) m = fmaxf(m, fabsf(y[i]));
    return m;
}

// The largest of 16 lanes, which hold one group of 128 columns. All lanes of the warp must call it.
__device__ __forceinline__ float group_max(float x) {
#pragma unroll
    for (int d = 8; d > 0; d /= 2) x = fmaxf(x, __shfl_xor_sync(~0u, x, d));
    return x;
}
