//! What a row sees: the one rule of the twins and of the dense attention that judges them.
//!
//! Rows are a sequence's last ones: of `rows` rows in a context of `context` tokens, row `i` is the token
//! `context - rows + i`, and sees itself and all keys before it. More rows than tokens leave the first rows without a key.

/// The end of the keys that row `row` sees.
pub(super) fn visible_end(context: usize, rows: usize, row: usize) -> usize {
    (context + row + 1).saturating_sub(rows)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_row_sees_the_whole_context_and_each_row_before_it_one_key_less() {
        let ends =
            |context, rows| (0..rows).map(|row| visible_end(context, rows, row)).collect::<Vec<usize>>();
        assert_eq!(ends(5, 1), [5]);
        assert_eq!(ends(5, 5), [1, 2, 3, 4, 5]);
        assert_eq!(ends(2, 4), [0, 0, 1, 2], "rows without a key");
    }
}
