//! Conversion between f32 and the 16-bit floats that a cache may store.
//!
//! Reading is exact. Writing rounds to nearest, ties to even, as the kernels do; a value beyond the largest finite
//! 16-bit float becomes that float (no infinity is ever stored), and NaN stays NaN.

/// The largest finite 16-bit float, 65504.
const MAX_BITS: u16 = 0x7bff;

/// The value of a 16-bit float, exactly.
#[inline]
pub fn f16_bits_to_f32(bits: u16) -> f32 {
    let sign = u32::from(bits & 0x8000) << 16;
    // The exponent and mantissa in place of an f32's: too small by 2^112, the difference of the exponents' biases. The
    // multiplication is exact, and makes normal numbers of subnormal ones.
    let magnitude = f32::from_bits(u32::from(bits & 0x7fff) << 13) * f32::from_bits((127 + 112) << 23);
    // Infinity and NaN have the highest exponent, whatever the bias.
    let special = if bits & 0x7c00 == 0x7c00 { 0x7f80_0000 } else { 0 };
    f32::from_bits(magnitude.to_bits() | special | sign)
}

/// The 16-bit float nearest to `value`, ties to even; beyond ±65504, ±65504; NaN for NaN.
#[inline]
pub fn f32_to_f16_bits(value: f32) -> u16 {
    let bits = value.to_bits();
    let sign = (bits >> 16) as u16 & 0x8000;
    let magnitude = bits & 0x7fff_ffff;
    if magnitude > 0x7f80_0000 {
        return sign | 0x7e00;
    }
    if magnitude >= 65504f32.to_bits() {
        return sign | MAX_BITS;
    }
    if magnitude < (127 - 14) << 23 {
        // Below the smallest normal number, 2^-14: the spacing is 2^-24, and adding 1/2, whose own spacing is 2^-24,
        // leaves the count of it in the mantissa, rounded to nearest even by the addition.
        let rounded = f32::from_bits(magnitude) + 0.5;
        return sign | (rounded.to_bits() - 0.5f32.to_bits()) as u16;
    }
    // Thirteen bits fall away: add just under half of what they count, and one more when the last kept bit is odd.
    let odd = (magnitude >> 13) & 1;
    let rounded = magnitude + 0x0fff + odd;
    sign | ((rounded >> 13) - (112 << 10)) as u16
}

/// The two 16-bit floats of a word, the first in the low half.
#[inline]
pub(super) fn unpack_word(word: u32) -> [f32; 2] {
    [f16_bits_to_f32(word as u16), f16_bits_to_f32((word >> 16) as u16)]
}

/// A word of two 16-bit floats, the first in the low half.
#[inline]
pub(super) fn pack_word(low: f32, high: f32) -> u32 {
    u32::from(f32_to_f16_bits(low)) | u32::from(f32_to_f16_bits(high)) << 16
}

#[cfg(test)]
mod tests {
    use half::f16;

    use super::*;

    fn value_of(bits: u16) -> f64 {
        f16::from_bits(bits).to_f64()
    }

    #[test]
    fn every_16_bit_pattern_reads_as_half_reads_it() {
        for bits in 0..=u16::MAX {
            let expected = value_of(bits);
            let actual = f16_bits_to_f32(bits);
            if expected.is_nan() {
                assert!(actual.is_nan(), "{bits:#06x}");
            } else {
                assert_eq!(f64::from(actual), expected, "{bits:#06x}");
                assert_eq!(actual.is_sign_negative(), bits & 0x8000 != 0, "{bits:#06x}");
            }
        }
    }

    #[test]
    fn every_16_bit_pattern_survives_a_round_trip() {
        for bits in 0..=u16::MAX {
            let value = f16_bits_to_f32(bits);
            let written = f32_to_f16_bits(value);
            if value.is_nan() {
                assert!(f16_bits_to_f32(written).is_nan());
            } else if value.is_infinite() {
                assert_eq!(written, bits & 0x8000 | MAX_BITS);
            } else {
                assert_eq!(written, bits);
            }
        }
    }

    #[test]
    fn midpoints_round_to_even_and_their_neighbours_to_the_nearer_side() {
        for lower in 0..MAX_BITS {
            let upper = lower + 1;
            // Exact: both have 11 significant bits, the midpoint 12.
            let midpoint = ((value_of(lower) + value_of(upper)) / 2.0) as f32;
            let even = if lower % 2 == 0 { lower } else { upper };
            for sign in [0, 0x8000u16] {
                let signed = |magnitude: f32| if sign == 0 { magnitude } else { -magnitude };
                assert_eq!(f32_to_f16_bits(signed(midpoint)), sign | even);
                assert_eq!(f32_to_f16_bits(signed(midpoint.next_down())), sign | lower);
                assert_eq!(f32_to_f16_bits(signed(midpoint.next_up())), sign | upper);
            }
        }
    }

    #[test]
    fn values_beyond_the_range_become_the_largest_finite_one() {
        for value in [65504.0, 65519.0, 65520.0, 1e9, f32::MAX, f32::INFINITY] {
            assert_eq!(f16_bits_to_f32(f32_to_f16_bits(value)), 65504.0);
            assert_eq!(f16_bits_to_f32(f32_to_f16_bits(-value)), -65504.0);
        }
        assert!(f16_bits_to_f32(f32_to_f16_bits(f32::NAN)).is_nan());
        // Too small for any subnormal, or an f32 subnormal: zero of the same sign.
        assert_eq!(f32_to_f16_bits(-1e-40), 0x8000);
        assert_eq!(f32_to_f16_bits(2f32.powi(-25)), 0);
    }

    #[test]
    fn the_first_of_two_values_lies_in_the_low_half_of_a_word() {
        assert_eq!(pack_word(1.0, -2.0), 0xc000_3c00);
        assert_eq!(unpack_word(0xc000_3c00), [1.0, -2.0]);
    }
}
