//! The settings of one phase.

use std::hash::{Hash, Hasher};

use super::check::Checker;
use super::keys::{BACKEND, KEYS, PHASE_KEYS, Phase, Setting};
use crate::document::Value;
use crate::error::ConfigError;
use crate::layers::{Entry, PhaseEntries, Source};

/// The settings of one phase.
///
/// One that belongs to no configuration yet does not know which phase it will be: it may have any backend, and is
/// checked again when a configuration takes it.
#[derive(Clone, Debug, Default)]
pub struct PhaseConfig {
    pub(super) entries: PhaseEntries,
}

impl PhaseConfig {
    /// Checks an object with the keys of a phase.
    ///
    /// # Errors
    /// Everything that is wrong with it.
    pub fn from_value(value: &Value, source: &Source) -> Result<Self, ConfigError> {
        let mut checker = Checker::default();
        // The rows of decode, which allows every backend.
        let named = checker.phase("", &KEYS[Phase::Decode.rows()], value);
        let entry = |value: Option<Setting>| value.map(|value| Entry { value, source: source.clone() });
        Ok(Self { entries: checker.finish(named)?.map(entry) })
    }

    /// The names of its keys, each with what holds for it; a phase that is nowhere yet has no default backend.
    pub fn values(&self) -> [(&'static str, Option<&Setting>); PHASE_KEYS] {
        std::array::from_fn(|row| {
            let default = if row == BACKEND { None } else { KEYS[row].default.as_ref() };
            (KEYS[row].name(), self.entries[row].as_ref().map(|entry| &entry.value).or(default))
        })
    }

    /// The value of a key, by its name.
    pub fn get(&self, name: &str) -> Option<&Setting> {
        self.values().into_iter().find(|(key, _)| *key == name)?.1
    }

    /// Why the phase is disabled, if a rule disabled it.
    pub fn reason(&self) -> Option<String> {
        match &self.entries[BACKEND].as_ref()?.source {
            Source::Rule { name, reason } => Some(format!("{reason} (rule `{name}`)")),
            _ => None,
        }
    }

    /// What a source says that names everything this holds.
    pub fn to_value(&self) -> Value {
        let held = KEYS.iter().zip(&self.entries).filter_map(|(key, entry)| Some((key.name(), entry.as_ref()?)));
        Value::Object(held.map(|(name, entry)| (name.to_owned(), Value::from(&entry.value))).collect())
    }

    /// The names of the keys that somebody named, even where the value is the default.
    pub fn explicit_keys(&self) -> Vec<&'static str> {
        let named = |entry: &Option<Entry>| entry.as_ref().is_some_and(|entry| entry.source.is_explicit());
        KEYS.iter().zip(&self.entries).filter(|(_, entry)| named(entry)).map(|(key, _)| key.name()).collect()
    }
}

/// Equal where the same values hold, whoever named them.
impl PartialEq for PhaseConfig {
    fn eq(&self, other: &Self) -> bool {
        self.values() == other.values()
    }
}

impl Eq for PhaseConfig {}

impl Hash for PhaseConfig {
    fn hash<H: Hasher>(&self, state: &mut H) {
        self.values().hash(state);
    }
}
