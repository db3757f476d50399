//! A set of node positions that gives up its lowest members a machine word at a time.
//!
//! Invariants: a bit of `summary` is set exactly when its word of `words` is not 0, likewise `top` over `summary`;
//! sets of up to [`FEW`] members hold no bitmap; a bitmap in the spare store is all zero.

const FEW: usize = 6;
const WORD_BITS: u32 = u64::BITS;

/// Bitmaps that are not in use, all zero, and how large to make a new one.
#[derive(Debug, Default)]
pub(crate) struct SpareBitmaps {
    #[expect(clippy::vec_box, reason = "the boxes go to and fro between here and the sets")]
    zeroed: Vec<Box<Bitmap>>,
    words: usize,
}

impl SpareBitmaps {
    /// For positions below `nodes`.
    pub(crate) fn for_nodes(nodes: usize) -> Self {
        Self { zeroed: Vec::new(), words: nodes.div_ceil(WORD_BITS as usize).max(1) }
    }

    #[expect(
        clippy::unnecessary_box_returns,
        reason = "a set is smaller with a pointer, and most have no bitmap"
    )]
    fn take(&mut self) -> Box<Bitmap> {
        self.zeroed.pop().unwrap_or_else(|| Box::new(Bitmap::new(self.words)))
    }
}

#[derive(Debug)]
struct Bitmap {
    words: Vec<u64>,
    summary: Vec<u64>,
    top: Vec<u64>,
    count: u32,
}

impl Bitmap {
    fn new(words: usize) -> Self {
        let summary = words.div_ceil(WORD_BITS as usize);
        let top = summary.div_ceil(WORD_BITS as usize);
        Self { words: vec![0; words], summary: vec![0; summary], top: vec![0; top], count: 0 }
    }

    #[inline]
    fn insert(&mut self, word: u32, mask: u64) {
        let before = self.words[word as usize];
        self.words[word as usize] = before | mask;
        self.count += mask.count_ones();
        if before == 0 {
            let over = word / WORD_BITS;
            self.summary[over as usize] |= 1 << (word % WORD_BITS);
            self.top[(over / WORD_BITS) as usize] |= 1 << (over % WORD_BITS);
        }
    }

    #[inline]
    fn remove(&mut self, word: u32, mask: u64) {
        let left = self.words[word as usize] & !mask;
        self.words[word as usize] = left;
        self.count -= mask.count_ones();
        if left == 0 {
            let over = word / WORD_BITS;
            self.summary[over as usize] &= !(1 << (word % WORD_BITS));
            if self.summary[over as usize] == 0 {
                self.top[(over / WORD_BITS) as usize] &= !(1 << (over % WORD_BITS));
            }
        }
    }

    #[inline]
    fn lowest_word(&self) -> Option<(u32, u64)> {
        let at_top = self.top.iter().position(|&bits| bits != 0)?;
        let over = at_top as u32 * WORD_BITS + self.top[at_top].trailing_zeros();
        let word = over * WORD_BITS + self.summary[over as usize].trailing_zeros();
        Some((word, self.words[word as usize]))
    }
}

/// See the module.
#[derive(Debug, Default)]
pub(crate) struct NodeSet {
    /// Ascending in `few[..len]`, while there is no bitmap.
    few: [u32; FEW],
    len: u8,
    many: Option<Box<Bitmap>>,
}

impl NodeSet {
    #[inline]
    pub(crate) fn is_empty(&self) -> bool {
        // A bitmap is given back as soon as few members are left.
        self.len == 0 && self.many.is_none()
    }

    /// The lowest word with members, as its number and its members.
    #[inline]
    pub(crate) fn lowest_word(&self) -> Option<(u32, u64)> {
        if let Some(bitmap) = &self.many {
            return bitmap.lowest_word();
        }
        let members = &self.few[..usize::from(self.len)];
        let word = members.first()? / WORD_BITS;
        let of_word = members.iter().take_while(|&&node| node / WORD_BITS == word);
        Some((word, of_word.fold(0, |mask, node| mask | 1 << (node % WORD_BITS))))
    }

    /// Adds members that are not in the set.
    #[inline]
    pub(crate) fn insert(&mut self, word: u32, mask: u64, spare: &mut SpareBitmaps) {
        if let Some(bitmap) = &mut self.many {
            bitmap.insert(word, mask);
        } else if usize::from(self.len) + mask.count_ones() as usize <= FEW {
            self.insert_few(word, mask);
        } else {
            let mut bitmap = spare.take();
            for &node in &self.few[..usize::from(self.len)] {
                bitmap.insert(node / WORD_BITS, 1 << (node % WORD_BITS));
            }
            bitmap.insert(word, mask);
            self.len = 0;
            self.many = Some(bitmap);
        }
    }

    /// Removes members that are in the set.
    #[inline]
    pub(crate) fn remove(&mut self, word: u32, mask: u64, spare: &mut SpareBitmaps) {
        let Some(bitmap) = &mut self.many else {
            return self.remove_few(word, mask);
        };
        bitmap.remove(word, mask);
        // Well below what makes a bitmap, so that one member going to and fro does not convert each time.
        if bitmap.count <= FEW as u32 / 3 {
            self.shrink(spare);
        }
    }

    fn insert_few(&mut self, word: u32, mask: u64) {
        let mut rest = mask;
        while rest != 0 {
            let node = word * WORD_BITS + rest.trailing_zeros();
            let len = usize::from(self.len);
            let at = self.few[..len].partition_point(|&member| member < node);
            self.few.copy_within(at..len, at + 1);
            self.few[at] = node;
            self.len += 1;
            rest &= rest - 1;
        }
    }

    fn remove_few(&mut self, word: u32, mask: u64) {
        let mut kept = 0;
        for at in 0..usize::from(self.len) {
            let node = self.few[at];
            if node / WORD_BITS != word || mask & 1 << (node % WORD_BITS) == 0 {
                self.few[kept] = node;
                kept += 1;
            }
        }
        self.len = kept as u8;
    }

    fn shrink(&mut self, spare: &mut SpareBitmaps) {
        let Some(mut bitmap) = self.many.take() else { return };
        while let Some((word, mask)) = bitmap.lowest_word() {
            self.insert_few(word, mask);
            bitmap.remove(word, mask);
        }
        spare.zeroed.push(bitmap);
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    /// A small generator, so that the test needs no dependency and is the same each time.
    fn next(seed: &mut u64) -> u64 {
        *seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        *seed >> 33
    }

    #[test]
    fn behaves_like_an_ordered_set() {
        let nodes = 20_000;
        let mut spare = SpareBitmaps::for_nodes(nodes as usize);
        let mut set = NodeSet::default();
        let mut plain = BTreeSet::new();
        let mut seed = 7;
        for step in 0..40_000 {
            // Long phases of growth and decline, so that bitmaps are made and given back.
            let growing = u64::is_multiple_of(step / 2_000, 2);
            let node = if growing || plain.is_empty() || next(&mut seed).is_multiple_of(8) {
                next(&mut seed) as u32 % nodes
            } else {
                *plain.iter().nth(next(&mut seed) as usize % plain.len()).unwrap()
            };
            let (word, mask) = (node / 64, 1 << (node % 64));
            if plain.insert(node) {
                set.insert(word, mask, &mut spare);
            } else {
                plain.remove(&node);
                set.remove(word, mask, &mut spare);
            }
            let lowest = set.lowest_word().map(|(word, mask)| word * 64 + mask.trailing_zeros());
            assert_eq!(lowest, plain.first().copied());
            assert_eq!(set.is_empty(), plain.is_empty());
        }
    }
}
