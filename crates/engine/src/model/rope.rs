//! Rotary frequencies as transformers computes them (`modeling_rope_utils.py`), in the same order of f32 operations.
//!
//! With base `θ`, `d` rotating elements and pair `i`: `inv_freq[i] = 1 / θ^(2i/d)`; scaling methods then change them so
//! that a model reads further than it was trained to. torch computes `scalar / tensor` as `(1 / tensor) * scalar`.

use kwire_kernels::{Rope, RopePairing};

use super::config::{Fields, ModelError};

/// Positions that a config may name at most; no real model comes near.
pub(crate) const MAX_CONTEXT: usize = 1 << 31;

/// Unscaled frequencies of `dim` rotating elements.
fn inv_freq(theta: f64, dim: usize) -> Vec<f32> {
    powers(theta, dim).map(|p| 1.0 / p).collect()
}

/// `θ^(2i/d)`: the exponent is an f32, the power is rounded once.
fn powers(theta: f64, dim: usize) -> impl Iterator<Item = f32> {
    let theta = f64::from(theta as f32);
    (0..dim / 2).map(move |i| theta.powf(f64::from((2 * i) as f32 / dim as f32)) as f32)
}

/// How far positions are stretched, as both config formats say it.
#[derive(Debug, Clone, PartialEq)]
pub(crate) enum Scaling {
    /// As trained.
    None,
    /// All frequencies divided by `factor`.
    Linear { factor: f64 },
    /// Llama 3.1: only long wavelengths are stretched.
    Llama3 { factor: f64, low_freq: f64, high_freq: f64, original: usize },
    /// YaRN (arXiv 2309.00071).
    Yarn(Yarn),
}

/// YaRN's parameters.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Yarn {
    pub factor: f64,
    pub original: usize,
    pub beta_fast: f64,
    pub beta_slow: f64,
    pub truncate: bool,
    /// Factor on cos and sin.
    pub attention_factor: f64,
}

/// YaRN's factor on cos and sin for positions stretched by `factor`, as the config's `mscale` weighs it.
fn yarn_mscale(factor: f64, mscale: f64) -> f64 {
    if factor <= 1.0 { 1.0 } else { 0.1 * mscale * factor.ln() + 1.0 }
}

impl Scaling {
    /// The rotation of `dim` elements.
    pub(crate) fn rope(&self, theta: f64, dim: usize, pairing: RopePairing) -> Rope {
        let mut inv_freq = inv_freq(theta, dim);
        let mut scale = 1.0;
        match self {
            Self::None => {}
            Self::Linear { factor } => inv_freq.iter_mut().for_each(|f| *f /= *factor as f32),
            Self::Llama3 { factor, low_freq, high_freq, original } => {
                let original = *original as f64;
                inv_freq.iter_mut().for_each(|f| *f = llama3_freq(*f, *factor, *low_freq, *high_freq, original));
            }
            Self::Yarn(yarn) => {
                inv_freq = yarn.inv_freq(theta, dim);
                scale = yarn.attention_factor as f32;
            }
        }
        Rope { inv_freq, scale, pairing }
    }

    /// Positions that the stretched model was made for, from what the config declares.
    pub(crate) fn max_positions(&self, declared: usize) -> usize {
        match self {
            Self::None | Self::Llama3 { .. } => declared,
            Self::Linear { factor } => (declared as f64 * factor) as usize,
            Self::Yarn(yarn) => declared.max((yarn.original as f64 * yarn.factor) as usize),
        }
    }
}

fn llama3_freq(freq: f32, factor: f64, low_freq: f64, high_freq: f64, original: f64) -> f32 {
    let wavelen = (1.0 / freq) * (2.0 * std::f64::consts::PI) as f32;
    if wavelen < (original / high_freq) as f32 {
        return freq;
    }
    if wavelen > (original / low_freq) as f32 {
        return freq / factor as f32;
    }
    let smooth = ((1.0 / wavelen) * original as f32 - low_freq as f32) / (high_freq - low_freq) as f32;
    (1.0 - smooth) * freq / factor as f32 + smooth * freq
}

impl Yarn {
    fn inv_freq(&self, theta: f64, dim: usize) -> Vec<f32> {
        let correction = |rotations: f64| {
            let turns = self.original as f64 / (rotations * 2.0 * std::f64::consts::PI);
            dim as f64 * turns.ln() / (2.0 * theta.ln())
        };
        let (mut low, mut high) = (correction(self.beta_fast), correction(self.beta_slow));
        if self.truncate {
            (low, high) = (low.floor(), high.ceil());
        }
        let (low, mut high) = (low.max(0.0), high.min(dim as f64 - 1.0));
        if low == high {
            high += 0.001;
        }
        let blend = |(i, power): (usize, f32)| {
            let ramp = ((i as f32 - low as f32) / (high - low) as f32).clamp(0.0, 1.0);
            let extrapolation_part = 1.0 - ramp;
            let interpolation = 1.0 / (self.factor as f32 * power);
            interpolation * (1.0 - extrapolation_part) + (1.0 / power) * extrapolation_part
        };
        powers(theta, dim).enumerate().map(blend).collect()
    }
}

