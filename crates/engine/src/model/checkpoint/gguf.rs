//! GGUF files, versions 2 and 3 (ggml's `docs/gguf.md`): typed metadata, then tensor descriptions, then aligned data.
//!
//! The whole header is walked and checked at open. Arrays stay in the file as checked byte ranges and are decoded when
//! asked for, so that a vocabulary costs nothing until the text side wants it.

use std::{
    collections::{HashMap, HashSet},
    fs::File,
    io::Read,
    ops::Deref,
    path::{Path, PathBuf},
};

use half::{bf16, f16};
use kwire_kernels::{DType, FileMap};

use super::{Blame, CheckpointError, Entry, TensorInfo, Tensors};

const MAGIC: &[u8; 4] = b"GGUF";
const DEFAULT_ALIGNMENT: u64 = 32;
const MAX_ALIGNMENT: u64 = 1 << 20;
/// ggml's `GGML_MAX_DIMS`.
const MAX_DIMS: u32 = 4;
/// gguf.md: "keys are at most 2^16-1 bytes long".
const MAX_KEY_BYTES: usize = 65_535;
/// gguf.md allows any depth; real files use 1.
const MAX_ARRAY_DEPTH: u32 = 4;

/// A metadata value.
#[derive(Debug, Clone, PartialEq)]
pub(crate) enum MetaValue {
    /// Any unsigned integer.
    U64(u64),
    /// Any signed integer.
    I64(i64),
    /// A 32-bit float.
    F32(f32),
    /// A 64-bit float.
    F64(f64),
    /// A boolean.
    Bool(bool),
    /// A UTF-8 string.
    Str(String),
    /// An array, still in the file.
    Array(MetaArray),
}

/// A checked array of metadata: where its elements lie.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct MetaArray {
    kind: Kind,
    len: usize,
    start: usize,
    end: usize,
}

impl MetaArray {
    /// Number of elements.
    pub(crate) fn len(&self) -> usize {
        self.len
    }
}

/// Metadata by key.
#[derive(Debug, Default)]
pub(crate) struct Meta(HashMap<String, MetaValue>);

impl Meta {
    pub(crate) fn get(&self, key: &str) -> Option<&MetaValue> {
        self.0.get(key)
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = (&str, &MetaValue)> {
        self.0.iter().map(|(k, v)| (k.as_str(), v))
    }

    #[cfg(test)]
    pub(crate) fn from_pairs(pairs: impl IntoIterator<Item = (String, MetaValue)>) -> Self {
        Self(pairs.into_iter().collect())
    }
}

/// Value types, by their number in the file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
    U8,
    I8,
    U16,
    I16,
    U32,
    I32,
    F32,
    Bool,
    Str,
    Array,
    U64,
    I64,
    F64,
}

impl Kind {
    fn from_number(n: u32) -> Option<Self> {
        use Kind::{Array, Bool, F32, F64, I8, I16, I32, I64, Str, U8, U16, U32, U64};
        [U8, I8, U16, I16, U32, I32, F32, Bool, Str, Array, U64, I64, F64].get(n as usize).copied()
    }

    /// Size of a value; for strings and arrays the least that one takes.
    const fn min_bytes(self) -> usize {
        match self {
            Self::U8 | Self::I8 | Self::Bool => 1,
            Self::U16 | Self::I16 => 2,
            Self::U32 | Self::I32 | Self::F32 => 4,
            Self::U64 | Self::I64 | Self::F64 | Self::Str => 8,
            Self::Array => 12,
        }
    }
}

/// An opened file: its map and metadata. The tensor list goes to the checkpoint.
#[derive(Debug)]
pub(super) struct Gguf {
    path: PathBuf,
    file: Bytes,
    meta: Meta,
}

#[derive(Debug)]
enum Bytes {
    Map(FileMap),
    Memory(Vec<u8>),
}

impl Deref for Bytes {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        match self {
            Self::Map(map) => map,
            Self::Memory(bytes) => bytes,
        }
    }
}

impl Gguf {
    pub(super) fn open(path: &Path) -> Result<(Self, Tensors), CheckpointError> {
        let map = FileMap::open(path).map_err(|e| Blame(path).io(e))?;
        let (meta, tensors) = parse(path, &map)?;
        Ok((Self { path: path.to_owned(), file: Bytes::Map(map), meta }, tensors))
    }

    /// A file that is in memory already; `path` is only a name.
    pub(super) fn from_bytes(path: &Path, bytes: Vec<u8>) -> Result<(Self, Tensors), CheckpointError> {
        let (meta, tensors) = parse(path, &bytes)?;
        Ok((Self { path: path.to_owned(), file: Bytes::Memory(bytes), meta }, tensors))
    }

