// The gated activation of an MLP and, where the next matrix product wants it, fp8 quantization of its result.
#include "../cuda/quantize.cuh"

// The values of `Activation`.
enum Act { SILU, GELU_TANH, GELU };

// x * logistic(y); 0 at large negative y.
__device__ __forceinline__ float logistic_product(float x, float y) { return __fdividef(x, 1.0f + __expf(-y)); }

template <Act ACT> __device__ __forceinline__ float apply(float x) {
    if (ACT == SILU) return logistic_product(x, x);
    // (1 + tanh u) / 2 = logistic(2u), which has no cancellation; u = sqrt(2/pi) (x + 0.044715 x^3).
    if (ACT == GELU_TANH) return logistic_product(x, x * (1.0f + 0.044715f * x * x) * (2.0f * 0.7978845608f));
    return 0.5f * x * erfcf(x * -0.70710678118f);
}

// out[row][i] = act(gate_up[row][i]) * gate_up[row][cols + i]: eight columns.
template <typename T, Act ACT>
__device__ __forceinline__ void products(float (&y)[8], const Vec<T, 8>& gate, const Vec<T, 8>& up) {
#pragma unroll
    for (int j = 0; j < 8; j++) y[j] = apply<ACT>(to_f32(gate.at[j])) * to_f32(up.at[j]);
}

// gate_up [rows][2 * cols], out [rows][cols], cols a multiple of 8. FP8_GROUP: cols a multiple of 128,
// scales f32[rows][cols / 128].
// grid (rows, ceil(cols / (8 * block))), block a multiple of 32 threads.
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

// One block a row; the products wait in registers for the row's largest. cols at most 32 * block.
// scales f32[rows]. grid (rows), block min(1024, ceil(cols / 8)) threads rounded up to 32.
template <typename T, Act ACT> __device__ void gated_fp8_token(const T* gate_up, fp8* out, float* scales, uint32_t cols) {
    __shared__ float partial[32];
    constexpr int V = 4;
    pdl_wait();
    pdl_trigger();
    const size_t row = blockIdx.x;
    float y[V][8], amax = 0.0f;
#pragma unroll
    for (int v = 0; v < V; v++) {
        const uint32_t i = (v * blockDim.x + threadIdx.x) * 8;
        if (i >= cols) break;
        products<T, ACT>(y[v], load_vec<T, 8>(gate_up + row * 2 * cols + i),
                         load_vec<T, 8>(gate_up + row * 2 * cols + cols + i));
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
        gated_fp8_token<T, ACT>(gate_up, out, scales, cols);                                                          \
    }
#define GATED(T)                                                                                                     \
    GATED_ACT(silu_##T, T, SILU) GATED_ACT(gelu_tanh_##T, T, GELU_TANH) GATED_ACT(gelu_##T, T, GELU)
GATED(bf16)
GATED(f16)
