// Moving whole blocks and rows, keeping the block tables, and making weights.
//
// The storage of a KV group is one allocation of planes: keys and values of every layer, `n_planes = 2 * n_layers`, each
// `plane_bytes` after the one before, each holding all blocks of `block_bytes` one after another. Sizes are multiples of 16.
#include "../cuda/quantize.cuh"

// 16-byte pieces `threadIdx.x + blockDim.x * (0, 1, 2, ...)` of the part of a run that falls to block `part` of `n_parts`.
__device__ __forceinline__ void copy_run(uint4* dst, const uint4* src, uint32_t n, uint32_t part, uint32_t n_parts) {
    uint32_t i = part * blockDim.x + threadIdx.x;
    const uint32_t step = n_parts * blockDim.x;
    for (; i + 3 * step < n; i += 4 * step) {
        uint4 x[4];
#pragma unroll
        for (int j = 0; j < 4; j++) x[j] = src[i + j * step];
#pragma unroll
        for (int j = 0; j < 4; j++) dst[i + j * step] = x[j];
    }
    for (; i < n; i += step) dst[i] = src[i];
}

// Copies blocks within a group: pairs u32[n_pairs][2] of (src, dst), which must not depend on each other: where a block is
// the source of one and the destination of another, use two launches.
// grid (n_planes, n_pairs, parts), block 256; parts 4 at blocks of 128 KB.
extern "C" __global__ void copy_blocks(uint8_t* storage, size_t plane_bytes, size_t block_bytes, const uint2* pairs) {
    pdl_wait();
    pdl_trigger();
    const uint2 pair = pairs[blockIdx.y];
    uint8_t* plane = storage + blockIdx.x * plane_bytes;
    copy_run(reinterpret_cast<uint4*>(plane + pair.y * block_bytes),
             reinterpret_cast<const uint4*>(plane + pair.x * block_bytes), block_bytes / 16, blockIdx.z, gridDim.z);
}

// Between blocks u32[n_blocks] of a group and a buffer [n_blocks][n_planes][block_bytes] on the device (or mapped host
// memory). grid (n_planes, n_blocks, parts), block 256.
extern "C" __global__ void export_blocks(const uint8_t* storage, size_t plane_bytes, size_t block_bytes,
                                         const uint32_t* blocks, uint8_t* buffer) {
    pdl_wait();
    pdl_trigger();
    const uint8_t* block = storage + blockIdx.x * plane_bytes + blocks[blockIdx.y] * block_bytes;
    uint8_t* at = buffer + (size_t(blockIdx.y) * gridDim.x + blockIdx.x) * block_bytes;
    copy_run(reinterpret_cast<uint4*>(at), reinterpret_cast<const uint4*>(block), block_bytes / 16, blockIdx.z, gridDim.z);
}
extern "C" __global__ void import_blocks(uint8_t* storage, size_t plane_bytes, size_t block_bytes,
                                         const uint32_t* blocks, const uint8_t* buffer) {
    pdl_wait();
    pdl_trigger();
    uint8_t* block = storage + blockIdx.x * plane_bytes + blocks[blockIdx.y] * block_bytes;
    const uint8_t* at = buffer + (size_t(blockIdx.y) * gridDim.x + blockIdx.x) * block_bytes;
    copy_run(reinterpret_cast<uint4*>(block), reinterpret_cast<const uint4*>(at), block_bytes / 16, blockIdx.z, gridDim.z);
}

// tables[slot][index] = block for deltas u32[n][3] of (slot, index, block), in no order: an entry may occur once.
// grid ceil(n / 256), block 256. Launch what follows without overlap: kernels read the tables before their wait.
extern "C" __global__ void update_tables(uint32_t* tables, uint32_t max_blocks, const uint32_t* deltas, uint32_t n) {
    pdl_wait();
    const uint32_t i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) tables[size_t(deltas[3 * i]) * max_blocks + deltas[3 * i + 1]] = deltas[3 * i + 2];
}

// out[i] = x[rows[i]], rows of row_bytes (a multiple of 16); indices beyond the last row read that one.
// grid (n, y), block min(row_bytes / 16, 256).
extern "C" __global__ void gather_rows(const uint8_t* x, const uint32_t* rows, uint8_t* out, uint32_t row_bytes,
                                       uint32_t n_rows) {
    pdl_wait();
    pdl_trigger();
    const size_t row = min(rows[blockIdx.x], n_rows - 1);
    copy_run(reinterpret_cast<uint4*>(out + size_t(blockIdx.x) * row_bytes),
             reinterpret_cast<const uint4*>(x + row * row_bytes), row_bytes / 16, blockIdx.y, gridDim.y);
}

