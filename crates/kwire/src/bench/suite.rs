//! A fixed set of workloads against one or more servers, as a table with ratios.
//!
//! Servers take turns within each workload, so that a busy moment of the machine doesn't hit only one of them.

use std::fmt::Write;
use std::sync::Arc;

use anyhow::{Result, bail};

use super::load::Shape;
use super::report::{Percentiles, Report};
use super::{Plan, measure};
use crate::output;

/// One workload of the suite.
struct Workload {
    name: &'static str,
    what: &'static str,
    concurrency: usize,
    requests: usize,
    warmup: usize,
    prompt_tokens: (usize, usize),
    shared_prefix: usize,
    max_tokens: u32,
}

/// For a small model on a few CPU cores.
const CPU: &[Workload] = &[
    Workload {
        name: "A",
        what: "one user",
        concurrency: 1,
        requests: 8,
        warmup: 1,
        prompt_tokens: (118, 138),
        shared_prefix: 0,
        max_tokens: 128,
    },
    Workload {
        name: "B",
        what: "16 users",
        concurrency: 16,
        requests: 64,
        warmup: 8,
        prompt_tokens: (206, 306),
        shared_prefix: 0,
        max_tokens: 128,
    },
    Workload {
        name: "C",
        what: "64 users",
        concurrency: 64,
        requests: 128,
        warmup: 8,
        prompt_tokens: (206, 306),
        shared_prefix: 0,
        max_tokens: 64,
    },
    Workload {
        name: "D",
        what: "long prompts",
        concurrency: 4,
        requests: 24,
        warmup: 2,
        prompt_tokens: (1400, 1600),
        shared_prefix: 0,
        max_tokens: 16,
    },
    Workload {
        name: "E",
        what: "a shared prefix, cold at the start",
        concurrency: 16,
        requests: 64,
        warmup: 4,
        prompt_tokens: (50, 50),
        shared_prefix: 1000,
        max_tokens: 32,
    },
];

/// The suites by name.
pub const NAMES: &[&str] = &["cpu"];

/// Runs the suite `rounds` times; the table's ratios compare each server with the first.
pub(super) async fn run(plans: &[Plan], only: Option<&str>, rounds: usize, seed: u64) -> Result<Vec<Report>> {
    let wanted = |w: &Workload| only.is_none_or(|o| o.contains(w.name));
    if !CPU.iter().any(wanted) {
        let names: String = CPU.iter().map(|w| w.name).collect();
        bail!("--only {:?} names no workload of {names}", only.unwrap_or_default());
    }
    let mut reports = Vec::new();
    for (index, w) in CPU.iter().enumerate().filter(|(_, w)| wanted(w)) {
        let mut rows = Vec::new();
        for round in 0..rounds {
            for plan in plans {
                // A seed for each workload and round: else prompts of one would be in a server's cache for the next.
                let seed = seed + (round * CPU.len() + index) as u64;
                let plan = Plan {
                    target: Arc::clone(&plan.target),
                    label: format!("{} {}", w.name, plan.label),
                    shape: Shape {
                        prompt_tokens: w.prompt_tokens,
                        shared_prefix: w.shared_prefix,
                        max_tokens: w.max_tokens,
                        ignore_eos: true,
                        temperature: 0.0,
                        seed,
                    },
                    concurrency: w.concurrency,
                    requests: w.requests,
                    warmup: w.warmup,
                    warm_prefix: false,
                    ..plan.clone()
                };
                let report = measure(&plan).await;
                eprint!("{report}");
                rows.push(report);
            }
        }
        output::line(table(w, &rows, plans.len()))?;
        reports.extend(rows);
    }
    Ok(reports)
}

