//! The best tokens of a row without sorting the vocabulary.

use std::cmp::Ordering;

use super::scan;
use crate::cpu::Isa;

/// A token that may be drawn.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Candidate {
    pub id: u32,
    pub logit: f32,
    /// Unnormalized probability.
    pub weight: f32,
}

/// Better first: by logit, then by lower id.
pub(super) fn better(a: &Candidate, b: &Candidate) -> Ordering {
    b.logit.partial_cmp(&a.logit).expect("no NaN gets here").then(a.id.cmp(&b.id))
}

/// Puts the best `k` tokens whose logit is at least `floor` into `out`, in no order. Tokens at -inf are never taken.
pub(super) fn top_k(isa: Isa, logits: &[f32], k: usize, floor: f32, out: &mut Vec<Candidate>) {
    out.clear();
    // A row is scanned against a threshold that rises whenever the buffer is full: about k ln(n / k) tokens pass it. A
    // later token that equals the threshold has a higher id than k better ones, so `>` is right after a cut.
    let capacity = 2 * k + 64;
    let below = floor.max(f32::MIN).next_down();
    let keep = |out: &mut Vec<Candidate>| {
        out.select_nth_unstable_by(k - 1, better);
        out.truncate(k);
        out[k - 1].logit
    };
    let mut threshold = below;
    scan::for_each_above(isa, logits, below, &mut |id, logit| {
        out.push(Candidate { id, logit, weight: 0.0 });
        if out.len() >= capacity {
            threshold = keep(out);
        }
        threshold
    });
    if out.len() > k {
        keep(out);
    }
}

/// Puts all tokens whose logit is at least `floor` into `out`, in the order of ids.
pub(super) fn at_least(isa: Isa, logits: &[f32], floor: f32, out: &mut Vec<Candidate>) {
    out.clear();
    let below = floor.max(f32::MIN).next_down();
    scan::for_each_above(isa, logits, below, &mut |id, logit| {
        out.push(Candidate { id, logit, weight: 0.0 });
        below
    });
}

/// The last token of the smallest set of best ones whose weights reach `mass`: the set is all that are not worse.
/// `work` holds the tokens and is reordered. Selection by halving, as in quickselect: linear on average.
pub(super) fn nucleus_end(work: &mut [Candidate], mass: f64) -> Candidate {
    let (mut rest, mut before) = (work, 0.0);
    while rest.len() > 1 {
        let half = rest.len() / 2;
        rest.select_nth_unstable_by(half, better);
        let sum: f64 = rest[..half].iter().map(|c| f64::from(c.weight)).sum();
        if before + sum >= mass {
            rest = &mut rest[..half];
        } else {
            before += sum;
            rest = &mut rest[half..];
        }
    }
    rest[0]
}
