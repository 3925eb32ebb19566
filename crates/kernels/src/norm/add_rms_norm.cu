// RMS normalization with the residual addition before it and, where the next matrix product wants it, fp8 quantization.
#include "../cuda/quantize.cuh"

// The sum (or, with MAX, the largest) of a value over the block, the same in all threads. `partial` must be another one of
// two arrays at each call: then one barrier a call is enough.
template <bool MAX> __device__ __forceinline__ float block_reduce(float x, float* partial) {
    const int lane = threadIdx.x % 32, n_warps = (blockDim.x + 31) / 32;
    x = MAX ? warp_max(x) : warp_sum(x);
    if (lane == 0) partial[threadIdx.x / 32] = x;
    __syncthreads();
    x = lane < n_warps ? partial[lane] : 0.0f;
    return MAX ? warp_max(x) : warp_sum(x);
}

// residual[row] += delta[row] (where delta is not null), rounded to T; out[row] = residual / sqrt(mean(residual^2) + eps) *
// weight. Sums are in f32, and their order depends on the block size alone: choose it by `cols`, never by `rows`.
//
// delta, residual, out [rows][cols]; weight f32[cols]; cols a multiple of 8 (of 128 with groups), at most V * 8192.
// scales f32[rows] (FP8_TOKEN) or f32[rows][cols / 128] (FP8_GROUP), unused otherwise.
// grid: `rows` (fewer are allowed: a block then takes every gridDim.x-th row); block: ceil(cols / 8 / V) threads rounded up
// to 32, at most 1024.
// `weight` is read before the wait for earlier kernels.
template <typename T, typename O, Output OUT, int V>
__device__ void add_rms_norm(const T* delta, T* residual, const float* weight, O* out, float* scales, float eps,
                             uint32_t rows, uint32_t cols) {
    __shared__ float partial[2][32];
    int turn = 0;
    const uint32_t n_vec = cols / 8;
    float w[V][8];
#pragma unroll
    for (int v = 0; v < V; v++) {
        const uint32_t i = threadIdx.x + v * blockDim.x;
        if (i < n_vec) {
            *reinterpret_cast<float4*>(&w[v][0]) = *reinterpret_cast<const float4*>(weight + i * 8);
            *reinterpret_cast<float4*>(&w[v][4]) = *reinterpret_cast<const float4*>(weight + i * 8 + 4);
        }
    }
    pdl_wait();
    pdl_trigger();
    for (uint32_t row = blockIdx.x; row < rows; row += gridDim.x) {
        Vec<T, 8> x[V], d[V];
        float sum = 0.0f;
#pragma unroll
        for (int v = 0; v < V; v++) {
            const uint32_t i = threadIdx.x + v * blockDim.x;
            if (i < n_vec) {
                x[v] = load_vec<T, 8>(residual + size_t(row) * cols + i * 8);
                if (delta) d[v] = load_vec<T, 8>(delta + size_t(row) * cols + i * 8);
            }
        }
#pragma unroll
        for (int v = 0; v < V; v++) {
            const uint32_t i = threadIdx.x + v * blockDim.x;
            if (i >= n_vec) break;
            if (delta) {
#pragma unroll
                for (int j = 0; j < 8; j++) x[v].at[j] = from_f32<T>(to_f32(x[v].at[j]) + to_f32(d[v].at[j]));
                store_vec(residual + size_t(row) * cols + i * 8, x[v]);
            }
#pragma unroll
            for (int j = 0; j < 8; j++) sum += to_f32(x[v].at[j]) * to_f32(x[v].at[j]);
        }
        const float total = block_reduce<false>(sum, partial[turn++ % 2]);
        const float scale = rsqrtf(total / float(cols) + eps);
        float y[V][8], amax = 0.0f;
#pragma unroll
        for (int v = 0; v < V; v++) {
            const uint32_t i = threadIdx.x + v * blockDim.x;
            const bool in = i < n_vec;
#pragma unroll
            for (int j = 0; j < 8; j++) y[v][j] = in ? to_f32(x[v].at[j]) * scale * w[v][j] : 0.0f;
            if (OUT == PLAIN && in) {
                Vec<T, 8> o;
#pragma unroll
                for (int j = 0; j < 8; j++) o.at[j] = from_f32<T>(y[v][j]);
                store_vec(reinterpret_cast<T*>(out) + size_t(row) * cols + i * 8, o);
            }
            if (OUT == FP8_TOKEN) amax = fmaxf(amax, amax8(y[v]));
            if (OUT == FP8_GROUP) {
                const float group = fp8_amax(group_max(amax8(y[v])));
                if (in) {
                    store_fp8x8(reinterpret_cast<fp8*>(out) + size_t(row) * cols + i * 8, y[v], FP8_MAX / group);
                    if (i % 16 == 0) scales[size_t(row) * (cols / 128) + i / 16] = group / FP8_MAX;
                }
            }
        }
        if (OUT == FP8_TOKEN) {
            amax = fp8_amax(block_reduce<true>(amax, partial[turn++ % 2]));
            if (threadIdx.x == 0) scales[row] = amax / FP8_MAX;
#pragma unroll
            for (int v = 0; v < V; v++) {
                const uint32_t i = threadIdx.x + v * blockDim.x;
                if (i < n_vec)
                    store_fp8x8(reinterpret_cast<fp8*>(out) + size_t(row) * cols + i * 8, y[v], FP8_MAX / amax);
            }
        }
    }
}

// `..._wide` for more than 8192 columns.
#define ADD_RMS_NORM_V(NAME, T, V)                                                                                   \
    extern "C" __global__ void __launch_bounds__(1024)                                                               \
        NAME(const T* delta, T* residual, const float* weight, T* out, float eps, uint32_t rows, uint32_t cols) {      \
        add_rms_norm<T, T, PLAIN, V>(delta, residual, weight, out, nullptr, eps, rows, cols);                         \
    }
#define ADD_RMS_NORM_FP8(NAME, T, OUT, V)                                                                            \
    extern "C" __global__ void __launch_bounds__(1024)                                                               \
        NAME(const T* delta, T* residual, const float* weight, fp8* out, float* scales, float eps, uint32_t rows,      \
             uint32_t cols) {                                                                                         \
        add_rms_norm<T, fp8, OUT, V>(delta, residual, weight, out, scales, eps, rows, cols);                          \
    }
#define ADD_RMS_NORM(NAME, T)                                                                                        \
    ADD_RMS_NORM_V(NAME, T, 1)                                                                                       \
    ADD_RMS_NORM_V(NAME##_wide, T, 2)                                                                                \
    ADD_RMS_NORM_FP8(NAME##_fp8_token, T, FP8_TOKEN, 1)                                                              \
    ADD_RMS_NORM_FP8(NAME##_fp8_token_wide, T, FP8_TOKEN, 2)                                                         \
    ADD_RMS_NORM_FP8(NAME##_fp8_group, T, FP8_GROUP, 1)                                                              \
    ADD_RMS_NORM_FP8(NAME##_fp8_group_wide, T, FP8_GROUP, 2)
ADD_RMS_NORM(add_rms_norm_bf16, bf16)
ADD_RMS_NORM(add_rms_norm_f16, f16)
