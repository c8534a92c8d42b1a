//! The element types of buffers, and which casts between them lose nothing.

use std::fmt;

/// The set of values that an element type can hold, as far as lossless casts need it.
#[derive(Clone, Copy)]
enum Values {
    /// All integers of so many bits.
    Int { signed: bool, bits: u32 },
    /// All `m * 2^e` with `m` of so many binary digits (0 digits: bare powers of two, without zero), where the smallest
    /// positive value is `2^least` and the largest is below `2^(most + 1)`.
    Float { digits: u32, least: i32, most: i32, infinite: bool },
}

use Values::{Float, Int};

/// An element type of a buffer, by torch's name for it.
#[derive(Clone, Copy)]
pub struct DType {
    name: &'static str,
    itemsize: usize,
    values: Values,
    grouped: bool,
}

/// One line for each type: name, bytes, values, and whether torch's grouped copy is sure to know it on every device.
const DTYPES: &[DType] = &[
    DType::new("bool", 1, Int { signed: false, bits: 1 }, true),
    DType::new("uint8", 1, Int { signed: false, bits: 8 }, true),
    DType::new("int8", 1, Int { signed: true, bits: 8 }, true),
    DType::new("int16", 2, Int { signed: true, bits: 16 }, true),
    DType::new("int32", 4, Int { signed: true, bits: 32 }, true),
    DType::new("int64", 8, Int { signed: true, bits: 64 }, true),
    DType::new("uint16", 2, Int { signed: false, bits: 16 }, false),
    DType::new("uint32", 4, Int { signed: false, bits: 32 }, false),
    DType::new("uint64", 8, Int { signed: false, bits: 64 }, false),
    DType::new("float16", 2, Float { digits: 11, least: -24, most: 15, infinite: true }, true),
    DType::new("bfloat16", 2, Float { digits: 8, least: -133, most: 127, infinite: true }, true),
    DType::new("float32", 4, Float { digits: 24, least: -149, most: 127, infinite: true }, true),
    DType::new("float64", 8, Float { digits: 53, least: -1074, most: 1023, infinite: true }, true),
    DType::new("float8_e4m3fn", 1, Float { digits: 4, least: -9, most: 8, infinite: false }, false),
    DType::new("float8_e5m2", 1, Float { digits: 3, least: -16, most: 15, infinite: true }, false),
    DType::new("float8_e4m3fnuz", 1, Float { digits: 4, least: -10, most: 7, infinite: false }, false),
    DType::new("float8_e5m2fnuz", 1, Float { digits: 3, least: -17, most: 15, infinite: false }, false),
    DType::new("float8_e8m0fnu", 1, Float { digits: 0, least: -127, most: 127, infinite: false }, false),
];

/// The names that torch gives to the same types.
const ALIASES: &[(&str, &str)] = &[
    ("short", "int16"),
    ("int", "int32"),
    ("long", "int64"),
    ("half", "float16"),
    ("float", "float32"),
    ("double", "float64"),
];

impl DType {
    const fn new(name: &'static str, itemsize: usize, values: Values, grouped: bool) -> Self {
        Self { name, itemsize, values, grouped }
    }

    /// The type of that name, which may be an alias (`long`) and may carry the prefix `torch.`.
    pub fn parse(spelling: &str) -> Option<Self> {
        let name = spelling.strip_prefix("torch.").unwrap_or(spelling);
        let named = |name| DTYPES.iter().find(|dtype| dtype.name == name).copied();
        named(name).or_else(|| ALIASES.iter().find(|(alias, _)| *alias == name).and_then(|(_, name)| named(name)))
    }

    /// The name, without `torch.`.
    pub fn name(self) -> &'static str {
        self.name
    }

    /// Bytes of one element.
    pub fn itemsize(self) -> usize {
        self.itemsize
    }

    /// Whether one grouped copy call is sure to take this type on every device.
    pub fn is_grouped(self) -> bool {
        self.grouped
    }

    /// Whether every value of `source` (NaN aside) is a value of this type, so that a cast loses nothing.
    pub fn holds(self, source: Self) -> bool {
        match (self.values, source.values) {
            (Int { signed: true, bits: to }, Int { signed: false, bits: from }) => to > from,
            (Int { signed: false, .. }, Int { signed: true, .. }) | (Int { .. }, Float { .. }) => false,
            (Int { bits: to, .. }, Int { bits: from, .. }) => to >= from,
            (Float { digits, most, .. }, Int { signed, bits }) => {
                let magnitude = bits - u32::from(signed);
                digits >= magnitude && i64::from(most) >= i64::from(magnitude)
            }
            (
                Float { digits, least, most, infinite },
                Float { digits: from_digits, least: from_least, most: from_most, infinite: from_infinite },
            ) => digits >= from_digits && least <= from_least && most >= from_most && (infinite || !from_infinite),
        }
    }

    /// The bits of an integer as an element of this type, rounded where the type is a float; none where it does not hold it,
    /// or where its elements are not known bit by bit.
    #[expect(clippy::cast_precision_loss, reason = "floats round")]
    pub fn bits_of_integer(self, number: i128) -> Option<u64> {
        match self.values {
            Int { signed, bits } => {
                let magnitude = bits - u32::from(signed);
                let least = if signed { -(1_i128 << magnitude) } else { 0 };
                // Two's complement in the element's own bytes; of a boolean, the whole byte is 0 or 1.
                let mask = u64::MAX >> (64 - 8 * self.itemsize);
                let low = u64::try_from(number & i128::from(u64::MAX)).ok()?;
                (least..1_i128 << magnitude).contains(&number).then_some(low & mask)
            }
            Float { .. } => self.bits_of_real(number as f64),
        }
    }

    /// The bits of a real number as an element of this type, rounded; none for a type of integers, for a finite number that
    /// is out of range, or where elements are not known bit by bit.
    #[expect(clippy::cast_possible_truncation, reason = "floats round")]
    pub fn bits_of_real(self, number: f64) -> Option<u64> {
        match self.name {
            "float32" if !number.is_finite() || number.abs() <= f64::from(f32::MAX) => {
                Some(u64::from((number as f32).to_bits()))
            }
            "float64" => Some(number.to_bits()),
            _ => None,
        }
    }

    /// The integer type of that many bytes a copy can be carried out in, whatever the bytes mean.
    pub fn carrier(itemsize: usize) -> Self {
        match itemsize {
            1 => DTYPES[1],
            2 => DTYPES[3],
            4 => DTYPES[4],
            _ => DTYPES[5],
        }
    }
}

impl PartialEq for DType {
    fn eq(&self, other: &Self) -> bool {
        self.name == other.name
    }
}

impl Eq for DType {}

impl fmt::Debug for DType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name)
    }
}

impl fmt::Display for DType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name)
    }
}
