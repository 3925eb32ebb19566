//! A fixed, zeroed, aligned array for weights and scratch.

use std::alloc::{Layout, alloc, dealloc, handle_alloc_error};
use std::ops::{Deref, DerefMut};
use std::ptr::NonNull;

/// From this size on the system is asked for huge pages: streaming weights through 4 KiB pages misses the TLB.
const HUGE_PAGE: usize = 2 << 20;

/// Plain numbers, or structs of them, for which any bits, zeros among them, are a value.
pub(super) trait Plain: Copy {}
impl Plain for u8 {}
impl Plain for i8 {}
impl Plain for i16 {}
impl Plain for u32 {}
impl Plain for super::activations::ResidualTile {}
impl Plain for f32 {}

/// `len` values of `T`, zero at first, aligned to a cache line or more.
pub(super) struct Buffer<T: Plain> {
    data: NonNull<T>,
    len: usize,
}

impl<T: Plain> Buffer<T> {
    /// # Panics
    /// If the size overflows. Aborts when out of memory, as the standard collections do.
    pub(super) fn zeroed(len: usize) -> Self {
        let layout = Self::layout(len);
        // SAFETY: the layout has at least one byte.
        let data = unsafe { alloc(layout) };
        let Some(data) = NonNull::new(data) else { handle_alloc_error(layout) };
        #[cfg(target_os = "linux")]
        if layout.size() >= HUGE_PAGE {
            // SAFETY: the range is ours and huge-page aligned; the advice changes no contents. Failure is harmless.
            unsafe { libc::madvise(data.as_ptr().cast(), layout.size(), libc::MADV_HUGEPAGE) };
        }
        // After the advice, so that the first touch already takes huge pages.
        // SAFETY: the whole allocation is ours.
        unsafe { data.write_bytes(0, layout.size()) };
        Self { data: data.cast(), len }
    }

    fn layout(len: usize) -> Layout {
        let bytes = len.checked_mul(size_of::<T>()).expect("buffer size").max(1);
        let align = if bytes >= HUGE_PAGE { HUGE_PAGE } else { 64 };
        Layout::from_size_align(bytes, align).expect("buffer size")
    }
}

impl<T: Plain> Deref for Buffer<T> {
    type Target = [T];

    fn deref(&self) -> &[T] {
        // SAFETY: `zeroed` allocated `len` values, initialised with zeros, which `Plain` allows.
        unsafe { std::slice::from_raw_parts(self.data.as_ptr(), self.len) }
    }
}

impl<T: Plain> DerefMut for Buffer<T> {
    fn deref_mut(&mut self) -> &mut [T] {
        // SAFETY: as in `deref`; `&mut self` makes the borrow unique.
        unsafe { std::slice::from_raw_parts_mut(self.data.as_ptr(), self.len) }
    }
}

impl<T: Plain> Drop for Buffer<T> {
    fn drop(&mut self) {
        // SAFETY: allocated in `zeroed` with this very layout.
        unsafe { dealloc(self.data.as_ptr().cast(), Self::layout(self.len)) }
    }
}

// SAFETY: it owns plain numbers and hands out borrows by the usual rules.
unsafe impl<T: Plain + Send> Send for Buffer<T> {}
// SAFETY: as above.
unsafe impl<T: Plain + Sync> Sync for Buffer<T> {}
