//! Optimized lists against every list there is, and the text a user sees.

#![expect(clippy::expect_used, reason = "a helper that panics is a test that fails")]

use std::collections::BTreeMap;

use devicegraph::document::Value;
use devicegraph::optimize::{Arguments, Optimized};
use insta::assert_snapshot;
use proptest::collection::{btree_map, vec};
use proptest::option;
use proptest::prelude::*;

fn int(number: impl Into<i64>) -> Value {
    Value::Int(number.into())
}

fn optional(number: Option<u32>) -> Value {
    number.map_or(Value::Null, int)
}

fn table<V: Copy + Into<i64>>(entries: &BTreeMap<u32, V>) -> Value {
    Value::Object(entries.iter().map(|(size, value)| (size.to_string(), int(*value))).collect())
}

fn optimized(arguments: &Arguments) -> Optimized {
    Optimized::new(arguments).expect("the arguments are good")
}

/// Every list with this maximum, of sizes that are aligned.
fn lists(maximum: u32, alignment: u32) -> impl Iterator<Item = Vec<u32>> {
    let below: Vec<u32> = (1..maximum).filter(|size| size.is_multiple_of(alignment)).collect();
    (0..1_u32 << below.len()).map(move |bits| {
        let chosen = below.iter().enumerate().filter(|(i, _)| bits & (1 << i) != 0);
        chosen.map(|(_, size)| *size).chain([maximum]).collect()
    })
}

/// The padded rows of a list, size by size.
fn padding(histogram: &BTreeMap<u32, u32>, list: &[u32]) -> u128 {
    let of = |(size, steps): (&u32, &u32)| {
        let bucket = list.iter().find(|bucket| *bucket >= size);
        bucket.map_or(0, |bucket| u128::from(bucket - size) * u128::from(*steps))
    };
    histogram.iter().map(of).sum()
}

