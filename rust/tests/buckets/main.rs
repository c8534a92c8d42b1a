//! Bucket lists against a naive reading of the same rules, and the text a user sees.

#![expect(clippy::expect_used, reason = "a helper that panics is a test that fails")]

use std::collections::BTreeSet;
use std::hash::{DefaultHasher, Hash, Hasher};

use devicegraph::buckets::{Arguments, Buckets};
use devicegraph::config::LARGEST_SIZE;
use devicegraph::document::Value;
use insta::assert_snapshot;
use proptest::collection::vec;
use proptest::option;
use proptest::prelude::*;

mod budget;
mod naive;

fn int(number: u32) -> Value {
    Value::Int(number.into())
}

fn optional(number: Option<u32>) -> Value {
    number.map_or(Value::Null, int)
}

fn list(sizes: &[u32]) -> Value {
    Value::List(sizes.iter().copied().map(int).collect())
}

fn decode(arguments: &Arguments) -> Buckets {
    Buckets::decode(arguments).expect("the arguments are good")
}

fn explicit(sizes: &[u32], padding: bool, alignment: u32, limit: Option<u32>, max_graphs: Option<u32>) -> Buckets {
    decode(&Arguments {
        bs: list(sizes),
        padding: Value::Bool(padding),
        alignment: int(alignment),
        limit: optional(limit),
        max_graphs: optional(max_graphs),
        ..Arguments::default()
    })
}

