//! Matrix products by cuBLASLt, with one plan for each shape.
//!
//! The library's own choice of algorithm is up to 20 % slower than the best of its first few. So the first product of a size
//! class measures them, and what won is kept in a file for the next start.

use std::collections::HashMap;
use std::ffi::c_void;
use std::fmt::Write as _;
use std::mem::size_of_val;
use std::path::PathBuf;
use std::ptr::from_ref;

use cudarc::cublaslt::result::{self, CublasError};
use cudarc::cublaslt::sys;

use super::Element;
use super::device::{Device, DeviceBuffer, Event};
use crate::KernelError;

/// What NVIDIA recommends for Hopper (cuBLAS guide, "cublasSetWorkspace").
const WORKSPACE_BYTES: usize = 32 << 20;

/// Algorithms to measure, times each, and the memory that is overwritten between two measurements.
const N_CANDIDATES: usize = 8;
const N_MEASUREMENTS: usize = 3;
const FLUSH_BYTES: usize = 128 << 20;

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
    /// Whether a bias is added, which is of the inputs' type.
    pub bias: bool,
}

/// The library's handle, its workspace, and the plans so far.
pub struct CublasLt {
    handle: sys::cublasLtHandle_t,
    workspace: DeviceBuffer,
    element: Element,
    plans: HashMap<Shape, Plan>,
    choices: Choices,
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
    /// Opens the library for products of `element` matrices; `file` keeps measured choices.
    pub fn new(device: &Device, element: Element, file: Option<PathBuf>) -> Result<Self, KernelError> {
        // SAFETY: only looks for the library.
        if !unsafe { sys::is_culib_present() } {
            let message = "cuBLASLt (libcublasLt.so.13) was not found: install CUDA's runtime libraries, or name their folder in LD_LIBRARY_PATH";
            return Err(KernelError::Unsupported(message.into()));
        }
        let handle = result::create_handle().map_err(fault)?;
        let workspace = device.buffer(WORKSPACE_BYTES, "the workspace of matrix products")?;
        let choices = Choices::open(device, element, file);
        Ok(Self { handle, workspace, element, plans: HashMap::new(), choices })
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
            let plan = self.plan(device, shape, [x, w, bias, out])?;
            self.plans.insert(shape, plan);
        }
        self.run(device, &self.plans[&shape], shape, [x, w, bias, out])
    }

    /// The plan of a shape, with the algorithm that was the fastest of its size class.
    fn plan(&mut self, device: &Device, shape: Shape, buffers: [u64; 4]) -> Result<Plan, CublasError> {
        let mut plan = Plan::new(shape, self.element)?;
        let class = shape.class();
        let chosen = self.choices.get(&class).map(|data| sys::cublasLtMatmulAlgo_t { data });
        if let Some(algorithm) = chosen.filter(|algorithm| plan.accepts(self.handle, algorithm)) {
            plan.algorithm = algorithm;
            return Ok(plan);
        }
        let candidates = plan.candidates(self.handle)?;
        plan.algorithm = candidates[0];
        if chosen.is_none() && !device.is_recording() {
            plan.algorithm = self.measure(device, &mut plan, candidates, shape, buffers)?;
            self.choices.add(class, plan.algorithm.data);
        }
        Ok(plan)
    }

    /// The fastest of `candidates`, on weights that come from memory and not from the L2 cache.
    fn measure(
        &self,
        device: &Device,
        plan: &mut Plan,
        candidates: Vec<sys::cublasLtMatmulAlgo_t>,
        shape: Shape,
        buffers: [u64; 4],
    ) -> Result<sys::cublasLtMatmulAlgo_t, CublasError> {
        let mut best = (f32::INFINITY, candidates[0]);
        let Ok(flush) = device.buffer(FLUSH_BYTES, "the measurement of matrix products") else { return Ok(best.1) };
        let (Ok(start), Ok(end)) = (Event::new(true), Event::new(true)) else { return Ok(best.1) };
        for algorithm in candidates {
            plan.algorithm = algorithm;
            let mut fastest = f32::INFINITY;
            for _ in 0..N_MEASUREMENTS {
                device.zero(&flush);
                start.record(device);
                self.run(device, plan, shape, buffers)?;
                end.record(device);
                if end.wait(device).is_err() {
                    return Ok(best.1);
                }
                fastest = fastest.min(end.ms_since(&start).unwrap_or(f32::INFINITY));
            }
            if fastest < best.0 {
                best = (fastest, algorithm);
            }
        }
        Ok(best.1)
    }

    fn run(&self, device: &Device, plan: &Plan, shape: Shape, [x, w, bias, out]: [u64; 4]) -> Result<(), CublasError> {
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
    /// Descriptors, without an algorithm.
    fn new(shape: Shape, element: Element) -> Result<Self, CublasError> {
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
            set(A::CUBLASLT_MATMUL_DESC_BIAS_DATA_TYPE, &(input as i32))?;
        }
        let layout =
            |kind, rows: usize, cols: usize| result::create_matrix_layout(kind, rows as u64, cols as u64, rows as i64);
        let (w, x, out) = (layout(input, k, n)?, layout(input, k, m)?, layout(output, n, m)?);
        Ok(Self { product, w, x, out, algorithm: sys::cublasLtMatmulAlgo_t { data: [0; 8] } })
    }

    /// What the library proposes, best guess first; at least one.
    fn candidates(&self, handle: sys::cublasLtHandle_t) -> Result<Vec<sys::cublasLtMatmulAlgo_t>, CublasError> {
        use sys::cublasLtMatmulPreferenceAttributes_t::CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES as WORKSPACE;
        let preference = result::create_matmul_pref()?;
        // SAFETY: plain data, for which zeros are valid.
        let mut found: [sys::cublasLtMatmulHeuristicResult_t; N_CANDIDATES] = unsafe { std::mem::zeroed() };
        let mut n_found = 0;
        // SAFETY: all handles are live; the attribute is a size; there is room for the results that are asked for.
        unsafe {
            result::set_matmul_pref_attribute(preference, WORKSPACE, from_ref(&WORKSPACE_BYTES).cast(), 8)?;
            let status = sys::cublasLtMatmulAlgoGetHeuristic(
                handle,
                self.product,
                self.w,
                self.x,
                self.out,
                self.out,
                preference,
                N_CANDIDATES as i32,
                found.as_mut_ptr(),
                &raw mut n_found,
            );
            result::destroy_matmul_pref(preference)?;
            status.result()?;
        }
        let usable = found.iter().take(n_found as usize).filter(|f| f.state.result().is_ok());
        let algorithms: Vec<_> = usable.map(|f| f.algo).collect();
        match algorithms.is_empty() {
            true => Err(CublasError(sys::cublasStatus_t::CUBLAS_STATUS_NOT_SUPPORTED)),
            false => Ok(algorithms),
        }
    }

    /// Whether an algorithm that was measured for another size of the class also does this one.
    fn accepts(&self, handle: sys::cublasLtHandle_t, algorithm: &sys::cublasLtMatmulAlgo_t) -> bool {
        // SAFETY: plain data, for which zeros are valid.
        let mut checked: sys::cublasLtMatmulHeuristicResult_t = unsafe { std::mem::zeroed() };
        // SAFETY: all handles are live.
        let status = unsafe {
            sys::cublasLtMatmulAlgoCheck(
                handle,
                self.product,
                self.w,
                self.x,
                self.out,
                self.out,
                algorithm,
                &raw mut checked,
            )
        };
        status.result().is_ok() && checked.workspaceSize <= WORKSPACE_BYTES
    }
}

