//! Safetensors files, one or sharded (huggingface/safetensors, README "Format"): a length, a JSON header, the data.
//!
//! The header is parsed here and not by the `safetensors` crate, whose errors do not say which tensor is wrong and which
//! keeps the last of two tensors of one name; the crate is the referee in the tests.

use std::{
    borrow::Cow,
    collections::{BTreeMap, HashMap, HashSet},
    fmt,
    fs::File,
    os::unix::fs::FileExt,
    path::{Path, PathBuf},
};

use kwire_kernels::{DType, FileMap};
use serde::{
    Deserialize, Deserializer,
    de::{Error, IgnoredAny, MapAccess, Visitor},
};

use super::{Blame, CheckpointError, Entry, ReadMode, TensorInfo, Tensors};

/// The `safetensors` crate's limit.
const MAX_HEADER_BYTES: u64 = 100_000_000;
const MAX_INDEX_BYTES: u64 = 100_000_000;
/// Below this a single read is faster than starting threads.
const PARALLEL_MIN_BYTES: usize = 8 << 20;
const MAX_READ_THREADS: usize = 8;
const INDEX: &str = "model.safetensors.index.json";

/// One opened file.
#[derive(Debug)]
pub(super) struct Shard {
    path: PathBuf,
    bytes: ShardBytes,
}

#[derive(Debug)]
enum ShardBytes {
    File(File),
    Map(FileMap),
}

impl Shard {
    /// Bytes that the header vouches for; a failure means that the file changed or the disk failed.
    pub(super) fn read(&self, offset: usize, len: usize) -> Result<Cow<'_, [u8]>, CheckpointError> {
        match &self.bytes {
            ShardBytes::Map(map) => Ok(Cow::Borrowed(&map[offset..offset + len])),
            ShardBytes::File(file) => {
                let mut out = vec![0; len];
                read_parallel(file, offset as u64, &mut out).map_err(|e| Blame(&self.path).io(e))?;
                Ok(Cow::Owned(out))
            }
        }
    }
}

fn read_parallel(file: &File, offset: u64, out: &mut [u8]) -> std::io::Result<()> {
    if out.len() < PARALLEL_MIN_BYTES {
        return file.read_exact_at(out, offset);
    }
    let n_threads = std::thread::available_parallelism().map_or(1, usize::from).clamp(2, MAX_READ_THREADS);
    let part = out.len().div_ceil(n_threads).next_multiple_of(4096);
    std::thread::scope(|scope| {
        let readers: Vec<_> = out
            .chunks_mut(part)
            .enumerate()
            .map(|(i, chunk)| scope.spawn(move || file.read_exact_at(chunk, offset + (i * part) as u64)))
            .collect();
        readers.into_iter().try_for_each(|r| r.join().expect("a reader does not panic"))
    })
}

/// Opens the weights of a Hugging Face folder.
pub(super) fn open_folder(folder: &Path, mode: ReadMode) -> Result<(Vec<Shard>, Tensors), CheckpointError> {
    let index = folder.join(INDEX);
    if index.is_file() {
        return open_sharded(folder, &index, mode);
    }
    let single = single_file(folder)?;
    let (shard, list) = open_file(&single, 0, mode)?;
    Ok((vec![shard], list))
}

/// `model.safetensors`, or the only safetensors file of the folder.
fn single_file(folder: &Path) -> Result<PathBuf, CheckpointError> {
    let usual = folder.join("model.safetensors");
    if usual.is_file() {
        return Ok(usual);
    }
    let mut found = Vec::new();
    for entry in std::fs::read_dir(folder).map_err(|e| Blame(folder).io(e))? {
        let path = entry.map_err(|e| Blame(folder).io(e))?.path();
        if path.extension().is_some_and(|e| e == "safetensors") {
            found.push(path);
        }
    }
    match found.len() {
        1 => Ok(found.remove(0)),
        0 => Err(CheckpointError::NotFound {
            path: folder.to_owned(),
            reason: format!("expected model.safetensors or {INDEX} (pickled .bin weights are never loaded)"),
        }),
        n => Err(CheckpointError::NotFound {
            path: folder.to_owned(),
            reason: format!("{n} safetensors files but no {INDEX} that says which tensor is where"),
        }),
    }
}

#[derive(Deserialize)]
struct Index {
    weight_map: UniqueMap<String>,
}

