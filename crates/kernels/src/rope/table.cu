// Rotation tables, made once at load.

#include "common.cuh"

// table[position][0..n_pairs] = cos(position * inv_freq[i]) * scale, table[position][n_pairs..] = sin, both f32. As in
// Hugging Face's LlamaRotaryEmbedding the angle is an f32 product. Grid: max_positions; block: any.
extern "C" __global__ void rope_table(const float* inv_freq, uint32_t n_pairs, float scale, float* table) {
    uint32_t position = blockIdx.x;
    for (uint32_t i = threadIdx.x; i < n_pairs; i += blockDim.x) {
        double sin, cos;
        sincos((double)__fmul_rn((float)position, inv_freq[i]), &sin, &cos);
        table[(size_t)position * 2 * n_pairs + i] = (float)cos * scale;
        table[(size_t)position * 2 * n_pairs + n_pairs + i] = (float)sin * scale;
    }
}
