//! Counters in Prometheus' text format. Labels are finite: route templates, methods and status
//! classes, all known at the start, so a count is one atomic add without a lock or an allocation.

use std::fmt::Write as _;
use std::sync::atomic::{AtomicI64, AtomicU64, Ordering};
use std::time::Duration;

use dsec_proto::rest::{NodeStatus, NodeUsage};
use http::{Method, StatusCode};

use crate::api::ROUTES;

/// Upper bounds of the latency histogram, microseconds: from what this process adds itself to a
/// command that is waited for.
const BUCKETS_US: [u64; 14] = [
    100, 250, 500, 1_000, 2_500, 5_000, 10_000, 25_000, 50_000, 100_000, 250_000, 1_000_000, 10_000_000,
    60_000_000,
];
const METHODS: [&str; 7] = ["GET", "POST", "PUT", "DELETE", "HEAD", "PATCH", "OTHER"];
/// Classes of status: 1xx to 5xx.
const CLASSES: [&str; 5] = ["1xx", "2xx", "3xx", "4xx", "5xx"];
/// Requests that no route takes.
const UNMATCHED: &str = "(unmatched)";

/// A route's place in the table; made once per request from its template.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Route(usize);

impl Route {
    /// Finds a template; what is not one of [`ROUTES`] counts as unmatched.
    pub fn of(template: Option<&str>) -> Self {
        let place = template.and_then(|template| ROUTES.iter().position(|route| *route == template));
        Self(place.unwrap_or(ROUTES.len()))
    }

    /// The template.
    pub fn template(self) -> &'static str {
        ROUTES.get(self.0).copied().unwrap_or(UNMATCHED)
    }
}

#[derive(Default)]
struct Series {
    counts: [[AtomicU64; CLASSES.len()]; METHODS.len()],
    buckets: [AtomicU64; BUCKETS_US.len()],
    total_us: AtomicU64,
}

/// All counters of this process.
pub struct Metrics {
    series: Vec<Series>,
    in_flight: AtomicI64,
}

/// A request in flight; dropping it counts it out, also when its caller hung up.
pub struct InFlight<'a>(&'a AtomicI64);

impl Drop for InFlight<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

impl Default for Metrics {
    fn default() -> Self {
        Self::new()
    }
}

impl Metrics {
    /// All zero.
    pub fn new() -> Self {
        let series = (0..=ROUTES.len()).map(|_| Series::default()).collect();
        Self { series, in_flight: AtomicI64::new(0) }
    }

    /// Counts a request in.
    pub fn begin(&self) -> InFlight<'_> {
        self.in_flight.fetch_add(1, Ordering::Relaxed);
        InFlight(&self.in_flight)
    }

    /// Counts an answer. `elapsed` is until its head: streams go on for as long as they like.
    pub fn count(&self, route: Route, method: &Method, status: StatusCode, elapsed: Duration) {
        let series = &self.series[route.0];
        let method = METHODS.iter().position(|name| *name == method.as_str()).unwrap_or(METHODS.len() - 1);
        let class = usize::from(status.as_u16() / 100).clamp(1, CLASSES.len()) - 1;
        series.counts[method][class].fetch_add(1, Ordering::Relaxed);
        let us = elapsed.as_micros() as u64;
        series.total_us.fetch_add(us, Ordering::Relaxed);
        if let Some(bucket) = BUCKETS_US.iter().position(|bound| us <= *bound) {
            series.buckets[bucket].fetch_add(1, Ordering::Relaxed);
        }
    }

    /// Everything that is not zero, as Prometheus reads it.
    pub fn render(&self) -> String {
        let mut text = String::with_capacity(16 << 10);
        text.push_str("# HELP dsec_control_in_flight_requests Requests whose answer has not begun.\n");
        text.push_str("# TYPE dsec_control_in_flight_requests gauge\n");
        let in_flight = self.in_flight.load(Ordering::Relaxed);
        let _ = writeln!(text, "dsec_control_in_flight_requests {in_flight}");
        text.push_str("# HELP dsec_control_requests_total Requests by route, method and status class.\n");
        text.push_str("# TYPE dsec_control_requests_total counter\n");
        self.each(|route, series| series.render_counts(route, &mut text));
        text.push_str("# HELP dsec_control_request_seconds Time until the head of the answer.\n");
        text.push_str("# TYPE dsec_control_request_seconds histogram\n");
        self.each(|route, series| series.render_histogram(route, &mut text));
        text
    }

    fn each(&self, mut render: impl FnMut(&str, &Series)) {
        for (place, series) in self.series.iter().enumerate() {
            if series.total() > 0 {
                render(Route(place).template(), series);
            }
        }
    }
}

