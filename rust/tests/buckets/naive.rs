//! The rules, read one size at a time.

use std::collections::BTreeSet;

fn every(size: u32, from: u32, to: u32, step: u32) -> bool {
    (from..=to).contains(&size) && (size - from).is_multiple_of(step)
}

pub(crate) fn decode(maximum: u32, padding: bool, num_tokens_per_bs: u32) -> BTreeSet<u32> {
    let plain = |size| {
        [1, 2, 4, 8, 12].contains(&size)
            || every(size, 16, 256, 8)
            || every(size, 272, 496, 16)
            || every(size, 512, u32::MAX, 32)
    };
    let speculative = |size| {
        size <= 8
            || every(size, 10, 32, 2)
            || every(size, 40, 64, 4)
            || every(size, 72, 256, 8)
            || every(size, 272, u32::MAX, 16)
    };
    let wanted = |&size: &u32| {
        !padding || size == maximum || if num_tokens_per_bs == 1 { plain(size) } else { speculative(size) }
    };
    (1..=maximum).filter(wanted).collect()
}

/// What a step of a dense list is padded by at most, as a share of its size.
pub(crate) fn padding(sizes: &[u32], from: u32) -> f64 {
    let pairs = sizes.windows(2).filter(|pair| pair[0] >= from);
    pairs.map(|pair| f64::from(pair[1] - pair[0] - 1) / f64::from(pair[1])).fold(0.0, f64::max)
}

pub(crate) fn kept(asked: &[u32], padding: bool, alignment: u32, limit: Option<u32>) -> BTreeSet<u32> {
    let fits = |size: u32| size.is_multiple_of(alignment) && limit.is_none_or(|limit| size <= limit);
    let mut kept: BTreeSet<u32> = asked.iter().copied().filter(|size| fits(*size)).collect();
    if let Some(limit) = limit.filter(|limit| padding && asked.iter().any(|size| size > limit)) {
        kept.extend((1..=limit).rev().find(|size| fits(*size)));
    }
    kept
}

pub(crate) fn fit(sizes: &[u32], padding: bool, raw: u32) -> Option<u32> {
    sizes.iter().copied().filter(|&size| if padding { raw > 0 && size >= raw } else { size == raw }).min()
}
