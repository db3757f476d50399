//! A set of node positions that gives up its lowest members a machine word at a time.
//!
//! A word is 64 neighbouring positions. The lowest one with members is at hand; that alone is what most calls need. The
//! other words are a short list. Of sets that lie within many words all are in a bitmap with a summary above it.
//!
//! Invariants: `mask` is 0 only when the set is empty; `others[..len]` ascends, is above `word` and has no empty mask; a
//! set with a bitmap has no list; its lowest word is in the bitmap too, where it is not 0 but may have been left behind by
//! `mask`; a bit of `summary` is set exactly when its word of `words` is not 0; `used` counts the words that are not 0; a
//! bitmap in the spare store is all zero.

#![allow(clippy::inline_always, reason = "a call would pass what is in registers through memory")]

const FEW: usize = 3;
/// Words at which a bitmap becomes a list again: less than what makes one, so that one member going to and fro does
/// not convert each time.
const WORDS_OF_A_LIST: u32 = 2;
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
    used: u32,
}

impl Bitmap {
    fn new(words: usize) -> Self {
        Self { words: vec![0; words], summary: vec![0; words.div_ceil(WORD_BITS as usize)], used: 0 }
    }

    #[inline]
    fn insert(&mut self, word: u32, mask: u64) {
        let before = self.words[word as usize];
        self.words[word as usize] = before | mask;
        if before == 0 {
            self.used += 1;
            self.summary[(word / WORD_BITS) as usize] |= 1 << (word % WORD_BITS);
        }
    }

    #[inline]
    fn remove(&mut self, word: u32, mask: u64) {
        self.set(word, self.words[word as usize] & !mask);
    }

    /// Changes a word that is not 0.
    #[inline]
    fn set(&mut self, word: u32, members: u64) {
        self.words[word as usize] = members;
        if members == 0 {
            self.used -= 1;
            self.summary[(word / WORD_BITS) as usize] &= !(1 << (word % WORD_BITS));
        }
    }

    /// The lowest word that is not 0, where none below `least` is.
    #[inline]
    fn lowest_word(&self, least: u32) -> Option<(u32, u64)> {
        let mut over = (least / WORD_BITS) as usize;
        while *self.summary.get(over)? == 0 {
            over += 1;
        }
        let word = over as u32 * WORD_BITS + self.summary[over].trailing_zeros();
        Some((word, self.words[word as usize]))
    }
}

/// See the module.
#[derive(Debug, Default)]
pub(crate) struct NodeSet {
    /// The lowest word and its members.
    mask: u64,
    word: u32,
    len: u32,
    others: [(u32, u64); FEW],
    many: Option<Box<Bitmap>>,
}

impl NodeSet {
    /// The lowest word with members, as its number and its members; no members if there are none.
    #[inline]
    pub(crate) fn lowest_word(&self) -> (u32, u64) {
        (self.word, self.mask)
    }

    #[inline]
    pub(crate) fn is_empty(&self) -> bool {
        self.mask == 0
    }

    /// Whether these are all members.
    #[inline]
    pub(crate) fn is_just(&self, word: u32, mask: u64) -> bool {
        self.word == word && self.mask == mask && self.len == 0 && self.many.is_none()
    }

    /// Adds members that are not in the set.
    #[inline(always)]
    pub(crate) fn insert(&mut self, word: u32, mask: u64, spare: &mut SpareBitmaps) {
        if self.mask == 0 {
            (self.word, self.mask) = (word, mask);
        } else if self.word == word {
            self.mask |= mask;
        } else {
            self.insert_elsewhere(word, mask, spare);
        }
    }

    /// Removes members that are in the set.
    #[inline(always)]
    pub(crate) fn remove(&mut self, word: u32, mask: u64, spare: &mut SpareBitmaps) {
        if self.word == word {
            self.mask &= !mask;
            if self.mask == 0 && (self.len > 0 || self.many.is_some()) {
                self.advance(spare);
            }
        } else {
            self.remove_elsewhere(word, mask, spare);
        }
    }

    /// Makes the next word the lowest one.
    #[inline(never)]
    fn advance(&mut self, spare: &mut SpareBitmaps) {
        if let Some(bitmap) = &mut self.many {
            bitmap.set(self.word, 0);
            (self.word, self.mask) = bitmap.lowest_word(self.word).unwrap_or_default();
            if bitmap.used <= WORDS_OF_A_LIST {
                self.shrink(spare);
            }
        } else {
            (self.word, self.mask) = self.others[0];
            self.others.copy_within(1.., 0);
            self.len -= 1;
        }
    }

    #[inline(never)]
    fn insert_elsewhere(&mut self, word: u32, mask: u64, spare: &mut SpareBitmaps) {
        if let Some(bitmap) = &mut self.many {
            bitmap.insert(word, mask);
            if word < self.word {
                bitmap.set(self.word, self.mask);
                (self.word, self.mask) = (word, mask);
            }
        } else if word < self.word {
            let (lowest, members) = (self.word, self.mask);
            (self.word, self.mask) = (word, mask);
            self.insert_in_list(lowest, members, spare);
        } else {
            self.insert_in_list(word, mask, spare);
        }
    }

    fn insert_in_list(&mut self, word: u32, mask: u64, spare: &mut SpareBitmaps) {
        let len = self.len as usize;
        let at = self.others[..len].partition_point(|other| other.0 < word);
        if at < len && self.others[at].0 == word {
            self.others[at].1 |= mask;
        } else if len < FEW {
            self.others.copy_within(at..len, at + 1);
            self.others[at] = (word, mask);
            self.len += 1;
        } else {
            let mut bitmap = spare.take();
            for &(word, mask) in self.others.iter().chain([&(self.word, self.mask), &(word, mask)]) {
                bitmap.insert(word, mask);
            }
            self.len = 0;
            self.many = Some(bitmap);
        }
    }

    #[inline(never)]
    fn remove_elsewhere(&mut self, word: u32, mask: u64, spare: &mut SpareBitmaps) {
        if let Some(bitmap) = &mut self.many {
            bitmap.remove(word, mask);
            if bitmap.used <= WORDS_OF_A_LIST {
                self.shrink(spare);
            }
        } else {
            self.remove_from_list(word, mask);
        }
    }

    fn remove_from_list(&mut self, word: u32, mask: u64) {
        let len = self.len as usize;
        let Some(at) = self.others[..len].iter().position(|other| other.0 == word) else { return };
        self.others[at].1 &= !mask;
        if self.others[at].1 == 0 {
            self.others.copy_within(at + 1..len, at);
            self.len -= 1;
        }
    }

    /// Makes a list of the bitmap, but for the lowest word, which is at hand.
    #[cold]
    fn shrink(&mut self, spare: &mut SpareBitmaps) {
        let Some(mut bitmap) = self.many.take() else { return };
        while let Some((word, mask)) = bitmap.lowest_word(self.word) {
            if word != self.word {
                self.others[self.len as usize] = (word, mask);
                self.len += 1;
            }
            bitmap.set(word, 0);
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
            let (word, mask) = set.lowest_word();
            let lowest = (mask != 0).then(|| word * 64 + mask.trailing_zeros());
            assert_eq!(lowest, plain.first().copied());
        }
    }
}
