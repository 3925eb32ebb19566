//! vLLM's histogram buckets (`vllm/v1/metrics/buckets.py`).

pub const TIME_TO_FIRST_TOKEN: [f64; 22] = [
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0,
    160.0, 640.0, 2560.0,
];
pub const PER_TOKEN: [f64; 19] =
    [0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0];
pub const REQUEST_TIME: [f64; 21] = [
    0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0, 960.0,
    1920.0, 7680.0,
];
pub const ITERATION_TOKENS: [f64; 13] =
    [1.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0, 512.0, 1024.0, 2048.0, 4096.0, 8192.0, 16384.0];
pub const PARAMS_N: [f64; 5] = [1.0, 2.0, 5.0, 10.0, 20.0];
pub const PREEMPTIONS: [f64; 7] = [1.0, 2.0, 3.0, 4.0, 5.0, 10.0, 20.0];
pub const HTTP: [f64; 3] = [0.1, 0.5, 1.0];
pub const HTTP_HIGH_RESOLUTION: [f64; 21] = [
    0.01, 0.025, 0.05, 0.075, 0.1, 0.25, 0.5, 0.75, 1.0, 1.5, 2.0, 2.5, 3.0, 3.5, 4.0, 4.5, 5.0, 7.5, 10.0, 30.0, 60.0,
];

/// 1, 2, 5, 10, 20, 50... up to `max` (`build_1_2_5_buckets`).
pub fn one_two_five(max: usize) -> Vec<f64> {
    let series = (0..).flat_map(|exponent| [1.0, 2.0, 5.0].map(|m| m * 10_f64.powi(exponent)));
    series.take_while(|&bucket| bucket <= max as f64).collect()
}

#[cfg(test)]
mod tests {
    #[test]
    fn the_series_ends_at_the_maximum() {
        assert_eq!(super::one_two_five(20), [1.0, 2.0, 5.0, 10.0, 20.0]);
        assert_eq!(super::one_two_five(49), [1.0, 2.0, 5.0, 10.0, 20.0]);
    }
}
