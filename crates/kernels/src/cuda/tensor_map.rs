//! Tensor maps: how the copy engine (TMA) sees a matrix.

use cudarc::driver::sys;

use super::Element;
use super::device::fault;
use crate::KernelError;

/// A `CUtensorMap`.
pub type TensorMap = [u64; 16];

/// How much of a matrix a miss brings to the L2 cache.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[allow(missing_docs)]
pub enum Promotion {
    L2_128,
    L2_256,
}

/// A map of three dimensions, the innermost first; `strides` in bytes, of the others. As wide as a tile is, so is it swizzled.
pub fn encode(
    address: u64,
    element: Element,
    sizes: [usize; 3],
    strides: [usize; 2],
    tile: [usize; 3],
    promotion: Promotion,
) -> Result<TensorMap, KernelError> {
    use sys::CUtensorMapDataType_enum as Type;
    use sys::CUtensorMapSwizzle_enum as Swizzle;
    let promotion = match promotion {
        Promotion::L2_128 => sys::CUtensorMapL2promotion_enum::CU_TENSOR_MAP_L2_PROMOTION_L2_128B,
        Promotion::L2_256 => sys::CUtensorMapL2promotion_enum::CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
    };
    let swizzle = match tile[0] * Element::BYTES {
        128 => Swizzle::CU_TENSOR_MAP_SWIZZLE_128B,
        64 => Swizzle::CU_TENSOR_MAP_SWIZZLE_64B,
        32 => Swizzle::CU_TENSOR_MAP_SWIZZLE_32B,
        _ => Swizzle::CU_TENSOR_MAP_SWIZZLE_NONE,
    };
    let kind = match element {
        Element::Bf16 => Type::CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
        Element::F16 => Type::CU_TENSOR_MAP_DATA_TYPE_FLOAT16,
    };
    let (sizes, strides) = (sizes.map(|n| n as u64), strides.map(|n| n as u64));
    let (tile, steps) = (tile.map(|n| n as u32), [1u32; 3]);
    let mut map = std::mem::MaybeUninit::<sys::CUtensorMap>::zeroed();
    // SAFETY: the arrays have three (strides two) entries, as the rank says; the map is written whole.
    let result = unsafe {
        sys::cuTensorMapEncodeTiled(
            map.as_mut_ptr(),
            kind,
            3,
            address as *mut _,
            sizes.as_ptr(),
            strides.as_ptr(),
            tile.as_ptr(),
            steps.as_ptr(),
            sys::CUtensorMapInterleave_enum::CU_TENSOR_MAP_INTERLEAVE_NONE,
            swizzle,
            promotion,
            sys::CUtensorMapFloatOOBfill_enum::CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
        )
    };
    result.result().map_err(fault("describing a tensor"))?;
    // SAFETY: the driver filled it; it is 16 words.
    Ok(unsafe { map.assume_init() }.opaque)
}