    pub(super) fn path(&self) -> &Path {
        &self.path
    }

    pub(super) fn meta(&self) -> &Meta {
        &self.meta
    }

    pub(super) fn bytes(&self, offset: usize, len: usize) -> &[u8] {
        &self.file[offset..offset + len]
    }

    /// Decodes a plain-float tensor.
    pub(super) fn floats(&self, name: &str, info: &TensorInfo, bytes: &[u8]) -> Result<Vec<f32>, CheckpointError> {
        let halves = || bytes.chunks_exact(2).map(|b| u16::from_le_bytes([b[0], b[1]]));
        match info.dtype {
            DType::F32 => Ok(bytes.chunks_exact(4).map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]])).collect()),
            DType::F16 => Ok(halves().map(|b| f16::from_bits(b).to_f32()).collect()),
            DType::Bf16 => Ok(halves().map(|b| bf16::from_bits(b).to_f32()).collect()),
            other => Err(Blame(&self.path).invalid(format!("tensor {name:?}"), format!("{other:?}"), "plain floats")),
        }
    }

    /// Decodes an array of strings, which must be UTF-8.
    pub(super) fn strings(&self, key: &str, array: MetaArray) -> Result<Vec<String>, CheckpointError> {
        self.elements(key, array, Kind::Str, "an array of strings", |r, i| {
            let bytes = r.string_bytes(key)?;
            let text = std::str::from_utf8(bytes)
                .map_err(|_| r.blame.invalid(format!("key {key:?}[{i}]"), String::from_utf8_lossy(bytes), "UTF-8"))?;
            Ok(text.to_owned())
        })
    }

    /// Decodes an array of 32-bit floats.
    pub(super) fn f32s(&self, key: &str, array: MetaArray) -> Result<Vec<f32>, CheckpointError> {
        self.elements(key, array, Kind::F32, "an array of f32", |r, _| Ok(f32::from_le_bytes(r.take(key)?)))
    }

    /// Decodes an array of 32-bit integers, signed or not.
    pub(super) fn i32s(&self, key: &str, array: MetaArray) -> Result<Vec<i32>, CheckpointError> {
        let kind = if array.kind == Kind::U32 { Kind::U32 } else { Kind::I32 };
        self.elements(key, array, kind, "an array of i32", |r, _| Ok(i32::from_le_bytes(r.take(key)?)))
    }

    fn elements<T>(
        &self,
        key: &str,
        array: MetaArray,
        kind: Kind,
        expected: &str,
        mut one: impl FnMut(&mut Reader<'_>, usize) -> Result<T, CheckpointError>,
    ) -> Result<Vec<T>, CheckpointError> {
        let blame = Blame(&self.path);
        if array.kind != kind {
            return Err(blame.invalid(format!("key {key:?}"), format!("an array of {:?}", array.kind), expected));
        }
        let mut reader = Reader { blame, bytes: &self.file[..array.end], at: array.start };
        // Each element takes at least `min_bytes` of the file (checked at open), so the capacity is justified.
        let mut out = Vec::with_capacity(array.len);
        for i in 0..array.len {
            out.push(one(&mut reader, i)?);
        }
        Ok(out)
    }
}

/// Whether a file begins as GGUF does; no if it cannot be read.
pub(super) fn has_magic(path: &Path) -> bool {
    let mut magic = [0; 4];
    File::open(path).and_then(|mut f| f.read_exact(&mut magic)).is_ok() && &magic == MAGIC
}

/// Walks a whole header.
fn parse(path: &Path, bytes: &[u8]) -> Result<(Meta, Tensors), CheckpointError> {
    let mut r = Reader { blame: Blame(path), bytes, at: 0 };
    r.magic_and_version()?;
    let n_tensors = r.count("tensor count", 8 + 4 + 8 + 4 + 8)?;
    let n_meta = r.count("metadata count", 8 + 4 + 1)?;
    let meta = r.metadata(n_meta)?;
    refuse_split(r.blame, &meta)?;
    let alignment = alignment(r.blame, &meta)?;
    let mut tensors = r.tensor_table(n_tensors)?;
    place(r.blame, &mut tensors, (r.at as u64).next_multiple_of(alignment), alignment, bytes.len() as u64)?;
    let list = tensors.into_iter().map(|t| (t.name, t.entry)).collect();
    Ok((meta, list))
}

/// A tensor while its place is being checked.
struct Placed {
    name: String,
    entry: Entry,
    relative: u64,
}

