// Moving whole blocks and rows.
//
// The storage of a KV group is one allocation of planes: keys and values of every layer, `n_planes = 2 * n_layers`, each
// `plane_bytes` after the one before, each holding all blocks of `block_bytes` one after another. Sizes are multiples of 16.
#include "../cuda/common.cuh"

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