/// What nodes did for the content of layers.
pub fn content(nodes: &[NodeStatus]) -> String {
    type Measure = fn(&NodeUsage) -> f64;
    let all: [(&str, &str, &str, Measure); 7] = [
        ("asked_bytes_total", "counter", "Bytes of layers that kernels asked for.", |u| {
            u.content.asked_bytes as f64
        }),
        ("cached_bytes_total", "counter", "Of these, bytes that were on the node.", |u| {
            u.content.cached_bytes as f64
        }),
        ("fetched_bytes_total", "counter", "Bytes that came from the layer store, compressed.", |u| {
            u.content.fetched_bytes as f64
        }),
        ("fetches_total", "counter", "Fetches from the layer store.", |u| u.content.fetches as f64),
        ("failed_reads_total", "counter", "Reads of layers that failed.", |u| u.content.failed_reads as f64),
        ("wait_seconds_total", "counter", "Time that readers of layers waited for the store.", |u| {
            u.content.waited_ms as f64 / 1e3
        }),
        ("cache_bytes", "gauge", "Content of layers on the node's disk.", |u| u.content_cache_bytes as f64),
    ];
    let mut text = String::new();
    // Writing to a String does not fail.
    for (name, kind, help, measure) in all {
        let _ = writeln!(text, "# HELP dsec_content_{name} {help}\n# TYPE dsec_content_{name} {kind}");
        for node in nodes {
            let _ = writeln!(text, "dsec_content_{name}{{node=\"{}\"}} {}", node.node, measure(&node.usage));
        }
    }
    text
}

impl Series {
    fn total(&self) -> u64 {
        self.counts.iter().flatten().map(|count| count.load(Ordering::Relaxed)).sum()
    }

    // Writing to a String does not fail, so the results below carry nothing.
    fn render_counts(&self, route: &str, text: &mut String) {
        for (method, classes) in METHODS.iter().zip(&self.counts) {
            for (class, count) in CLASSES.iter().zip(classes) {
                let count = count.load(Ordering::Relaxed);
                if count > 0 {
                    let _ = writeln!(
                        text,
                        "dsec_control_requests_total{{route=\"{route}\",method=\"{method}\",status=\"{class}\"}} {count}"
                    );
                }
            }
        }
    }

    fn render_histogram(&self, route: &str, text: &mut String) {
        const NAME: &str = "dsec_control_request_seconds";
        let mut below = 0;
        for (bound, bucket) in BUCKETS_US.iter().zip(&self.buckets) {
            below += bucket.load(Ordering::Relaxed);
            let seconds = *bound as f64 / 1e6;
            let _ = writeln!(text, "{NAME}_bucket{{route=\"{route}\",le=\"{seconds}\"}} {below}");
        }
        let total = self.total();
        let sum = self.total_us.load(Ordering::Relaxed) as f64 / 1e6;
        let _ = writeln!(text, "{NAME}_bucket{{route=\"{route}\",le=\"+Inf\"}} {total}");
        let _ = writeln!(text, "{NAME}_sum{{route=\"{route}\"}} {sum}");
        let _ = writeln!(text, "{NAME}_count{{route=\"{route}\"}} {total}");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn labels_are_templates_and_never_ids() {
        let metrics = Metrics::new();
        let route = Route::of(Some("/v1/sandboxes/{id}"));
        metrics.count(route, &Method::GET, StatusCode::OK, Duration::from_micros(300));
        metrics.count(route, &Method::GET, StatusCode::NOT_FOUND, Duration::from_secs(100));
        let odd = Method::from_bytes(b"BREW").unwrap();
        metrics.count(Route::of(Some("/v1/sandboxes/sb-n1-a")), &odd, StatusCode::OK, Duration::ZERO);
        let text = metrics.render();
        for line in [
            "dsec_control_requests_total{route=\"/v1/sandboxes/{id}\",method=\"GET\",status=\"2xx\"} 1",
            "dsec_control_requests_total{route=\"(unmatched)\",method=\"OTHER\",status=\"2xx\"} 1",
            "dsec_control_request_seconds_bucket{route=\"/v1/sandboxes/{id}\",le=\"0.0005\"} 1",
            "dsec_control_request_seconds_bucket{route=\"/v1/sandboxes/{id}\",le=\"60\"} 1",
            "dsec_control_request_seconds_count{route=\"/v1/sandboxes/{id}\"} 2",
            "dsec_control_in_flight_requests 0",
        ] {
            assert!(text.lines().any(|have| have == line), "missing {line} in\n{text}");
        }
        assert!(!text.contains("sb-n1-a"));
    }
}