/// Turns offsets relative to the data section into checked absolute ones.
fn place(
    blame: Blame<'_>,
    tensors: &mut [Placed],
    data_start: u64,
    alignment: u64,
    file_len: u64,
) -> Result<(), CheckpointError> {
    for t in &mut *tensors {
        let at = || format!("offset of tensor {:?}", t.name);
        if t.relative % alignment != 0 {
            return Err(blame.invalid(at(), t.relative.to_string(), format!("a multiple of {alignment}")));
        }
        let end = data_start.checked_add(t.relative).and_then(|o| o.checked_add(t.entry.info.bytes as u64));
        match end {
            Some(end) if end <= file_len => t.entry.offset = end as usize - t.entry.info.bytes,
            _ => {
                let found = format!("{} bytes at offset {} + {data_start}", t.entry.info.bytes, t.relative);
                let expected = format!("an end within the file's {file_len} bytes (is the download complete?)");
                return Err(blame.invalid(format!("tensor {:?}", t.name), found, expected));
            }
        }
    }
    let mut by_offset: Vec<&Placed> = tensors.iter().collect();
    by_offset.sort_unstable_by_key(|t| t.entry.offset);
    for pair in by_offset.windows(2) {
        let end = pair[0].entry.offset + pair[0].entry.info.bytes;
        if end > pair[1].entry.offset {
            return Err(blame.invalid(
                format!("tensor {:?}", pair[1].name),
                format!("starts at byte {}, inside tensor {:?}", pair[1].entry.offset, pair[0].name),
                format!("a start at or after byte {end}"),
            ));
        }
    }
    Ok(())
}

fn alignment(blame: Blame<'_>, meta: &Meta) -> Result<u64, CheckpointError> {
    match meta.get("general.alignment") {
        None => Ok(DEFAULT_ALIGNMENT),
        Some(MetaValue::U64(a)) if a.is_power_of_two() && (8..=MAX_ALIGNMENT).contains(a) => Ok(*a),
        Some(other) => {
            let expected = format!("a power of two from 8 to {MAX_ALIGNMENT}");
            Err(blame.invalid("key \"general.alignment\"", format!("{other:?}"), expected))
        }
    }
}

fn refuse_split(blame: Blame<'_>, meta: &Meta) -> Result<(), CheckpointError> {
    match meta.get("split.count") {
        None | Some(MetaValue::U64(0 | 1)) => Ok(()),
        Some(count) => Err(blame.unsupported(
            "key \"split.count\"",
            format!("a GGUF split into parts ({count:?})"),
            "merge the parts first: `llama-gguf-split --merge FIRST_PART OUT.gguf`",
        )),
    }
}

/// Format of a `ggml_type` number, or the name of a format that is refused.
fn tensor_type(n: u32) -> Result<DType, &'static str> {
    const REFUSED: [(u32, &str); 24] = [
        (4, "Q4_2"),
        (5, "Q4_3"),
        (9, "Q8_1"),
        (10, "Q2_K"),
        (11, "Q3_K"),
        (15, "Q8_K"),
        (16, "IQ2_XXS"),
        (17, "IQ2_XS"),
        (18, "IQ3_XXS"),
        (19, "IQ1_S"),
        (20, "IQ4_NL"),
        (21, "IQ3_S"),
        (22, "IQ2_S"),
        (23, "IQ4_XS"),
        (24, "I8"),
        (25, "I16"),
        (26, "I32"),
        (27, "I64"),
        (28, "F64"),
        (29, "IQ1_M"),
        (34, "TQ1_0"),
        (35, "TQ2_0"),
        (39, "MXFP4"),
        (40, "NVFP4"),
    ];
    Ok(match n {
        0 => DType::F32,
        1 => DType::F16,
        2 => DType::Q4_0,
        3 => DType::Q4_1,
        6 => DType::Q5_0,
        7 => DType::Q5_1,
        8 => DType::Q8_0,
        12 => DType::Q4K,
        13 => DType::Q5K,
        14 => DType::Q6K,
        30 => DType::Bf16,
        other => return Err(REFUSED.iter().find(|(n, _)| *n == other).map_or("", |(_, name)| name)),
    })
}

/// A position in the file; every read checks what is left.
struct Reader<'a> {
    blame: Blame<'a>,
    bytes: &'a [u8],
    at: usize,
}

impl<'a> Reader<'a> {
    fn left(&self) -> usize {
        self.bytes.len() - self.at
    }