proptest! {
    #[test]
    fn the_default_lists_of_decode_are_the_rule_read_size_by_size(
        maximum in 1..3000u32, padding: bool, num_tokens_per_bs in 1..4u32,
    ) {
        let buckets = decode(&Arguments {
            maximum: int(maximum),
            padding: Value::Bool(padding),
            num_tokens_per_bs: int(num_tokens_per_bs),
            ..Arguments::default()
        });
        let expected = naive::decode(maximum, padding, num_tokens_per_bs);
        prop_assert_eq!(buckets.sizes(), expected.into_iter().collect::<Vec<_>>());
    }

    #[test]
    fn the_maximum_of_a_default_list_is_in_it_rounded_up_to_the_alignment(
        maximum in 1..20_000u32, alignment in 1..100u32, padding: bool,
    ) {
        let arguments = Arguments {
            maximum: int(maximum),
            alignment: int(alignment),
            padding: Value::Bool(padding),
            ..Arguments::default()
        };
        for buckets in [decode(&arguments), Buckets::prefill(&arguments).expect("the arguments are good")] {
            prop_assert_eq!(buckets.maximum(), maximum.next_multiple_of(alignment));
            prop_assert!(buckets.sizes().iter().all(|size| size.is_multiple_of(alignment)));
            prop_assert_eq!(buckets.dropped().count(), 0);
        }
    }

    #[test]
    fn no_alignment_makes_a_bucket_that_is_no_size(below in 0..200u32, alignment in 1..LARGEST_SIZE, dense: bool) {
        let preset = Value::Text((if dense { "dense" } else { "default" }).into());
        let arguments = Arguments {
            maximum: int(LARGEST_SIZE - below),
            alignment: int(alignment),
            preset,
            ..Arguments::default()
        };
        for buckets in [decode(&arguments), Buckets::prefill(&arguments).expect("the arguments are good")] {
            prop_assert!(buckets.maximum() <= LARGEST_SIZE && LARGEST_SIZE - buckets.maximum() < alignment + below);
            prop_assert!(buckets.sizes().iter().all(|size| size.is_multiple_of(alignment)));
        }
    }

    #[test]
    fn an_explicit_list_keeps_what_the_rules_keep(
        sizes in vec(1..300u32, 1..20), padding: bool, alignment in 1..40u32, limit in option::of(1..300u32),
    ) {
        let buckets = explicit(&sizes, padding, alignment, limit, None);
        let expected = naive::kept(&sizes, padding, alignment, limit);
        prop_assert_eq!(buckets.sizes(), expected.into_iter().collect::<Vec<_>>());
    }

    #[test]
    fn every_size_asked_for_is_either_kept_or_dropped(
        sizes in vec(1..300u32, 1..20),
        padding: bool,
        alignment in 1..40u32,
        limit in option::of(1..300u32),
        max_graphs in option::of(1..8u32),
    ) {
        let buckets = explicit(&sizes, padding, alignment, limit, max_graphs);
        let kept: BTreeSet<u32> = buckets.sizes().iter().copied().collect();
        let dropped: BTreeSet<u32> = buckets.dropped().map(|(size, _)| size).collect();
        let asked: BTreeSet<u32> = sizes.iter().copied().collect();
        prop_assert!(kept.is_disjoint(&dropped));
        prop_assert_eq!(&dropped, &asked.difference(&kept).copied().collect());
        prop_assert_eq!(buckets.asked(), asked.into_iter().collect::<Vec<_>>());
    }

    #[test]
    fn neither_order_nor_repetition_in_a_list_matters(
        mut sizes in vec(1..300u32, 1..20), limit in option::of(1..300u32), max_graphs in option::of(1..8u32),
    ) {
        let buckets = explicit(&sizes, true, 1, limit, max_graphs);
        sizes.reverse();
        sizes.extend_from_within(..1);
        let same = explicit(&sizes, true, 1, limit, max_graphs);
        prop_assert_eq!(buckets.to_string(), same.to_string());
        prop_assert_eq!(buckets, same);
    }

    #[test]
    fn fit_is_the_smallest_bucket_that_holds_the_size(
        sizes in vec(1..300u32, 1..20), padding: bool, limit in option::of(1..300u32),
    ) {
        let buckets = explicit(&sizes, padding, 1, limit, None);
        for raw in 0..302 {
            prop_assert_eq!(buckets.fit(raw.into()), naive::fit(buckets.sizes(), padding, raw));
        }
        prop_assert_eq!(buckets.fit(-1), None);
        prop_assert_eq!(buckets.fit(i64::MAX), None);
    }

    #[test]
    fn a_dense_list_has_the_maximum_and_pads_by_a_sixteenth_at_most(maximum in 1..20_000u32) {
        let arguments =
            Arguments { maximum: int(maximum), preset: Value::Text("dense".into()), ..Arguments::default() };
        let (dense, prefill) = (decode(&arguments), Buckets::prefill(&arguments).expect("the arguments are good"));
        prop_assert_eq!((dense.maximum(), prefill.maximum()), (maximum, maximum));
        prop_assert!(dense.sizes().starts_with(&(1..=maximum.min(32)).collect::<Vec<_>>()));
        prop_assert!(naive::padding(dense.sizes(), 1) <= 1.0 / 16.0);
        prop_assert!(naive::padding(prefill.sizes(), 128) <= 1.0 / 16.0);
        let default = decode(&Arguments { maximum: int(maximum), ..Arguments::default() });
        prop_assert!(dense.sizes().len() >= default.sizes().len());
    }

    #[test]
    fn tokens_are_aligned_with_the_fewest_requests(
        num_tokens_per_bs in 1..8u32, token_alignment in 1..64u32, alignment in 1..8u32, maximum in 1..200u32,
    ) {
        let buckets = decode(&Arguments {
            maximum: int(maximum),
            num_tokens_per_bs: int(num_tokens_per_bs),
            token_alignment: int(token_alignment),
            alignment: int(alignment),
            ..Arguments::default()
        });
        let aligned =
            |size: &u32| (size * num_tokens_per_bs).is_multiple_of(token_alignment) && size.is_multiple_of(alignment);
        prop_assert!(buckets.sizes().iter().all(aligned));
        prop_assert_eq!(Some(buckets.maximum()), (maximum..=maximum + 512).find(aligned));
    }
}

