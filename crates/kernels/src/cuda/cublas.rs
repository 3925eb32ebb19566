//! Matrix products by cuBLASLt, with one plan for each shape.

use std::collections::HashMap;
use std::ffi::c_void;
use std::mem::size_of_val;
use std::ptr::from_ref;

use cudarc::cublaslt::result::{self, CublasError};
use cudarc::cublaslt::sys;

use super::Element;
use super::device::{Device, DeviceBuffer};
use crate::KernelError;

/// What NVIDIA recommends for Hopper (cuBLAS guide, "cublasSetWorkspace").
const WORKSPACE_BYTES: usize = 32 << 20;

/// `out[m][n] = x[m][k] · w[n][k]ᵀ + bias[n]`, all row-major.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Shape {
    /// Tokens.
    pub m: usize,
    /// Output features.
    pub n: usize,
    /// Input features.
    pub k: usize,
    /// Whether the output is f32 and not the inputs' type.
    pub f32_out: bool,
    /// Whether a bias of f32 is added.
    pub bias: bool,
}

/// The library's handle, its workspace, and the plans so far.
pub struct CublasLt {
    handle: sys::cublasLtHandle_t,
    workspace: DeviceBuffer,
    element: Element,
    plans: HashMap<Shape, Plan>,
}

// SAFETY: a library handle with one owner.
unsafe impl Send for CublasLt {}

/// Descriptors and the algorithm of one shape.
struct Plan {
    product: sys::cublasLtMatmulDesc_t,
    w: sys::cublasLtMatrixLayout_t,
    x: sys::cublasLtMatrixLayout_t,
    out: sys::cublasLtMatrixLayout_t,
    algorithm: sys::cublasLtMatmulAlgo_t,
}

impl CublasLt {
    /// Opens the library for products of `element` matrices.
    pub fn new(device: &Device, element: Element) -> Result<Self, KernelError> {
        // SAFETY: only looks for the library.
        if !unsafe { sys::is_culib_present() } {
            let message = "cuBLASLt (libcublasLt.so.13) was not found: install CUDA's runtime libraries, or name their folder in LD_LIBRARY_PATH";
            return Err(KernelError::Unsupported(message.into()));
        }
        let handle = result::create_handle().map_err(fault)?;
        let workspace = device.buffer(WORKSPACE_BYTES, "the workspace of matrix products")?;
        Ok(Self { handle, workspace, element, plans: HashMap::new() })
    }

    /// Enqueues a product. Addresses are of device memory of the shape's sizes.
    pub fn product(&mut self, device: &Device, shape: Shape, x: u64, w: u64, bias: u64, out: u64) {
        if let Err(error) = self.try_product(device, shape, x, w, bias, out) {
            device.note_error(KernelError::Device(format!("matrix product {shape:?}: {error:?}")));
        }
    }

    fn try_product(
        &mut self,
        device: &Device,
        shape: Shape,
        x: u64,
        w: u64,
        bias: u64,
        out: u64,
    ) -> Result<(), CublasError> {
        if !self.plans.contains_key(&shape) {
            let plan = Plan::new(self.handle, shape, self.element)?;
            self.plans.insert(shape, plan);
        }
        let plan = &self.plans[&shape];
        let (alpha, beta) = (1.0f32, 0.0f32);
        let scalar = |x: &f32| from_ref(x).cast::<c_void>();
        if shape.bias {
            use sys::cublasLtMatmulDescAttributes_t::CUBLASLT_MATMUL_DESC_BIAS_POINTER as BIAS;
            // SAFETY: the attribute is a pointer.
            unsafe { result::set_matmul_desc_attribute(plan.product, BIAS, from_ref(&bias).cast(), 8)? };
        }
        // SAFETY: descriptors of matching shapes; the caller's addresses hold them. As cuBLAS counts by columns, the
        // row-major product is out ᵀ = w · xᵀ.
        unsafe {
            result::matmul(
                self.handle,
                plan.product,
                scalar(&alpha),
                scalar(&beta),
                w as *const c_void,
                plan.w,
                x as *const c_void,
                plan.x,
                out as *const c_void,
                plan.out,
                out as *mut c_void,
                plan.out,
                &raw const plan.algorithm,
                self.workspace.address as *mut c_void,
                WORKSPACE_BYTES,
                device.stream().cast(),
            )
        }
    }
}

