//! Four-bit weights with a scale per group of k: the format and its meaning. No fast kernel computes it yet; the layout
//! is that of the other packed weights, so that one can be added without a change of files or callers.
//!
//! # Meaning
//!
//! A row of w is cut into groups of [`GROUP`] values (the last one may be shorter). Group g of row o has the scale
//! S = max |w| / 7 and values Q = clamp(rint(w / S), −7, 7), halves to even. x is quantised per token as for int8. Then
//! y_o = s · Σ_g (Σ_{k in g} q_k · Q_k) · S_g: the inner sums are exact, each becomes the nearest f32 and is multiplied
//! by S_g, products are added from the first group to the last, and the sum is multiplied by the row's scale s, every
//! operation rounded.
//!
//! # Layout
//!
//! A panel is sixteen rows of w, filled up with zeros. Per group it has a line of sixteen f32 scales and then lines of 64
//! bytes, each sixteen columns by eight k; a column's eight values are four bytes, byte i holding k = i in its lower half
//! and k = i + 4 in its upper half, each with 8 added. A mask and a shift of a line give two lines of an int8 panel.

use crate::weight::{LINE, PANEL};

/// Values that share a scale.
pub const GROUP: usize = 32;
/// Values of k in a line.
const LINE_VALUES: usize = 8;
/// Added to values as stored.
const SHIFT: i8 = 8;

/// A row as groups of values and their scales.
#[derive(Debug, Clone, PartialEq)]
pub struct Row {
    /// One per value of the row, −7 ..= 7.
    pub values: Vec<i8>,
    /// One per group.
    pub scales: Vec<f32>,
}

/// Quantises one row.
pub fn quantize_row(w: &[f32]) -> Row {
    let mut row = Row {
        values: Vec::with_capacity(w.len()),
        scales: Vec::new(),
    };
    for group in w.chunks(GROUP) {
        let largest = group
            .iter()
            .fold(1e-10f32, |largest, w| largest.max(w.abs()));
        let scale = largest / 7.0;
        let values = group
            .iter()
            .map(|w| (w / scale).round_ties_even().clamp(-7.0, 7.0) as i8);
        row.values.extend(values);
        row.scales.push(scale);
    }
    row
}

/// y of one quantised row of x with its scale, and one row of w.
pub fn dot(q: &[i8], scale: f32, w: &Row) -> f32 {
    let groups = q.chunks(GROUP).zip(w.values.chunks(GROUP)).zip(&w.scales);
    let sum = groups.fold(0.0f32, |sum, ((q, w), scale)| {
        sum + super::dot_i8(q, w) as f32 * scale
    });
    sum * scale
}

/// Bytes of packed `[n, k]`.
pub fn packed_bytes(n: usize, k: usize) -> usize {
    let lines = k.div_ceil(GROUP) * (1 + GROUP / LINE_VALUES);
    n.div_ceil(PANEL) * lines * LINE
}

/// Rows of the same length in the packed layout.
pub fn pack(rows: &[Row]) -> Vec<u8> {
    let k = rows.first().map_or(0, |row| row.values.len());
    let groups = k.div_ceil(GROUP);
    let mut out = Vec::with_capacity(packed_bytes(rows.len(), k));
    for panel in rows.chunks(PANEL) {
        for group in 0..groups {
            for column in 0..PANEL {
                let scale = panel.get(column).map_or(0.0, |row| row.scales[group]);
                out.extend(scale.to_le_bytes());
            }
            for line in 0..GROUP / LINE_VALUES {
                for column in 0..PANEL {
                    let value = |place: usize| {
                        let k = group * GROUP + line * LINE_VALUES + place;
                        let value = panel.get(column).and_then(|row| row.values.get(k));
                        (value.copied().unwrap_or(0) + SHIFT) as u8
                    };
                    out.extend((0..4).map(|i| value(i) | value(i + 4) << 4));
                }
            }
        }
    }
    out
}

/// One row of packed `[n, k]`.
pub fn unpack_row(packed: &[u8], k: usize, row: usize) -> Row {
    let groups = k.div_ceil(GROUP);
    let group_bytes = (1 + GROUP / LINE_VALUES) * LINE;
    let panel = &packed[row / PANEL * groups * group_bytes..][..groups * group_bytes];
    let column = row % PANEL * 4;
    let mut found = Row {
        values: Vec::with_capacity(k),
        scales: Vec::with_capacity(groups),
    };
    for group in panel.chunks(group_bytes) {
        let (scales, lines) = group.split_at(LINE);
        let scale = &scales[column..column + 4];
        found
            .scales
            .push(f32::from_le_bytes([scale[0], scale[1], scale[2], scale[3]]));
        for line in lines.chunks(LINE) {
            let cell = &line[column..column + 4];
            let lower = cell.iter().map(|byte| (byte & 15) as i8 - SHIFT);
            let upper = cell.iter().map(|byte| (byte >> 4) as i8 - SHIFT);
            found.values.extend(lower.chain(upper));
        }
    }
    found.values.truncate(k);
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    fn values(count: usize, seed: usize) -> Vec<f32> {
        (0..count)
            .map(|i| ((i * 7919 + seed * 104_729) % 1009) as f32 / 504.5 - 1.0)
            .collect()
    }

    #[test]
    fn packed_rows_are_read_back_and_a_line_splits_into_two_of_int8() {
        for (n, k) in [(1, 1), (16, 32), (20, 33), (33, 80), (48, 176)] {
            let rows: Vec<Row> = (0..n).map(|row| quantize_row(&values(k, row))).collect();
            let packed = pack(&rows);
            assert_eq!(packed.len(), packed_bytes(n, k));
            for (index, row) in rows.iter().enumerate() {
                assert_eq!(unpack_row(&packed, k, index), *row, "{n} {k} {index}");
            }
            let line = &packed[LINE..2 * LINE];
            for place in 0..8.min(k) {
                let byte = line[place % 4];
                let value = if place < 4 { byte & 15 } else { byte >> 4 };
                assert_eq!(value as i8 - SHIFT, rows[0].values[place]);
            }
        }
    }

    #[test]
    fn products_are_as_close_as_four_bits_allow() {
        let (k, n) = (320, 8);
        let x = values(k, 99);
        let (q, scale) = super::super::quantize_row(&x);
        for row in 0..n {
            let w = values(k, row);
            let exact: f32 = x.iter().zip(&w).map(|(x, w)| x * w).sum();
            let size: f32 = x.iter().zip(&w).map(|(x, w)| (x * w).abs()).sum();
            let y = dot(&q, scale, &quantize_row(&w));
            assert!((y - exact).abs() < 0.03 * size, "{y} {exact}");
        }
    }

    #[test]
    fn groups_have_scales_of_their_own() {
        let mut w = vec![7.0; 32];
        w.extend([0.007; 32]);
        w.extend([0.0; 3]);
        let row = quantize_row(&w);
        assert_eq!(row.scales.len(), 3);
        assert_eq!((row.values[0], row.values[40], row.values[66]), (7, 7, 0));
        let q = vec![1; 67];
        let y = dot(&q, 2.0, &row);
        assert_eq!(y, ((224.0 * row.scales[0]) + 224.0 * row.scales[1]) * 2.0);
    }
}