/// Reads `rope_parameters` (transformers 5), or `rope_theta` and `rope_scaling` (before): base and scaling.
pub(crate) fn from_hf(c: &Fields) -> Result<(f64, Scaling), ModelError> {
    let (parameters, scaling) = (c.object("rope_parameters")?, c.object("rope_scaling")?);
    if parameters.is_some() && scaling.is_some() {
        return Err(c.unsupported("rope_scaling", "it stands beside rope_parameters; keep one of the two"));
    }
    let outer = c.opt_positive("rope_theta")?;
    let Some(r) = parameters.or(scaling) else { return Ok((outer.unwrap_or(10_000.0), Scaling::None)) };
    let theta = r.opt_positive("rope_theta")?.or(outer).unwrap_or(10_000.0);
    let (kind, legacy) = (r.opt_str("rope_type")?, r.opt_str("type")?);
    let key = if kind.is_some() { "rope_type" } else { "type" };
    let scaling = match kind.or(legacy).unwrap_or("default") {
        "default" => Scaling::None,
        "linear" => Scaling::Linear { factor: r.positive("factor")? },
        "llama3" => llama3_from_hf(&r)?,
        "yarn" => yarn_from_hf(&r, c)?,
        _ => return Err(r.unsupported(key, "default, linear, llama3 and yarn are; null runs the original context")),
    };
    if r.opt_positive("partial_rotary_factor")?.is_some_and(|part| part != 1.0) {
        return Err(r.unsupported("partial_rotary_factor", "heads rotate whole in these families"));
    }
    r.finish(&["finetuned"])?;
    Ok((theta, scaling))
}

fn llama3_from_hf(r: &Fields) -> Result<Scaling, ModelError> {
    let (low_freq, high_freq) = (r.positive("low_freq_factor")?, r.positive("high_freq_factor")?);
    if low_freq >= high_freq {
        return Err(r.wrong("high_freq_factor", format!("more than low_freq_factor, {low_freq}")));
    }
    let original = r.count("original_max_position_embeddings", MAX_CONTEXT)?;
    Ok(Scaling::Llama3 { factor: r.positive("factor")?, low_freq, high_freq, original })
}

fn yarn_from_hf(r: &Fields, c: &Fields) -> Result<Scaling, ModelError> {
    let original = match r.opt_count("original_max_position_embeddings", MAX_CONTEXT)? {
        Some(n) => n,
        None => c.count("max_position_embeddings", MAX_CONTEXT)?,
    };
    let factor = r.positive("factor")?;
    let (mscale, mscale_all) = (r.opt_positive("mscale")?, r.opt_positive("mscale_all_dim")?);
    let default_factor = match (mscale, mscale_all) {
        (Some(m), Some(all)) => yarn_mscale(factor, m) / yarn_mscale(factor, all),
        _ => yarn_mscale(factor, 1.0),
    };
    Ok(Scaling::Yarn(Yarn {
        factor,
        original,
        beta_fast: r.opt_positive("beta_fast")?.unwrap_or(32.0),
        beta_slow: r.opt_positive("beta_slow")?.unwrap_or(1.0),
        truncate: r.get("truncate").is_none() || r.flag("truncate")?,
        attention_factor: r.opt_positive("attention_factor")?.unwrap_or(default_factor),
    }))
}

/// Reads `rope.scaling.*` of a GGUF file (gguf.md, "RoPE scaling").
pub(crate) fn scaling_from_gguf(g: &Fields) -> Result<Scaling, ModelError> {
    let factor = g.opt_positive("rope.scaling.factor")?;
    let legacy = g.opt_positive("rope.scale_linear")?;
    match (g.opt_str("rope.scaling.type")?, factor, legacy) {
        (Some("none"), ..) | (None, None, None) => Ok(Scaling::None),
        (Some("linear") | None, Some(factor), _) | (Some("linear") | None, None, Some(factor)) => {
            Ok(Scaling::Linear { factor })
        }
        (Some("yarn"), Some(factor), _) => {
            let original = match g.opt_count("rope.scaling.original_context_length", MAX_CONTEXT)? {
                Some(n) => n,
                None => g.count("context_length", MAX_CONTEXT)?,
            };
            let attention = g.opt_positive("rope.scaling.attn_factor")?.unwrap_or(1.0);
            Ok(Scaling::Yarn(Yarn {
                factor,
                original,
                beta_fast: g.opt_positive("rope.scaling.yarn_beta_fast")?.unwrap_or(32.0),
                beta_slow: g.opt_positive("rope.scaling.yarn_beta_slow")?.unwrap_or(1.0),
                truncate: true,
                attention_factor: attention * yarn_mscale(factor, 1.0),
            }))
        }
        (Some("linear" | "yarn"), None, _) => Err(g.wrong("rope.scaling.factor", "a finite number above 0")),
        (Some(_), ..) => Err(g.unsupported("rope.scaling.type", "none, linear and yarn are")),
    }
}
