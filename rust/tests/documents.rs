//! Documents, good and bad, for every test that needs some.

use std::borrow::Cow;

use devicegraph::config::{Config, Phase};
use devicegraph::document::Value;
use devicegraph::layers::Source;
use proptest::collection::{btree_set, vec};
use proptest::option;
use proptest::prelude::*;
use proptest::sample::select;

/// Who says everything here.
pub(crate) const SOURCE: Source = Source::Config(Cow::Borrowed("a test"));

/// What a document names, by path, and merging in the words of the rule.
pub(crate) mod naive {
    use std::collections::BTreeMap;

    use super::Value;

    pub(crate) type Named = BTreeMap<String, Value>;

    pub(crate) fn named(document: &Value) -> Named {
        let Value::Object(entries) = document else {
            return Named::new();
        };
        let mut named = Named::new();
        for (name, value) in entries {
            match value {
                Value::Null => {}
                Value::Object(keys) => named.extend(
                    keys.iter().filter(|(_, v)| *v != Value::Null).map(|(key, v)| (format!("{name}.{key}"), v.clone())),
                ),
                value => drop(named.insert(name.clone(), value.clone())),
            }
        }
        named
    }

    /// The higher one wins key by key, and of `bs` and `max_bs` it wins both.
    pub(crate) fn merged(lower: &Named, higher: &Named) -> Named {
        let mut all = lower.clone();
        for phase in ["decode", "prefill"] {
            let pair = [format!("{phase}.bs"), format!("{phase}.max_bs")];
            if pair.iter().any(|key| higher.contains_key(key)) {
                all.retain(|key, _| !pair.contains(key));
            }
        }
        all.extend(higher.clone());
        all
    }
}

pub(crate) fn good(document: &Value) -> Config {
    Config::from_value(document, &SOURCE).expect("the document is good")
}

pub(crate) fn object<const N: usize>(entries: [(&str, Value); N]) -> Value {
    Value::Object(entries.map(|(name, value)| (name.to_owned(), value)).into())
}

fn sizes() -> impl Strategy<Value = (Value, Value)> {
    let list = btree_set(1..2000u32, 1..6).prop_map(|sizes| {
        let largest = sizes.last().copied().unwrap_or(1);
        (Value::Int(largest.into()), Value::List(sizes.into_iter().map(|size| Value::Int(size.into())).collect()))
    });
    // Either of the two, both in agreement, or none.
    (list, 0..4u8).prop_map(|((max_bs, bs), which)| match which {
        0 => (Value::Null, Value::Null),
        1 => (max_bs, Value::Null),
        2 => (Value::Null, bs),
        _ => (max_bs, bs),
    })
}

/// What one source says of a phase.
pub(crate) fn phase(phase: Phase) -> impl Strategy<Value = Value> {
    let word = |words: &'static [&'static str]| {
        option::of(select(words)).prop_map(|word| word.map_or(Value::Null, |word| Value::Text(word.into())))
    };
    (word(phase.backends()), sizes(), word(&["eager", "inductor"])).prop_map(|(backend, (max_bs, bs), compiler)| {
        object([("backend", backend), ("max_bs", max_bs), ("bs", bs), ("tc_compiler", compiler)])
    })
}

/// A document with nothing wrong in it.
pub(crate) fn good_document() -> impl Strategy<Value = Value> {
    let padding = option::of(any::<bool>()).prop_map(|flag| flag.map_or(Value::Null, Value::Bool));
    (phase(Phase::Decode), phase(Phase::Prefill), padding)
        .prop_map(|(decode, prefill, padding)| object([("decode", decode), ("prefill", prefill), ("padding", padding)]))
}

/// Documents made of the right words in any place, and of a few wrong ones.
pub(crate) fn any_document() -> impl Strategy<Value = Value> {
    const WORDS: [&str; 12] = [
        "decode",
        "prefill",
        "padding",
        "backend",
        "max_bs",
        "bs",
        "tc_compiler",
        "full",
        "disabled",
        "eager",
        "ful",
        "",
    ];
    let leaf = prop_oneof![
        Just(Value::Null),
        any::<bool>().prop_map(Value::Bool),
        (-2..10i64).prop_map(Value::Int),
        any::<f64>().prop_map(Value::Float),
        select(&WORDS[..]).prop_map(|word| Value::Text(word.into())),
    ];
    leaf.prop_recursive(4, 40, 6, |inner| {
        let entry = (select(&WORDS[..]), inner.clone()).prop_map(|(name, value)| (name.to_owned(), value));
        prop_oneof![vec(inner, 0..4).prop_map(Value::List), vec(entry, 0..6).prop_map(Value::Object)]
    })
}