/// A Markdown table of one workload. `rows` hold the servers in turn.
fn table(w: &Workload, rows: &[Report], n_servers: usize) -> String {
    let mut out = format!(
        "### {}: {} (concurrency {}, prompt {}, {} out, {} requests)\n\n",
        w.name,
        w.what,
        w.concurrency,
        if w.shared_prefix > 0 {
            format!("{} + {}", w.shared_prefix, w.prompt_tokens.0)
        } else {
            span(w.prompt_tokens)
        },
        w.max_tokens,
        w.requests
    );
    out.push_str(
        "| server | out tok/s | total tok/s | TTFT p50 / p95 / p99 ms | ITL p50 / p95 / p99 ms | TPOT p50 | ok |\n",
    );
    out.push_str("|---|---|---|---|---|---|---|\n");
    for report in rows {
        let tpot = report.tpot_ms.as_ref().map_or_else(|| "-".to_owned(), |p| format!("{:.1}", p.p50));
        _ = writeln!(
            out,
            "| {} | **{:.1}** | {:.0} | {} | {} | {tpot} | {}/{} |",
            report.label.split_once(' ').map_or("", |(_, label)| label),
            report.output_tok_s,
            report.total_tok_s,
            three(report.ttft_ms.as_ref()),
            three(report.itl_ms.as_ref()),
            report.ok,
            report.requests
        );
    }
    if n_servers > 1 {
        ratios(&mut out, rows, n_servers);
    }
    out
}

/// How the first server compares with each other one; above 1 is better for it. Medians over rounds.
fn ratios(out: &mut String, rows: &[Report], n_servers: usize) {
    let median = |server: usize, of: &dyn Fn(&Report) -> f64| {
        let mut values: Vec<f64> = rows.iter().skip(server).step_by(n_servers).map(of).collect();
        values.sort_by(f64::total_cmp);
        values[values.len() / 2]
    };
    let p95 = |p: &Option<Percentiles>| p.as_ref().map_or(f64::NAN, |p| p.p95);
    let label = |server: usize| rows[server].label.split_once(' ').map_or("", |(_, l)| l).to_owned();
    for other in 1..n_servers {
        let up = |of: &dyn Fn(&Report) -> f64| median(0, of) / median(other, of);
        _ = writeln!(
            out,
            "\n{} against {}: {:.2}x output, {:.2}x total, {:.2}x shorter TTFT p95, {:.2}x shorter ITL p95",
            label(0),
            label(other),
            up(&|r| r.output_tok_s),
            up(&|r| r.total_tok_s),
            1.0 / up(&|r| p95(&r.ttft_ms)),
            1.0 / up(&|r| p95(&r.itl_ms)),
        );
    }
}

fn span((low, high): (usize, usize)) -> String {
    if low == high { low.to_string() } else { format!("{low}-{high}") }
}

fn three(p: Option<&Percentiles>) -> String {
    p.map_or_else(|| "-".to_owned(), |p| format!("{:.1} / {:.1} / {:.1}", p.p50, p.p95, p.p99))
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::super::report::{Context, Outcome};
    use super::*;

    #[test]
    fn the_table_compares_the_first_server_with_the_others() {
        let report = |label: &str, ms: u64| {
            let outcome = Outcome {
                first: Some(Duration::from_millis(ms)),
                last: Duration::from_millis(ms * 3),
                gaps: vec![Duration::from_millis(ms)],
                pieces: 2,
                output_tokens: Some(2),
                prompt_tokens: Some(10),
                ..Outcome::default()
            };
            let context = Context { label, model: "m", concurrency: 1, chars_per_token: 4.0 };
            Report::new(&context, &[outcome], ms as f64 / 1000.0)
        };
        let text = table(&CPU[0], &[report("A kwire", 10), report("A peer", 20)], 2);
        expect_test::expect![[r"
            ### A: one user (concurrency 1, prompt 118-138, 128 out, 8 requests)

            | server | out tok/s | total tok/s | TTFT p50 / p95 / p99 ms | ITL p50 / p95 / p99 ms | TPOT p50 | ok |
            |---|---|---|---|---|---|---|
            | kwire | **200.0** | 1200 | 10.0 / 10.0 / 10.0 | 10.0 / 10.0 / 10.0 | 20.0 | 1/1 |
            | peer | **100.0** | 600 | 20.0 / 20.0 / 20.0 | 20.0 / 20.0 / 20.0 | 40.0 | 1/1 |

            kwire against peer: 2.00x output, 2.00x total, 2.00x shorter TTFT p95, 2.00x shorter ITL p95
        "]]
        .assert_eq(&text);
    }
}
