//! What a budget of graphs or of bytes leaves of a list.

use devicegraph::buckets::{Arguments, Buckets};
use devicegraph::document::Value;
use insta::assert_snapshot;
use proptest::collection::vec;
use proptest::prelude::*;

use crate::{decode, explicit, int, list, optional};

/// The largest ratio between neighbours: the worst share of padding.
fn worst_growth(sizes: &[u32]) -> f64 {
    sizes.windows(2).map(|pair| f64::from(pair[1]) / f64::from(pair[0])).fold(1.0, f64::max)
}

proptest! {
    #[test]
    fn a_graph_budget_keeps_the_ends_and_spreads_the_rest(sizes in vec(1..100u32, 3..10), max_graphs in 2..8u32) {
        let whole = explicit(&sizes, true, 1, None, None);
        let buckets = explicit(&sizes, true, 1, None, Some(max_graphs));
        let (all, kept) = (whole.sizes(), buckets.sizes());
        prop_assert_eq!(kept.len(), all.len().min(max_graphs as usize));
        prop_assert_eq!((kept.first(), kept.last()), (all.first(), all.last()));
        prop_assert!(kept.iter().all(|size| all.contains(size)));
        // Every way to choose as many with both ends, the best of them against ours.
        let choices = (0..1u32 << all.len()).map(|bits| {
            let chosen = all.iter().enumerate().filter(|(i, _)| bits & (1 << i) != 0);
            chosen.map(|(_, size)| *size).collect::<Vec<u32>>()
        });
        let comparable = choices.filter(|c| c.len() == kept.len() && c.first() == all.first() && c.last() == all.last());
        let best = comparable.map(|choice| worst_growth(&choice)).fold(f64::INFINITY, f64::min);
        prop_assert!(worst_growth(kept) <= best * worst_growth(all) + 1e-9, "{:?} of {:?}, best {}", kept, all, best);
    }

    #[test]
    fn a_budget_of_bytes_is_kept_to_with_the_ends_and_as_many_between_as_fit(
        sizes in vec(1..100u32, 1..12), costs in vec(0..50u32, 100), budget in 0..400u32,
    ) {
        let bytes_of = |size: u32| costs[size as usize];
        let table = (1..100).map(|size| (size.to_string(), int(bytes_of(size)))).collect();
        let weigh = |max_bytes: Option<u32>, max_graphs: Option<u32>| decode(&Arguments {
            bs: list(&sizes),
            max_bytes: optional(max_bytes),
            max_graphs: optional(max_graphs),
            bytes_per_size: Value::Object(Vec::clone(&table)),
            ..Arguments::default()
        });
        let (whole, buckets) = (weigh(None, None), weigh(Some(budget), None));
        let total = |sizes: &[u32]| sizes.iter().map(|size| u64::from(bytes_of(*size))).sum::<u64>();
        prop_assert_eq!(buckets.total_bytes(), Some(total(buckets.sizes())));
        prop_assert!(total(buckets.sizes()) <= budget.into());
        // The largest is the largest that fits alone, and the smallest is there unless the two do not fit together.
        let alone = whole.sizes();
        let reach = alone.iter().rposition(|size| bytes_of(*size) <= budget).map_or(0, |at| at + 1);
        let reachable = &alone[..reach];
        prop_assert_eq!(buckets.sizes().last(), reachable.last());
        if let [first, .., last] = reachable && total(&[*first, *last]) <= budget.into() {
            prop_assert_eq!(buckets.sizes().first(), Some(first));
        }
        // One graph more, spread in the same way, is never within the budget where fewer take less.
        let graphs = buckets.sizes().len();
        if graphs < reachable.len() && reach == alone.len() {
            let more = weigh(None, Some(u32::try_from(graphs).expect("few") + 1));
            let grows = (1..=reachable.len()).map(|graphs| weigh(None, u32::try_from(graphs).ok()).total_bytes());
            if grows.is_sorted() {
                prop_assert!(more.total_bytes() > Some(budget.into()));
            }
        }
    }
}