proptest! {
    #[test]
    fn no_list_of_as_many_graphs_pads_less(
        histogram in btree_map(1..14_u32, 1..50_u32, 1..10),
        max_graphs in option::of(1..8_u32),
        maximum in option::of(1..14_u32),
        limit in option::of(4..14_u32),
        alignment in 1..4_u32,
    ) {
        let best = optimized(&Arguments {
            histogram: table(&histogram),
            max_graphs: optional(max_graphs),
            maximum: optional(maximum),
            limit: optional(limit),
            alignment: int(alignment),
            ..Arguments::default()
        });
        let seen = *histogram.keys().last().expect("there is one");
        let largest = maximum.or(limit).unwrap_or(seen).next_multiple_of(alignment);
        let largest = limit.map_or(largest, |limit| largest.min(limit - limit % alignment));
        prop_assert_eq!(best.sizes().last(), Some(&largest));
        prop_assert!(best.sizes().iter().all(|size| size.is_multiple_of(alignment)));
        let mut least = BTreeMap::new();
        for list in lists(largest, alignment) {
            let entry = least.entry(list.len()).or_insert(u128::MAX);
            *entry = padding(&histogram, &list).min(*entry);
        }
        let within = max_graphs.map_or(usize::MAX, |graphs| graphs as usize);
        prop_assert!(best.sizes().len() <= within);
        let expected = least.iter().filter(|(graphs, _)| **graphs <= within).map(|(_, padding)| *padding).min();
        prop_assert_eq!(Some(best.outcome().padded_rows), expected);
        prop_assert_eq!(padding(&histogram, best.sizes()), best.outcome().padded_rows);
        let curve: Vec<u128> = least.into_values().take(best.curve().len()).collect();
        prop_assert_eq!(best.curve(), curve);
        let above = histogram.iter().filter(|(size, _)| **size > largest);
        prop_assert_eq!(best.outcome().eager, above.map(|(_, steps)| u128::from(*steps)).sum::<u128>());
    }

    #[test]
    fn no_list_within_a_budget_of_bytes_pads_less(
        histogram in btree_map(1..13_u32, 1..50_u32, 1..12),
        max_graphs in option::of(1..8_u32),
        mut bytes in vec(0..20_u32, 13),
        each in 0..10_u32, row in 0..4_u32, is_table: bool,
        budget in 0..100_u32,
    ) {
        // Sizes that were seen are chosen from. Where bytes fall as a size grows, another could do with less.
        let is_candidate = |size: &u32| !is_table || histogram.contains_key(size);
        if !is_table {
            bytes = (0..13).map(|size| each + row * size).collect();
        }
        let bytes_of = |list: &[u32]| list.iter().map(|size| bytes[*size as usize]).sum::<u32>();
        let sizes: BTreeMap<u32, u32> = (1..13).map(|size| (size, bytes[size as usize])).collect();
        let arguments = Arguments {
            histogram: table(&histogram),
            max_graphs: optional(max_graphs),
            bytes: int(budget),
            bytes_per_size: table(&sizes),
            ..Arguments::default()
        };
        let maximum = *histogram.keys().last().expect("there is one");
        let within = max_graphs.unwrap_or(u32::MAX) as usize;
        let lists = lists(maximum, 1).filter(|list| list.iter().all(is_candidate));
        let fitting = lists.filter(|list| bytes_of(list) <= budget && list.len() <= within);
        let Some(least) = fitting.map(|list| padding(&histogram, &list)).min() else {
            let error = Optimized::new(&arguments).expect_err("nothing fits");
            prop_assert_eq!(error.issues[0].code(), "budget-too-small");
            return Ok(());
        };
        let best = optimized(&arguments);
        prop_assert_eq!(best.outcome().padded_rows, least);
        prop_assert_eq!(padding(&histogram, best.sizes()), least);
        prop_assert_eq!(best.total_bytes(), Some(bytes_of(best.sizes()).into()));
        prop_assert!(bytes_of(best.sizes()) <= budget);
        prop_assert!(best.sizes().len() <= within);
    }

}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]

    #[test]
    fn large_histograms_agree_with_a_table_filled_cell_by_cell(
        histogram in btree_map(1..400_u32, 1..1000_u32, 20..40), max_graphs in 1..12_u32, row in 0..3_u32, extra in 0..400_u32,
    ) {
        let arguments = Arguments {
            histogram: table(&histogram), max_graphs: optional(Some(max_graphs)), ..Arguments::default()
        };
        let sizes: Vec<u32> = histogram.keys().copied().collect();
        // least[graphs][bytes], where a graph takes 10 bytes and `row` for each row, in tens.
        let each = |size: u32| 1 + (row * size) / 10;
        let budget = each(sizes[sizes.len() - 1]) + extra / 10;
        let cells = budget as usize + 1;
        let mut least = vec![vec![vec![u128::MAX; cells]; max_graphs as usize + 1]; sizes.len() + 1];
        least[0][0].fill(0);
        for to in 1..=sizes.len() {
            let cost = each(sizes[to - 1]) as usize;
            for from in 0..to {
                let run: u128 = sizes[from..to].iter().map(|size| u128::from(sizes[to - 1] - size) * u128::from(histogram[size])).sum();
                for graphs in 1..=max_graphs as usize {
                    for cell in cost..cells {
                        let before = least[from][graphs - 1][cell - cost];
                        if before < u128::MAX {
                            least[to][graphs][cell] = least[to][graphs][cell].min(before + run);
                        }
                    }
                }
            }
        }
        let best = least[sizes.len()].iter().map(|cells| cells[budget as usize]).min();
        let table = sizes.iter().map(|size| (size.to_string(), int(each(*size)))).collect();
        let within = optimized(&Arguments { bytes: int(budget), bytes_per_size: Value::Object(table), ..arguments });
        prop_assert_eq!(Some(within.outcome().padded_rows), best);
    }
}

/// A thousand steps in eleven sizes.
fn traffic() -> Value {
    let steps =
        [(1, 300), (2, 150), (3, 100), (5, 120), (8, 90), (13, 80), (21, 60), (30, 40), (33, 30), (48, 20), (64, 10)];
    table(&BTreeMap::from(steps))
}

