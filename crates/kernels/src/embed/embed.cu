// Looking up the input embeddings of a step's tokens.
#include "../cuda/common.cuh"

// out[t] = scale * table[id(t)], where id(t) is token_ids[t] or, with the bit DRAWN, last_token[slot in the other bits].
// The ids found are written to `resolved` [n_tokens] (may be `token_ids` itself). Ids beyond the table read its last row.
//
// token_ids u32[n_tokens], last_token u32[n_slots], table [n_vocab][cols], out [n_tokens][cols]; cols a multiple of 8.
// grid (n_tokens), block min(cols / 8, 512) threads.
template <typename T, typename W>
__device__ void embed(const uint32_t* token_ids, const uint32_t* last_token, uint32_t* resolved, const W* table, T* out,
                      float scale, uint32_t n_vocab, uint32_t cols) {
    pdl_wait();
    pdl_trigger();
    const uint32_t token = blockIdx.x;
    const uint32_t given = token_ids[token];
    const uint32_t id = given & DRAWN ? last_token[given & ~DRAWN] : given;
    const W* row = table + size_t(min(id, n_vocab - 1)) * cols;
    for (uint32_t i = threadIdx.x * 8; i < cols; i += blockDim.x * 8) {
        float x[8];
        constexpr int N = 16 / sizeof(W);
#pragma unroll
        for (int part = 0; part < 8 / N; part++) {
            const Vec<W, N> v = load_vec<W, N>(row + i + part * N);
#pragma unroll
            for (int j = 0; j < N; j++) x[part * N + j] = to_f32(v.at[j]);
        }
        Vec<T, 8> y;
#pragma unroll
        for (int j = 0; j < 8; j++) y.at[j] = from_f32<T>(x[j] * scale);
        store_vec(out + size_t(token) * cols + i, y);
    }
    // Every thread has read the id: `resolved` may be the array it came from.
    __syncthreads();
    if (threadIdx.x == 0) resolved[token] = id;
}

#define EMBED(NAME, T, W)                                                                                             \
    extern "C" __global__ void NAME(const uint32_t* token_ids, const uint32_t* last_token, uint32_t* resolved,         \
                                    const W* table, T* out, float scale, uint32_t n_vocab, uint32_t cols) {            \
        embed<T, W>(token_ids, last_token, resolved, table, out, scale, n_vocab, cols);                               \
    }
EMBED(embed_bf16, bf16, bf16)
EMBED(embed_f16, f16, f16)
EMBED(embed_bf16_from_f32, bf16, float)
EMBED(embed_f16_from_f32, f16, float)