#[test]
fn the_default_list_of_prefill_is_the_documented_one() {
    let buckets = |maximum| Buckets::prefill(&Arguments { maximum: int(maximum), ..Arguments::default() });
    let text = |maximum| buckets(maximum).expect("the arguments are good").to_string();
    assert_snapshot!(text(8192), @r"
    asked    4..32 by 4, 48..256 by 16, 288..512 by 32, 576..1024 by 64, 1280..4096 by 256, 4608..8192 by 512
    kept     4..32 by 4, 48..256 by 16, 288..512 by 32, 576..1024 by 64, 1280..4096 by 256, 4608..8192 by 512
    padding  on: a size in between takes the next larger bucket
    ");
    assert_eq!(buckets(3).expect("the arguments are good").sizes(), [3]);
    assert_eq!(buckets(50).expect("the arguments are good").sizes(), [4, 8, 12, 16, 20, 24, 28, 32, 48, 50]);
}

#[test]
fn without_padding_prefill_keeps_its_list_and_takes_exact_sizes_only() {
    let arguments = Arguments { maximum: int(50), padding: Value::Bool(false), ..Arguments::default() };
    let buckets = Buckets::prefill(&arguments).expect("the arguments are good");
    assert_eq!(buckets.sizes(), [4, 8, 12, 16, 20, 24, 28, 32, 48, 50]);
    assert_eq!((buckets.fit(48), buckets.fit(47)), (Some(48), None));
}

#[test]
fn a_limit_cuts_the_list_and_joins_it_when_padding_is_on() {
    assert_snapshot!(explicit(&[8, 1, 4, 4, 2, 64], true, 1, Some(6), None), @r"
    asked    1, 2, 4, 8, 64
    kept     1, 2, 4, 6
    added    6, the largest size within the limit
    dropped  8, 64: above the limit 6
    padding  on: a size in between takes the next larger bucket
    ");
    assert_eq!(explicit(&[8, 1, 4, 4, 2, 64], false, 1, Some(6), None).sizes(), [1, 2, 4]);
    assert_eq!(explicit(&[1, 2, 4], true, 1, Some(6), None).sizes(), [1, 2, 4]);
}

#[test]
fn a_default_list_never_exceeds_the_limit() {
    let arguments = Arguments { maximum: int(512), limit: int(100), alignment: int(8), ..Arguments::default() };
    assert_snapshot!(decode(&arguments), @r"
    asked    8..256 by 8, 272..512 by 16
    kept     8..96 by 8
    dropped  104..256 by 8, 272..512 by 16: above the limit 100
    padding  on: a size in between takes the next larger bucket
    ");
    let one = decode(&Arguments { limit: int(1), ..Arguments::default() });
    assert_eq!(one.sizes(), [1]);
}

#[test]
fn a_list_of_which_nothing_is_left_is_empty_and_says_why() {
    let buckets = explicit(&[128], false, 1, Some(64), None);
    assert_eq!((buckets.sizes().len(), buckets.maximum(), buckets.fit(1)), (0, 0, None));
    assert_snapshot!(buckets, @r"
    asked    128
    kept     none
    dropped  128: above the limit 64
    padding  off: a size in between runs eager
    ");
    assert_eq!(explicit(&[8], true, 16, Some(8), None).maximum(), 0);
    let unaligned =
        explicit(&[8], true, 16, Some(8), None).dropped().map(|(_, reason)| reason.code()).collect::<Vec<_>>();
    assert_eq!(unaligned, ["bucket-not-aligned"], "the limit itself is within it");
}

#[test]
fn lists_are_equal_and_hash_alike_where_every_size_has_the_same_bucket_and_only_there() {
    let hash = |buckets: &Buckets| {
        let mut state = DefaultHasher::new();
        buckets.hash(&mut state);
        state.finish()
    };
    let buckets = explicit(&[1, 2, 4], true, 1, None, None);
    let same = explicit(&[1, 2, 4, 8], true, 1, Some(4), None);
    assert_eq!((&buckets, hash(&buckets)), (&same, hash(&same)), "however the list came about");
    for other in [explicit(&[1, 2], true, 1, None, None), explicit(&[1, 2, 4], false, 1, None, None)] {
        assert!(buckets != other && hash(&buckets) != hash(&other), "{other}");
    }
}

#[test]
fn four_sizes_with_one_step_are_a_run_and_three_are_not() {
    assert_snapshot!(explicit(&[1, 2, 3, 4, 10, 12, 14, 16, 20, 24, 28], true, 1, None, None), @r"
    asked    1..4, 10..16 by 2, 20, 24, 28
    kept     1..4, 10..16 by 2, 20, 24, 28
    padding  on: a size in between takes the next larger bucket
    ");
}

#[test]
fn the_maximum_follows_what_the_alignment_drops() {
    let buckets = explicit(&[8, 16, 88], true, 16, None, None);
    assert_eq!((buckets.sizes(), buckets.maximum()), (&[16][..], 16));
}

#[test]
fn dropped_sizes_have_code_sentence_and_hint() {
    let buckets = explicit(&[3, 16, 24, 32, 500, 900], true, 8, Some(600), Some(3));
    let text: Vec<String> = buckets
        .dropped()
        .map(|(size, reason)| format!("{size} is {reason} [{}] {:?}", reason.code(), reason.hint(size)))
        .collect();
    assert_snapshot!(text.join("\n"), @r#"
    3 is not a multiple of the alignment 8 [bucket-not-aligned] Some("use 8")
    24 is beyond the budget of 3 graphs [bucket-over-budget] None
    500 is not a multiple of the alignment 8 [bucket-not-aligned] Some("use 496 or 504")
    900 is above the limit 600 [bucket-over-limit] None
    "#);
}

#[test]
fn every_bad_argument_is_reported_at_once() {
    let error = Buckets::decode(&Arguments {
        maximum: Value::Bool(true),
        bs: Value::List(vec![int(0), Value::Int(-3), Value::Float(1.5), Value::Text("4".into()), int(8)]),
        padding: int(1),
        num_tokens_per_bs: int(0),
        alignment: Value::Text("two".into()),
        token_alignment: Value::Float(2.0),
        limit: int(0),
        max_graphs: int(0),
        max_bytes: Value::Int(-1),
        bytes_per_size: Value::Text("1 GiB".into()),
        preset: Value::Text("dens".into()),
    });
    assert_snapshot!(error.expect_err("nothing in it is good"), @r#"
    14 problems:
    max_bs: `true` is a boolean, not an integer from 1 to 1048576 [wrong-type]
    bs[0]: `0` is not an integer from 1 to 1048576 [out-of-range]
    bs[1]: `-3` is not an integer from 1 to 1048576 [out-of-range]
    bs[2]: `1.5` is a float, not an integer from 1 to 1048576 [wrong-type]
    bs[3]: `"4"` is a string, not an integer from 1 to 1048576 [wrong-type]
      hint: write 4, without quotes
    limit: `0` is not an integer from 1 to 1048576 [out-of-range]
    padding: `1` is an integer, not `true` or `false` [wrong-type]
    num_tokens_per_bs: `0` is not an integer from 1 to 1048576 [out-of-range]
    alignment: `"two"` is a string, not an integer from 1 to 1048576 [wrong-type]
    token_alignment: `2.0` is a float, not an integer from 1 to 1048576 [wrong-type]
    max_graphs: `0` is not an integer from 1 to 1048576 [out-of-range]
    max_bytes: `-1` is not an integer of at least 0 [out-of-range]
    bytes_per_size: `"1 GiB"` is a string, not an integer, a mapping from sizes to integers, or a function of the size [wrong-type]
    preset: `"dens"` is not one of `default` or `dense` [unknown-preset]
      hint: did you mean `dense`?
    "#);
}

#[test]
fn arguments_that_contradict_one_another_are_refused() {
    let message = |arguments| Buckets::decode(&arguments).expect_err("they contradict").to_string();
    assert_snapshot!(message(Arguments::default()), @"
    max_bs: nothing says how large the largest bucket is [no-maximum]
      hint: give `max_bs`, `bs` or `limit`
    ");
    assert_snapshot!(message(Arguments { maximum: int(64), bs: list(&[1, 8]), ..Arguments::default() }), @"
    max_bs: `64` is not the largest entry of `bs`, 8 [sizes-disagree]
      hint: leave `max_bs` out, or set it to 8, or add 64 to `bs`
    ");
    let (alignment, token_alignment) = (int(1_048_573), int(1_048_575));
    assert_snapshot!(message(Arguments { maximum: int(8), alignment, token_alignment, ..Arguments::default() }), @"alignment: every size would have to be a multiple of 1099507433475, and the largest is 1048576 [out-of-range]");
    let nothing = Buckets::explicit(&Arguments::default()).expect_err("a list is needed");
    assert_snapshot!(nothing, @"bs: `null` is null, not a list of integers from 1 to 1048576 [wrong-type]");
    let empty = Buckets::explicit(&Arguments { bs: list(&[]), ..Arguments::default() });
    assert_snapshot!(empty.expect_err("a size is needed"), @"
    bs: `[]` names no size [empty-list]
      hint: to run this phase without graphs, set its `backend` to `disabled`
    ");
}

#[test]
fn the_largest_size_is_a_bucket_of_a_default_list_or_else_the_largest_multiple_below_it() {
    for (alignment, largest) in [(1, LARGEST_SIZE), (4, LARGEST_SIZE), (3, LARGEST_SIZE - 1), (7, LARGEST_SIZE - 4)] {
        let arguments = Arguments { maximum: int(LARGEST_SIZE), alignment: int(alignment), ..Arguments::default() };
        assert_eq!(Buckets::prefill(&arguments).expect("the arguments are good").maximum(), largest, "{alignment}");
    }
}
