//! Time to issue against time to read, of a few real cards.

use super::family::Family;
use super::per_key::PerKey;

/// A card, as its maker's data sheet describes it.
#[derive(Clone, Copy, Debug)]
pub struct Card {
    /// Its name.
    pub name: &'static str,
    /// The family whose code it runs, or its closest.
    pub family: Family,
    /// Compute units.
    pub compute_units: u32,
    /// The clock that it keeps up: AMD's "game frequency", Vega's base. At a higher one issuing takes less time.
    pub clock_mhz: u32,
    /// Memory bandwidth.
    pub bandwidth_gb: u32,
}

/// The cards that are looked at. RX 7600 and Steam Deck are relatives of GFX1100 and NAVI21 with the same instructions;
/// the former has fewer registers.
pub const CARDS: [Card; 5] = [
    Card {
        name: "RX 7900 XTX",
        family: Family::Gfx1100,
        compute_units: 96,
        clock_mhz: 2300,
        bandwidth_gb: 960,
    },
    Card { name: "RX 7600", family: Family::Gfx1100, compute_units: 32, clock_mhz: 2250, bandwidth_gb: 288 },
    Card { name: "RX 6800", family: Family::Navi21, compute_units: 60, clock_mhz: 1815, bandwidth_gb: 512 },
    Card { name: "Steam Deck", family: Family::Navi21, compute_units: 8, clock_mhz: 1600, bandwidth_gb: 88 },
    Card {
        name: "RX Vega 64",
        family: Family::Vega10,
        compute_units: 64,
        clock_mhz: 1247,
        bandwidth_gb: 484,
    },
];

impl Card {
    /// Nanoseconds to issue a key's instructions on all of the card's SIMDs. Nothing overlaps: every instruction takes
    /// its clocks from its SIMD, although waves issue to different units at once.
    pub fn issue_ns(&self, per_key: &PerKey) -> f64 {
        let vector = per_key.vector_alu + per_key.cross_lane;
        let others = per_key.instructions - vector;
        let clocks = vector * self.family.vector_clocks() + others * self.family.other_clocks();
        let simds = f64::from(self.compute_units * self.family.simds_per_compute_unit());
        clocks / simds / f64::from(self.clock_mhz) * 1e3
    }

    /// Nanoseconds to read a key's bytes from memory, at all of its bandwidth and without caches.
    pub fn read_ns(&self, per_key: &PerKey) -> f64 {
        per_key.global_bytes / f64::from(self.bandwidth_gb)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_are_those_of_the_whole_card() {
        let per_key = PerKey {
            instructions: 30.0,
            vector_alu: 19.0,
            cross_lane: 1.0,
            global_bytes: 512.0,
            ..PerKey::default()
        };
        let card = |family| Card { name: "", family, compute_units: 10, clock_mhz: 1000, bandwidth_gb: 64 };
        assert_eq!(card(Family::Navi21).issue_ns(&per_key), (20.0 * 2.0 + 10.0) / 20.0);
        assert_eq!(card(Family::Vega10).issue_ns(&per_key), 30.0 * 4.0 / 40.0);
        assert_eq!(card(Family::Navi21).read_ns(&per_key), 8.0);
    }
}
