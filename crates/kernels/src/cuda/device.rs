//! A GPU: its context and stream, kernels by name, and memory.
//!
//! Everything runs on one stream, in order. Launches report no error to their caller: a fault is remembered, and
//! [`Device::check`] gives it when results are read, as CUDA itself does with faults inside kernels.

use std::cell::RefCell;
use std::collections::HashMap;
use std::ffi::c_void;
use std::ptr;

use cudarc::driver::result::{self, DriverError};
use cudarc::driver::sys;

use crate::KernelError;

include!(concat!(env!("OUT_DIR"), "/modules.rs"));

/// The oldest driver that runs code of the toolkit this is built with (CUDA 13.0), as `cuDriverGetVersion` says it.
const MIN_DRIVER: i32 = 13_000;

/// A GPU with everything that is set up once.
pub struct Device {
    context: sys::CUcontext,
    stream: sys::CUstream,
    kernels: HashMap<&'static str, sys::CUfunction>,
    modules: Vec<sys::CUmodule>,
    /// Streaming multiprocessors.
    pub n_sms: usize,
    /// The vendor's name of it.
    pub name: String,
    /// Compute capability, e.g. `(9, 0)`.
    pub capability: (i32, i32),
    fault: RefCell<Option<KernelError>>,
}

// SAFETY: driver handles may be used from any thread whose current context is theirs; see `bind`.
unsafe impl Send for Device {}

/// A kernel argument: a scalar of up to 8 bytes, or a struct that is passed by value.
#[derive(Clone, Copy)]
pub enum Arg<'a> {
    /// Little-endian bits of a scalar or a device address.
    Word(u64),
    /// Bytes of a struct, aligned as the kernel declares it.
    Struct(&'a [u64]),
}

macro_rules! arg_from {
    ($($t:ty => $e:expr),*) => {$(
        impl From<$t> for Arg<'_> {
            fn from(x: $t) -> Self {
                let word: fn($t) -> u64 = $e;
                Self::Word(word(x))
            }
        }
    )*};
}
arg_from!(u32 => u64::from, u64 => |x| x, f32 => |x| u64::from(x.to_bits()), i32 => |x| u64::from(x as u32),
    usize => |x| u64::from(u32::try_from(x).expect("sizes on the device are 32-bit")));

impl From<&DeviceBuffer> for Arg<'_> {
    fn from(buffer: &DeviceBuffer) -> Self {
        Self::Word(buffer.address)
    }
}

impl From<Option<&DeviceBuffer>> for Arg<'_> {
    fn from(buffer: Option<&DeviceBuffer>) -> Self {
        Self::Word(buffer.map_or(0, |b| b.address))
    }
}

/// Blocks, threads of a block, and dynamic shared memory of a launch.
#[derive(Debug, Clone, Copy)]
pub struct Launch {
    /// Blocks.
    pub grid: [usize; 3],
    /// Threads of a block.
    pub threads: usize,
    /// Bytes of dynamic shared memory.
    pub shared_bytes: usize,
    /// Blocks of a cluster; 1: none.
    pub cluster: usize,
}

impl Launch {
    /// A grid without clusters.
    pub fn new(grid: [usize; 3], threads: usize, shared_bytes: usize) -> Self {
        Self { grid, threads, shared_bytes, cluster: 1 }
    }

    /// A one-dimensional grid without dynamic shared memory.
    pub fn linear(blocks: usize, threads: usize) -> Self {
        Self::new([blocks, 1, 1], threads, 0)
    }
}

