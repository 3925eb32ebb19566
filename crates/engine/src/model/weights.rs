//! From a checkpoint to a backend's weights. Each tensor is consumed exactly once, or loading fails with its name.
//!
//! Fusion is decided here: q, k and v become one linear layer, gate and up another.

use std::borrow::Cow;
use std::collections::HashSet;

use kwire_kernels::{Backend, DType, KernelError, WeightPart};

use super::checkpoint::{Checkpoint, CheckpointError};
use super::spec::{AttentionSpec, DecoderSpec, LayerRole, LayerSpec, Role, WeightNames};

/// Why a checkpoint's weights cannot be taken.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs)]
pub enum LoadError {
    #[error(transparent)]
    Checkpoint(#[from] CheckpointError),
    #[error("tensor {name}: {source}")]
    Kernel { name: String, source: KernelError },
    #[error(transparent)]
    Memory(#[from] KernelError),
    #[error("the checkpoint has no tensor {name}, which its config calls for")]
    Missing { name: String },
    #[error("tensor {name} has the shape {found:?}, but the config calls for {expected:?}")]
    Shape { name: String, found: Vec<usize>, expected: Vec<usize> },
    #[error("tensor {name} is stored as {dtype:?}; a norm or bias must be a plain float")]
    QuantizedVector { name: String, dtype: DType },
    #[error("{count} tensors are used by nothing that the config describes, the first is {first}")]
    Unused { first: String, count: usize },
}

/// Weights of one layer.
pub(super) struct LayerWeights<B: Backend> {
    pub attention_norm: B::Vector,
    pub qkv: B::Weight,
    pub qk_norm: Option<(B::Vector, B::Vector)>,
    pub out: B::Weight,
    pub mlp_norm: B::Vector,
    pub gate_up: B::Weight,
    pub down: B::Weight,
}

/// Weights of a decoder.
pub struct Weights<B: Backend> {
    pub(super) embed: B::Weight,
    /// `None`: the embedding's.
    pub(super) head: Option<B::Weight>,
    pub(super) final_norm: B::Vector,
    pub(super) layers: Vec<LayerWeights<B>>,
}

/// Names and shapes of all tensors that `spec` calls for.
pub(super) fn tensors(spec: &DecoderSpec, names: &WeightNames) -> Vec<(String, Vec<usize>)> {
    let mut tensors = Vec::new();
    let mut add = |role, shape: &[usize], bias: bool| {
        let base = names.name(role);
        tensors.push((format!("{base}.weight"), shape.to_vec()));
        if bias {
            tensors.push((format!("{base}.bias"), shape[..1].to_vec()));
        }
    };
    add(Role::Embed, &[spec.n_vocab, spec.hidden], false);
    for (i, layer) in spec.layers.iter().enumerate() {
        let AttentionSpec { op, qkv_bias, out_bias, qk_norm_eps, .. } = &layer.attention;
        let (q, kv, mlp) = (op.heads * op.head_dim, op.kv_heads * op.head_dim, &layer.mlp);
        let mut add = |role, shape: &[usize], bias| add(Role::Layer(i, role), shape, bias);
        add(LayerRole::AttentionNorm, &[spec.hidden], false);
        add(LayerRole::Q, &[q, spec.hidden], *qkv_bias);
        add(LayerRole::K, &[kv, spec.hidden], *qkv_bias);
        add(LayerRole::V, &[kv, spec.hidden], *qkv_bias);
        if qk_norm_eps.is_some() {
            add(LayerRole::QNorm, &[op.head_dim], false);
            add(LayerRole::KNorm, &[op.head_dim], false);
        }
        add(LayerRole::O, &[spec.hidden, q], *out_bias);
        add(LayerRole::MlpNorm, &[spec.hidden], false);
        add(LayerRole::Gate, &[mlp.width, spec.hidden], mlp.bias);
        add(LayerRole::Up, &[mlp.width, spec.hidden], mlp.bias);
        add(LayerRole::Down, &[spec.hidden, mlp.width], mlp.bias);
    }
    add(Role::FinalNorm, &[spec.hidden], false);
    if !spec.tied {
        add(Role::Head, &[spec.n_vocab, spec.hidden], false);
    }
    tensors
}

/// Called with the bytes of the file that have been taken so far.
pub type Progress<'a> = &'a mut dyn FnMut(usize);

/// Loads all weights of `spec`.
pub fn load<B: Backend>(
    checkpoint: &Checkpoint,
    spec: &DecoderSpec,
    names: &WeightNames,
    backend: &mut B,
    progress: Progress<'_>,
) -> Result<Weights<B>, LoadError> {
    let mut loader = Loader { checkpoint, names, backend, used: HashSet::new(), n_bytes: 0, progress };
    let embed = loader.linear(&[(Role::Embed, spec.n_vocab, false)], spec.hidden)?;
    let layers = spec.layers.iter().enumerate().map(|(i, layer)| loader.layer(i, layer, spec.hidden));
    let layers = layers.collect::<Result<_, _>>()?;
    let final_norm = loader.norm(Role::FinalNorm, spec.hidden)?;
    let head = match spec.tied {
        true => None,
        false => Some(loader.linear(&[(Role::Head, spec.n_vocab, false)], spec.hidden)?),
    };
    loader.finish()?;
    Ok(Weights { embed, head, final_norm, layers })
}

struct Loader<'a, B> {
    checkpoint: &'a Checkpoint,
    names: &'a WeightNames,
    backend: &'a mut B,
    used: HashSet<String>,
    n_bytes: usize,
    progress: Progress<'a>,
}

impl<'a, B: Backend> Loader<'a, B> {
    fn layer(&mut self, i: usize, layer: &LayerSpec, hidden: usize) -> Result<LayerWeights<B>, LoadError> {
        let role = |role| Role::Layer(i, role);
        let AttentionSpec { op, qkv_bias, out_bias, qk_norm_eps, .. } = &layer.attention;
        let (q_rows, kv_rows) = (op.heads * op.head_dim, op.kv_heads * op.head_dim);
        let mlp = &layer.mlp;
        let qkv = [
            (role(LayerRole::Q), q_rows, *qkv_bias),
            (role(LayerRole::K), kv_rows, *qkv_bias),
            (role(LayerRole::V), kv_rows, *qkv_bias),
        ];
        let gate_up = [(role(LayerRole::Gate), mlp.width, mlp.bias), (role(LayerRole::Up), mlp.width, mlp.bias)];
        let qk_norm = match qk_norm_eps {
            None => None,
            Some(_) => {
                Some((self.norm(role(LayerRole::QNorm), op.head_dim)?, self.norm(role(LayerRole::KNorm), op.head_dim)?))
            }
        };
        Ok(LayerWeights {
            attention_norm: self.norm(role(LayerRole::AttentionNorm), hidden)?,
            qkv: self.linear(&qkv, hidden)?,
            qk_norm,
            out: self.linear(&[(role(LayerRole::O), hidden, *out_bias)], q_rows)?,
            mlp_norm: self.norm(role(LayerRole::MlpNorm), hidden)?,
            gate_up: self.linear(&gate_up, hidden)?,
            down: self.linear(&[(role(LayerRole::Down), hidden, mlp.bias)], mlp.width)?,
        })
    }

