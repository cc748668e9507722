//! Views of activation tensors: rows at a stride, for reading and for writing.
//!
//! A writing view knows which row it starts at, so that a tensor can be cut between rows and the pieces given to
//! threads, each of which still names rows by their number in the whole.

/// Rows of a tensor, for reading: row `i` starts at element `i * stride`.
#[derive(Clone, Copy, Debug)]
pub struct Rows<'a> {
    data: &'a [f32],
    stride: usize,
}

impl<'a> Rows<'a> {
    /// Rows of `data`, one every `stride` elements.
    pub fn new(data: &'a [f32], stride: usize) -> Self {
        Self { data, stride }
    }

    /// The first `len` elements of row `row`.
    ///
    /// # Panics
    /// When the row ends beyond the data.
    pub fn row(&self, row: usize, len: usize) -> &'a [f32] {
        &self.data[row.saturating_mul(self.stride)..][..len]
    }

    /// The view from row `row` on, which becomes row 0.
    ///
    /// # Panics
    /// When the row starts beyond the data.
    pub fn from_row(&self, row: usize) -> Self {
        Self { data: &self.data[row.saturating_mul(self.stride)..], stride: self.stride }
    }
}

/// Consecutive rows of a tensor, for writing.
#[derive(Debug)]
pub struct RowsMut<'a> {
    data: &'a mut [f32],
    stride: usize,
    first_row: usize,
}

impl<'a> RowsMut<'a> {
    /// All rows of `data`, one every `stride` elements, from row 0 on.
    pub fn new(data: &'a mut [f32], stride: usize) -> Self {
        Self { data, stride, first_row: 0 }
    }

    /// The first `len` elements of row `row`, counted from the start of the whole tensor.
    ///
    /// # Panics
    /// When the view does not hold the row.
    pub fn row_mut(&mut self, row: usize, len: usize) -> &mut [f32] {
        assert!(row >= self.first_row, "row {row} lies before the view, which starts at {}", self.first_row);
        &mut self.data[(row - self.first_row).saturating_mul(self.stride)..][..len]
    }

    /// The rows before `row`, and those from `row` on; both keep their numbers.
    ///
    /// A `row` outside the view leaves one side empty.
    pub fn split_at_row(self, row: usize) -> (Self, Self) {
        let row = row.max(self.first_row);
        let middle = (row - self.first_row).saturating_mul(self.stride).min(self.data.len());
        let (before, after) = self.data.split_at_mut(middle);
        (
            Self { data: before, stride: self.stride, first_row: self.first_row },
            Self { data: after, stride: self.stride, first_row: row },
        )
    }

    /// The same rows for the length of a shorter borrow.
    pub fn reborrow(&mut self) -> RowsMut<'_> {
        RowsMut { data: self.data, stride: self.stride, first_row: self.first_row }
    }

    /// The same rows for reading. Only a view that starts at row 0 numbers them alike.
    ///
    /// # Panics
    /// When the view starts at a later row.
    pub fn as_rows(&self) -> Rows<'_> {
        assert_eq!(self.first_row, 0, "a view of later rows cannot be read by row number");
        Rows { data: self.data, stride: self.stride }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_sides_of_a_cut_keep_the_row_numbers() {
        let mut data: Vec<f32> = (0..10).map(|i| i as f32).collect();
        // Four rows of 2 at stride 3; the last row has no padding behind it.
        let view = RowsMut::new(&mut data[..8], 3);
        let (mut before, after) = view.split_at_row(1);
        assert_eq!(before.row_mut(0, 2), [0.0, 1.0]);
        let (mut middle, mut last) = after.split_at_row(2);
        assert_eq!(middle.row_mut(1, 2), [3.0, 4.0]);
        assert_eq!(last.row_mut(2, 2), [6.0, 7.0]);
    }

    #[test]
    fn a_cut_outside_the_view_leaves_one_side_empty() {
        let mut data = [0.0, 1.0];
        let (before, after) = RowsMut::new(&mut data, 1).split_at_row(5);
        assert_eq!((before.data.len(), after.data.len(), after.first_row), (2, 0, 5));
    }
}
