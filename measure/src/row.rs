//! One row of the bench `attention`: a line of its table, an object of its JSON.

use serde::Serialize;

use crate::cases::{Spec, What};
use crate::stream::StreamRates;

/// The figures of one case. Times, bytes and dispatches are per layer, except for block copies and swaps, which are of
/// all layers at once.
#[derive(Clone, Debug, Serialize)]
#[allow(missing_docs)]
pub struct Row {
    pub kernel: &'static str,
    pub adapter: String,
    pub kv: String,
    pub query_heads: u32,
    pub kv_heads: u32,
    pub head_dim: u32,
    pub context: u32,
    pub batch: u32,
    pub rows: u32,
    pub block_size: u32,
    pub seconds: f64,
    pub bytes_per_s: f64,
    pub share_of_stream: f64,
    pub dispatches: u32,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub kv_bytes_loaded: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub plain_kv_bytes_loaded: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub over_contiguous: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub plain_over_ours: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub gather_over_ours: Option<f64>,
    #[serde(skip)]
    pub name: String,
}

impl Row {
    /// `bytes` in `seconds`, as a share of `stream` bytes per second.
    pub fn new(spec: &Spec, stream: f64, bytes: u64, seconds: f64) -> Self {
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

    /// A stream rate.
    pub fn stream(kernel: &'static str, rates: &StreamRates, bytes: u64, bytes_per_s: f64) -> Self {
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

    /// As a line of the table.
    pub fn print(&self) {
        let ratio = |ratio: Option<f64>| ratio.map_or_else(String::new, |ratio| format!("{ratio:.3}"));
        let mib = |bytes: Option<u64>| {
            bytes.map_or_else(String::new, |bytes| format!("{:.2}", bytes as f64 / 1_048_576.0))
        };
        let name = self.name.replacen("swap ", &format!("{} ", self.kernel), 1);
        println!(
            "{name:<50} {:>10.1} {:>9.2} {:>6.1}% {:>5} {:>9} {:>9} {:>11} {:>8} {:>8}",
            self.seconds * 1e6,
            self.bytes_per_s / 1e9,
            self.share_of_stream * 100.0,
            self.dispatches,
            mib(self.kv_bytes_loaded),
            mib(self.plain_kv_bytes_loaded),
            ratio(self.over_contiguous),
            ratio(self.plain_over_ours),
            ratio(self.gather_over_ours),
        );
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn json_has_the_keys_that_readers_go_by() {
        let spec = &crate::cases::quick()[1];
        let mut row = Row::new(spec, 100.0, 50, 2.0);
        let keys = |row: &Row| {
            let value = serde_json::to_value(row).expect("JSON");
            value.as_object().expect("an object").keys().cloned().collect::<Vec<_>>()
        };
        let always = [
            "kernel",
            "adapter",
            "kv",
            "query_heads",
            "kv_heads",
            "head_dim",
            "context",
            "batch",
            "rows",
            "block_size",
            "seconds",
            "bytes_per_s",
            "share_of_stream",
            "dispatches",
        ];
        let mut expected = always.map(str::to_owned).to_vec();
        expected.sort_unstable();
        let mut found = keys(&row);
        found.sort_unstable();
        assert_eq!(found, expected);
        assert_eq!((row.bytes_per_s, row.share_of_stream), (25.0, 0.25));

        row.over_contiguous = Some(1.0);
        row.plain_over_ours = Some(2.0);
        row.gather_over_ours = Some(3.0);
        let found = keys(&row);
        assert!(
            ["over_contiguous", "plain_over_ours", "gather_over_ours"]
                .iter()
                .all(|key| found.contains(&(*key).to_owned()))
        );
    }
}
