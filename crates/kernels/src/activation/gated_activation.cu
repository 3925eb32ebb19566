// The gated activation of an MLP and, where the next matrix product wants it, fp8 quantization of its result.
#include "../cuda/quantize.cuh"

// The values of `Activation`.
enum Act { SILU, GELU_TANH, GELU };

// x * logistic(y); 0 at large negative y.
__device__ __forceinline__ float logistic_product(float x, float y) { return __fdividef(x, 1.0f + __expf(-y)); }

// (1 + erf(x / sqrt 2)) / 2, accurate also in the tails: the fit of activation.rs, cheaper than erfcf.
__device__ __forceinline__ float normal_cdf(float x) {
    const float z = fabsf(x) * 0.70710678f, t = __fdividef(1.0f, fmaf(z, 0.5f, 1.0f));
    float fit = 0.17087276f;
    fit = fmaf(fit, t, -0.82215226f), fit = fmaf(fit, t, 1.4885159f), fit = fmaf(fit, t, -1.135204f);
    fit = fmaf(fit, t, 0.27886808f), fit = fmaf(fit, t, -0.18628806f), fit = fmaf(fit, t, 0.09678418f);
    fit = fmaf(fit, t, 0.37409195f), fit = fmaf(fit, t, 1.0000237f), fit = fmaf(fit, t, -1.2655122f);
    const float tail = 0.5f * t * __expf(fmaf(-z, z, fit));
    return x > 0.0f ? 1.0f - tail : tail;
}

template <Act ACT> __device__ __forceinline__ float apply(float x) {
    if (ACT == SILU) return logistic_product(x, x);
    // (1 + tanh u) / 2 = logistic(2u), which has no cancellation; u = sqrt(2/pi) (x + 0.044715 x^3).
    if (ACT == GELU_TANH) return logistic_product(x, x * (1.0f + 0.044715f * x * x) * (2.0f * 0.7978845608f));
    return x * normal_cdf(x);
}

// out[row][i] = act(gate_up[row][i]) * gate_up[row][cols + i]: eight columns.
template <typename T, Act ACT>
__device__ __forceinline__ void products(float (&y)[8], const Vec<T, 8>& gate, const Vec<T, 8>& up) {
#pragma unroll
    for (int j = 0; j < 8; j++) y[j] = apply<ACT>(to_f32(gate.at[j])) * to_f32(up.at[j]);
}

// gate_up [rows][2 * cols], out [rows][cols], cols a multiple of 8. FP8_GROUP: cols a multiple of 128,
// scales f32[rows][cols / 128].
// grid (rows, ceil(cols / (8 * block))), block 256 (any multiple of 32).
template <typename T, typename O, Output OUT, Act ACT>
__device__ void gated(const T* gate_up, O* out, float* scales, uint32_t cols) {
    pdl_wait();
    pdl_trigger();
    const uint32_t i = (blockIdx.y * blockDim.x + threadIdx.x) * 8;
    const size_t row = blockIdx.x;
    const bool in = i < cols;
    float y[8];
    if (in) {
        const Vec<T, 8> gate = load_vec<T, 8>(gate_up + row * 2 * cols + i);
        const Vec<T, 8> up = load_vec<T, 8>(gate_up + row * 2 * cols + cols + i);
        products<T, ACT>(y, gate, up);
    } else {
#pragma unroll
        for (int j = 0; j < 8; j++) y[j] = 0.0f;
    }
    if (OUT == FP8_GROUP) {
        const float amax = fp8_amax(group_max(amax8(y)));
        if (!in) return;
        store_fp8x8(reinterpret_cast<fp8*>(out) + row * cols + i, y, FP8_MAX / amax);
        if (threadIdx.x % 16 == 0) scales[row * (cols / 128) + i / 128] = amax / FP8_MAX;
    } else if (in) {
        Vec<T, 8> o;
#pragma unroll
        for (int j = 0; j < 8; j++) o.at[j] = from_f32<T>(y[j]);
        store_vec(reinterpret_cast<T*>(out) + row * cols + i, o);
    }
}

// One block a row; the products wait in registers for the row's largest. V = 2 up to 16384 columns, 4 (`..._wide`) up to 32768.
// scales f32[rows]. grid (rows), block ceil(cols / 8 / V) threads rounded up to 32, at most 1024.
template <typename T, Act ACT, int V>
__device__ void gated_fp8_token(const T* gate_up, fp8* out, float* scales, uint32_t cols) {
    __shared__ float partial[32];
    pdl_wait();
    pdl_trigger();
    const size_t row = blockIdx.x;
    Vec<T, 8> gate[V], up[V];
#pragma unroll
    for (int v = 0; v < V; v++) {
        const uint32_t i = (v * blockDim.x + threadIdx.x) * 8;
        if (i >= cols) break;
        gate[v] = load_vec<T, 8>(gate_up + row * 2 * cols + i);
        up[v] = load_vec<T, 8>(gate_up + row * 2 * cols + cols + i);
    }
    float y[V][8], amax = 0.0f;
#pragma unroll
    for (int v = 0; v < V; v++) {
        if ((v * blockDim.x + threadIdx.x) * 8 >= cols) break;
        products<T, ACT>(y[v], gate[v], up[v]);
        amax = fmaxf(amax, amax8(y[v]));
    }
    amax = warp_max(amax);
    if (threadIdx.x % 32 == 0) partial[threadIdx.x / 32] = amax;
    __syncthreads();
    amax = fp8_amax(warp_max(threadIdx.x % 32 < (blockDim.x + 31) / 32 ? partial[threadIdx.x % 32] : 0.0f));
    if (threadIdx.x == 0) scales[row] = amax / FP8_MAX;
#pragma unroll
    for (int v = 0; v < V; v++) {
        const uint32_t i = (v * blockDim.x + threadIdx.x) * 8;
        if (i >= cols) break;
        store_fp8x8(out + row * cols + i, y[v], FP8_MAX / amax);
    }
}

#define GATED_ACT(NAME, T, ACT)                                                                                      \
    extern "C" __global__ void NAME(const T* gate_up, T* out, uint32_t cols) {                                        \
        gated<T, T, PLAIN, ACT>(gate_up, out, nullptr, cols);                                                         \
    }                                                                                                                 \
    extern "C" __global__ void NAME##_fp8_group(const T* gate_up, fp8* out, float* scales, uint32_t cols) {            \
        gated<T, fp8, FP8_GROUP, ACT>(gate_up, out, scales, cols);                                                    \
    }                                                                                                                 \
    extern "C" __global__ void __launch_bounds__(1024)                                                               \
        NAME##_fp8_token(const T* gate_up, fp8* out, float* scales, uint32_t cols) {                                  \
        gated_fp8_token<T, ACT, 2>(gate_up, out, scales, cols);                                                       \
    }                                                                                                                 \
    extern "C" __global__ void __launch_bounds__(1024)                                                               \
        NAME##_fp8_token_wide(const T* gate_up, fp8* out, float* scales, uint32_t cols) {                             \
        gated_fp8_token<T, ACT, 4>(gate_up, out, scales, cols);                                                       \
    }
#define GATED(T)                                                                                                     \
    GATED_ACT(silu_##T, T, SILU) GATED_ACT(gelu_tanh_##T, T, GELU_TANH) GATED_ACT(gelu_##T, T, GELU)
GATED(bf16)
GATED(f16)
