//! The pool's ledger: one key however it is spelled, and one memory only where both users find what they rely on.

#![allow(clippy::unwrap_used, reason = "a helper of a test may fail the test")]

use std::collections::HashMap;

use devicegraph::error::SlotFault;
use devicegraph::pool::{Joined, Ledger, PoolKey, Reliance};
use devicegraph::slot::PaddingPolicy::{self, FillOnce, FillSentinel, ForeachCopy, KeepPad, Zero};
use proptest::prelude::*;

fn key(name: &str, numel: usize, dtype: &str, device: &str) -> Result<PoolKey, SlotFault> {
    PoolKey::new(name, numel, dtype, device, 1)
}

fn relies(policy: PaddingPolicy, pad: u8, shape: &[usize]) -> Reliance {
    let rewrites = matches!(policy, Zero | FillSentinel);
    Reliance { policy, pad: vec![pad, 0], shape: shape.to_vec(), rewrites, fed: true }
}

#[test]
fn spellings_of_one_buffer_are_one_key() {
    assert_eq!(key("ids", 8, "torch.long", "cuda"), key("ids", 8, "int64", "cuda:1"));
    assert_eq!(key("ids", 8, "int64", "cpu:0"), key("ids", 8, "torch.int64", "cpu"));
    assert_eq!(key("ids", 8, "int64", "npu"), key("ids", 8, "int64", "npu:1"));
    for other in [
        key("ids", 8, "int64", "cuda:0"),
        key("ids", 8, "int32", "cuda"),
        key("ids", 9, "int64", "cuda"),
        key("locs", 8, "int64", "cuda"),
    ] {
        assert_ne!(key("ids", 8, "int64", "cuda"), other);
    }
}

#[test]
fn what_is_no_device_or_dtype_is_refused() {
    let told = |key: Result<PoolKey, SlotFault>| key.unwrap_err().to_string();
    insta::assert_snapshot!(told(key("ids", 8, "int64", "cuda:x")), @"`cuda:x` is no device");
    insta::assert_snapshot!(told(key("ids", 8, "int64", "")), @"`` is no device");
    insta::assert_snapshot!(told(key("ids", 8, "quint8", "cpu")), @"slot `ids`: `quint8` is no slot dtype");
}

#[test]
fn users_share_only_where_both_find_what_they_rely_on() {
    let (zero, one, other_one) =
        (relies(Zero, 0, &[8]), relies(FillSentinel, 1, &[8]), relies(FillSentinel, 2, &[4, 2]));
    assert!(zero.shares_with(&one), "each restores its own rows before each use");
    assert!(one.shares_with(&other_one), "and so in any shape");

    let written_once = relies(FillOnce, 1, &[8]);
    assert!(written_once.shares_with(&written_once.clone()));
    assert!(!written_once.shares_with(&relies(FillOnce, 2, &[8])));
    assert!(!written_once.shares_with(&one), "what is written once must not be written each step");
    assert!(!written_once.shares_with(&Reliance { fed: false, ..written_once.clone() }));

    let kept = relies(KeepPad, 0, &[8]);
    assert!(kept.shares_with(&kept.clone()));
    assert!(!kept.shares_with(&zero));
    assert!(!kept.shares_with(&relies(KeepPad, 0, &[4, 2])), "kept rows of another shape are other rows");

    let rows = relies(ForeachCopy, 0, &[8]);
    assert!(rows.shares_with(&zero) && zero.shares_with(&rows));
    assert!(rows.shares_with(&relies(Zero, 3, &[8])), "its zeros are zeros, whatever pad value it names");
    assert!(rows.shares_with(&relies(FillSentinel, 0, &[8])), "a sentinel of 0 is zeros, too");
    assert!(!rows.shares_with(&one), "a foreign sentinel is no row of an earlier replay");
    assert!(!rows.shares_with(&relies(Zero, 0, &[4, 2])));
    assert!(!rows.shares_with(&Reliance { rewrites: false, ..zero }));
}