fn open_sharded(folder: &Path, index_path: &Path, mode: ReadMode) -> Result<(Vec<Shard>, Tensors), CheckpointError> {
    let blame = Blame(index_path);
    let text = read_small(index_path, MAX_INDEX_BYTES)?;
    let index: Index = serde_json::from_slice(&text)
        .map_err(|e| blame.invalid("JSON", e.to_string(), "{\"weight_map\": {tensor: file}}"))?;
    let mut wanted: BTreeMap<&str, Vec<&str>> = BTreeMap::new();
    for (tensor, file) in &index.weight_map.0 {
        let plain = Path::new(file).components().count() == 1 && Path::new(file).file_name().is_some();
        if !plain || !file.ends_with(".safetensors") {
            return Err(blame.invalid(format!("file of tensor {tensor:?}"), format!("{file:?}"), "a plain file name"));
        }
        wanted.entry(file).or_default().push(tensor);
    }
    let (mut shards, mut all) = (Vec::new(), Vec::new());
    let mut seen: HashMap<String, &str> = HashMap::new();
    for (i, (file, tensors)) in wanted.iter().enumerate() {
        let path = folder.join(file);
        if !path.is_file() {
            let at = format!("file {file:?} with tensor {:?}", tensors[0]);
            return Err(blame.invalid(at, "missing", "every shard beside the index (is the download complete?)"));
        }
        let (shard, list) = open_file(&path, i, mode)?;
        check_shard(blame, file, tensors, &list, &index.weight_map, &mut seen)?;
        shards.push(shard);
        all.extend(list);
    }
    Ok((shards, all))
}

/// The shard holds exactly the tensors that the index places in it. `seen` has the file of each tensor so far.
fn check_shard<'a>(
    blame: Blame<'_>,
    file: &'a str,
    tensors: &[&str],
    list: &[(String, Entry)],
    index: &UniqueMap<String>,
    seen: &mut HashMap<String, &'a str>,
) -> Result<(), CheckpointError> {
    let held: HashSet<&str> = list.iter().map(|(name, _)| name.as_str()).collect();
    if let Some(missing) = tensors.iter().find(|t| !held.contains(*t)) {
        return Err(blame.invalid(format!("tensor {missing:?}"), format!("not in {file:?}"), "the file that holds it"));
    }
    let expected: HashSet<&str> = tensors.iter().copied().collect();
    for (name, _) in list {
        if let Some(other) = seen.insert(name.clone(), file) {
            let found = format!("in {file:?} and in {other:?}");
            return Err(blame.invalid(format!("tensor {name:?}"), found, "each tensor in one file"));
        }
        if !expected.contains(name.as_str()) {
            let found = match index.0.iter().find(|(tensor, _)| tensor == name) {
                Some((_, other)) => format!("in {file:?}, while the index says {other:?}"),
                None => format!("in {file:?}, but not in the index"),
            };
            return Err(blame.invalid(format!("tensor {name:?}"), found, "files that agree with the index"));
        }
    }
    Ok(())
}

/// Reads a file that is expected to be small, whole.
pub(super) fn read_small(path: &Path, max_bytes: u64) -> Result<Vec<u8>, CheckpointError> {
    let blame = Blame(path);
    let len = std::fs::metadata(path).map_err(|e| blame.io(e))?.len();
    if len > max_bytes {
        return Err(blame.invalid("file size", format!("{len} bytes"), format!("at most {max_bytes}")));
    }
    std::fs::read(path).map_err(|e| blame.io(e))
}

/// Opens one file and checks its header.
fn open_file(path: &Path, file: usize, mode: ReadMode) -> Result<(Shard, Tensors), CheckpointError> {
    let blame = Blame(path);
    let handle = File::open(path).map_err(|e| blame.io(e))?;
    let file_len = handle.metadata().map_err(|e| blame.io(e))?.len();
    let header_len = match file_len.checked_sub(8) {
        None => return Err(blame.invalid("file size", format!("{file_len} bytes"), "at least 8")),
        Some(rest) => {
            let mut prefix = [0; 8];
            handle.read_exact_at(&mut prefix, 0).map_err(|e| blame.io(e))?;
            header_len(blame, u64::from_le_bytes(prefix), rest)?
        }
    };
    let mut header = vec![0; header_len];
    handle.read_exact_at(&mut header, 8).map_err(|e| blame.io(e))?;
    let list = parse_header(path, &header, file_len, file)?;
    let bytes = match mode {
        ReadMode::Parallel => ShardBytes::File(handle),
        ReadMode::Mmap => ShardBytes::Map(FileMap::open(path).map_err(|e| blame.io(e))?),
    };
    if let ShardBytes::Map(map) = &bytes
        && (map.len() as u64) < file_len
    {
        return Err(blame.invalid("file size", format!("{} bytes", map.len()), format!("{file_len}, as a moment ago")));
    }
    Ok((Shard { path: path.to_owned(), bytes }, list))
}

fn header_len(blame: Blame<'_>, declared: u64, rest: u64) -> Result<usize, CheckpointError> {
    if declared > rest.min(MAX_HEADER_BYTES) {
        let expected = format!("at most {}", rest.min(MAX_HEADER_BYTES));
        return Err(blame.invalid("header size", format!("{declared} bytes"), expected));
    }
    Ok(declared as usize)
}

#[derive(Deserialize)]
struct RawTensor {
    dtype: String,
    shape: Vec<u64>,
    data_offsets: (u64, u64),
}

