//! Against the reference over random requests, against the distribution itself, and the special cases.

use super::*;
use crate::cpu::{Isa, Pool};
use crate::testing::{Rng, assert_close};
use crate::{SampleParams, SampleRequest, Sampled, TokenMask};

fn request(params: &SampleParams) -> SampleRequest<'_> {
    SampleRequest { logit: 0, slot: 0, params, position: 0, forced: None, prompt: &[], output: &[], mask: None }
}

fn run(row: &[f32], requests: &[SampleRequest<'_>]) -> Vec<Sampled> {
    let (mut pool, mut scratch) = (Pool::new(2), SampleScratch::new(2));
    sample(&mut pool, Isa::detect(), &mut scratch, row, row.len(), row.len(), requests)
}

fn one(row: &[f32], request: SampleRequest<'_>) -> Sampled {
    run(row, &[request]).pop().unwrap()
}

fn random_params(rng: &mut Rng, n_vocab: usize) -> SampleParams {
    let mut pick = |options: &[f32]| options[rng.below(options.len())];
    let mut params = SampleParams {
        temperature: pick(&[0.0, 1.0, 0.7, 2.0, 0.05]),
        top_p: pick(&[1.0, 0.9, 0.5, 0.999, 0.01, 0.0]),
        top_k: pick(&[0.0, 0.0, 1.0, 5.0, 50.0, 1e6]) as u32,
        min_p: pick(&[0.0, 0.0, 0.1, 0.001, 1.0]),
        repetition_penalty: pick(&[1.0, 1.0, 1.3, 0.8]),
        presence_penalty: pick(&[0.0, 0.0, 0.7, -0.3]),
        frequency_penalty: pick(&[0.0, 0.0, 0.2]),
        logprobs: [None, Some(0), Some(1), Some(20), Some(1000)][pick(&[0.0, 1.0, 2.0, 3.0, 4.0]) as usize],
        ..SampleParams::default()
    };
    if rng.below(3) == 0 {
        params.bias = (0..4).map(|_| (rng.below(n_vocab + 3) as u32, rng.normal() * 5.0)).collect();
    }
    params.seed = rng.next_u64();
    params
}

#[test]
fn matches_the_reference_over_random_requests() {
    let mut rng = Rng::new(2);
    for case in 0..400 {
        let n_vocab = [7, 64, 1000, 3333][case % 4];
        // Rounded logits have ties; spread ones concentrate the mass.
        let step = if case % 3 == 0 { 0.25 } else { 1e-6 };
        let spread = [1.0, 3.0, 8.0][case % 5 % 3];
        let mut row: Vec<f32> = rng.normals(n_vocab).iter().map(|x| (x * spread / step).round() * step).collect();
        if case % 7 == 0 {
            (0..n_vocab / 3).for_each(|_| row[rng.below(n_vocab)] = f32::NEG_INFINITY);
            row[3] = 0.5;
        }
        let params: Vec<SampleParams> = (0..4).map(|_| random_params(&mut rng, n_vocab)).collect();
        let tokens = |rng: &mut Rng| (0..rng.below(60)).map(|_| rng.below(n_vocab + 2) as u32).collect::<Vec<_>>();
        let (prompt, output) = (tokens(&mut rng), tokens(&mut rng));
        let mut mask = TokenMask::none(n_vocab);
        (0..n_vocab / 2).for_each(|_| mask.allow(rng.below(n_vocab) as u32));
        mask.allow(3);
        let requests: Vec<SampleRequest<'_>> = params
            .iter()
            .enumerate()
            .map(|(i, params)| SampleRequest {
                position: 10 * case + i,
                forced: (rng.below(6) == 0).then_some(3),
                prompt: &prompt,
                output: &output,
                mask: (rng.below(3) == 0).then_some(&mask),
                ..request(params)
            })
            .collect();
        for (request, got) in requests.iter().zip(run(&row, &requests)) {
            let want = reference::sample(&row, request);
            assert_eq!((got.token, got.corrupt), (want.token, want.corrupt), "case {case}: {:?}", request.params);
            let (Some(got), Some(want)) = (&got.logprobs, &want.logprobs) else {
                assert_eq!(got.logprobs, want.logprobs);
                continue;
            };
            assert_eq!(got.rank, want.rank);
            assert_close(&[got.sampled], &[want.sampled], 2e-6);
            assert_eq!(
                got.top.iter().map(|t| t.0).collect::<Vec<_>>(),
                want.top.iter().map(|t| t.0).collect::<Vec<_>>()
            );
            let values = |t: &[(u32, f32)]| t.iter().map(|t| t.1).collect::<Vec<_>>();
            assert_close(&values(&got.top), &values(&want.top), 2e-6);
        }
    }
}

/// Draws with fixed seeds and compares the frequencies with the distribution that the reference states.
#[test]
fn draws_follow_the_distribution() {
    let row: Vec<f32> = Rng::new(9).normals(1500).iter().map(|x| x * 2.0).collect();
    for (top_p, top_k, min_p, temperature) in
        [(1.0, 0, 0.0, 1.0), (0.8, 0, 0.0, 0.9), (1.0, 12, 0.0, 1.0), (1.0, 0, 0.05, 1.4), (0.7, 30, 0.01, 0.8)]
    {
        let n = 20_000;
        let params: Vec<SampleParams> = (0..n)
            .map(|seed| SampleParams { temperature, top_p, top_k, min_p, seed, ..SampleParams::default() })
            .collect();
        let requests: Vec<_> = params.iter().map(|p| SampleRequest { position: 17, ..request(p) }).collect();
        let mut counts = vec![0u32; row.len()];
        run(&row, &requests).iter().for_each(|s| counts[s.token as usize] += 1);
        // Rare tokens are put together, as the chi-square test needs some five expected draws in a bin.
        let (mut chi2, mut bins, mut rare) = (0.0, 0, (0.0, 0.0));
        for (token, p) in reference::distribution(&row, &request(&params[0])).unwrap() {
            let (expected, drawn) = (p * n as f64, f64::from(std::mem::take(&mut counts[token as usize])));
            if expected < 8.0 {
                rare = (rare.0 + expected, rare.1 + drawn);
            } else {
                chi2 += (drawn - expected).powi(2) / expected;
                bins += 1;
            }
        }
        if rare.0 > 0.0 {
            chi2 += (rare.1 - rare.0).powi(2) / rare.0;
            bins += 1;
        }
        assert!(counts.iter().all(|&c| c == 0), "a token outside the distribution was drawn");
        let df = f64::from(bins - 1);
        assert!(chi2 < df + 3.3 * (2.0 * df).sqrt() + 4.0, "chi-square {chi2} at {df} degrees of freedom");
    }
}

#[test]
fn a_draw_depends_on_seed_and_position_alone() {
    let row = Rng::new(5).normals(49_152);
    let params = SampleParams { seed: 11, ..SampleParams::default() };
    let draws = |n_workers: usize, isa: Isa, n: usize| {
        let requests: Vec<_> = (0..n).map(|position| SampleRequest { position, ..request(&params) }).collect();
        let (mut pool, mut scratch) = (Pool::new(n_workers), SampleScratch::new(n_workers));
        sample(&mut pool, isa, &mut scratch, &row, row.len(), row.len(), &requests)
    };
    let want = draws(1, Isa::detect(), 40);
    assert_eq!(draws(2, Isa::detect(), 40), want);
    assert_eq!(draws(1, Isa::Portable, 3), want[..3]);
    let tokens: std::collections::HashSet<u32> = want.iter().map(|s| s.token).collect();
    assert!(tokens.len() > 35, "positions give different draws");
}

#[test]
fn greedy_takes_the_lowest_id_of_the_best() {
    let greedy = SampleParams { temperature: 0.0, ..SampleParams::default() };
    for n in [1, 2, 15, 16, 17, 100, 1000, 49_157] {
        for best in [0, n / 3, n - 1] {
            let mut row = vec![-1.0; n];
            row[best..].fill(2.0);
            assert_eq!(one(&row, request(&greedy)).token, best as u32);
            let top_k = SampleParams { top_k: 1, ..SampleParams::default() };
            assert_eq!(one(&row, request(&top_k)).token, best as u32);
        }
    }
}

#[test]
fn corrupt_logits_are_told() {
    let greedy = SampleParams { temperature: 0.0, ..SampleParams::default() };
    let drawn = SampleParams::default();
    for n in [3, 64, 65, 1000] {
        for params in [&greedy, &drawn] {
            for at in [0, n / 2, n - 1] {
                for bad in [f32::NAN, -f32::NAN, f32::INFINITY] {
                    let mut row = vec![0.5; n];
                    row[at] = bad;
                    assert!(one(&row, request(params)).corrupt);
                    assert!(one(&row, SampleRequest { forced: Some(1), ..request(params) }).corrupt);
                }
                let mut row = vec![f32::NEG_INFINITY; n];
                assert!(one(&row, request(params)).corrupt);
                row[at] = -5.0;
                assert_eq!(one(&row, request(params)), Sampled { token: at as u32, logprobs: None, corrupt: false });
            }
            let nothing = TokenMask::none(n);
            assert!(one(&vec![0.5; n], SampleRequest { mask: Some(&nothing), ..request(params) }).corrupt);
        }
    }
}

#[test]
fn rows_are_read_at_their_stride() {
    let greedy = SampleParams { temperature: 0.0, ..SampleParams::default() };
    let mut logits = vec![0.0; 3 * 40];
    (logits[40 + 7], logits[80 + 29], logits[40 + 35]) = (1.0, 1.0, 9.0);
    let requests = [2, 1, 2].map(|logit| SampleRequest { logit, ..request(&greedy) });
    let (mut pool, mut scratch) = (Pool::new(1), SampleScratch::new(1));
    let answers = sample(&mut pool, Isa::detect(), &mut scratch, &logits, 40, 30, &requests);
    assert_eq!(answers.iter().map(|a| a.token).collect::<Vec<_>>(), [29, 7, 29]);
}
