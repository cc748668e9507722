//! The figures: a table as they come, then JSON and a plot.

use std::path::Path;

use measure::Failure;
use measure::row::Row;
use measure::stream::StreamRates;

/// All rows of a run.
pub(crate) struct Report {
    adapter: String,
    rows: Vec<Row>,
    left_out: Vec<String>,
}

impl Report {
    pub(crate) fn new(adapter: &str, rates: StreamRates) -> Self {
        println!(
            "\n{:<50} {:>10} {:>9} {:>7} {:>5} {:>9} {:>9} {:>11} {:>8} {:>8}",
            "", "us", "GB/s", "stream", "disp.", "K+V MiB", "plain MiB", "/contiguous", "plain/", "gather/"
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
             K+V MiB: keys and values loaded; plain MiB: by the plain kernel."
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