    fn slice(&mut self, n: usize, what: &str) -> Result<&'a [u8], CheckpointError> {
        if n > self.left() {
            let found = format!("{n} bytes wanted at byte {}, {} left", self.at, self.left());
            return Err(self.blame.invalid(what, found, "a complete file"));
        }
        let slice = &self.bytes[self.at..self.at + n];
        self.at += n;
        Ok(slice)
    }

    fn take<const N: usize>(&mut self, what: &str) -> Result<[u8; N], CheckpointError> {
        let slice = self.slice(N, what)?;
        Ok(slice.try_into().expect("slice has the asked length"))
    }

    fn u32(&mut self, what: &str) -> Result<u32, CheckpointError> {
        Ok(u32::from_le_bytes(self.take(what)?))
    }

    fn u64(&mut self, what: &str) -> Result<u64, CheckpointError> {
        Ok(u64::from_le_bytes(self.take(what)?))
    }

    /// A count of things that take at least `min_bytes` each.
    fn count(&mut self, what: &str, min_bytes: usize) -> Result<usize, CheckpointError> {
        let n = self.u64(what)?;
        let most = self.left() / min_bytes;
        match usize::try_from(n) {
            Ok(n) if n <= most => Ok(n),
            _ => {
                Err(self.blame.invalid(what, n.to_string(), format!("at most {most}, all that the file has room for")))
            }
        }
    }

    fn string_bytes(&mut self, what: &str) -> Result<&'a [u8], CheckpointError> {
        let n = self.u64(what)?;
        match usize::try_from(n) {
            Ok(n) if n <= self.left() => self.slice(n, what),
            _ => {
                let expected = format!("at most the {} bytes that are left", self.left());
                Err(self.blame.invalid(what, format!("a string of {n} bytes"), expected))
            }
        }
    }

    fn string(&mut self, what: &str) -> Result<&'a str, CheckpointError> {
        let bytes = self.string_bytes(what)?;
        std::str::from_utf8(bytes)
            .map_err(|_| self.blame.invalid(what, String::from_utf8_lossy(bytes).into_owned(), "UTF-8"))
    }

    fn magic_and_version(&mut self) -> Result<(), CheckpointError> {
        let magic: [u8; 4] = self.take("magic")?;
        if &magic != MAGIC {
            return Err(self.blame.invalid("magic", format!("{magic:?}"), "the bytes GGUF"));
        }
        let version = self.u32("version")?;
        match version {
            2 | 3 => Ok(()),
            0 | 1 => Err(self.blame.unsupported(
                "version",
                format!("GGUF version {version}"),
                "convert the model again; versions 2 and 3 are supported",
            )),
            _ if matches!(version.swap_bytes(), 1..=3) => Err(self.blame.unsupported(
                "version",
                "a big-endian GGUF file",
                "convert the model again as little-endian",
            )),
            _ => Err(self.blame.unsupported(
                "version",
                format!("GGUF version {version}"),
                "versions 2 and 3 are supported; use an older file or a newer release",
            )),
        }
    }

    fn metadata(&mut self, n: usize) -> Result<Meta, CheckpointError> {
        let mut map = HashMap::with_capacity(n);
        for i in 0..n {
            let key = self.string(&format!("key {i}"))?;
            if key.is_empty() || key.len() > MAX_KEY_BYTES {
                let expected = format!("a name of 1 to {MAX_KEY_BYTES} bytes");
                return Err(self.blame.invalid(format!("key {i}"), format!("{key:?}"), expected));
            }
            let at = format!("key {:?}", super::clip(key));
            let kind = self.kind(&at)?;
            let value = self.value(kind, &at)?;
            if map.insert(key.to_owned(), value).is_some() {
                return Err(self.blame.invalid(at, "given twice", "each key once"));
            }
        }
        Ok(Meta(map))
    }

    fn kind(&mut self, at: &str) -> Result<Kind, CheckpointError> {
        let n = self.u32(at)?;
        Kind::from_number(n)
            .ok_or_else(|| self.blame.invalid(at, format!("value type {n}"), "a value type from 0 to 12"))
    }

    fn value(&mut self, kind: Kind, at: &str) -> Result<MetaValue, CheckpointError> {
        Ok(match kind {
            Kind::U8 => MetaValue::U64(u8::from_le_bytes(self.take(at)?).into()),
            Kind::U16 => MetaValue::U64(u16::from_le_bytes(self.take(at)?).into()),
            Kind::U32 => MetaValue::U64(self.u32(at)?.into()),
            Kind::U64 => MetaValue::U64(self.u64(at)?),
            Kind::I8 => MetaValue::I64(i8::from_le_bytes(self.take(at)?).into()),
            Kind::I16 => MetaValue::I64(i16::from_le_bytes(self.take(at)?).into()),
            Kind::I32 => MetaValue::I64(i32::from_le_bytes(self.take(at)?).into()),
            Kind::I64 => MetaValue::I64(i64::from_le_bytes(self.take(at)?)),
            Kind::F32 => MetaValue::F32(f32::from_le_bytes(self.take(at)?)),
            Kind::F64 => MetaValue::F64(f64::from_le_bytes(self.take(at)?)),
            Kind::Bool => match self.take::<1>(at)? {
                [b @ (0 | 1)] => MetaValue::Bool(b == 1),
                [b] => return Err(self.blame.invalid(at, format!("the byte {b}"), "a boolean, 0 or 1")),
            },
            Kind::Str => MetaValue::Str(self.string(at)?.to_owned()),
            Kind::Array => MetaValue::Array(self.array(at, 1)?),
        })
    }

    /// Checks an array and steps over it.
    fn array(&mut self, at: &str, depth: u32) -> Result<MetaArray, CheckpointError> {
        if depth > MAX_ARRAY_DEPTH {
            let expected = format!("arrays nested at most {MAX_ARRAY_DEPTH} deep");
            return Err(self.blame.invalid(at, "a deeper array", expected));
        }
        let kind = self.kind(at)?;
        let len = self.count(at, kind.min_bytes())?;
        let start = self.at;
        match kind {
            Kind::Str => {
                for _ in 0..len {
                    self.string_bytes(at)?;
                }
            }
            Kind::Array => {
                for _ in 0..len {
                    self.array(at, depth + 1)?;
                }
            }
            // `count` has checked that the product fits.
            plain => drop(self.slice(len * plain.min_bytes(), at)?),
        }
        Ok(MetaArray { kind, len, start, end: self.at })
    }

    fn tensor_table(&mut self, n: usize) -> Result<Vec<Placed>, CheckpointError> {
        let mut names = HashSet::with_capacity(n);
        let mut out = Vec::with_capacity(n);
        for i in 0..n {
            let name = self.string(&format!("name of tensor {i}"))?;
            let at = format!("tensor {:?}", super::clip(name));
            if name.is_empty() || !names.insert(name) {
                return Err(self.blame.invalid(
                    format!("name of tensor {i}"),
                    format!("{name:?}"),
                    "a name not yet used",
                ));
            }
            let shape = self.shape(&at)?;
            let n_type = self.u32(&at)?;
            let dtype = tensor_type(n_type).map_err(|name| {
                let next = "F32, F16, BF16, Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, Q4_K, Q5_K and Q6_K are; pick such a file";
                self.blame.unsupported(&at, format!("type {n_type} {name}").trim_end(), next)
            })?;
            let bytes = self.size(dtype, &shape, &at)?;
            let relative = self.u64(&at)?;
            let entry = Entry { info: TensorInfo { dtype, shape, bytes }, file: 0, offset: 0 };
            out.push(Placed { name: name.to_owned(), entry, relative });
        }
        Ok(out)
    }

    /// Dimensions, turned to outermost first.
    fn shape(&mut self, at: &str) -> Result<Vec<usize>, CheckpointError> {
        let n_dims = self.u32(at)?;
        if n_dims == 0 || n_dims > MAX_DIMS {
            let expected = format!("1 to {MAX_DIMS} dimensions");
            return Err(self.blame.invalid(at, format!("{n_dims} dimensions"), expected));
        }
        let mut shape = Vec::with_capacity(n_dims as usize);
        for _ in 0..n_dims {
            let dim = self.u64(at)?;
            match usize::try_from(dim) {
                Ok(dim) if dim > 0 => shape.push(dim),
                _ => return Err(self.blame.invalid(at, format!("a dimension of {dim}"), "at least 1")),
            }
        }
        shape.reverse();
        Ok(shape)
    }

    fn size(&self, dtype: DType, shape: &[usize], at: &str) -> Result<usize, CheckpointError> {
        let (row, rows) = shape.split_last().expect("shapes have a dimension");
        let row_bytes = dtype.row_bytes(*row).ok_or_else(|| {
            let expected = format!("a multiple of {} ({dtype:?})", dtype.block_len());
            self.blame.invalid(at, format!("rows of {row} elements"), expected)
        })?;
        rows.iter()
            .try_fold(row_bytes, |n, dim| n.checked_mul(*dim))
            .ok_or_else(|| self.blame.invalid(at, format!("shape {shape:?}"), "a size below 2^64 bytes"))
    }
}
