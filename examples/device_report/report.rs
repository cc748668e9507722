//! The report, for people and for programs.

use std::fmt::Write as _;

use serde::Serialize;

use super::adapters::AdapterFacts;
use super::check::Check;
use super::models::Fit;
use super::rates::{Decode, Rates, Ratios};
use super::requests::Request;

/// All that is reported; as JSON, with these names.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct Report {
    pub(crate) versions: Versions,
    pub(crate) adapters: Vec<AdapterFacts>,
    /// Index of the adapter that the rest is about.
    pub(crate) adapter: usize,
    /// Everything that it offers, by wgpu's names.
    pub(crate) features: Vec<&'static str>,
    pub(crate) requests: Vec<Request>,
    /// Size of the pool that the models are fitted into.
    pub(crate) pool_bytes: u64,
    pub(crate) models: Vec<Fit>,
    /// Null where none could be measured.
    pub(crate) rates: Option<Rates>,
    /// Why not all of them were measured; null where they were.
    pub(crate) rates_failure: Option<String>,
    /// Whether that is a kernel's fault: a wrong result, or a call that wgpu refused.
    #[serde(skip)]
    pub(crate) rates_are_wrong: bool,
    /// Null unless it was asked for.
    pub(crate) check: Option<Check>,
}

/// What this program was built from, and for what.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct Versions {
    pub(crate) paged_kv: &'static str,
    pub(crate) wgpu: &'static str,
    pub(crate) os: &'static str,
    pub(crate) arch: &'static str,
}

impl Versions {
    pub(crate) fn here() -> Self {
        Self {
            paged_kv: locked("paged-kv"),
            wgpu: locked("wgpu"),
            os: std::env::consts::OS,
            arch: std::env::consts::ARCH,
        }
    }
}

/// The version of a package that this workspace was built with.
fn locked(package: &str) -> &'static str {
    let packages = include_str!("../../Cargo.lock").split("[[package]]");
    let quoted = |text: &'static str, key: &str| text.lines().find_map(|line| line.strip_prefix(key));
    packages
        .filter(|entry| quoted(entry, "name = ") == Some(&format!("\"{package}\"")))
        .find_map(|entry| quoted(entry, "version = "))
        .unwrap_or_default()
        .trim_matches('"')
}

impl Report {
    /// Why there is less in it than was asked for.
    pub(crate) fn failure(&self) -> Option<&str> {
        self.rates_failure.as_deref().or_else(|| self.check.as_ref().and_then(Check::shortfall))
    }

    /// The program's exit status.
    pub(crate) fn status(&self) -> u8 {
        let cases = self.check.iter().flat_map(|check| &check.cases);
        match self.failure() {
            _ if self.rates_are_wrong || cases.into_iter().any(|case| case.failure.is_some()) => 1,
            Some(_) => 3,
            None => 0,
        }
    }

    pub(crate) fn json(&self) -> String {
        serde_json::to_string_pretty(self).unwrap_or_else(|error| error.to_string())
    }

    /// At most 100 columns wide.
    pub(crate) fn text(&self) -> String {
        let Versions { paged_kv, wgpu, os, arch } = &self.versions;
        let mut text = format!("paged-kv {paged_kv}, wgpu {wgpu}, {os} {arch}\n");
        self.write_adapters(&mut text);
        self.write_requests(&mut text);
        self.write_models(&mut text);
        self.write_rates(&mut text);
        self.write_check(&mut text);
        text
    }

    fn write_adapters(&self, text: &mut String) {
        text.push_str("\nadapters, * the one below; --adapter NAME takes another\n");
        for (index, facts) in self.adapters.iter().enumerate() {
            let mark = if index == self.adapter { '*' } else { ' ' };
            let computes = if facts.computes { "" } else { ", does not compute" };
            let _ = writeln!(text, "{mark} {} ({}{computes})", facts.label, facts.device_type);
            let driver = format!("{} {}", facts.driver, facts.driver_info);
            wrap(text, "      ", driver.trim());
        }
    }

    fn write_requests(&self, text: &mut String) {
        let _ = writeln!(
            text,
            "\n{:<33}{:>12}{:>14}{:>14}",
            "what to request", "by default", "offered", "request"
        );
        for request in &self.requests {
            let shown = |value: u64| match (request.is_limit, value) {
                (true, bytes) => mib(bytes),
                (false, 0) => "no".to_owned(),
                (false, _) => "yes".to_owned(),
            };
            let Request { name, default, offered, request, buys, .. } = request;
            let [default, offered, request] = [*default, *offered, *request].map(shown);
            let _ = writeln!(text, "  {name:<31}{default:>12}{offered:>14}{request:>14}\n      {buys}");
        }
        let [least, most] = self.adapters[self.adapter].subgroup_sizes;
        let _ = writeln!(text, "  subgroups of {least} to {most} lanes; they are used from 4 on");
    }

