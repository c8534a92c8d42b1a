//! Slots, sources and sizes of any kind, and what a fill of them leaves.

use devicegraph::dtype::DType;
use devicegraph::slot::{Axis, Feed, PaddingPolicy, Rows, SlotLayout, SourceDevice};
use devicegraph::step::{Sizes, Source};
use proptest::prelude::*;

pub(crate) const MAX_BS: usize = 12;
pub(crate) const MAX_TOKENS: usize = 24;
pub(crate) const PAD_VALUE: i64 = 7;

/// A slot, what its buffer holds before (by element of its whole span), and what the batch brings for it.
#[derive(Debug, Clone)]
pub(crate) struct Case {
    pub(crate) slot: SlotLayout,
    pub(crate) before: Vec<i64>,
    pub(crate) source: Option<Source>,
    pub(crate) values: Vec<i64>,
}

pub(crate) fn capacity(axis: Axis) -> usize {
    if axis == Axis::Bs { MAX_BS } else { MAX_TOKENS }
}

/// Every index of a shape, in row-major order.
pub(crate) fn indices(shape: &[usize]) -> Vec<Vec<usize>> {
    shape.iter().fold(vec![vec![]], |all, size| {
        all.iter().flat_map(|index| (0..*size).map(move |next| [index.as_slice(), &[next]].concat())).collect()
    })
}

pub(crate) fn offset(index: &[usize], strides: &[usize]) -> usize {
    index.iter().zip(strides).map(|(index, stride)| index * stride).sum()
}

/// The specification, by element: what the table of policies says that a fill leaves in a slot.
pub(crate) fn specified(case: &Case, sizes: [usize; 4], unread: bool) -> Vec<i64> {
    let Case { slot, before, source, values } = case;
    let (raw, padded) = if slot.axis == Axis::Bs { (sizes[0], sizes[1]) } else { (sizes[2], sizes[3]) };
    let whole = slot.axis == Axis::None;
    let padded = slot.rows.at(padded);
    let width = slot.shape[slot.shape.len() - 1];
    let (head, wide) = match (slot.feed, source) {
        (Feed::Elsewhere, _) => (slot.rows.at(raw), width),
        (Feed::Function, None) if !unread => return before.clone(),
        (_, None) => (0, width),
        (_, Some(source)) => (source.shape[slot.dim], source.shape[source.shape.len() - 1]),
    };
    let tail = match slot.policy {
        PaddingPolicy::Zero => Some(0),
        PaddingPolicy::FillSentinel => Some(PAD_VALUE),
        _ => None,
    };
    let mut after = before.clone();
    for index in indices(&slot.shape) {
        let (row, place) = (index[slot.dim], offset(&index, &slot.strides));
        if (whole || row < head) && source.is_some() && slot.feed != Feed::Elsewhere {
            let given = &source.as_ref().unwrap().shape;
            after[place] = if index[index.len() - 1] < wide {
                values[index.iter().zip(given).fold(0, |place, (index, size)| place * size + index)]
            } else {
                PAD_VALUE
            };
        } else if !whole && (head..padded).contains(&row) {
            after[place] = tail.unwrap_or(before[place]);
        }
    }
    after
}

pub(crate) fn axis() -> impl Strategy<Value = Axis> {
    prop_oneof![Just(Axis::Bs), Just(Axis::Tokens), Just(Axis::None)]
}

pub(crate) fn policy(axis: Axis) -> impl Strategy<Value = PaddingPolicy> {
    use PaddingPolicy::{FillOnce, FillSentinel, ForeachCopy, KeepPad, Zero};
    let rows = axis != Axis::None;
    prop::sample::select(if rows { vec![KeepPad, FillSentinel, Zero, ForeachCopy, FillOnce] } else { vec![KeepPad] })
}

pub(crate) fn dtype() -> impl Strategy<Value = &'static str> {
    prop::sample::select(vec!["int8", "int16", "int32", "int64"])
}

/// Strides of a shape whose dimensions lie in any order, with gaps.
pub(crate) fn strides(shape: Vec<usize>) -> impl Strategy<Value = Vec<usize>> {
    let rank = shape.len();
    (Just((0..rank).collect::<Vec<_>>()).prop_shuffle(), prop::collection::vec(0_usize..2, rank), any::<bool>())
        .prop_map(move |(order, gaps, plain)| {
            let mut strides = vec![0; rank];
            let mut step = 1;
            for position in (0..rank).rev() {
                let dim = if plain { position } else { order[position] };
                strides[dim] = step;
                step *= shape[dim] + if plain { 0 } else { gaps[position] };
            }
            strides
        })
}

