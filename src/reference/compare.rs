//! Compares an f32 result with an f64 one, row by row.

use std::fmt;

/// The worst element of a comparison that failed.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Mismatch {
    /// Index of the element.
    pub index: usize,
    /// What was computed.
    pub actual: f32,
    /// What it should be.
    pub expected: f64,
    /// Their difference relative to the row's largest expected magnitude; infinite where only one of them is NaN, or
    /// infinite.
    pub error: f64,
}

impl fmt::Display for Mismatch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { index, actual, expected, error } = self;
        write!(f, "element {index} is {actual}, expected {expected}: relative error {error:e}")
    }
}

impl std::error::Error for Mismatch {}

/// Compares `actual` with `expected`, both rows of `row_len` elements, and returns the largest relative error.
///
/// An element's error is its difference relative to the largest finite magnitude in its row of `expected`: a sum's
/// rounding errors are in proportion to its terms, so small elements beside large ones deserve no tighter bound. NaN
/// equals only NaN, and an infinity only itself. A row of zeros must be zeros.
///
/// # Errors
/// [`Mismatch`], the worst element, when an error exceeds `tolerance`.
///
/// # Panics
/// When the lengths differ, or rows have no elements.
pub fn compare(actual: &[f32], expected: &[f64], row_len: usize, tolerance: f64) -> Result<f64, Mismatch> {
    assert_eq!(actual.len(), expected.len(), "elements of the actual and of the expected result");
    assert!(row_len > 0, "rows of no elements are compared");
    let mut worst: Option<Mismatch> = None;
    for (row, (actual, expected)) in actual.chunks(row_len).zip(expected.chunks(row_len)).enumerate() {
        let scale = expected.iter().map(|x| x.abs()).filter(|x| x.is_finite()).fold(0.0, f64::max);
        for (column, (&actual, &expected)) in actual.iter().zip(expected).enumerate() {
            let error = element_error(f64::from(actual), expected, scale);
            if worst.is_none_or(|worst| error > worst.error) {
                worst = Some(Mismatch { index: row * row_len + column, actual, expected, error });
            }
        }
    }
    match worst {
        Some(mismatch) if mismatch.error > tolerance => Err(mismatch),
        Some(mismatch) => Ok(mismatch.error),
        None => Ok(0.0),
    }
}

/// Never NaN: a comparison with NaN must not pass for want of being greater.
fn element_error(actual: f64, expected: f64, scale: f64) -> f64 {
    if actual == expected || (actual.is_nan() && expected.is_nan()) {
        return 0.0;
    }
    let error = (actual - expected).abs() / scale;
    if error.is_nan() { f64::INFINITY } else { error }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn b05c_nan_on_one_side_alone_is_a_failure() {
        assert!(compare(&[0.0], &[f64::NAN], 1, 1e9).is_err());
        assert!(compare(&[f32::NAN], &[0.0], 1, 1e9).is_err());
        assert!(compare(&[1.0, f32::NAN], &[1.0, 2.0], 2, 1e9).is_err());
        assert!(compare(&[1.0, 2.0], &[1.0, f64::NAN], 2, 1e9).is_err());
        assert_eq!(compare(&[f32::NAN], &[f64::NAN], 1, 0.0), Ok(0.0));
    }

    #[test]
    fn an_infinity_equals_only_itself() {
        assert_eq!(compare(&[f32::INFINITY, 1.0], &[f64::INFINITY, 1.0], 2, 0.0), Ok(0.0));
        assert!(compare(&[f32::INFINITY], &[f64::NEG_INFINITY], 1, 1e9).is_err());
        assert!(compare(&[f32::MAX, 1.0], &[f64::INFINITY, 1.0], 2, 1e9).is_err());
        assert!(compare(&[f32::INFINITY, 1.0], &[1.0, 1.0], 2, 1e9).is_err());
    }

    #[test]
    #[should_panic(expected = "rows of no elements")]
    fn rows_have_elements() {
        _ = compare(&[], &[], 0, 0.0);
    }

    #[test]
    fn errors_are_relative_to_the_largest_element_of_the_row() {
        let error = compare(&[100.0, 0.5, 1.0], &[100.0, 0.0, 1.0], 2, 0.01);
        assert_eq!(error, Ok(0.005));
        // The same difference in a row of its own, and where all should be zero.
        assert_eq!(compare(&[100.0, 1.5], &[100.0, 1.0], 1, 0.01).map_err(|worst| worst.index), Err(1));
        assert!(compare(&[1e-30], &[0.0], 1, 1e9).is_err());
    }
}