impl Device {
    /// Takes GPU `ordinal` of those that are visible (`CUDA_VISIBLE_DEVICES`).
    pub fn new(ordinal: usize) -> Result<Self, KernelError> {
        // SAFETY: only looks for the library.
        if !unsafe { sys::is_culib_present() } {
            return Err(KernelError::Unsupported("no CUDA driver (libcuda.so) on this machine".into()));
        }
        result::init().map_err(fault("starting CUDA"))?;
        check_driver()?;
        let n_devices = result::device::get_count().map_err(fault("counting GPUs"))?;
        let ordinal = i32::try_from(ordinal).unwrap_or(i32::MAX);
        if ordinal >= n_devices {
            return Err(KernelError::Unsupported(format!("GPU {ordinal} of {n_devices} visible ones does not exist")));
        }
        let device = result::device::get(ordinal).map_err(fault("opening the GPU"))?;
        let attribute = |a| {
            // SAFETY: `device` is a valid handle.
            unsafe { result::device::get_attribute(device, a) }.map_err(fault("reading the GPU's properties"))
        };
        use sys::CUdevice_attribute as A;
        let n_sms = attribute(A::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)?;
        let capability = (
            attribute(A::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)?,
            attribute(A::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)?,
        );
        let name = result::device::get_name(device).map_err(fault("reading the GPU's name"))?;
        // SAFETY: the handles come from the calls before; the primary context is released in `drop`.
        let (context, stream) = unsafe {
            let context = result::primary_ctx::retain(device).map_err(fault("opening the GPU"))?;
            result::ctx::set_current(context).map_err(fault("opening the GPU"))?;
            (
                context,
                result::stream::create(result::stream::StreamKind::NonBlocking).map_err(fault("opening the GPU"))?,
            )
        };
        let n_sms = usize::try_from(n_sms).expect("a count");
        let (kernels, modules) = load_kernels(capability)?;
        Ok(Self { context, stream, kernels, modules, n_sms, name, capability, fault: RefCell::default() })
    }

    /// Makes this GPU the calling thread's. Each thread that uses it calls this first.
    pub fn bind(&self) {
        // SAFETY: the context lives as long as `self`.
        self.note("binding the GPU", unsafe { result::ctx::set_current(self.context) });
    }

    /// The stream of all work.
    pub fn stream(&self) -> sys::CUstream {
        self.stream
    }

    /// Whether a kernel of this name was built for this device.
    pub fn has_kernel(&self, name: &str) -> bool {
        self.kernels.contains_key(name)
    }

