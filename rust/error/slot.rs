//! What does not fit a slot.

use std::fmt;

use crate::dtype::DType;
use crate::slot::Axis;

/// A slot, a source or a size that does not fit. Nothing was written.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SlotFault {
    /// A stable word to branch on.
    pub code: &'static str,
    /// What, where, and with which value.
    pub message: Box<str>,
    /// The way out, where there is one.
    pub hint: Option<Box<str>>,
    /// The slot at fault, where it is one slot's.
    pub slot: Option<Box<str>>,
    /// What would have fitted.
    pub expected: Option<Box<str>>,
    /// What was there.
    pub given: Option<Box<str>>,
}

impl std::error::Error for SlotFault {}

impl fmt::Display for SlotFault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.message)
    }
}

impl SlotFault {
    fn new(code: &'static str, message: String) -> Self {
        Self { code, message: message.into(), hint: None, slot: None, expected: None, given: None }
    }

    fn of(slot: &str, code: &'static str, what: fmt::Arguments<'_>) -> Self {
        Self { slot: Some(slot.into()), ..Self::new(code, format!("slot `{slot}`: {what}")) }
    }

    fn between(mut self, expected: impl fmt::Display, given: impl fmt::Display) -> Self {
        self.expected = Some(expected.to_string().into());
        self.given = Some(given.to_string().into());
        self
    }

    fn hinting(mut self, hint: String) -> Self {
        self.hint = Some(hint.into());
        self
    }

    pub(crate) fn unknown_word(what: &str, word: &str, allowed: &[&str]) -> Self {
        let allowed = allowed.iter().map(|word| format!("`{word}`")).collect::<Vec<_>>().join(", ");
        Self::new("unknown-word", format!("`{word}` is no {what}")).hinting(format!("use one of {allowed}"))
    }

    pub(crate) fn unsupported_dtype(slot: &str, dtype: &str) -> Self {
        Self::of(slot, "unsupported-dtype", format_args!("`{dtype}` is no slot dtype"))
    }

    pub(crate) fn bad_device(spelling: &str) -> Self {
        Self::new("bad-device", format!("`{spelling}` is no device"))
            .hinting("write it as `cuda:0` or `cpu`".to_owned())
    }

    pub(crate) fn empty_shape(slot: &str, shape: &[usize]) -> Self {
        Self::of(slot, "empty-shape", format_args!("shape {shape:?} holds no element"))
    }

    pub(crate) fn shared_elements(slot: &str, shape: &[usize], strides: &[usize]) -> Self {
        let what = format_args!("elements of shape {shape:?} with strides {strides:?} share memory");
        Self::of(slot, "shared-elements", what)
    }

    pub(crate) fn capacity_too_small(slot: &str, axis: Axis, shape: &[usize], dim: usize, needed: usize) -> Self {
        let argument = if axis == Axis::Bs { "first" } else { "second" };
        Self::of(slot, "capacity-too-small", format_args!("shape {shape:?} has too few rows along dimension {dim}"))
            .between(format_args!("at least {needed} rows"), format_args!("{shape:?}"))
            .hinting(format!(
                "size it by the {argument} argument of `shape_fn`, or cut another dimension with a `slice_fn`"
            ))
    }

    pub(crate) fn no_trailing_axis(slot: &str, shape: &[usize]) -> Self {
        let what = format_args!("shape {shape:?} has no axis after its rows for `trailing=\"prefix\"`");
        Self::of(slot, "no-trailing-axis", what)
    }

    pub(crate) fn negative_size(argument: &str, size: i64) -> Self {
        Self::new("negative-size", format!("`{argument}`: {size} is negative")).between("0 or more", size)
    }

    pub(crate) fn raw_above_padded(axis: Axis, raw: usize, padded: usize) -> Self {
        let (live, bucket) = (axis.raw(), axis.padded());
        Self::new("raw-above-padded", format!("`{live}`: {raw} is more than `{bucket}`, which is {padded}"))
            .between(format_args!("at most {padded}"), raw)
            .hinting("pad to a bucket that holds the live size".to_owned())
    }

    pub(crate) fn above_capacity(argument: &str, size: usize, capacity: usize) -> Self {
        Self::new("above-capacity", format!("`{argument}`: {size} is more than the {capacity} that the buffers hold"))
            .between(format_args!("at most {capacity}"), size)
    }

    pub(crate) fn bucket_not_divisible(slot: &str, size: usize, unit: usize) -> Self {
        let below = size / unit * unit;
        let above = below + unit;
        Self::of(slot, "bucket-not-divisible", format_args!("a bucket of {size} is not a multiple of {unit}"))
            .between(format_args!("a multiple of {unit}"), size)
            .hinting(if below == 0 { format!("use {above}") } else { format!("use {below} or {above}") })
    }

    pub(crate) fn field_missing(slot: &str) -> Self {
        Self::of(slot, "field-missing", format_args!("the batch lacks this required field"))
    }

    /// For a size that is no integer, or a boolean, which Python takes for one.
    #[cfg(feature = "python")]
    pub(crate) fn not_a_size(argument: &str, given: &str) -> Self {
        let given = super::config::cut(&given.split_whitespace().collect::<Vec<_>>().join(" "));
        Self::new("not-a-size", format!("`{argument}`: {given} is no size")).between("an integer", given)
    }

    pub(crate) fn wrong_rows(slot: &str, expected: usize, given: usize) -> Self {
        Self::of(slot, "wrong-rows", format_args!("the source has {}, the batch {expected}", rows(given)))
            .between(rows(expected), rows(given))
    }

    pub(crate) fn too_many_rows(slot: &str, padded: usize, given: usize) -> Self {
        Self::of(slot, "too-many-rows", format_args!("the source has {}, the bucket {padded}", rows(given)))
            .between(format_args!("at most {}", rows(padded)), rows(given))
    }

    pub(crate) fn too_wide(slot: &str, capacity: usize, given: usize) -> Self {
        Self::of(slot, "too-wide", format_args!("the source is {given} wide, the slot {capacity}"))
            .between(format_args!("at most {capacity}"), given)
    }

    pub(crate) fn wrong_shape(slot: &str, expected: &[usize], given: &[usize]) -> Self {
        Self::of(slot, "wrong-shape", format_args!("the source has shape {given:?}, expected {expected:?}"))
            .between(format_args!("{expected:?}"), format_args!("{given:?}"))
    }

    pub(crate) fn wrong_device(slot: &str, expected: &str, given: &str) -> Self {
        Self::of(slot, "wrong-device", format_args!("the source is on `{given}`, expected `{expected}`"))
            .between(expected, given)
            .hinting("move the source, or say where it may be with `source_device=\"cpu\"` or `\"any\"`".to_owned())
    }

    pub(crate) fn narrowing_cast(slot: &str, to: DType, from: DType) -> Self {
        Self::of(slot, "narrowing-cast", format_args!("a cast from `{from}` to `{to}` can change values"))
            .between(to, from)
            .hinting(format!("declare the slot as `{from}`, or accept the loss with `allow_narrowing=True`"))
    }
}

fn rows(count: usize) -> String {
    if count == 1 { "1 row".to_owned() } else { format!("{count} rows") }
}
