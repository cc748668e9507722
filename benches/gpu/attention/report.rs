//! The figures: a table as they come, then JSON and a plot.

use std::path::Path;

use bench_support::Failure;
use bench_support::stream::StreamRates;
use serde::Serialize;

use crate::cases::{Spec, What};

/// The figures of one case. Times, bytes and dispatches are per layer, except for block copies and swaps, which are of
/// all layers at once.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct Row {
    pub(crate) kernel: &'static str,
    pub(crate) adapter: String,
    pub(crate) kv: String,
    pub(crate) query_heads: u32,
    pub(crate) kv_heads: u32,
    pub(crate) head_dim: u32,
    pub(crate) context: u32,
    pub(crate) batch: u32,
    pub(crate) rows: u32,
    pub(crate) block_size: u32,
    pub(crate) seconds: f64,
    pub(crate) bytes_per_s: f64,
    pub(crate) share_of_stream: f64,
    pub(crate) dispatches: u32,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) kv_bytes_loaded: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) plain_kv_bytes_loaded: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) over_contiguous: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) plain_over_ours: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) gather_over_ours: Option<f64>,
    #[serde(skip)]
    pub(crate) name: String,
}

impl Row {
    /// `bytes` in `seconds`, as a share of `stream` bytes per second.
    pub(crate) fn new(spec: &Spec, stream: f64, bytes: u64, seconds: f64) -> Self {
        let case = &spec.case;
        let bytes_per_s = bytes as f64 / seconds;
        Self {
            kernel: spec.kernel(),
            adapter: String::new(),
            kv: case.kv_type.to_string(),
            query_heads: case.num_query_heads,
            kv_heads: case.num_kv_heads,
            head_dim: case.head_dim,
            context: spec.context(),
            batch: case.sequences.len() as u32,
            rows: if spec.what == What::Swap { 0 } else { case.rows() },
            block_size: case.block_size,
            seconds,
            bytes_per_s,
            share_of_stream: bytes_per_s / stream,
            dispatches: 0,
            kv_bytes_loaded: None,
            plain_kv_bytes_loaded: None,
            over_contiguous: None,
            plain_over_ours: None,
            gather_over_ours: None,
            name: spec.name(),
        }
    }

    fn stream(kernel: &'static str, rates: &StreamRates, bytes: u64, bytes_per_s: f64) -> Self {
        Self {
            kernel,
            adapter: String::new(),
            kv: "none".to_owned(),
            query_heads: 0,
            kv_heads: 0,
            head_dim: 0,
            context: 0,
            batch: 0,
            rows: 0,
            block_size: 0,
            seconds: bytes as f64 / bytes_per_s,
            bytes_per_s,
            share_of_stream: 1.0,
            dispatches: 1,
            kv_bytes_loaded: None,
            plain_kv_bytes_loaded: None,
            over_contiguous: None,
            plain_over_ours: None,
            gather_over_ours: None,
            name: format!("{kernel} {} MiB", rates.bytes >> 20),
        }
    }

    fn print(&self) {
        let ratio = |ratio: Option<f64>| ratio.map_or_else(String::new, |ratio| format!("{ratio:.3}"));
        let loaded =
            self.kv_bytes_loaded.map_or_else(String::new, |bytes| format!("{:.2}", bytes as f64 / 1048576.0));
        let name = self.name.replacen("swap ", &format!("{} ", self.kernel), 1);
        println!(
            "{name:<50} {:>10.1} {:>9.2} {:>6.1}% {:>5} {loaded:>9} {:>11} {:>8} {:>8}",
            self.seconds * 1e6,
            self.bytes_per_s / 1e9,
            self.share_of_stream * 100.0,
            self.dispatches,
            ratio(self.over_contiguous),
            ratio(self.plain_over_ours),
            ratio(self.gather_over_ours),
        );
    }
}

/// All rows of a run.
pub(crate) struct Report {
    adapter: String,
    rows: Vec<Row>,
    left_out: Vec<String>,
}

impl Report {
    pub(crate) fn new(adapter: &str, rates: StreamRates) -> Self {
        println!(
            "\n{:<50} {:>10} {:>9} {:>7} {:>5} {:>9} {:>11} {:>8} {:>8}",
            "", "us", "GB/s", "stream", "disp.", "K+V MiB", "/contiguous", "plain/", "gather/"
        );
        let mut report = Self { adapter: adapter.to_owned(), rows: Vec::new(), left_out: Vec::new() };
        report.add(Row::stream("stream_read", &rates, rates.bytes, rates.read));
        report.add(Row::stream("stream_copy", &rates, 2 * rates.bytes, rates.copy));
        report
    }

    pub(crate) fn add(&mut self, mut row: Row) {
        row.adapter.clone_from(&self.adapter);
        row.print();
        self.rows.push(row);
    }

    pub(crate) fn leave_out(&mut self, name: &str, reason: &str) {
        println!("{name:<50} left out");
        self.left_out.push(format!("{name}: {reason}"));
    }

    pub(crate) fn finish(self, json: Option<&Path>) -> Result<(), Failure> {
        println!(
            "\nus: microseconds per layer. /contiguous: our time over the same kernels' without block tables. plain/: \
             one invocation per\nquery vector over ours. gather/: gathering and the contiguous kernels over ours. \
             K+V MiB: keys and values loaded."
        );
        if !self.left_out.is_empty() {
            println!("\nleft out:\n  {}", self.left_out.join("\n  "));
        }
        if let Some(path) = json {
            std::fs::write(path, serde_json::to_string_pretty(&self.rows)? + "\n")?;
            let plot = path.with_extension("svg");
            crate::plot::draw(&plot, &self.adapter, &self.rows)?;
            println!("\nwrote {} and {}", path.display(), plot.display());
        }
        Ok(())
    }
}