#[test]
fn a_budget_of_bytes_prints_what_is_used_and_what_is_dropped() {
    let weigh = |bs: &[u32], max_bytes: i64, max_graphs: Option<u32>, bytes_per_size: Value| {
        let max_bytes = Value::Int(max_bytes);
        let max_graphs = optional(max_graphs);
        decode(&Arguments { bs: list(bs), max_bytes, max_graphs, bytes_per_size, ..Arguments::default() })
    };
    assert_snapshot!(weigh(&[1, 2, 4, 8, 16, 32], 30 << 20, Some(5), int(7 << 20)), @r"
    asked    1, 2, 4, 8, 16, 32
    kept     1, 4, 16, 32
    dropped  8: beyond the budget of 5 graphs
    dropped  2: beyond the budget of 30.0 MiB
    bytes    28.0 MiB of 30.0 MiB
    padding  on: a size in between takes the next larger bucket
    ");
    let table = Value::from_json(r#"{"1": 10, "2": 20, "64": 4000}"#).expect("json");
    let buckets = weigh(&[1, 2, 64], 100, None, table);
    assert_eq!((buckets.sizes(), buckets.total_bytes(), buckets.fit(3)), (&[1, 2][..], Some(30), None));
    assert_eq!(*buckets.bytes(), [(1, 10), (2, 20), (64, 4000)].into(), "of what the budget took away, too");
    assert!(buckets.to_string().contains("bytes    30 bytes of 100 bytes"), "{buckets}");
    let most = Value::Int(i64::MAX);
    let buckets = decode(&Arguments { bs: list(&[1]), bytes_per_size: most, ..Arguments::default() });
    assert!(buckets.to_string().contains("bytes    8388608.0 TiB\n"), "{buckets}");
    assert_eq!(weigh(&[1, 2], 5, None, int(6)).sizes(), [0_u32; 0]);
    assert_eq!(weigh(&[1, 2], 0, None, int(0)).sizes(), [1, 2]);
}

#[test]
fn bytes_that_nobody_gave_or_that_are_none_are_refused() {
    let message = |max_bytes: Value, bytes_per_size: Value| {
        let arguments = Arguments { bs: list(&[1, 2, 3]), max_bytes, bytes_per_size, ..Arguments::default() };
        Buckets::decode(&arguments).expect_err("the bytes are not good").to_string()
    };
    let table = Value::from_json(r#"{"1": 10, "2": -1, "4": 4000}"#).expect("json");
    assert_snapshot!(message(int(8), Value::Null), @"
    max_bytes: nothing says how many bytes a graph takes [no-bytes]
      hint: give `bytes_per_size`
    ");
    assert_snapshot!(message(Value::Float(8.0), table), @"max_bytes: `8.0` is a float, not an integer of at least 0 [wrong-type]");
    let table = Value::from_json(r#"{"1": null, "2": -1, "4": 4000}"#).expect("json");
    assert_snapshot!(message(Value::Null, table), @"
    3 problems:
    bytes_per_size[1]: `null` is null, not an integer of at least 0 [wrong-type]
    bytes_per_size[2]: `-1` is not an integer of at least 0 [out-of-range]
    bytes_per_size[3]: nothing says how many bytes the graph of this size takes [no-bytes]
    ");
}

#[test]
fn one_graph_is_the_largest_two_are_the_ends_and_more_grow_by_one_ratio() {
    let sizes = [1, 2, 4, 8, 16];
    assert_eq!(explicit(&sizes, true, 1, None, Some(1)).sizes(), [16]);
    assert_eq!(explicit(&sizes, true, 1, None, Some(2)).sizes(), [1, 16]);
    assert_eq!(explicit(&sizes, true, 1, None, Some(3)).sizes(), [1, 4, 16]);
    assert_eq!(explicit(&[10, 20, 40, 80, 160], true, 1, None, Some(3)).sizes(), [10, 40, 160]);
    assert_eq!(explicit(&[10, 1000, 1001, 1002, 2000], true, 1, None, Some(4)).sizes(), [10, 1000, 1001, 2000]);
    assert_eq!(explicit(&[1, 2, 8, 16], true, 1, None, Some(3)).sizes(), [1, 8, 16], "of two as near, the larger");
}