#[test]
fn a_memory_is_forgotten_with_its_last_user() {
    let mut ledger = Ledger::default();
    let join = |ledger: &mut Ledger| {
        ledger.join(key("ids", 8, "int64", "cuda").unwrap(), "decode".to_owned(), relies(Zero, 0, &[8]))
    };
    let (first, second) = (join(&mut ledger), join(&mut ledger));
    assert_eq!((first.fresh, second.fresh, first.entry), (true, false, second.entry));
    assert_eq!(ledger.owners(first.entry), ["decode", "decode"]);
    assert_eq!((ledger.len(), ledger.is_empty()), (1, false));
    assert_eq!(ledger.leave(first.user), None);
    assert_eq!(ledger.owners(first.entry), ["decode"]);
    assert_eq!(ledger.leave(first.user), None, "leaving twice is harmless");
    assert_eq!(ledger.leave(second.user), Some(second.entry));
    assert!(ledger.owners(second.entry).is_empty());
    assert!(ledger.is_empty());
    let third = join(&mut ledger);
    assert!(third.fresh && third.entry != first.entry, "a number is never used again");
}

#[test]
fn the_ledger_prints_who_shares_what() {
    let mut ledger = Ledger::default();
    let mut join = |name, owner: &str, shape: &[usize]| {
        let numel = shape.iter().product();
        ledger.join(key(name, numel, "int64", "cuda").unwrap(), owner.to_owned(), relies(Zero, 0, shape));
    };
    join("input_ids", "decode", &[64]);
    join("mrope_positions", "decode", &[3, 64]);
    join("input_ids", "prefill", &[8, 8]);
    insta::assert_snapshot!(ledger, @"input-buffer pool: 2 buffers, 2048 bytes, 512 bytes saved by sharing
  input_ids        int64     cuda:1           512 bytes  decode [64], prefill [8, 8]
  mrope_positions  int64     cuda:1          1536 bytes  decode [3, 64]");
}

fn reliances() -> impl Strategy<Value = Reliance> {
    let policy = prop::sample::select(vec![KeepPad, FillSentinel, Zero, ForeachCopy, FillOnce]);
    let shape = prop::sample::select(vec![vec![8], vec![4, 2], vec![2, 4]]);
    (policy, 0_u8..3, shape, any::<bool>(), any::<bool>()).prop_map(|(policy, pad, shape, rewrites, fed)| {
        let rewrites = rewrites && matches!(policy, Zero | FillSentinel);
        Reliance { policy, pad: vec![pad], shape, rewrites, fed }
    })
}

proptest! {
    #[test]
    fn sharing_is_mutual_and_with_oneself(one in reliances(), other in reliances()) {
        prop_assert!(one.shares_with(&one));
        prop_assert_eq!(one.shares_with(&other), other.shares_with(&one));
    }

    #[test]
    fn whoever_comes_and_goes_nobody_shares_against_its_reliance(
        steps in prop::collection::vec((reliances(), 0_usize..2, prop::option::of(any::<prop::sample::Index>())), 1..60),
    ) {
        let mut ledger = Ledger::default();
        let mut users: Vec<(Joined, usize, Reliance)> = Vec::new();
        for (reliance, name, leaver) in steps {
            if let (Some(leaver), false) = (leaver, users.is_empty()) {
                let (gone, ..) = users.swap_remove(leaver.index(users.len()));
                let last = !users.iter().any(|(joined, ..)| joined.entry == gone.entry);
                prop_assert_eq!(ledger.leave(gone.user), last.then_some(gone.entry));
            }
            let joined = ledger.join(key(["a", "b"][name], 8, "int64", "cpu").unwrap(), String::new(), reliance.clone());
            prop_assert_eq!(joined.fresh, !users.iter().any(|(other, ..)| other.entry == joined.entry));
            users.push((joined, name, reliance));
            let mut entries: HashMap<u64, Vec<&(Joined, usize, Reliance)>> = HashMap::new();
            for user in &users {
                entries.entry(user.0.entry).or_default().push(user);
            }
            prop_assert_eq!(ledger.len(), entries.len());
            for sharing in entries.values() {
                for (_, name, one) in sharing {
                    prop_assert!(sharing.iter().all(|(_, other_name, other)| name == other_name && one.shares_with(other)));
                }
            }
            let bytes = entries.len() * 64;
            prop_assert_eq!((ledger.bytes(), ledger.saved_bytes()), (bytes, users.len() * 64 - bytes));
        }
    }
}
