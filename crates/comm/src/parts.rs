//! Where bytes of other ranks go: one buffer for each, kept from call to call.

/// Bytes at an address that is a multiple of 8, so that they can be looked at as numbers of any width up to 64 bits.
#[derive(Clone, Debug, Default)]
pub struct AlignedBytes {
    words: Vec<u64>,
    length: usize,
}

/// One buffer for each rank of a group. The memory stays from call to call: nothing is allocated when no part is
/// longer than before.
#[derive(Clone, Debug, Default)]
pub struct Parts {
    parts: Vec<AlignedBytes>,
}

impl AlignedBytes {
    /// The bytes.
    pub fn as_slice(&self) -> &[u8] {
        &bytemuck::cast_slice(&self.words)[..self.length]
    }

    /// The bytes, to fill them.
    pub fn as_mut_slice(&mut self) -> &mut [u8] {
        &mut bytemuck::cast_slice_mut(&mut self.words)[..self.length]
    }

    /// Sets the length; bytes that are new to it are of no known value.
    pub fn set_len(&mut self, length: usize) {
        self.words.resize(length.div_ceil(8), 0);
        self.length = length;
    }
}

impl Parts {
    /// One empty buffer for each of `world` ranks.
    pub fn new(world: u32) -> Self {
        Self {
            parts: vec![AlignedBytes::default(); world as usize],
        }
    }

    /// Bytes of `rank`; empty for a rank that does not exist.
    pub fn part(&self, rank: u32) -> &[u8] {
        self.parts
            .get(rank as usize)
            .map_or(&[], AlignedBytes::as_slice)
    }

    /// Bytes of all ranks, in their order.
    pub fn iter(&self) -> impl Iterator<Item = &[u8]> {
        self.parts.iter().map(AlignedBytes::as_slice)
    }

    /// Number of ranks.
    pub fn ranks(&self) -> usize {
        self.parts.len()
    }

    /// Bytes of all ranks together.
    pub fn total(&self) -> usize {
        self.iter().map(<[u8]>::len).sum()
    }

    pub(crate) fn part_mut(&mut self, rank: u32) -> Option<&mut AlignedBytes> {
        self.parts.get_mut(rank as usize)
    }

    /// As many buffers as there are ranks.
    pub(crate) fn fit(&mut self, world: u32) {
        self.parts
            .resize_with(world as usize, AlignedBytes::default);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_are_aligned_and_keep_what_fits() {
        let mut bytes = AlignedBytes::default();
        assert!(bytes.as_slice().is_empty());
        for length in [1, 7, 8, 9, 1000, 3, 0, 17] {
            bytes.set_len(length);
            assert_eq!(bytes.as_mut_slice().len(), length);
            assert!((bytes.as_slice().as_ptr() as usize).is_multiple_of(8));
        }
        bytes.as_mut_slice().fill(5);
        bytes.set_len(4);
        assert_eq!(bytes.as_slice(), [5; 4]);
    }
}