fn parse_header(path: &Path, header: &[u8], file_len: u64, file: usize) -> Result<Tensors, CheckpointError> {
    let blame = Blame(path);
    let raw: UniqueMap<RawTensor> = serde_json::from_slice(header)
        .map_err(|e| blame.invalid("header", e.to_string(), "a JSON object of tensors, each named once"))?;
    let data_start = 8 + header.len() as u64;
    let data_len = file_len - data_start;
    let mut list = Vec::with_capacity(raw.0.len());
    for (name, tensor) in raw.0 {
        let entry = check_tensor(blame, &name, &tensor, data_start, data_len, file)?;
        list.push((name, entry));
    }
    list.sort_by_key(|(_, e)| (e.offset, e.info.bytes));
    check_contiguous(blame, &list, data_start, file_len)?;
    Ok(list)
}

fn check_tensor(
    blame: Blame<'_>,
    name: &str,
    raw: &RawTensor,
    data_start: u64,
    data_len: u64,
    file: usize,
) -> Result<Entry, CheckpointError> {
    let at = format!("tensor {:?}", super::clip(name));
    let dtype = match raw.dtype.as_str() {
        "F32" => DType::F32,
        "F16" => DType::F16,
        "BF16" => DType::Bf16,
        other => {
            let next = "F32, F16 and BF16 are; pick such a checkpoint, or a GGUF file for quantized weights";
            return Err(blame.unsupported(at, format!("type {other:?}"), next));
        }
    };
    let (begin, end) = raw.data_offsets;
    if begin > end || end > data_len {
        let expected = format!("begin <= end <= {data_len} (is the download complete?)");
        return Err(blame.invalid(at, format!("data offsets [{begin}, {end}]"), expected));
    }
    let bytes = raw
        .shape
        .iter()
        .try_fold(dtype.block_bytes() as u64, |n, dim| n.checked_mul(*dim))
        .ok_or_else(|| blame.invalid(&at, format!("shape {:?}", raw.shape), "a size below 2^64 bytes"))?;
    if bytes != end - begin {
        let found = format!("{} bytes for shape {:?} of {}", end - begin, raw.shape, raw.dtype);
        return Err(blame.invalid(at, found, format!("{bytes} bytes")));
    }
    let shape = raw.shape.iter().map(|d| usize::try_from(*d)).collect::<Result<Vec<_>, _>>();
    let shape = shape.map_err(|_| blame.invalid(&at, format!("shape {:?}", raw.shape), "dimensions below 2^63"))?;
    let info = TensorInfo { dtype, shape, bytes: bytes as usize };
    Ok(Entry { info, file, offset: (data_start + begin) as usize })
}

/// The format wants no gaps and no overlaps; `list` is sorted by offset.
fn check_contiguous(
    blame: Blame<'_>,
    list: &[(String, Entry)],
    data_start: u64,
    file_len: u64,
) -> Result<(), CheckpointError> {
    let mut end = data_start as usize;
    for (name, entry) in list {
        if entry.offset != end {
            let found = format!("starts at byte {}", entry.offset);
            let expected = format!("byte {end}: no gaps and no overlaps");
            return Err(blame.invalid(format!("tensor {name:?}"), found, expected));
        }
        end += entry.info.bytes;
    }
    if end as u64 != file_len {
        return Err(blame.invalid(
            "file size",
            format!("{file_len} bytes"),
            format!("{end}, the end of the last tensor"),
        ));
    }
    Ok(())
}

/// A JSON object in its own order that refuses a key given twice, and skips the free text under `__metadata__`.
struct UniqueMap<T>(Vec<(String, T)>);

impl<'de, T: Deserialize<'de>> Deserialize<'de> for UniqueMap<T> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Pairs<T>(std::marker::PhantomData<T>);
        impl<'de, T: Deserialize<'de>> Visitor<'de> for Pairs<T> {
            type Value = UniqueMap<T>;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a JSON object")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Self::Value, A::Error> {
                let mut seen = HashSet::new();
                let mut pairs = Vec::new();
                while let Some(key) = map.next_key::<String>()? {
                    let at = |what: &dyn fmt::Display| A::Error::custom(format!("{:?}: {what}", super::clip(&key)));
                    if !seen.insert(key.clone()) {
                        return Err(at(&"given twice"));
                    }
                    if key == "__metadata__" {
                        map.next_value::<IgnoredAny>()?;
                    } else {
                        let value = map.next_value::<T>().map_err(|e| at(&e))?;
                        pairs.push((key, value));
                    }
                }
                Ok(UniqueMap(pairs))
            }
        }
        deserializer.deserialize_map(Pairs(std::marker::PhantomData))
    }
}

/// Checks a whole file that is in memory; `path` is only a name.
pub(super) fn check_bytes(path: &Path, bytes: &[u8]) -> Result<Tensors, CheckpointError> {
    let blame = Blame(path);
    let Some((prefix, rest)) = bytes.split_first_chunk() else {
        return Err(blame.invalid("file size", format!("{} bytes", bytes.len()), "at least 8"));
    };
    let len = header_len(blame, u64::from_le_bytes(*prefix), rest.len() as u64)?;
    parse_header(path, &rest[..len], bytes.len() as u64, 0)
}
