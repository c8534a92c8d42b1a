//! Which backend each phase is captured by, and for which sizes.
//!
//! A source of settings (a JSON text, keyword arguments) is checked into a layer: the keys that it names, and who named
//! them. A configuration is layers on top of the defaults; everything else about it follows from them.

mod check;
mod keys;
mod phase;
mod state;

use std::borrow::Cow;
use std::hash::{Hash, Hasher};

pub(crate) use check::Checker;
pub(crate) use keys::{BACKEND, PHASE_KEYS, row, twin};
pub use keys::{
    BACKENDS, BREAKABLE, COMPILERS, DISABLED, KEYS, Key, Kind, LARGEST_SIZE, PHASES, Phase, Setting, TC_PIECEWISE,
};
use keys::{PADDING, TC_COMPILER};
pub use phase::PhaseConfig;

use crate::document::Value;
use crate::error::{ConfigError, Issue, Problem};
use crate::layers::{Entry, Held, Layer, Source};

/// The settings of both phases, checked.
#[derive(Clone, Debug, Default)]
pub struct Config {
    /// What was named, lowest layer first.
    layers: Vec<Layer>,
    /// The soft rules that an explicit backend outweighs.
    outweighed: Vec<Outweighed>,
}

/// A soft rule against a backend that somebody chose.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Outweighed {
    pub(crate) phase: Phase,
    pub(crate) rule: String,
    pub(crate) reason: String,
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
    pub fn from_value(value: &Value, source: &Source) -> Result<Self, ConfigError> {
        let mut checker = Checker::default();
        let named = checker.config(value);
        Ok(Self::default().with_layer(Layer::named_by(source, checker.finish(named)?)))
    }

    /// Reads JSON text.
    ///
    /// # Errors
    /// A syntax error, or everything that is wrong with the document.
    pub fn from_json(text: &str, source: &Source) -> Result<Self, ConfigError> {
        Self::from_value(&Value::from_json(text)?, source)
    }

    /// Reads what a file holds, as the suffix of its name says.
    ///
    /// # Errors
    /// A suffix other than `.json` and `.toml`, bytes that are not text, a syntax error, or everything that is wrong
    /// with the document; the error names the file.
    pub fn from_file(name: &str, content: &[u8]) -> Result<Self, ConfigError> {
        let source = Source::Config(Cow::Owned(name.to_owned()));
        let read = || {
            let text = std::str::from_utf8(content)
                .map_err(|error| Issue::new("", Value::Null, Problem::NotUtf8 { offset: error.valid_up_to() }))?;
            match name.rsplit_once('.').map(|(_, suffix)| suffix.to_lowercase()).as_deref() {
                Some("json") => Self::from_json(text, &source),
                Some("toml") => Self::from_value(&Value::from_toml(text)?, &source),
                _ => Err(Issue::new("", Value::Text(name.to_owned()), Problem::UnknownFileType).into()),
            }
        };
        read().map_err(|error: ConfigError| ConfigError { file: Some(name.to_owned()), ..error })
    }

    /// A copy on top of which one more source names keys of one phase.
    ///
    /// # Errors
    /// Everything that is wrong with that source.
    pub fn with_phase(&self, phase: Phase, value: &Value, source: &Source) -> Result<Self, ConfigError> {
        let mut checker = Checker::default();
        let named = checker.phase(&format!("{}.", phase.name()), &KEYS[phase.rows()], value);
        let mut layer = Layer::default();
        for (entry, value) in layer.phase_mut(phase).iter_mut().zip(checker.finish(named)?) {
            *entry = value.map(|value| Entry { value, source: source.clone() });
        }
        Ok(self.clone().with_layer(layer))
    }

    /// What a phase says that was taken from elsewhere was said there, not here.
    pub fn with_sources_of(mut self, phase: Phase, taken: &PhaseConfig) -> Self {
        for layer in &mut self.layers {
            for (entry, taken) in layer.phase_mut(phase).iter_mut().zip(&taken.entries) {
                if let (Some(entry), Some(taken)) = (entry, taken) {
                    entry.source = taken.source.clone();
                }
            }
        }
        self
    }

    /// With one more layer on top; one that names a backend has outweighed no rule yet.
    pub(crate) fn with_layer(mut self, layer: Layer) -> Self {
        self.outweighed.retain(|rule| layer.0[rule.phase.rows().start + BACKEND].is_none());
        if !layer.is_empty() {
            self.layers.push(layer);
        }
        self
    }

    /// The same with what people named in another configuration on top, layer by layer; what rules made of it stays
    /// behind.
    pub fn with_config(self, higher: &Self) -> Self {
        let explicit = higher.layers.iter().cloned().map(|mut layer| {
            layer.retain(Source::is_explicit);
            layer
        });
        explicit.fold(self, Self::with_layer)
    }

    /// What people named, without what rules made of it.
    pub(crate) fn without_rules(&self) -> Self {
        let mut config = Self { layers: self.layers.clone(), outweighed: Vec::new() };
        for layer in &mut config.layers {
            layer.retain(|source| !matches!(source, Source::Rule { .. }));
        }
        config.layers.retain(|layer| !layer.is_empty());
        config
    }

    pub(crate) fn outweighing(self, outweighed: Vec<Outweighed>) -> Self {
        Self { outweighed, ..self }
    }

    pub(crate) fn held(&self, row: usize) -> Held<'_> {
        Held::of(&self.layers, row)
    }

    /// The backend of a phase, and who chose it.
    pub(crate) fn backend(&self, phase: Phase) -> (&'static str, &Source) {
        let row = phase.rows().start + BACKEND;
        let held = self.held(row).entry;
        match held.map(|entry| &entry.value).or(KEYS[row].default.as_ref()) {
            Some(Setting::Word(word)) => (word, held.map_or(&Source::Default, |entry| &entry.source)),
            _ => (DISABLED, &Source::Default),
        }
    }

    /// The same with one phase disabled by a rule.
    pub(crate) fn disabled_by(self, phase: Phase, rule: Source) -> Self {
        let mut layer = Layer::default();
        layer.phase_mut(phase)[BACKEND] = Some(Entry { value: Setting::Word(DISABLED), source: rule });
        self.with_layer(layer)
    }

    /// What holds, by row of the table.
    pub fn values(&self) -> [Option<&Setting>; KEYS.len()] {
        std::array::from_fn(|row| self.held(row).entry.map(|entry| &entry.value).or(KEYS[row].default.as_ref()))
    }

    /// One phase's settings, its backend among them.
    pub fn phase(&self, phase: Phase) -> PhaseConfig {
        let mut entries = std::array::from_fn(|row| self.held(phase.rows().start + row).entry.cloned());
        if entries[BACKEND].is_none() {
            let default = KEYS[phase.rows()][BACKEND].default.clone();
            entries[BACKEND] = default.map(|value| Entry { value, source: Source::Default });
        }
        PhaseConfig { entries }
    }

    /// Whether a size may be padded to a larger bucket.
    pub fn padding(&self) -> bool {
        self.values()[PADDING] == Some(&Setting::Flag(true))
    }

    fn is_explicit(&self, row: usize) -> bool {
        self.held(row).entry.is_some_and(|entry| entry.source.is_explicit())
    }

    /// The paths of the keys that somebody named, even where the value is the default.
    pub fn explicit_keys(&self) -> Vec<&'static str> {
        (0..KEYS.len()).filter(|row| self.is_explicit(*row)).map(|row| KEYS[row].path).collect()
    }

    /// What is no error, yet has no effect, or goes against advice.
    pub fn warnings(&self) -> Vec<Issue> {
        let unused = Phase::ALL.into_iter().filter_map(|phase| self.unused_compiler(phase));
        let outweighed = self.outweighed.iter().map(|Outweighed { phase, rule, reason }| {
            let (backend, source) = self.backend(*phase);
            let (rule, reason) = (rule.clone(), reason.clone());
            let path = KEYS[phase.rows().start + BACKEND].path;
            Issue::new(path, Value::Text(backend.into()), Problem::RuleOutweighed { rule, reason }).said_by(source)
        });
        unused.chain(outweighed).collect()
    }

    fn unused_compiler(&self, phase: Phase) -> Option<Issue> {
        let row = |phase: Phase| phase.rows().start + TC_COMPILER;
        let entry = self.held(row(phase)).entry.filter(|entry| entry.source.is_explicit())?;
        let (backend, _) = self.backend(phase);
        // One option names the compiler of both phases: where one of them compiles, it has its effect.
        let used = |other: &Phase| {
            let same = self.held(row(*other)).entry.is_some_and(|same| same.source == entry.source);
            self.backend(*other).0 == TC_PIECEWISE
                && (*other == phase || (same && matches!(entry.source, Source::Option(_))))
        };
        let issue =
            || Issue::new(KEYS[row(phase)].path, Value::from(&entry.value), Problem::CompilerUnused { backend });
        (!Phase::ALL.iter().any(used)).then(|| issue().said_by(&entry.source))
    }

    /// A document that says the same.
    pub fn to_value(&self, export: Export) -> Value {
        let entry = |(row, value): (usize, Option<&Setting>)| {
            let wanted = match export {
                Export::Full => true,
                Export::Explicit if self.is_explicit(row) => true,
                Export::Explicit | Export::Differences => value != KEYS[row].default.as_ref(),
            };
            wanted.then(|| (KEYS[row].path, value.map_or(Value::Null, Value::from)))
        };
        nested(self.values().into_iter().enumerate().filter_map(entry))
    }
}

/// Entries by path, in the order of the table, as the document that they are.
fn nested(entries: impl IntoIterator<Item = (&'static str, Value)>) -> Value {
    let mut document: Vec<(String, Value)> = Vec::new();
    for (path, value) in entries {
        let Some((phase, key)) = path.split_once('.') else {
            document.push((path.to_owned(), value));
            continue;
        };
        match document.last_mut() {
            Some((last, Value::Object(keys))) if last == phase => keys.push((key.to_owned(), value)),
            _ => document.push((phase.to_owned(), Value::Object(vec![(key.to_owned(), value)]))),
        }
    }
    Value::Object(document)
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