    /// One linear layer of parts `(role, rows, has a bias)`, stacked.
    fn linear(&mut self, parts: &[(Role, usize, bool)], n_cols: usize) -> Result<B::Weight, LoadError> {
        let first = parts[0].0;
        let mut loaded = Vec::with_capacity(parts.len());
        for &(role, n_rows, has_bias) in parts {
            let base = self.names.name(role);
            let (dtype, data) = self.take(&format!("{base}.weight"), &[n_rows, n_cols])?;
            let bias = if has_bias { Some(self.vector(&format!("{base}.bias"), n_rows)?) } else { None };
            loaded.push((dtype, n_rows, data, bias));
        }
        let parts: Vec<_> = loaded
            .iter()
            .map(|(dtype, n_rows, data, bias)| WeightPart {
                dtype: *dtype,
                n_rows: *n_rows,
                n_cols,
                data,
                bias: bias.as_deref(),
            })
            .collect();
        let result = self.backend.weight(&parts);
        result.map_err(|source| LoadError::Kernel { name: self.names.name(first), source })
    }

    fn norm(&mut self, role: Role, n: usize) -> Result<B::Vector, LoadError> {
        let name = format!("{}.weight", self.names.name(role));
        let values = self.vector(&name, n)?;
        self.backend.vector(&values).map_err(|source| LoadError::Kernel { name, source })
    }

    fn vector(&mut self, name: &str, n: usize) -> Result<Vec<f32>, LoadError> {
        let (dtype, data) = self.take(name, &[n])?;
        match dtype {
            DType::F32 => Ok(data.as_chunks().0.iter().map(|&b| f32::from_le_bytes(b)).collect()),
            DType::F16 => Ok(data.as_chunks().0.iter().map(|&b| half::f16::from_le_bytes(b).to_f32()).collect()),
            DType::Bf16 => Ok(data.as_chunks().0.iter().map(|&b| half::bf16::from_le_bytes(b).to_f32()).collect()),
            _ => Err(LoadError::QuantizedVector { name: name.to_owned(), dtype }),
        }
    }

    /// Consumes a tensor of exactly this shape.
    fn take(&mut self, name: &str, expected: &[usize]) -> Result<(DType, Cow<'a, [u8]>), LoadError> {
        let checkpoint = self.checkpoint;
        let info = checkpoint.info(name).ok_or_else(|| LoadError::Missing { name: name.to_owned() })?;
        if info.shape != expected {
            let (name, found) = (name.to_owned(), info.shape.clone());
            return Err(LoadError::Shape { name, found, expected: expected.to_vec() });
        }
        let fresh = self.used.insert(name.to_owned());
        assert!(fresh, "the spec uses {name} twice");
        let data = checkpoint.read(name)?;
        self.n_bytes += data.len();
        (self.progress)(self.n_bytes);
        Ok((info.dtype, data))
    }

    fn finish(self) -> Result<(), LoadError> {
        let mut unused = self.checkpoint.names().filter(|n| !self.used.contains(*n) && !self.names.is_ignored(n));
        match unused.next() {
            None => Ok(()),
            Some(first) => Err(LoadError::Unused { first: first.to_owned(), count: 1 + unused.count() }),
        }
    }
}