#[test]
fn a_list_prints_what_it_comes_to() {
    let arguments = Arguments { histogram: traffic(), max_graphs: int(4), ..Arguments::default() };
    let best = optimized(&arguments);
    assert_snapshot!(best, @"
    sizes    3, 13, 33, 64
    steps    1000
    padding  3320 of 11630 rows (28.5%) with 4 graphs
    ");
    assert_eq!(best.curve()[3], best.outcome().padded_rows);
    assert!((best.outcome().waste() - 3320.0 / 11630.0).abs() < 1e-12);
    let (limit, alignment) = (int(50), int(8));
    let (bytes, bytes_per_size) = (int(30 << 20), int(7 << 20));
    assert_snapshot!(optimized(&Arguments { bytes, bytes_per_size, limit, alignment, ..arguments }), @"
    sizes    8, 16, 32, 48
    steps    990, and 10 above the largest size: eager
    bytes    28.0 MiB
    padding  5290 of 12960 rows (40.8%) with 4 graphs
    ");
}

#[test]
fn the_sizes_to_choose_from_are_those_seen_and_the_maximum_rounded_up() {
    let arguments = Arguments { histogram: traffic(), alignment: int(8), maximum: int(70), ..Arguments::default() };
    assert_eq!(arguments.candidates().expect("the arguments are good"), [8, 16, 24, 32, 40, 48, 64, 72]);
}

#[test]
fn steps_above_every_bucket_still_leave_a_list() {
    let best = optimized(&Arguments { histogram: traffic(), maximum: int(1), ..Arguments::default() });
    assert_eq!((best.sizes(), best.outcome().replayed, best.outcome().eager), (&[1][..], 300, 700));
    let above = Value::Object(vec![("9".into(), int(5))]);
    let none = optimized(&Arguments { histogram: above, limit: int(8), ..Arguments::default() });
    assert_eq!((none.sizes(), none.outcome().eager, none.outcome().waste().to_bits()), (&[8][..], 5, 0));
}

#[test]
fn counts_of_any_size_do_not_overflow() {
    let histogram = Value::Object((1..100).map(|size| ((size * 10_000).to_string(), Value::Int(i64::MAX))).collect());
    let best = optimized(&Arguments { histogram, max_graphs: int(1), ..Arguments::default() });
    let each = u128::from(i64::MAX.unsigned_abs()) * 10_000;
    assert_eq!(best.outcome().padded_rows, each * (98 * 99 / 2));
}

#[test]
fn two_thousand_sizes_have_a_list_for_every_number_of_graphs() {
    let steps: BTreeMap<u32, u32> = (1..=2000).map(|size| (size, 1 + size * 7919 % 101)).collect();
    let mut before = u128::MAX;
    for max_graphs in [1_u32, 2, 50, 51, 1999, 2000] {
        let best =
            optimized(&Arguments { histogram: table(&steps), max_graphs: int(max_graphs), ..Arguments::default() });
        assert_eq!((best.sizes().len(), best.sizes().last()), (max_graphs as usize, Some(&2000)));
        assert_eq!(padding(&steps, best.sizes()), best.outcome().padded_rows);
        assert!(best.outcome().padded_rows < before);
        before = best.outcome().padded_rows;
    }
    assert_eq!(before, 0);
}

#[test]
fn every_problem_of_the_arguments_is_reported() {
    let histogram = Value::Object(vec![
        ("0".into(), int(1)),
        ("four".into(), int(1)),
        ("4".into(), int(-1)),
        ("5".into(), Value::Null),
        ("6".into(), int(1)),
        ("06".into(), int(1)),
    ]);
    let error = Optimized::new(&Arguments {
        histogram,
        max_graphs: int(0),
        bytes: int(5),
        bytes_per_size: Value::Null,
        maximum: Value::Text("64".into()),
        alignment: int(8),
        limit: int(7),
    });
    assert_snapshot!(error.expect_err("nothing in it is good"), @r#"
    9 problems:
    histogram[0]: `0` is not an integer from 1 to 1048576 [out-of-range]
    histogram[four]: `"four"` is a string, not an integer from 1 to 1048576 [wrong-type]
    histogram[4]: `-1` is not an integer of at least 0 [out-of-range]
    histogram[5]: `null` is null, not an integer of at least 0 [wrong-type]
    histogram[06]: the key is given more than once [repeated-key]
      hint: keep one of them
    max_graphs: `0` is not an integer from 1 to 1048576 [out-of-range]
    bytes: nothing says how many bytes a graph takes [no-bytes]
      hint: give `bytes_per_size`
    maximum: `"64"` is a string, not an integer from 1 to 1048576 [wrong-type]
      hint: write 64, without quotes
    limit: no multiple of the alignment 8 is within `7` [limit-below-alignment]
    "#);
    let nothing = |histogram| Optimized::new(&Arguments { histogram, ..Arguments::default() }).expect_err("no steps");
    assert_snapshot!(nothing(Value::Null), @"histogram: `null` is null, not a mapping from live sizes to numbers of steps [wrong-type]");
    assert_snapshot!(nothing(Value::Object(vec![("4".into(), int(0))])), @r#"histogram: `{"4": 0}` counts no step [empty-histogram]"#);
}