// The finalizer of MurmurHash3 over (seed, index).
__device__ __forceinline__ uint32_t hash(uint32_t seed, size_t index) {
    uint32_t x = uint32_t(index) ^ seed + uint32_t(index >> 32) * 0x9E3779B9u;
    x = (x ^ x >> 16) * 0x85EBCA6Bu;
    x = (x ^ x >> 13) * 0xC2B2AE35u;
    return x ^ x >> 16;
}

template <typename T, int N> __device__ __forceinline__ void store(T* to, const float (&x)[N]) {
    Vec<T, N> v;
#pragma unroll
    for (int j = 0; j < N; j++) v.at[j] = from_f32<T>(x[j]);
    store_vec(to, v);
}
template <> __device__ __forceinline__ void store<fp8, 16>(fp8* to, const float (&x)[16]) {
    *reinterpret_cast<uint4*>(to) = make_uint4(to_fp8x4(x[0], x[1], x[2], x[3]), to_fp8x4(x[4], x[5], x[6], x[7]),
                                               to_fp8x4(x[8], x[9], x[10], x[11]), to_fp8x4(x[12], x[13], x[14], x[15]));
}

// Dummy weights: element i is uniform in [-range, range), from 16 bits of the hash of (seed, i / 2). n a multiple of 16, `out`
// aligned to 16 bytes. grid: any, best 8 blocks a multiprocessor; block 256.
template <typename T> __device__ void fill_uniform(T* out, size_t n, uint32_t seed, float range) {
    constexpr int N = 16 / sizeof(T);
    const size_t step = size_t(gridDim.x) * blockDim.x * N;
    const float unit = range / 32768.0f;
    for (size_t i = (size_t(blockIdx.x) * blockDim.x + threadIdx.x) * N; i < n; i += step) {
        float x[N];
#pragma unroll
        for (int j = 0; j < N; j += 2) {
            const uint32_t bits = hash(seed, (i + j) / 2);
            // 2^23 + b, as a float's bits: cheaper than a conversion of b.
            x[j] = (__uint_as_float(0x4B000000u | (bits & 0xFFFFu)) - 8421376.0f) * unit;
            x[j + 1] = (__uint_as_float(0x4B000000u | bits >> 16) - 8421376.0f) * unit;
        }
        store<T, N>(out + i, x);
    }
}

#define FILL(NAME, T)                                                                                                \
    extern "C" __global__ void NAME(T* out, size_t n, uint32_t seed, float range) { fill_uniform<T>(out, n, seed, range); }
FILL(fill_uniform_bf16, bf16)
FILL(fill_uniform_f16, f16)
FILL(fill_uniform_f32, float)
FILL(fill_uniform_fp8, fp8)

// Element i of `out` = element i of `in`. Both aligned to 16 bytes. grid: any; block 256.
template <typename From, typename To> __device__ void convert(const From* in, To* out, size_t n) {
    const size_t step = size_t(gridDim.x) * blockDim.x * 8;
    for (size_t i = (size_t(blockIdx.x) * blockDim.x + threadIdx.x) * 8; i < n; i += step) {
        if (i + 8 > n) {
            for (size_t j = i; j < n; j++) out[j] = from_f32<To>(to_f32(in[j]));
            return;
        }
        constexpr int N = 16 / sizeof(From);
        Vec<To, 8> y;
#pragma unroll
        for (int part = 0; part < 8; part += N) {
            const Vec<From, N> x = load_vec<From, N>(in + i + part);
#pragma unroll
            for (int j = 0; j < N; j++) y.at[part + j] = from_f32<To>(to_f32(x.at[j]));
        }
        store_vec(out + i, y);
    }
}

#define CONVERT(NAME, FROM, TO)                                                                                      \
    extern "C" __global__ void NAME(const FROM* in, TO* out, size_t n) { convert<FROM, TO>(in, out, n); }
CONVERT(convert_f32_bf16, float, bf16)
CONVERT(convert_f32_f16, float, f16)
CONVERT(convert_f16_bf16, f16, bf16)
CONVERT(convert_bf16_f16, bf16, f16)
