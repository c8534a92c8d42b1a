//! What pickle keeps of a configuration: every layer, and who said what.
//!
//! A state is read through the validator, not around it: what another version wrote is checked like any document.

use std::borrow::Cow;

use super::keys::{KEYS, Key, Phase, row};
use super::{Config, Outweighed, PhaseConfig, nested};
use crate::document::Value;
use crate::error::{ConfigError, Expected, Issue, Problem};
use crate::layers::{Entry, Source};

impl Config {
    /// All of it as plain data.
    pub fn to_state(&self) -> Value {
        let layers = self.layers.iter().map(|layer| {
            let named = || KEYS.iter().zip(&layer.0).filter_map(|(key, entry)| Some((key.path, entry.as_ref()?)));
            let document = nested(named().map(|(path, entry)| (path, Value::from(&entry.value))));
            Value::List(vec![document, sources(named())])
        });
        let outweighed = self.outweighed.iter().map(|rule| texts([rule.phase.name(), &rule.rule, &rule.reason]));
        Value::List(vec![Value::List(layers.collect()), Value::List(outweighed.collect())])
    }

    /// Reads a state back.
    ///
    /// # Errors
    /// Everything that is wrong with the values in it, or that it is no such state.
    pub fn from_state(state: &Value) -> Result<Self, ConfigError> {
        let no_state = || no_state(state);
        let [layers, outweighed] = items(state).ok_or_else(no_state)? else { return Err(no_state()) };
        let mut config = Self::default();
        for layer in items(layers).ok_or_else(no_state)? {
            let [document, Value::Object(sources)] = items(layer).ok_or_else(no_state)? else { return Err(no_state()) };
            let Some(mut layer) = Self::from_value(document, &Source::Default)?.layers.pop() else { continue };
            for (path, source) in sources {
                let entry = row(path).and_then(|row| layer.0[row].as_mut()).ok_or_else(no_state)?;
                entry.source = read_source(source).ok_or_else(no_state)?;
            }
            config = config.with_layer(layer);
        }
        let outweighed = items(outweighed).ok_or_else(no_state)?.iter().map(|rule| {
            let [phase, rule, reason] = read_texts(rule)?;
            Some(Outweighed { phase: Phase::named(phase)?, rule: rule.into(), reason: reason.into() })
        });
        config.outweighed = outweighed.collect::<Option<_>>().ok_or_else(no_state)?;
        Ok(config)
    }
}

impl PhaseConfig {
    /// All of it as plain data.
    pub fn to_state(&self) -> Value {
        let held = KEYS.iter().zip(&self.entries).filter_map(|(key, entry)| Some((key.name(), entry.as_ref()?)));
        Value::List(vec![self.to_value(), sources(held)])
    }

    /// Reads a state back.
    ///
    /// # Errors
    /// Everything that is wrong with the values in it, or that it is no such state.
    pub fn from_state(state: &Value) -> Result<Self, ConfigError> {
        let no_state = || no_state(state);
        let [document, Value::Object(sources)] = items(state).ok_or_else(no_state)? else { return Err(no_state()) };
        let mut phase = Self::from_value(document, &Source::Default)?;
        for (name, source) in sources {
            let entry = KEYS.iter().map(Key::name).zip(&mut phase.entries).find(|(key, _)| key == name);
            let entry = entry.and_then(|(_, entry)| entry.as_mut()).ok_or_else(no_state)?;
            entry.source = read_source(source).ok_or_else(no_state)?;
        }
        Ok(phase)
    }
}

fn no_state(state: &Value) -> ConfigError {
    Issue::new("", state.clone(), Problem::WrongType(Expected::State)).into()
}

fn sources<'e>(entries: impl Iterator<Item = (&'static str, &'e Entry)>) -> Value {
    let source = |source: &Source| texts([source.kind(), source.name(), source.reason().unwrap_or_default()]);
    Value::Object(entries.map(|(path, entry)| (path.to_owned(), source(&entry.source))).collect())
}

fn read_source(state: &Value) -> Option<Source> {
    let [kind, name, reason] = read_texts(state)?;
    let (name, reason) = (Cow::from(name.to_owned()), reason.to_owned().into());
    let sources = [
        Source::Default,
        Source::Deprecated(name.clone()),
        Source::Option(name.clone()),
        Source::Config(name.clone()),
        Source::Rule { name, reason },
    ];
    sources.into_iter().find(|source| source.kind() == kind)
}

fn items(value: &Value) -> Option<&[Value]> {
    match value {
        Value::List(items) => Some(items),
        _ => None,
    }
}

fn texts(texts: [&str; 3]) -> Value {
    Value::List(texts.map(|text| Value::Text(text.to_owned())).into())
}

fn read_texts(value: &Value) -> Option<[&str; 3]> {
    match items(value)? {
        [Value::Text(one), Value::Text(two), Value::Text(three)] => Some([one, two, three]),
        _ => None,
    }
}
