//! See `paged_kv_fuzz::swap`.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| paged_kv_fuzz::swap(data));