    /// Enqueues a kernel. With programmatic dependent launch: it may begin before its predecessor has ended, and waits in
    /// `pdl_wait()`.
    pub fn launch(&self, kernel: &str, launch: Launch, args: &[Arg<'_>]) {
        let function = self.kernels.get(kernel).unwrap_or_else(|| panic!("no kernel {kernel}"));
        if launch.grid.contains(&0) {
            return;
        }
        let mut words = [0u64; 32];
        let mut pointers = [ptr::null_mut::<c_void>(); 32];
        for (i, arg) in args.iter().enumerate() {
            pointers[i] = match arg {
                Arg::Word(word) => {
                    words[i] = *word;
                    (&raw mut words[i]).cast()
                }
                Arg::Struct(bytes) => bytes.as_ptr().cast_mut().cast(),
            };
        }
        // SAFETY: plain data, for which zeros are valid.
        let mut attributes: [sys::CUlaunchAttribute; 2] = unsafe { std::mem::zeroed() };
        attributes[0].id = sys::CUlaunchAttributeID::CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION;
        attributes[0].value.programmaticStreamSerializationAllowed = 1;
        attributes[1].id = sys::CUlaunchAttributeID::CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION;
        attributes[1].value.clusterDim = sys::CUlaunchAttributeValue_union__bindgen_ty_1 {
            x: u32::try_from(launch.cluster).expect("a cluster is small"),
            y: 1,
            z: 1,
        };
        let n_attributes = match self.capability.0 {
            ..9 => 0,
            _ => 1 + u32::from(launch.cluster > 1),
        };
        let size = |n: usize| u32::try_from(n).expect("a launch size");
        let config = sys::CUlaunchConfig {
            gridDimX: size(launch.grid[0]),
            gridDimY: size(launch.grid[1]),
            gridDimZ: size(launch.grid[2]),
            blockDimX: size(launch.threads),
            blockDimY: 1,
            blockDimZ: 1,
            sharedMemBytes: size(launch.shared_bytes),
            hStream: self.stream,
            attrs: attributes.as_mut_ptr(),
            numAttrs: n_attributes,
        };
        // SAFETY: the wrappers beside each `.cu` file pass arguments of the kernel's own signature; buffers outlive the
        // stream's work, since they live as long as the backend.
        let result =
            unsafe { sys::cuLaunchKernelEx(&raw const config, *function, pointers.as_mut_ptr(), ptr::null_mut()) };
        self.note(kernel, result.result());
    }

    /// Whether work is being recorded into a graph, and not run.
    pub fn is_recording(&self) -> bool {
        // SAFETY: the stream lives.
        let status = unsafe { result::stream::is_capturing(self.stream) };
        status.is_ok_and(|s| s != sys::CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE)
    }

    /// Remembers a fault, of which only the first says the cause.
    pub fn note(&self, what: &str, result: Result<(), DriverError>) {
        if let Err(error) = result {
            self.note_error(KernelError::Device(format!("{what}: {}", describe(error))));
        }
    }

    /// Remembers a fault that is described already.
    pub fn note_error(&self, error: KernelError) {
        self.fault.borrow_mut().get_or_insert(error);
    }

    /// The first fault so far, if any. A faulted device stays faulted: the process must end.
    pub fn check(&self) -> Result<(), KernelError> {
        match &*self.fault.borrow() {
            None => Ok(()),
            Some(error) => Err(KernelError::Device(error.to_string())),
        }
    }

    /// Waits for all enqueued work.
    pub fn synchronize(&self) -> Result<(), KernelError> {
        // SAFETY: the stream lives as long as `self`.
        self.note("waiting for the GPU", unsafe { result::stream::synchronize(self.stream) });
        self.check()
    }

    /// Free and total bytes of the device's memory.
    pub fn memory(&self) -> Result<(usize, usize), KernelError> {
        result::mem_get_info().map_err(|e| KernelError::Device(format!("reading free memory: {}", describe(e))))
    }

    /// Reserves memory, not initialized.
    pub fn buffer(&self, bytes: usize, what: &'static str) -> Result<DeviceBuffer, KernelError> {
        // SAFETY: a plain allocation, freed in `DeviceBuffer::drop`.
        let address = unsafe { result::malloc_sync(bytes.max(16)) };
        let address = address.map_err(|_| KernelError::OutOfMemory { what, bytes })?;
        Ok(DeviceBuffer { address, bytes })
    }

    /// A buffer with these contents.
    pub fn upload(&self, data: &[u8], what: &'static str) -> Result<DeviceBuffer, KernelError> {
        let buffer = self.buffer(data.len(), what)?;
        self.write(&buffer, 0, data);
        self.synchronize()?;
        Ok(buffer)
    }

    /// Enqueues a copy of host memory into `to`. Unpinned memory is staged by the driver before this returns.
    pub fn write(&self, to: &DeviceBuffer, offset: usize, data: &[u8]) {
        assert!(offset + data.len() <= to.bytes, "a write past the buffer");
        // SAFETY: in bounds; the driver copies pageable memory before it returns.
        let result = unsafe { result::memcpy_htod_async(to.address + offset as u64, data, self.stream) };
        self.note("copying to the GPU", result);
    }

    /// Reads `bytes` of a buffer, after all work before.
    pub fn read(&self, from: &DeviceBuffer, offset: usize, into: &mut [u8]) -> Result<(), KernelError> {
        assert!(offset + into.len() <= from.bytes, "a read past the buffer");
        // SAFETY: in bounds; waited for before `into` is used.
        let result = unsafe { result::memcpy_dtoh_async(into, from.address + offset as u64, self.stream) };
        self.note("copying from the GPU", result);
        self.synchronize()
    }

    /// Enqueues zeros over a buffer.
    pub fn zero(&self, buffer: &DeviceBuffer) {
        // SAFETY: the whole buffer.
        let result = unsafe { result::memset_d8_async(buffer.address, 0, buffer.bytes, self.stream) };
        self.note("clearing memory", result);
    }
}

impl Drop for Device {
    fn drop(&mut self) {
        self.bind();
        // SAFETY: handles made in `new`; nothing uses them afterwards.
        unsafe {
            let _ = result::stream::synchronize(self.stream);
            for module in self.modules.drain(..) {
                let _ = result::module::unload(module);
            }
            let _ = result::stream::destroy(self.stream);
        }
    }
}

/// Memory on the device.
pub struct DeviceBuffer {
    /// Where it begins.
    pub address: sys::CUdeviceptr,
    /// Its size.
    pub bytes: usize,
}

impl DeviceBuffer {
    /// The address `offset` bytes in.
    pub fn at(&self, offset: usize) -> u64 {
        assert!(offset <= self.bytes, "an address past the buffer");
        self.address + offset as u64
    }
}

impl Drop for DeviceBuffer {
    fn drop(&mut self) {
        // SAFETY: allocated by `Device::buffer`; `cuMemFree` waits for work that uses it.
        let _ = unsafe { result::free_sync(self.address) };
    }
}

/// Page-locked host memory, which the device reads and writes at the same address.
pub struct PinnedBuffer {
    address: *mut u8,
    len: usize,
}

// SAFETY: plain memory with one owner.
unsafe impl Send for PinnedBuffer {}

impl PinnedBuffer {
    /// Reserves `len` zeroed bytes.
    pub fn new(len: usize) -> Result<Self, KernelError> {
        // SAFETY: a plain allocation, freed in `drop`.
        let address = unsafe { result::malloc_host(len.max(16), 0) };
        let address = address.map_err(|_| KernelError::OutOfMemory { what: "pinned host memory", bytes: len })?;
        // SAFETY: just allocated with at least `len` bytes.
        unsafe { ptr::write_bytes(address.cast::<u8>(), 0, len) };
        Ok(Self { address: address.cast(), len })
    }

