//! vLLM's human-readable whole numbers: `2048`, `2k` = 2,000, `2K` = 2,048, `25.6k` = 25,600, and so on to `T`.

/// Parses one. Decimals go with the decimal suffixes (k m g t) only, as in vLLM's `human_readable_int`.
pub fn parse(text: &str) -> Result<u64, String> {
    let text = text.trim();
    let bad = || format!("{text:?} is not a whole number; 4096, 4k (4,000) and 4K (4,096) are");
    let Some(suffix) = text.chars().last().filter(char::is_ascii_alphabetic) else {
        return text.parse().map_err(|_| bad());
    };
    let digits = &text[..text.len() - 1];
    let power = match suffix.to_ascii_lowercase() {
        'k' => 1,
        'm' => 2,
        'g' => 3,
        't' => 4,
        _ => return Err(bad()),
    };
    let too_large = || format!("{text:?} is too large");
    if suffix.is_ascii_uppercase() {
        if digits.contains('.') {
            let lower = suffix.to_ascii_lowercase();
            return Err(format!("{text:?}: decimals don't go with {suffix}; did you mean {digits}{lower}?"));
        }
        let n: u64 = digits.parse().map_err(|_| bad())?;
        return n.checked_mul(1 << (10 * power)).ok_or_else(too_large);
    }
    if !digits.starts_with(|c: char| c.is_ascii_digit()) || digits.contains(|c: char| c.is_ascii_alphabetic()) {
        return Err(bad());
    }
    let value = digits.parse::<f64>().map_err(|_| bad())? * 1000f64.powi(power);
    if value < u64::MAX as f64 { Ok(value as u64) } else { Err(too_large()) }
}

#[cfg(test)]
mod tests {
    use super::parse;

    #[test]
    fn as_vllm_reads_them() {
        for (text, value) in [
            ("0", 0),
            ("2048", 2048),
            ("1k", 1000),
            ("1K", 1024),
            ("25.6k", 25_600),
            ("2M", 2 << 20),
            ("1.5g", 1_500_000_000),
            ("4G", 4 << 30),
            ("1T", 1 << 40),
        ] {
            assert_eq!(parse(text), Ok(value), "{text}");
        }
    }

    #[test]
    fn what_is_not_a_number_is_refused() {
        for text in ["", "k", "-1", "1.5K", "1kk", "1e3k", "4 GiB", "ten", "99999999T", "inf", "nank", ".5k"] {
            assert!(parse(text).is_err(), "{text}");
        }
        assert!(parse("1.5K").unwrap_err().contains("did you mean 1.5k?"));
    }
}
