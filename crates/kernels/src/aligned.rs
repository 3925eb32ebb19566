//! Zeroed, page-aligned memory that the system commits on first touch: activations, scratch and the KV cache.

use std::ops::{Deref, DerefMut};

use memmap2::{MmapMut, MmapOptions};

use crate::KernelError;

/// A buffer of `f32`, page-aligned and zero at first. Untouched pages cost no memory.
pub struct AlignedBuf {
    map: MmapMut,
    len: usize,
}

impl AlignedBuf {
    /// Reserves `len` zeros; `what` names the buffer in the error.
    pub fn zeroed(len: usize, what: &'static str) -> Result<Self, KernelError> {
        let bytes = len.saturating_mul(4);
        Ok(Self { map: reserve(bytes, what)?, len })
    }

    /// Makes room for at least `len` elements; the contents are unspecified afterwards.
    pub fn grow(&mut self, len: usize) -> Result<(), KernelError> {
        if len > self.len {
            *self = Self::zeroed(len.next_power_of_two(), "scratch")?;
        }
        Ok(())
    }
}

impl Deref for AlignedBuf {
    type Target = [f32];
    fn deref(&self) -> &[f32] {
        // SAFETY: the map holds at least `4 * len` bytes, is page-aligned, and every bit pattern is an f32.
        unsafe { std::slice::from_raw_parts(self.map.as_ptr().cast(), self.len) }
    }
}

impl DerefMut for AlignedBuf {
    fn deref_mut(&mut self) -> &mut [f32] {
        // SAFETY: as in `deref`; `&mut self` makes the access unique.
        unsafe { std::slice::from_raw_parts_mut(self.map.as_mut_ptr().cast(), self.len) }
    }
}

/// Reserves `bytes` of zeroed anonymous memory.
pub(crate) fn reserve(bytes: usize, what: &'static str) -> Result<MmapMut, KernelError> {
    let failed = KernelError::OutOfMemory { what, bytes };
    if bytes > isize::MAX as usize {
        return Err(failed);
    }
    MmapOptions::new().len(bytes.max(1)).map_anon().map_err(|_| failed)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn is_zero_aligned_and_refuses_the_impossible() {
        let mut buf = AlignedBuf::zeroed(1000, "test").unwrap();
        assert_eq!(buf.as_ptr() as usize % 64, 0);
        assert!(buf.iter().all(|&x| x == 0.0));
        buf[999] = 1.0;
        buf.grow(5000).unwrap();
        assert!(buf.len() >= 5000);
        assert!(matches!(AlignedBuf::zeroed(usize::MAX / 2, "test"), Err(KernelError::OutOfMemory { .. })));
        assert_eq!(AlignedBuf::zeroed(0, "test").unwrap().len(), 0);
    }
}