    /// Its address, on host and device.
    pub fn address(&self) -> u64 {
        self.address as u64
    }

    /// The bytes. The caller makes sure that the device isn't writing them.
    pub fn bytes(&self) -> &[u8] {
        // SAFETY: allocated with `len` initialized bytes.
        unsafe { std::slice::from_raw_parts(self.address, self.len) }
    }

    /// The whole words in it. The caller makes sure that the device isn't writing them.
    pub fn words(&self) -> &[u32] {
        // SAFETY: page-aligned, and every bit pattern is a valid u32.
        unsafe { std::slice::from_raw_parts(self.address.cast(), self.len / 4) }
    }

    /// The whole words, to be written. The caller makes sure that the device isn't using them.
    pub fn words_mut(&mut self) -> &mut [u32] {
        // SAFETY: page-aligned, and every bit pattern is a valid u32; `self` is borrowed mutably.
        unsafe { std::slice::from_raw_parts_mut(self.address.cast(), self.len / 4) }
    }

    /// Makes room for `len` bytes; the contents are lost if there was not enough. The caller makes sure that the device
    /// isn't using it.
    pub fn grow(&mut self, len: usize) -> Result<(), KernelError> {
        if len > self.len {
            *self = Self::new(len.next_power_of_two())?;
        }
        Ok(())
    }

    /// The bytes, to be written. The caller makes sure that the device isn't using them.
    pub fn bytes_mut(&mut self) -> &mut [u8] {
        // SAFETY: allocated with `len` initialized bytes; `self` is borrowed mutably.
        unsafe { std::slice::from_raw_parts_mut(self.address, self.len) }
    }
}

impl Drop for PinnedBuffer {
    fn drop(&mut self) {
        // SAFETY: allocated by `malloc_host`.
        let _ = unsafe { result::free_host(self.address.cast()) };
    }
}

/// A point in the stream.
pub struct Event(sys::CUevent);

// SAFETY: a driver handle with one owner.
unsafe impl Send for Event {}

impl Event {
    /// An event; `timed` ones can be compared with [`Event::ms_since`].
    pub fn new(timed: bool) -> Result<Self, KernelError> {
        use sys::CUevent_flags as F;
        let flags = if timed { F::CU_EVENT_DEFAULT } else { F::CU_EVENT_DISABLE_TIMING };
        result::event::create(flags).map(Self).map_err(|e| KernelError::Device(describe(e)))
    }

    /// Marks the stream's end as of now.
    pub fn record(&self, device: &Device) {
        // SAFETY: both handles live.
        device.note("recording an event", unsafe { result::event::record(self.0, device.stream) });
    }

    /// Waits until the stream has passed it.
    pub fn wait(&self, device: &Device) -> Result<(), KernelError> {
        // SAFETY: the handle lives.
        device.note("a kernel", unsafe { result::event::synchronize(self.0) });
        device.check()
    }

