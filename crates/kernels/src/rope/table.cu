// Rotation tables, made once at load.

#include "common.cuh"

// table[position][i] = (cos, sin) of position * inv_freq[i], times scale. As in Hugging Face's LlamaRotaryEmbedding the
// angle is an f32 product. Grid: max_positions; block: any.
extern "C" __global__ void rope_table(const float* inv_freq, uint32_t n_pairs, float scale, float2* table) {
    uint32_t position = blockIdx.x;
    for (uint32_t i = threadIdx.x; i < n_pairs; i += blockDim.x) {
        double sin, cos;
        sincos((double)__fmul_rn((float)position, inv_freq[i]), &sin, &cos);
        table[(size_t)position * n_pairs + i] = make_float2((float)cos * scale, (float)sin * scale);
    }
}