    fn write_models(&self, text: &mut String) {
        let pool = mib(self.pool_bytes);
        let _ = writeln!(text, "\nwhat a pool of {pool} holds, in f16, in blocks of 16 tokens");
        text.push_str("  wgpu does not tell how much memory is free; --pool MIB for another size\n");
        let _ = writeln!(
            text,
            "{:16}{:>14}{:>12}{:>12}{:>9}   most that the limits allow",
            "", "KiB a token", "blocks", "tokens", "buffers"
        );
        for fit in &self.models {
            let or_none = |value: Option<u64>| value.map_or("none".to_owned(), |value| value.to_string());
            let _ = writeln!(
                text,
                "  {:<14}{:>14.1}{:>12}{:>12}{:>9}   {} tokens, {:.1} GiB",
                fit.model,
                fit.bytes_per_token as f64 / 1024.0,
                or_none(fit.blocks.map(u64::from)),
                or_none(fit.tokens),
                or_none(fit.arenas.map(u64::from)),
                fit.most_tokens,
                fit.most_bytes as f64 / (1u64 << 30) as f64,
            );
        }
    }

    fn write_rates(&self, text: &mut String) {
        let Some(rates) = &self.rates else {
            let reason = self.rates_failure.as_deref().unwrap_or_default();
            text.push('\n');
            return wrap(text, "rates: not measured: ", reason);
        };
        if !rates.variants.is_empty() {
            text.push_str("\nkernels for 32/8 heads of 128, f16\n");
        }
        for variant in &rates.variants {
            let _ = writeln!(text, "  {:<60}{:>8.2} s to make", variant.name, variant.creation_seconds);
        }
        let _ = writeln!(text, "\nrates, by {}", rates.clock);
        if rates.software {
            text.push_str("  a software adapter: they say nothing about a GPU\n");
        }
        let size = mib(rates.stream_bytes);
        let copy = format!("copy {size}, both ways counted");
        let _ = writeln!(text, "  read {size:<39}{:>10.2} GB/s", rates.read_bytes_per_s / 1e9);
        let _ = writeln!(text, "  {copy:<44}{:>10.2} GB/s", rates.copy_bytes_per_s / 1e9);
        if let Some(decode) = &rates.decode {
            write_decode(text, decode);
        }
        let Ratios { over_contiguous, key_columns } = rates.ratios.unwrap_or_default();
        if let Some(over_contiguous) = over_contiguous {
            let _ =
                writeln!(text, "  {:<44}{over_contiguous:>10.3}", "decode over decode without block tables");
        }
        if let Some(key_columns) = key_columns {
            let _ = writeln!(text, "  {:<44}{key_columns:>10.3}", "decode with keys by columns over decode");
        }
        if let Some(reason) = &self.rates_failure {
            wrap(text, "  not all was measured: ", reason);
        }
    }

    fn write_check(&self, text: &mut String) {
        let Some(check) = &self.check else {
            text.push_str("\nnumbers: not checked; --check does, in about three minutes at most\n");
            return;
        };
        if let (0, Some(reason)) = (check.cases_run, check.shortfall()) {
            text.push('\n');
            return wrap(text, "numbers: not checked: ", reason);
        }
        let wrong = check.cases.iter().filter(|case| case.failure.is_some()).count();
        let verdict = match wrong {
            0 => format!("right in all {} cases", check.cases_run),
            _ => format!("WRONG in {wrong} of {} cases", check.cases_run),
        };
        let _ = writeln!(
            text,
            "\nnumbers: {verdict} that were run, of {}, in {:.0} s; worst error {:.1e} of {:.0e} allowed",
            check.cases_total, check.seconds, check.worst_error, check.tolerance
        );
        if let Some(interruption) = &check.interruption {
            wrap(text, "  ended before its time: ", interruption);
        }
        for case in &check.cases {
            if let Some(failure) = &case.failure {
                let _ = writeln!(text, "  {}", case.name);
                wrap(text, "      ", failure);
            }
            if let Some(reason) = &case.not_run {
                let _ = writeln!(text, "  {}", case.name);
                wrap(text, "      not run: ", reason);
            }
        }
    }
}

fn write_decode(text: &mut String, decode: &Decode) {
    let Decode { sequences, context, layers: count, .. } = decode;
    let layers = if *count == 1 { "layer" } else { "layers" };
    let what = format!("decode {sequences} chats of {context} tokens, {count} {layers}");
    let _ = writeln!(
        text,
        "  {what:<44}{:>10.2} GB/s, {:.0} % of the read, {:.2} ms a layer",
        decode.bytes_per_s / 1e9,
        100.0 * decode.share_of_stream_read,
        1e3 * decode.layer_seconds,
    );
}

/// Adds `start` and `words`, of any length, in as many lines as they take.
fn wrap(text: &mut String, start: &str, words: &str) {
    let options = textwrap::Options::new(100).initial_indent(start).subsequent_indent("      ");
    text.push_str(&textwrap::fill(words, options));
    text.push('\n');
}

fn mib(bytes: u64) -> String {
    format!("{} MiB", bytes >> 20)
}
