//! Which backend each phase is captured by, and for which sizes.
//!
//! A source of settings (a JSON text, keyword arguments) is checked into a layer: the keys that it names. A
//! configuration is layers put on top of the defaults, key by key, and remembers which keys somebody named.

mod check;
mod keys;

use std::hash::{Hash, Hasher};

pub(crate) use check::Checker;
use keys::{BACKEND, BS, MAX_BS, PADDING, PHASE_KEYS, TC_COMPILER};
pub use keys::{BACKENDS, COMPILERS, KEYS, Key, Kind, LARGEST_SIZE, PHASES, Phase, Setting, TC_PIECEWISE};

use crate::document::Value;
use crate::error::{ConfigError, Issue, Problem};

/// A setting, and whether somebody named it.
#[derive(Clone, Debug)]
struct Entry {
    value: Setting,
    explicit: bool,
}

/// Puts what one source names on top of what is there.
///
/// `bs` and `max_bs` are two ways to say one thing, so a source that names either replaces both. That makes merging
/// associative, which dropping only a pair that disagrees would not.
fn overlay(entries: &mut [Option<Entry>], named: &[Option<Setting>]) {
    if entries.len() == PHASE_KEYS && (named[MAX_BS].is_some() || named[BS].is_some()) {
        entries[MAX_BS] = None;
        entries[BS] = None;
    }
    for (entry, value) in entries.iter_mut().zip(named) {
        if let Some(value) = value {
            *entry = Some(Entry { value: value.clone(), explicit: true });
        }
    }
}

/// The settings of one phase.
///
/// One that belongs to no configuration yet does not know which phase it will be: it may have any backend, and is
/// checked again when a configuration takes it.
#[derive(Clone, Debug, Default)]
pub struct PhaseConfig {
    entries: [Option<Entry>; PHASE_KEYS],
}

impl PhaseConfig {
    /// Checks an object with the keys of a phase.
    ///
    /// # Errors
    /// Everything that is wrong with it.
    pub fn from_value(value: &Value) -> Result<Self, ConfigError> {
        let mut checker = Checker::default();
        // The rows of decode, which allows every backend.
        let layer = checker.phase("", &KEYS[Phase::Decode.rows()], value);
        let mut config = Self::default();
        overlay(&mut config.entries, &checker.finish(layer)?);
        Ok(config)
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

    /// What a source says that names everything this holds, and the names of the keys in it that nobody named.
    pub fn to_value(&self) -> (Value, Vec<&'static str>) {
        let held = || KEYS.iter().zip(&self.entries).filter_map(|(key, entry)| Some((key.name(), entry.as_ref()?)));
        let object = held().map(|(name, entry)| (name.to_owned(), Value::from(&entry.value))).collect();
        (Value::Object(object), held().filter(|(_, entry)| !entry.explicit).map(|(name, _)| name).collect())
    }

    /// The names of the keys that somebody named, even where the value is the default.
    pub fn explicit_keys(&self) -> Vec<&'static str> {
        explicit(&self.entries).map(|row| KEYS[row].name()).collect()
    }

    /// The same values, with only those keys explicit whose name passes.
    pub fn retain_explicit(mut self, keep: impl Fn(&str) -> bool) -> Self {
        retain_explicit(&mut self.entries, |row| keep(KEYS[row].name()));
        self
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

/// The settings of both phases, checked.
#[derive(Clone, Debug, Default)]
pub struct Config {
    entries: [Option<Entry>; KEYS.len()],
}

/// How much of a configuration an export has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Export {
    /// What differs from the defaults.
    Differences,
    /// That, and what somebody named.
    Explicit,
    /// Every key.
    Full,
}

impl Config {
    /// Checks a document.
    ///
    /// # Errors
    /// Everything that is wrong with it.
    pub fn from_value(value: &Value) -> Result<Self, ConfigError> {
        let mut checker = Checker::default();
        let layer = checker.config(value);
        let layer = checker.finish(layer)?;
        let mut config = Self::default();
        for phase in Phase::ALL {
            overlay(&mut config.entries[phase.rows()], &layer[phase.rows()]);
        }
        overlay(&mut config.entries[PADDING..], &layer[PADDING..]);
        Ok(config)
    }

    /// Reads JSON text.
    ///
    /// # Errors
    /// A syntax error, or everything that is wrong with the document.
    pub fn from_json(text: &str) -> Result<Self, ConfigError> {
        Self::from_value(&Value::from_json(text)?)
    }

    /// Reads what a file holds, as the suffix of its name says.
    ///
    /// # Errors
    /// A suffix other than `.json` and `.toml`, bytes that are not text, a syntax error, or everything that is wrong
    /// with the document; the error names the file.
    pub fn from_file(name: &str, content: &[u8]) -> Result<Self, ConfigError> {
        let read = || {
            let text = std::str::from_utf8(content)
                .map_err(|error| Issue::new("", Value::Null, Problem::NotUtf8 { offset: error.valid_up_to() }))?;
            match name.rsplit_once('.').map(|(_, suffix)| suffix.to_lowercase()).as_deref() {
                Some("json") => Self::from_json(text),
                Some("toml") => Self::from_value(&Value::from_toml(text)?),
                _ => Err(Issue::new("", Value::Text(name.to_owned()), Problem::UnknownFileType).into()),
            }
        };
        read().map_err(|error: ConfigError| ConfigError { file: Some(name.to_owned()), ..error })
    }