    /// Milliseconds between two timed events that have passed.
    pub fn ms_since(&self, start: &Self) -> Result<f32, KernelError> {
        // SAFETY: both handles live.
        unsafe { result::event::elapsed(start.0, self.0) }.map_err(|e| KernelError::Device(describe(e)))
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        // SAFETY: made by `new`.
        let _ = unsafe { result::event::destroy(self.0) };
    }
}

fn check_driver() -> Result<(), KernelError> {
    let mut version = 0;
    // SAFETY: writes one integer.
    let result = unsafe { sys::cuDriverGetVersion(&raw mut version) }.result();
    result.map_err(|e| KernelError::Device(format!("reading the driver's version: {}", describe(e))))?;
    if version < MIN_DRIVER {
        let (have, need) = (version as f32 / 1000.0, MIN_DRIVER as f32 / 1000.0);
        let message = format!(
            "the NVIDIA driver supports CUDA {have:.1}; Kwire needs {need:.1} (driver 580 or newer): update the driver"
        );
        return Err(KernelError::Unsupported(message));
    }
    Ok(())
}

/// The driver's kernels by name, and the modules they live in.
type Kernels = (HashMap<&'static str, sys::CUfunction>, Vec<sys::CUmodule>);

/// Loads every embedded module and finds its kernels by enumeration, so that no list has to be kept.
fn load_kernels(capability: (i32, i32)) -> Result<Kernels, KernelError> {
    let (mut kernels, mut modules) = (HashMap::new(), Vec::new());
    for &(name, image) in MODULES {
        let fail = |e: DriverError| {
            let (major, minor) = capability;
            KernelError::Unsupported(format!(
                "kernels {name} of this build do not run on compute capability {major}.{minor}: {}",
                describe(e)
            ))
        };
        // SAFETY: a complete fat binary that nvcc made; names live as long as their module.
        unsafe {
            let module = result::module::load_data(image.as_ptr().cast()).map_err(fail)?;
            modules.push(module);
            let mut count = 0;
            sys::cuModuleGetFunctionCount(&raw mut count, module).result().map_err(fail)?;
            let mut functions = vec![ptr::null_mut(); count as usize];
            sys::cuModuleEnumerateFunctions(functions.as_mut_ptr(), count, module).result().map_err(fail)?;
            for function in functions {
                let mut text = ptr::null();
                sys::cuFuncGetName(&raw mut text, function).result().map_err(fail)?;
                let text = std::ffi::CStr::from_ptr(text).to_str().expect("kernel names are ASCII");
                kernels.insert(text, function);
            }
        }
    }
    Ok((kernels, modules))
}

impl Device {
    /// Lets a kernel be launched in clusters of 16 blocks, which not every device of its generation can hold.
    pub fn allow_wide_cluster(&self, kernel: &str) {
        let Some(&function) = self.kernels.get(kernel) else { return };
        let attribute = sys::CUfunction_attribute_enum::CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED;
        // SAFETY: a function of a loaded module.
        self.note(kernel, unsafe { result::function::set_function_attribute(function, attribute, 1) });
    }

    /// Lets a kernel use up to `bytes` of dynamic shared memory; above 48 KiB it must be asked for, once.
    pub fn allow_shared(&self, kernel: &str, bytes: usize) {
        let Some(&function) = self.kernels.get(kernel) else {
            return self.note_error(KernelError::Unsupported(format!("this build has no kernel {kernel}")));
        };
        let attribute = sys::CUfunction_attribute_enum::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
        let bytes = i32::try_from(bytes).expect("shared memory is small");
        // SAFETY: a function of a loaded module.
        self.note(kernel, unsafe { result::function::set_function_attribute(function, attribute, bytes) });
    }
}

/// A fault while `what` was done.
pub(super) fn fault(what: &'static str) -> impl Fn(DriverError) -> KernelError {
    move |e| KernelError::Device(format!("{what}: {}", describe(e)))
}

fn describe(error: DriverError) -> String {
    let text =
        |s: Result<&std::ffi::CStr, DriverError>| s.map(|s| s.to_string_lossy().into_owned()).unwrap_or_default();
    format!("{} ({})", text(error.error_string()), text(error.error_name()))
}