pub(crate) fn slots() -> impl Strategy<Value = SlotLayout> {
    let rows = prop_oneof![
        4 => Just(Rows::EACH),
        1 => Just(Rows { base: 1, step: 1, unit: 1 }),
        1 => Just(Rows { base: 0, step: 1, unit: 2 }),
        1 => Just(Rows { base: 0, step: 3, unit: 2 }),
    ];
    (axis(), rows, prop::collection::vec(1_usize..4, 0..3), 0_usize..3, 0_usize..2).prop_flat_map(
        |(axis, rows, mut shape, dim, spare)| {
            let dim = dim.min(shape.len());
            let along = if axis == Axis::None { 3 } else { rows.at(capacity(axis)) + spare };
            shape.insert(dim, along);
            let trailing = axis == Axis::None || dim + 1 < shape.len();
            let feed = prop::sample::select(vec![Feed::Field, Feed::Field, Feed::Function, Feed::Elsewhere]);
            (strides(shape.clone()), policy(axis), dtype(), feed, any::<bool>(), any::<bool>()).prop_map(
                move |(strides, policy, dtype, feed, prefix, host)| {
                    SlotLayout {
                        name: "slot".to_owned(),
                        axis,
                        policy,
                        dtype: DType::parse(dtype).unwrap(),
                        shape: shape.clone().into(),
                        strides: strides.into(),
                        dim,
                        rows,
                        capacity: capacity(axis),
                        feed,
                        device: if host { "cpu" } else { "cuda:0" }.to_owned(),
                        source_device: SourceDevice::Any,
                        required: false,
                        allow_narrowing: true,
                        prefix: prefix && trailing,
                    }
                    .checked()
                    .unwrap()
                },
            )
        },
    )
}

pub(crate) fn cases(sizes: [usize; 4]) -> impl Strategy<Value = Case> {
    let source = (any::<bool>(), dtype(), any::<bool>(), any::<bool>(), any::<usize>(), any::<usize>());
    (slots(), source).prop_flat_map(move |(slot, (present, cast, strided, away, rows, width))| {
        let (raw, padded) = if slot.axis == Axis::Bs { (sizes[0], sizes[1]) } else { (sizes[2], sizes[3]) };
        let mut shape = slot.shape.clone();
        if slot.axis != Axis::None {
            let padded = slot.rows.at(padded);
            shape[slot.dim] = if slot.feed == Feed::Function { rows % (padded + 1) } else { slot.rows.at(raw) };
        }
        if slot.prefix {
            let last = shape.len() - 1;
            shape[last] = width % (shape[last] + 1);
        }
        let other = if slot.device == "cpu" { "cuda:0" } else { "cpu" };
        let source = (present && slot.feed != Feed::Elsewhere).then(|| Source {
            dtype: if width % 3 == 0 { cast } else { slot.dtype.name() }.to_owned().into(),
            shape: shape.clone(),
            device: if away && rows % 3 == 0 { other.into() } else { slot.device.clone().into() },
            strides: stepped(&shape, 1).into(),
        });
        let span = 1 + slot.shape.iter().zip(&slot.strides).map(|(size, stride)| (size - 1) * stride).sum::<usize>();
        let item = prop::collection::vec(-100_i64..100, span);
        let values = prop::collection::vec(-100_i64..100, shape.iter().product::<usize>());
        (Just(slot), item, values, strides(shape.to_vec())).prop_map(move |(slot, before, values, strides)| {
            let lying = |source: Source| if strided { Source { strides: strides.into(), ..source } } else { source };
            Case { slot, before, source: source.clone().map(lying), values }
        })
    })
}

pub(crate) fn steps() -> impl Strategy<Value = ([usize; 4], Vec<Case>)> {
    let axis = |max: usize| (0..=max / 2, any::<usize>()).prop_map(|(half, raw)| (raw % (2 * half + 1), 2 * half));
    (axis(MAX_BS), axis(MAX_TOKENS)).prop_flat_map(|((raw_bs, padded_bs), (raw_tokens, padded_tokens))| {
        let sizes = [raw_bs, padded_bs, raw_tokens, padded_tokens];
        (Just(sizes), prop::collection::vec(cases(sizes), 1..6))
    })
}

pub(crate) fn checked(sizes: [usize; 4]) -> Sizes {
    let [raw_bs, padded_bs, raw_tokens, padded_tokens] = sizes.map(|size| i64::try_from(size).unwrap());
    Sizes::checked(raw_bs, padded_bs, raw_tokens, padded_tokens).unwrap()
}

/// Those of a row-major tensor, or of one that has every so many elements of it.
pub(crate) fn stepped(shape: &[usize], step: usize) -> Vec<usize> {
    let mut strides = vec![step; shape.len()];
    for dim in (1..shape.len()).rev() {
        strides[dim - 1] = strides[dim] * shape[dim];
    }
    strides
}
