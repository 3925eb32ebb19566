//! Metrics of the HTTP side, as `prometheus-fastapi-instrumentator` names them.

use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::histogram::Histogram;
use prometheus_client::registry::Registry;

use super::buckets;

type RequestLabels = [(&'static str, String); 3];
type DurationLabels = [(&'static str, String); 2];

/// Requests by route.
pub struct HttpMetrics {
    requests: Family<RequestLabels, Counter>,
    durations: Family<DurationLabels, Histogram, fn() -> Histogram>,
    high_resolution: Histogram,
}

impl HttpMetrics {
    /// Registers them.
    pub fn register(registry: &mut Registry) -> Self {
        let this = Self {
            requests: Family::default(),
            durations: Family::new_with_constructor(|| Histogram::new(buckets::HTTP)),
            high_resolution: Histogram::new(buckets::HTTP_HIGH_RESOLUTION),
        };
        registry.register("http_requests", "Requests by method, status and handler", this.requests.clone());
        let help = "Time until the answer began, by method and handler";
        registry.register("http_request_duration_seconds", help, this.durations.clone());
        let help = "Time until the answer began";
        registry.register("http_request_duration_highr_seconds", help, this.high_resolution.clone());
        this
    }

    /// Counts an answer. `handler` is the route, so that the number of series is bounded.
    pub fn observe(&self, method: &str, handler: &str, status: u16, seconds: f64) {
        let class = format!("{}xx", status / 100);
        let (method, handler) = (method.to_owned(), handler.to_owned());
        let labels = [("method", method.clone()), ("status", class), ("handler", handler.clone())];
        self.requests.get_or_create(&labels).inc();
        self.durations.get_or_create(&[("method", method), ("handler", handler)]).observe(seconds);
        self.high_resolution.observe(seconds);
    }
}