    /// A copy on top of which one more source names keys of one phase.
    ///
    /// # Errors
    /// Everything that is wrong with that source.
    pub fn with_phase(&self, phase: Phase, value: &Value) -> Result<Self, ConfigError> {
        let mut checker = Checker::default();
        let layer = checker.phase(&format!("{}.", phase.name()), &KEYS[phase.rows()], value);
        let mut config = self.clone();
        overlay(&mut config.entries[phase.rows()], &checker.finish(layer)?);
        Ok(config)
    }

    /// What holds, by row of the table.
    pub fn values(&self) -> [Option<&Setting>; KEYS.len()] {
        std::array::from_fn(|row| self.entries[row].as_ref().map(|entry| &entry.value).or(KEYS[row].default.as_ref()))
    }

    /// One phase's settings, its backend among them.
    pub fn phase(&self, phase: Phase) -> PhaseConfig {
        let mut entries = std::array::from_fn(|row| self.entries[phase.rows()][row].clone());
        if entries[BACKEND].is_none() {
            let default = KEYS[phase.rows()][BACKEND].default.clone();
            entries[BACKEND] = default.map(|value| Entry { value, explicit: false });
        }
        PhaseConfig { entries }
    }

    /// Whether a size may be padded to a larger bucket.
    pub fn padding(&self) -> bool {
        self.values()[PADDING] == Some(&Setting::Flag(true))
    }

    /// The paths of the keys that somebody named, even where the value is the default.
    pub fn explicit_keys(&self) -> Vec<&'static str> {
        explicit(&self.entries).map(|row| KEYS[row].path).collect()
    }

    /// The same values, with only those keys explicit whose path passes.
    pub fn retain_explicit(mut self, keep: impl Fn(&str) -> bool) -> Self {
        retain_explicit(&mut self.entries, |row| keep(KEYS[row].path));
        self
    }

    /// What is no error, yet has no effect.
    pub fn warnings(&self) -> Vec<Issue> {
        let unused = |phase: Phase| {
            let row = phase.rows().start + TC_COMPILER;
            let compiler = self.entries[row].as_ref().filter(|entry| entry.explicit)?;
            match self.values()[phase.rows().start + BACKEND] {
                Some(&Setting::Word(backend)) if backend != TC_PIECEWISE => {
                    Some(Issue::new(KEYS[row].path, Value::from(&compiler.value), Problem::CompilerUnused { backend }))
                }
                _ => None,
            }
        };
        Phase::ALL.into_iter().filter_map(unused).collect()
    }

    /// A document that says the same.
    pub fn to_value(&self, export: Export) -> Value {
        let entry = |row: usize| {
            let (key, value) = (&KEYS[row], self.values()[row]);
            let wanted = match export {
                Export::Full => true,
                Export::Explicit if self.entries[row].as_ref().is_some_and(|entry| entry.explicit) => true,
                Export::Explicit | Export::Differences => value != key.default.as_ref(),
            };
            wanted.then(|| (key.name().to_owned(), value.map_or(Value::Null, Value::from)))
        };
        let phases = Phase::ALL.map(|phase| (phase.name(), phase.rows().filter_map(entry).collect::<Vec<_>>()));
        let phases = phases.into_iter().filter(|(_, entries)| !entries.is_empty());
        let object = phases.map(|(name, entries)| (name.to_owned(), Value::Object(entries)));
        Value::Object(object.chain(entry(PADDING)).collect())
    }
}

/// Equal where the same values hold, whoever named them.
impl PartialEq for Config {
    fn eq(&self, other: &Self) -> bool {
        self.values() == other.values()
    }
}

impl Eq for Config {}

impl Hash for Config {
    fn hash<H: Hasher>(&self, state: &mut H) {
        self.values().hash(state);
    }
}

impl From<&Setting> for Value {
    fn from(setting: &Setting) -> Self {
        match setting {
            Setting::Word(word) => Self::Text((*word).to_owned()),
            Setting::Size(size) => Self::Int((*size).into()),
            Setting::Sizes(sizes) => Self::List(sizes.iter().map(|size| Self::Int((*size).into())).collect()),
            Setting::Flag(flag) => Self::Bool(*flag),
        }
    }
}

fn explicit(entries: &[Option<Entry>]) -> impl Iterator<Item = usize> {
    let named = |entry: &Option<Entry>| entry.as_ref().is_some_and(|entry| entry.explicit);
    entries.iter().enumerate().filter(move |(_, entry)| named(entry)).map(|(row, _)| row)
}

fn retain_explicit(entries: &mut [Option<Entry>], keep: impl Fn(usize) -> bool) {
    for (row, entry) in entries.iter_mut().enumerate() {
        if let Some(entry) = entry {
            entry.explicit &= keep(row);
        }
    }
}
