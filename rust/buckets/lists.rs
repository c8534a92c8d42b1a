//! The default lists, and how a list is thinned out.

/// A run of a default list: from, to (inclusive), step.
pub(super) type Band = (u32, u32, u32);

/// Dense where a padded row is a large part of the step, sparse where it is not.
pub(super) const DECODE: [Band; 5] = [(1, 2, 1), (4, 12, 4), (16, 256, 8), (272, 496, 16), (512, u32::MAX, 32)];
/// With several tokens a request every padded request costs several rows, so this list is denser.
pub(super) const SPECULATIVE: [Band; 5] = [(1, 8, 1), (10, 32, 2), (40, 64, 4), (72, 256, 8), (272, u32::MAX, 16)];
/// In tokens.
pub(super) const PREFILL: [Band; 6] =
    [(4, 32, 4), (48, 256, 16), (288, 512, 32), (576, 1024, 64), (1280, 4096, 256), (4608, u32::MAX, 512)];

/// For latency at small sizes: a step is padded by a sixteenth of its size at most, and by nothing up to 32 requests.
pub(super) const DENSE_DECODE: [Band; 5] = [(1, 32, 1), (34, 64, 2), (68, 128, 4), (136, 256, 8), (272, u32::MAX, 16)];
/// In tokens, by a sixteenth at most from 128 on.
pub(super) const DENSE_PREFILL: [Band; 7] = [
    (4, 64, 4),
    (72, 256, 8),
    (272, 512, 16),
    (544, 1024, 32),
    (1088, 2048, 64),
    (2176, 4096, 128),
    (4352, u32::MAX, 256),
];

/// The default list up to a maximum, which is in it whether a band has it or not.
pub(super) fn up_to(maximum: u32, bands: &[Band]) -> Vec<u32> {
    let sizes = bands.iter().flat_map(|&(from, to, step)| (from..=to.min(maximum)).step_by(step as usize));
    let mut sizes: Vec<u32> = sizes.collect();
    if sizes.last() != Some(&maximum) {
        sizes.push(maximum);
    }
    sizes
}

/// At most so many of the sizes: the smallest, the largest, and between them the ones that grow most evenly by ratio,
/// which keeps the worst share of padded rows low. With one graph it is the largest, which every size can use.
pub(super) fn thin(sizes: Vec<u32>, graphs: usize) -> Vec<u32> {
    let (Some(&smallest), Some(&largest)) = (sizes.first(), sizes.last()) else {
        return sizes;
    };
    if sizes.len() <= graphs {
        return sizes;
    }
    let (mut kept, mut next) = (Vec::with_capacity(graphs), 0);
    #[expect(clippy::cast_precision_loss, reason = "a number of graphs")]
    let growth = (f64::from(largest) / f64::from(smallest)).powf(1.0 / (graphs.max(2) - 1) as f64);
    let mut ideal = f64::from(smallest);
    for left in (1..graphs).rev() {
        // Each of the `left` graphs after this one needs a size above this one's.
        let candidates = &sizes[next..sizes.len() - left];
        let above = candidates.partition_point(|size| f64::from(*size) < ideal).min(candidates.len() - 1);
        let below = above.saturating_sub(1);
        let ratio = |at: usize| (f64::from(candidates[at]) / ideal).ln().abs();
        let nearest = if ratio(below) < ratio(above) { below } else { above };
        kept.push(candidates[nearest]);
        next += nearest + 1;
        ideal *= growth;
    }
    kept.push(largest);
    kept
}

/// What fits a budget of bytes: with the largest size that fits alone, as many sizes as `thin` can spread over the rest.
pub(super) fn within(mut sizes: Vec<u32>, budget: u64, bytes_of: impl Fn(u32) -> u64) -> Vec<u32> {
    while sizes.last().is_some_and(|&largest| bytes_of(largest) > budget) {
        sizes.pop();
    }
    let fitting = |graphs: usize| {
        let kept = thin(sizes.clone(), graphs);
        let total = kept.iter().fold(0_u64, |total, &size| total.saturating_add(bytes_of(size)));
        (total <= budget).then_some(kept)
    };
    // One fits, and more take more: the most that fit are found by halving.
    let (mut fits, mut too_many) = (sizes.len().min(1), sizes.len() + 1);
    while too_many - fits > 1 {
        let graphs = usize::midpoint(fits, too_many);
        if fitting(graphs).is_some() { fits = graphs } else { too_many = graphs }
    }
    fitting(fits).unwrap_or_default()
}