impl Shape {
    /// The size class: sizes up to the next of 32, 48, 64, 96, 128... tokens choose their algorithm together.
    fn class(self) -> Self {
        let power = self.m.next_power_of_two().max(32);
        let m = if self.m <= power / 4 * 3 && power > 32 { power / 4 * 3 } else { power };
        Self { m, ..self }
    }
}

/// Algorithms that were measured, by size class, and the file that keeps them.
struct Choices {
    known: HashMap<Shape, [u64; 8]>,
    /// What the measurements hold for: GPU, library, element type.
    scope: String,
    file: Option<PathBuf>,
}

impl Choices {
    fn open(device: &Device, element: Element, file: Option<PathBuf>) -> Self {
        // SAFETY: only reads a number.
        let version = unsafe { sys::cublasLtGetVersion() };
        let scope = format!("{}/{version}/{element:?}", device.name.replace([' ', '\n'], "-"));
        let text = file.as_ref().and_then(|path| std::fs::read_to_string(path).ok()).unwrap_or_default();
        let known = text.lines().filter_map(|line| parse_choice(line, &scope)).collect();
        Self { known, scope, file }
    }

    fn get(&self, class: &Shape) -> Option<[u64; 8]> {
        self.known.get(class).copied()
    }

    /// Keeps a choice. A file that can't be written costs the next start a measurement, and nothing else.
    fn add(&mut self, class: Shape, algorithm: [u64; 8]) {
        self.known.insert(class, algorithm);
        let Some(path) = &self.file else { return };
        let Shape { m, n, k, f32_out, bias } = class;
        let mut line = format!("{} {m} {n} {k} {} {}", self.scope, u8::from(f32_out), u8::from(bias));
        for word in algorithm {
            let _ = write!(line, " {word:x}");
        }
        let file = std::fs::OpenOptions::new().append(true).create(true).open(path);
        let _ = file.and_then(|mut file| std::io::Write::write_all(&mut file, (line + "\n").as_bytes()));
    }
}

/// `scope m n k f32_out bias` and the algorithm's eight words; `None` for other scopes and damaged lines.
fn parse_choice(line: &str, scope: &str) -> Option<(Shape, [u64; 8])> {
    let mut words = line.strip_prefix(scope)?.split_whitespace();
    let mut number = || words.next()?.parse::<usize>().ok();
    let shape = Shape { m: number()?, n: number()?, k: number()?, f32_out: number()? == 1, bias: number()? == 1 };
    let algorithm: Vec<u64> = words.map_while(|w| u64::from_str_radix(w, 16).ok()).collect();
    Some((shape, algorithm.try_into().ok()?))
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn size_classes_are_narrow() {
        let class = |m| Shape { m, n: 8, k: 8, f32_out: false, bias: false }.class().m;
        let classes = [1, 32, 33, 48, 49, 96, 97, 128, 200, 1000, 16384].map(class);
        assert_eq!(classes, [32, 32, 48, 48, 64, 96, 128, 128, 256, 1024, 16384]);
    }

    #[test]
    fn choices_come_back_from_their_line_and_damage_is_ignored() {
        let shape = Shape { m: 32, n: 16, k: 8, f32_out: true, bias: false };
        assert_eq!(
            parse_choice("gpu/1 32 16 8 1 0 1 2 3 4 5 6 7 ff", "gpu/1"),
            Some((shape, [1, 2, 3, 4, 5, 6, 7, 255]))
        );
        for line in ["", "gpu/2 32 16 8 1 0 1 2 3 4 5 6 7 8", "gpu/1 32 16", "gpu/1 32 16 8 1 0 1 2 3", "gpu/1 a b c"] {
            assert_eq!(parse_choice(line, "gpu/1"), None, "{line}");
        }
    }
}
