//! Slots as plain values: which casts lose nothing, how many rows a size has, and which layouts are possible.

#![allow(clippy::unwrap_used, reason = "a helper of a test may fail the test")]

use devicegraph::dtype::DType;
use devicegraph::error::SlotFault;
use devicegraph::slot::{Axis, Feed, PaddingPolicy, Region, Rows, SlotLayout, SourceDevice};
use proptest::prelude::*;

fn dtype(name: &str) -> DType {
    DType::parse(name).unwrap()
}

#[test]
fn a_type_takes_what_it_holds_exactly() {
    let names = [
        "bool",
        "uint8",
        "int8",
        "int16",
        "int32",
        "int64",
        "uint16",
        "uint32",
        "uint64",
        "float16",
        "bfloat16",
        "float32",
        "float64",
        "float8_e4m3fn",
        "float8_e5m2",
        "float8_e4m3fnuz",
        "float8_e5m2fnuz",
        "float8_e8m0fnu",
    ];
    let table: Vec<_> = names
        .iter()
        .map(|to| {
            let held = names.iter().filter(|from| *from != to && dtype(to).holds(dtype(from)));
            held.fold(format!("{to}:"), |line, from| line + " " + from)
        })
        .collect();
    insta::assert_snapshot!(table.join("\n"), @"bool:
uint8: bool
int8: bool
int16: bool uint8 int8
int32: bool uint8 int8 int16 uint16
int64: bool uint8 int8 int16 int32 uint16 uint32
uint16: bool uint8
uint32: bool uint8 uint16
uint64: bool uint8 uint16 uint32
float16: bool uint8 int8 float8_e4m3fn float8_e5m2 float8_e4m3fnuz float8_e5m2fnuz
bfloat16: bool uint8 int8 float8_e4m3fn float8_e5m2 float8_e4m3fnuz float8_e5m2fnuz float8_e8m0fnu
float32: bool uint8 int8 int16 uint16 float16 bfloat16 float8_e4m3fn float8_e5m2 float8_e4m3fnuz float8_e5m2fnuz float8_e8m0fnu
float64: bool uint8 int8 int16 int32 uint16 uint32 float16 bfloat16 float32 float8_e4m3fn float8_e5m2 float8_e4m3fnuz float8_e5m2fnuz float8_e8m0fnu
float8_e4m3fn: bool
float8_e5m2: bool
float8_e4m3fnuz: bool
float8_e5m2fnuz: bool
float8_e8m0fnu:");
}

proptest! {
    #[test]
    fn the_runs_of_a_region_are_its_elements_in_order(
        shape in prop::collection::vec(1_usize..4, 0..4), gaps in prop::collection::vec(0_usize..3, 4), start in 0_usize..5,
    ) {
        let mut strides = vec![1; shape.len()];
        for dim in (1..shape.len()).rev() {
            strides[dim - 1] = strides[dim] * (shape[dim] + gaps[dim]);
        }
        let region = Region { offset: start, shape: shape.clone().into(), strides: strides.clone().into() };
        let mut elements = vec![start];
        for (size, stride) in shape.iter().zip(&strides) {
            elements = elements.iter().flat_map(|start| (0..*size).map(move |index| start + index * stride)).collect();
        }
        let runs = region.runs();
        prop_assert_eq!(runs.offsets.len(), region.run_count());
        let covered: Vec<_> = runs.offsets.iter().flat_map(|start| *start..start + runs.len).collect();
        prop_assert_eq!(&covered, &elements);
        // The fewest: no run goes on where the one before it ends, unless a gap in another dimension keeps them apart.
        let plain = gaps.iter().zip(&shape).skip(1).all(|(gap, _)| *gap == 0);
        prop_assert!(!plain || runs.offsets.len() == 1);
    }
}

#[test]
fn rows_count_whole_units_on_top_of_the_base() {
    assert_eq!([0, 1, 7].map(|size| Rows::EACH.at(size)), [0, 1, 7]);
    assert_eq!([0, 1, 7].map(|size| Rows { base: 1, step: 1, unit: 1 }.at(size)), [1, 2, 8]);
    assert_eq!([0, 3, 4, 8, 11].map(|size| Rows { base: 0, step: 1, unit: 4 }.at(size)), [0, 0, 1, 2, 2]);
}

#[test]
fn aliases_and_the_prefix_name_the_same_type() {
    for (alias, name) in
        [("torch.long", "int64"), ("half", "float16"), ("torch.bfloat16", "bfloat16"), ("int", "int32")]
    {
        assert_eq!(dtype(alias), dtype(name));
    }
    assert_eq!(DType::parse("complex64"), None);
}

#[test]
fn a_number_has_the_bits_of_an_element_that_holds_it_and_none_where_none_does() {
    for (name, number, bits) in [
        ("bool", 1, Some(1)),
        ("bool", 2, None),
        ("uint8", 255, Some(0xff)),
        ("uint8", 256, None),
        ("uint8", -1, None),
        ("int8", 127, Some(0x7f)),
        ("int8", 128, None),
        ("int8", -128, Some(0x80)),
        ("int8", -129, None),
        ("int16", -1, Some(0xffff)),
        ("int32", -2, Some(0xffff_fffe)),
        ("int64", -1, Some(u64::MAX)),
        ("int64", 1 << 63, None),
        ("uint64", (1 << 64) - 1, Some(u64::MAX)),
        ("uint64", 1 << 64, None),
        ("float32", -2, Some(0xc000_0000)),
        ("float64", -2, Some(0xc000_0000_0000_0000)),
        ("float16", 1, None),
    ] {
        assert_eq!(dtype(name).bits_of_integer(number), bits, "{number} as {name}");
    }
    for (name, number, bits) in [
        ("float32", 1.5, Some(0x3fc0_0000)),
        ("float32", f64::from(f32::MIN), Some(0xff7f_ffff)),
        ("float32", 1e39, None),
        ("float32", f64::NEG_INFINITY, Some(0xff80_0000)),
        ("float32", f64::NAN, Some(0x7fc0_0000)),
        ("float64", 1e39, Some(1e39_f64.to_bits())),
        ("bfloat16", 1.0, None),
        ("int64", 1.0, None),
    ] {
        assert_eq!(dtype(name).bits_of_real(number), bits, "{number} as {name}");
    }
}

fn slot(shape: &[usize], strides: &[usize], dim: usize) -> SlotLayout {
    SlotLayout {
        name: "mrope".to_owned(),
        axis: Axis::Tokens,
        policy: PaddingPolicy::Zero,
        dtype: dtype("int64"),
        shape: shape.into(),
        strides: strides.into(),
        dim,
        rows: Rows::EACH,
        capacity: 24,
        feed: Feed::Field,
        device: "cuda:0".to_owned(),
        source_device: SourceDevice::Own,
        required: false,
        allow_narrowing: false,
        prefix: false,
    }
}

fn told<T: std::fmt::Debug>(result: &Result<T, SlotFault>) -> String {
    let fault = result.as_ref().unwrap_err();
    let hint = fault.hint.as_ref().map(|hint| format!("; hint: {hint}")).unwrap_or_default();
    format!("{fault} [{}]{hint}", fault.code)
}

#[test]
fn an_impossible_slot_says_why() {
    let prefix = SlotLayout { prefix: true, ..slot(&[24], &[1], 0) };
    let quarter = SlotLayout { rows: Rows { base: 0, step: 1, unit: 4 }, ..slot(&[6], &[1], 0) };
    insta::assert_snapshot!(told(&slot(&[23], &[1], 0).checked()), @"slot `mrope`: shape [23] has too few rows along dimension 0 [capacity-too-small]; hint: size it by the second argument of `shape_fn`, or cut another dimension with a `slice_fn`");
    insta::assert_snapshot!(told(&slot(&[3, 24], &[24, 1], 0).checked()), @"slot `mrope`: shape [3, 24] has too few rows along dimension 0 [capacity-too-small]; hint: size it by the second argument of `shape_fn`, or cut another dimension with a `slice_fn`");
    insta::assert_snapshot!(told(&slot(&[0, 24], &[24, 1], 1).checked()), @"slot `mrope`: shape [0, 24] holds no element [empty-shape]");
    insta::assert_snapshot!(told(&slot(&[3, 24], &[0, 1], 1).checked()), @"slot `mrope`: elements of shape [3, 24] with strides [0, 1] share memory [shared-elements]");
    insta::assert_snapshot!(told(&prefix.checked()), @r#"slot `mrope`: shape [24] has no axis after its rows for `trailing="prefix"` [no-trailing-axis]"#);
    insta::assert_snapshot!(told(&"rows".parse::<Axis>()), @"`rows` is no axis [unknown-word]; hint: use one of `bs`, `tokens`, `none`");
    insta::assert_snapshot!(told(&quarter.padded_rows(25)), @"`padded_num_tokens`: 25 is more than the 24 that the buffers hold [above-capacity]");
    insta::assert_snapshot!(told(&quarter.padded_rows(18)), @"slot `mrope`: a bucket of 18 is not a multiple of 4 [bucket-not-divisible]; hint: use 16 or 20");
    insta::assert_snapshot!(told(&quarter.padded_rows(3)), @"slot `mrope`: a bucket of 3 is not a multiple of 4 [bucket-not-divisible]; hint: use 4");
}

#[test]
fn a_layout_may_be_permuted_and_have_gaps_but_share_no_element() {
    assert!(slot(&[3, 24], &[1, 3], 1).checked().is_ok());
    assert!(slot(&[3, 24], &[1, 5], 1).checked().is_ok());
    assert!(slot(&[1, 24], &[0, 1], 1).checked().is_ok(), "one index never meets another");
    assert!(slot(&[3, 24], &[1, 2], 1).checked().is_err());
}
