//! Where each block is drawn: squares of whole points, row by row. Nothing here draws.

/// Points between two blocks.
const GAP: f32 = 3.0;
/// Sides of the largest and the smallest block, in points.
const LARGEST: u32 = 64;
pub(crate) const SMALLEST: u32 = 8;

/// A square: left, top, side.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Square {
    pub(crate) left: f32,
    pub(crate) top: f32,
    pub(crate) side: f32,
}

/// The grid that shows `num_cells` blocks as large as fits.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Grid {
    pub(crate) columns: u32,
    pub(crate) rows: u32,
    pub(crate) side: f32,
    num_cells: u32,
}

impl Grid {
    /// Fits into `width` points, and into `height` unless the blocks would be smaller than [`SMALLEST`]: then it is
    /// higher.
    pub(crate) fn fit(num_cells: u32, width: f32, height: f32) -> Self {
        let columns_of = |side: u32| ((width + GAP) / (side as f32 + GAP)).floor().max(1.0) as u32;
        let height_of = |rows: u32, side: u32| rows as f32 * (side as f32 + GAP) - GAP;
        let fits = |side: &u32| height_of(num_cells.div_ceil(columns_of(*side)), *side) <= height;
        let side = (SMALLEST..=LARGEST).rev().find(fits).unwrap_or(SMALLEST);
        let columns = columns_of(side).min(num_cells.max(1));
        // As many rows as needed, and the same number of blocks in each of them.
        let rows = num_cells.div_ceil(columns).max(1);
        let columns = num_cells.div_ceil(rows).max(1);
        Self { columns, rows, side: side as f32, num_cells }
    }

    /// Where block `index` is, from the grid's corner.
    pub(crate) fn square(&self, index: u32) -> Square {
        let pitch = self.side + GAP;
        let (row, column) = (index / self.columns, index % self.columns);
        Square { left: column as f32 * pitch, top: row as f32 * pitch, side: self.side }
    }

    /// The block at a point, from the grid's corner; gaps belong to no block.
    pub(crate) fn at(&self, x: f32, y: f32) -> Option<u32> {
        let pitch = self.side + GAP;
        if x < 0.0 || y < 0.0 || x % pitch >= self.side || y % pitch >= self.side {
            return None;
        }
        let (row, column) = ((y / pitch) as u32, (x / pitch) as u32);
        let index = row.checked_mul(self.columns)?.checked_add(column)?;
        (column < self.columns && index < self.num_cells).then_some(index)
    }

    pub(crate) fn size(&self) -> [f32; 2] {
        let pitch = self.side + GAP;
        [self.columns as f32 * pitch - GAP, self.rows as f32 * pitch - GAP]
    }
}

impl Square {
    /// One owner's part of a block that `of` share, and how much of it is filled: left and right, and the top of the
    /// filled part. Tokens that are few are drawn a few points high, so that they are seen.
    pub(crate) fn stripe(&self, index: usize, of: usize, filled: f32) -> (f32, f32, f32) {
        let edge = |index: usize| self.left + (self.side * index as f32 / of as f32).round();
        let height = (self.side * filled).round();
        let height = if filled > 0.0 { height.max((self.side / 8.0).round().max(4.0)) } else { 0.0 };
        (edge(index), edge(index + 1), self.top + self.side - height.min(self.side))
    }
}
