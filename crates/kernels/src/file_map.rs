//! Read-only file mapping, the only place that maps files: checkpoints are read in place, never copied to the heap.

use std::{fs::File, io, ops::Deref, path::Path};

use memmap2::{Advice, Mmap, UncheckedAdvice};

/// The bytes of a file, mapped read-only and shared with the page cache.
///
/// The file must not be truncated while it is mapped (access beyond its end would end the process with SIGBUS);
/// checkpoint stores replace files by renaming, which is safe.
pub struct FileMap {
    map: Mmap,
}

impl FileMap {
    /// Maps the whole file at `path`.
    pub fn open(path: &Path) -> io::Result<Self> {
        let file = File::open(path)?;
        // SAFETY: the map is read-only and private to this process; the type's documentation states the one
        // condition on the file that the operating system cannot enforce.
        let map = unsafe { Mmap::map(&file)? };
        Ok(Self { map })
    }

    /// Asks the system to read a range of the file ahead. A hint: failure is ignored.
    pub fn will_need(&self, offset: usize, len: usize) {
        if let Some((offset, len)) = self.clip(offset, len) {
            let _ = self.map.advise_range(Advice::WillNeed, offset, len);
        }
    }

    /// Says that the file will be read once, front to back. A hint: failure is ignored.
    pub fn sequential(&self) {
        let _ = self.map.advise(Advice::Sequential);
    }

    /// Says that a range has been used for the last time (its weights are repacked), so that it no longer counts as
    /// this process's memory. Reading it again works and reads the file again.
    pub fn done_with(&self, offset: usize, len: usize) {
        if let Some((offset, len)) = self.clip(offset, len) {
            // SAFETY: DONTNEED on a read-only file map only drops page-table entries: the next read finds the
            // file's bytes again, so no reference observes a change.
            let _ = unsafe { self.map.unchecked_advise_range(UncheckedAdvice::DontNeed, offset, len) };
        }
    }

    fn clip(&self, offset: usize, len: usize) -> Option<(usize, usize)> {
        let len = len.min(self.map.len().checked_sub(offset)?);
        (len > 0).then_some((offset, len))
    }
}

impl Deref for FileMap {
    type Target = [u8];
    fn deref(&self) -> &[u8] {
        &self.map
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reads_the_file_before_and_after_advice() {
        let path = std::env::temp_dir().join(format!("kwire-file-map-{}", std::process::id()));
        let bytes: Vec<u8> = (0..100_000u32).map(|i| i as u8).collect();
        std::fs::write(&path, &bytes).unwrap();
        let map = FileMap::open(&path).unwrap();
        map.sequential();
        map.will_need(5000, usize::MAX);
        assert_eq!(&map[..], &bytes[..]);
        map.done_with(0, 50_000);
        map.done_with(1 << 40, 1);
        assert_eq!(&map[..], &bytes[..]);
        std::fs::remove_file(&path).unwrap();
        assert!(FileMap::open(&path).is_err());
    }
}
