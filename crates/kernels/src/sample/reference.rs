//! The same steps in f64 with a full sort, as the documentation of [`crate::SampleParams`] reads.

use std::collections::HashMap;

use super::{GREEDY_BELOW, random};
use crate::{SampleRequest, Sampled, TokenLogprobs};

/// Tokens that may be drawn with their probabilities, in the order of ids; `None` if nothing can.
pub fn distribution(row: &[f32], request: &SampleRequest<'_>) -> Option<Vec<(u32, f64)>> {
    let params = request.params;
    let mut logits: Vec<f32> = row.to_vec();
    for (token, logit) in (0..).zip(&mut logits) {
        if request.mask.is_some_and(|mask| !mask.allows(token)) {
            *logit = f32::NEG_INFINITY;
        }
        for (_, bias) in params.bias.iter().filter(|b| b.0 == token) {
            *logit += bias;
        }
    }
    let mut counts = HashMap::new();
    request.output.iter().for_each(|token| *counts.entry(*token).or_insert(0) += 1);
    for (token, logit) in (0..).zip(&mut logits) {
        if counts.contains_key(&token) || request.prompt.contains(&token) {
            let penalty = params.repetition_penalty;
            *logit = if *logit > 0.0 { *logit / penalty } else { *logit * penalty };
        }
        if let Some(&count) = counts.get(&token) {
            *logit -= params.frequency_penalty * count as f32;
            *logit -= params.presence_penalty;
        }
    }
    if logits.iter().any(|x| x.is_nan()) {
        return None;
    }
    let mut sorted: Vec<(u32, f64)> =
        (0..).zip(logits.iter().map(|&x| f64::from(x))).filter(|x| x.1.is_finite()).collect();
    sorted.sort_by(|a, b| b.1.partial_cmp(&a.1).expect("no NaN").then(a.0.cmp(&b.0)));
    let best = sorted.first()?.1;
    if params.temperature < GREEDY_BELOW {
        return Some(vec![(sorted[0].0, 1.0)]);
    }
    sorted.iter_mut().for_each(|(_, x)| *x = ((*x - best) / f64::from(params.temperature)).exp());
    sorted.retain(|&(_, p)| p >= f64::from(params.min_p));
    if params.top_k > 0 {
        sorted.truncate(params.top_k as usize);
    }
    let total: f64 = sorted.iter().map(|x| x.1).sum();
    if params.top_p < 1.0 {
        let mut before = 0.0;
        let wanted = sorted.iter().take_while(|(_, p)| {
            let keep = before < f64::from(params.top_p) * total;
            before += p;
            keep
        });
        let n = wanted.count().max(1);
        sorted.truncate(n);
    }
    let total: f64 = sorted.iter().map(|x| x.1).sum();
    sorted.iter_mut().for_each(|(_, p)| *p /= total);
    sorted.sort_by_key(|x| x.0);
    Some(sorted)
}

/// The answer to one request.
pub fn sample(row: &[f32], request: &SampleRequest<'_>) -> Sampled {
    let corrupt = Sampled { token: request.forced.unwrap_or(0), logprobs: None, corrupt: true };
    if row.iter().any(|x| x.is_nan() || *x == f32::INFINITY) || row.iter().all(|&x| x == f32::NEG_INFINITY) {
        return corrupt;
    }
    let token = match (request.forced, distribution(row, request)) {
        (Some(token), _) => token,
        (None, None) => return corrupt,
        (None, Some(distribution)) => {
            let u = random::unit(request.params.seed, request.position as u64);
            let mut sum = 0.0;
            let drawn = distribution.iter().find(|(_, p)| {
                sum += p;
                u < sum
            });
            drawn.or(distribution.last()).expect("not empty").0
        }
    };
    let logprobs = request.params.logprobs.map(|n| logprobs(row, token, n as usize));
    Sampled { token, logprobs, corrupt: false }
}

fn logprobs(row: &[f32], token: u32, n: usize) -> TokenLogprobs {
    let max = f64::from(row.iter().copied().fold(f32::NEG_INFINITY, f32::max));
    let log_sum = row.iter().map(|&x| (f64::from(x) - max).exp()).sum::<f64>().ln();
    let logprob = |x: f32| (f64::from(x) - max - log_sum) as f32;
    let mut order: Vec<u32> = (0..row.len() as u32).filter(|&i| row[i as usize] > f32::NEG_INFINITY).collect();
    order.sort_by(|&a, &b| row[b as usize].partial_cmp(&row[a as usize]).expect("no NaN").then(a.cmp(&b)));
    let drawn = row[token as usize];
    TokenLogprobs {
        sampled: logprob(drawn),
        rank: row.iter().filter(|&&x| x > drawn).count() as u32 + 1,
        top: order.iter().take(n).map(|&i| (i, logprob(row[i as usize]))).collect(),
    }
}
