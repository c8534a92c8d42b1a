//! What there is to write in a configuration, as a JSON Schema for editors and pipelines.
//!
//! It comes from the table that the validator uses. Draft 4, because from draft 6 on `4.0` is an integer there, and it
//! is none here. A schema cannot say that `bs` and `max_bs` agree, nor that no key is repeated; the validator does.

use crate::config::{COMPILERS, KEYS, Key, Kind, LARGEST_SIZE, Phase};
use crate::document::Value;

/// The schema of a document.
pub fn schema() -> Value {
    let phase = |phase: Phase| {
        let about = format!("how {} is captured, and for which sizes", phase.name());
        let keys = KEYS[phase.rows()].iter().map(|key| (key.name(), property(key)));
        (phase.name(), entries(object(&about, or_null("object"), keys)))
    };
    let rest = KEYS.iter().filter(|key| !key.path.contains('.')).map(|key| (key.path, property(key)));
    let about = "which backend captures each phase, and for which sizes; null is \"not given\"";
    // A document is there or not, where a phase may be null.
    let document = object(about, text("object"), Phase::ALL.into_iter().map(phase).chain(rest));
    let head =
        [("$schema", text("http://json-schema.org/draft-04/schema#")), ("title", text("devicegraph configuration"))];
    entries(head.into_iter().chain(document))
}

type Entries = Vec<(&'static str, Value)>;

fn property(key: &Key) -> Value {
    let words = |words: &[&str]| Value::List(words.iter().map(|word| text(word)).chain([Value::Null]).collect());
    let size = |kind| vec![("type", kind), ("minimum", Value::Int(1)), ("maximum", Value::Int(LARGEST_SIZE.into()))];
    let allowed: Entries = match key.kind {
        Kind::Backend(phase) => vec![("enum", words(phase.backends()))],
        Kind::Compiler => vec![("enum", words(&COMPILERS))],
        Kind::Size => size(or_null("integer")),
        Kind::Sizes => {
            let item = entries(size(text("integer")));
            vec![("type", or_null("array")), ("minItems", Value::Int(1)), ("items", item)]
        }
        Kind::Flag => vec![("type", or_null("boolean"))],
    };
    let default = key.default.as_ref().map(|default| ("default", Value::from(default)));
    entries([("description", text(key.about))].into_iter().chain(allowed).chain(default))
}

fn object(about: &str, kind: Value, properties: impl Iterator<Item = (&'static str, Value)>) -> Entries {
    let strict = ("additionalProperties", Value::Bool(false));
    vec![("description", text(about)), ("type", kind), ("properties", entries(properties)), strict]
}

fn entries(entries: impl IntoIterator<Item = (&'static str, Value)>) -> Value {
    Value::Object(entries.into_iter().map(|(name, value)| (name.to_owned(), value)).collect())
}

fn or_null(kind: &str) -> Value {
    Value::List(vec![text(kind), text("null")])
}

fn text(text: &str) -> Value {
    Value::Text(text.to_owned())
}
