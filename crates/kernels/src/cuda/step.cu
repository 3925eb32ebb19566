// Brings a step's metadata to where kernels (and recorded graphs) expect it.

#include "common.cuh"

// A run of words of the packed metadata, and where it goes.
struct Section { uint32_t from, to, n; };
struct Sections { Section at[12]; };

// meta[to..to+n] = packed[from..from+n] for each section; `packed` is pinned host memory. Then n_deltas pairs
// (entry, block) at packed[deltas_from..] set tables[entry] = block.
// Grid: any; block: 256.
extern "C" __global__ void unpack_step(const uint32_t* packed, uint32_t* meta, Sections sections, uint32_t n_sections,
                                       uint32_t* tables, uint32_t deltas_from, uint32_t n_deltas) {
    pdl_trigger();
    pdl_wait();
    uint32_t first = blockIdx.x * blockDim.x + threadIdx.x, stride = gridDim.x * blockDim.x;
    for (uint32_t s = 0; s < n_sections; s++) {
        Section section = sections.at[s];
        for (uint32_t i = first; i < section.n; i += stride) meta[section.to + i] = packed[section.from + i];
    }
    for (uint32_t i = first; i < n_deltas; i += stride) {
        uint32_t entry = packed[deltas_from + 2 * i];
        tables[entry] = packed[deltas_from + 2 * i + 1];
    }
}
