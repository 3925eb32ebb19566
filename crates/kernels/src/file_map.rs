//! Read-only maps of whole files, so that weights can be used in place.
//!
//! The map is safe as long as nobody shortens the file: a checkpoint that is truncated while it is mapped raises SIGBUS
//! on the next touch, as with every engine that maps its weights. Replacing the file by rename is fine.

use std::{fs::File, io, ops::Deref, path::Path};

use memmap2::Mmap;

/// A file's bytes, mapped read-only.
#[derive(Debug)]
pub struct FileMap {
    // None: the file is empty, which cannot be mapped.
    map: Option<Mmap>,
}

impl FileMap {
    /// Maps the whole file.
    pub fn open(path: &Path) -> io::Result<Self> {
        let file = File::open(path)?;
        if file.metadata()?.len() == 0 {
            return Ok(Self { map: None });
        }
        // SAFETY: the map is private to this value and never written; that others do not shorten the file is a
        // condition of use (module documentation).
        let map = unsafe { Mmap::map(&file)? };
        Ok(Self { map: Some(map) })
    }
}

impl Deref for FileMap {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        self.map.as_deref().unwrap_or(&[])
    }
}