impl Plan {
    fn new(handle: sys::cublasLtHandle_t, shape: Shape, element: Element) -> Result<Self, CublasError> {
        use sys::cublasComputeType_t::CUBLAS_COMPUTE_32F;
        use sys::cublasLtMatmulDescAttributes_t as A;
        use sys::cudaDataType_t::CUDA_R_32F;
        let Shape { m, n, k, .. } = shape;
        let input = match element {
            Element::Bf16 => sys::cudaDataType_t::CUDA_R_16BF,
            Element::F16 => sys::cudaDataType_t::CUDA_R_16F,
        };
        let output = if shape.f32_out { CUDA_R_32F } else { input };
        let product = result::create_matmul_desc(CUBLAS_COMPUTE_32F, CUDA_R_32F)?;
        let set = |attribute, value: &i32| {
            // SAFETY: each of these attributes is a 32-bit integer.
            unsafe { result::set_matmul_desc_attribute(product, attribute, from_ref(value).cast(), size_of_val(value)) }
        };
        set(A::CUBLASLT_MATMUL_DESC_TRANSA, &1)?;
        if shape.bias {
            set(A::CUBLASLT_MATMUL_DESC_EPILOGUE, &(sys::cublasLtEpilogue_t::CUBLASLT_EPILOGUE_BIAS as i32))?;
            set(A::CUBLASLT_MATMUL_DESC_BIAS_DATA_TYPE, &(CUDA_R_32F as i32))?;
        }
        let layout =
            |kind, rows: usize, cols: usize| result::create_matrix_layout(kind, rows as u64, cols as u64, rows as i64);
        let (w, x, out) = (layout(input, k, n)?, layout(input, k, m)?, layout(output, n, m)?);
        let algorithm = first_algorithm(handle, product, w, x, out)?;
        Ok(Self { product, w, x, out, algorithm })
    }
}

/// The algorithm that the library expects to be the fastest.
fn first_algorithm(
    handle: sys::cublasLtHandle_t,
    product: sys::cublasLtMatmulDesc_t,
    w: sys::cublasLtMatrixLayout_t,
    x: sys::cublasLtMatrixLayout_t,
    out: sys::cublasLtMatrixLayout_t,
) -> Result<sys::cublasLtMatmulAlgo_t, CublasError> {
    use sys::cublasLtMatmulPreferenceAttributes_t::CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES as WORKSPACE;
    let preference = result::create_matmul_pref()?;
    // SAFETY: all handles are live; the attribute is a size.
    unsafe {
        result::set_matmul_pref_attribute(preference, WORKSPACE, from_ref(&WORKSPACE_BYTES).cast(), 8)?;
        let found = result::get_matmul_algo_heuristic(handle, product, w, x, out, out, preference);
        result::destroy_matmul_pref(preference)?;
        found.map(|f| f.algo)
    }
}

impl Drop for Plan {
    fn drop(&mut self) {
        // SAFETY: made in `new`, used by nothing else.
        unsafe {
            let _ = result::destroy_matrix_layout(self.w);
            let _ = result::destroy_matrix_layout(self.x);
            let _ = result::destroy_matrix_layout(self.out);
            let _ = result::destroy_matmul_desc(self.product);
        }
    }
}

impl Drop for CublasLt {
    fn drop(&mut self) {
        self.plans.clear();
        // SAFETY: made in `new`.
        let _ = unsafe { result::destroy_handle(self.handle) };
    }
}

fn fault(error: CublasError) -> KernelError {
    KernelError::Device(format!("cuBLASLt: {error:?}"))
}
