//! What several sources say, put on top of one another key by key, and who said what.

use std::borrow::Cow;
use std::fmt;

use crate::config::{KEYS, PHASE_KEYS, Phase, Setting, twin};

/// Who said that a key has a value. In the order of precedence, lowest first; a rule has the last word.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Source {
    /// Nobody: it is what holds otherwise.
    Default,
    /// A deprecated option, by its name.
    Deprecated(Cow<'static, str>),
    /// A current option, by its name.
    Option(Cow<'static, str>),
    /// A configuration: an option that holds a whole one, a file, or a call.
    Config(Cow<'static, str>),
    /// A rule over the engine's facts.
    Rule {
        /// Its name.
        name: Cow<'static, str>,
        /// Its reason.
        reason: Cow<'static, str>,
    },
}

impl Source {
    /// Whether a person chose the value.
    pub fn is_explicit(&self) -> bool {
        !matches!(self, Self::Default | Self::Rule { .. })
    }

    /// The kind of source, in a word.
    pub fn kind(&self) -> &'static str {
        match self {
            Self::Default => "default",
            Self::Deprecated(_) => "deprecated",
            Self::Option(_) => "option",
            Self::Config(_) => "config",
            Self::Rule { .. } => "rule",
        }
    }

    /// Its name; empty for the default.
    pub fn name(&self) -> &str {
        match self {
            Self::Default => "",
            Self::Deprecated(name) | Self::Option(name) | Self::Config(name) | Self::Rule { name, .. } => name,
        }
    }

    /// Why, where the source says why.
    pub fn reason(&self) -> Option<&str> {
        match self {
            Self::Rule { reason, .. } => Some(reason),
            _ => None,
        }
    }
}

impl fmt::Display for Source {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Default => f.write_str("default"),
            Self::Deprecated(name) => write!(f, "{name} (deprecated)"),
            Self::Option(name) | Self::Config(name) => f.write_str(name),
            Self::Rule { name, reason } => write!(f, "rule `{name}`: {reason}"),
        }
    }
}

/// A value, and who said it.
#[derive(Clone, Debug)]
pub(crate) struct Entry {
    pub(crate) value: Setting,
    pub(crate) source: Source,
}

/// What one layer names, by row of the table.
#[derive(Clone, Debug, Default)]
pub(crate) struct Layer(pub(crate) [Option<Entry>; KEYS.len()]);

impl Layer {
    /// What one source names.
    pub(crate) fn named_by(source: &Source, named: [Option<Setting>; KEYS.len()]) -> Self {
        Self(named.map(|value| value.map(|value| Entry { value, source: source.clone() })))
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.0.iter().all(Option::is_none)
    }

    pub(crate) fn phase_mut(&mut self, phase: Phase) -> &mut [Option<Entry>] {
        &mut self.0[phase.rows()]
    }

    /// Without the entries whose source does not pass.
    pub(crate) fn retain(&mut self, keep: impl Fn(&Source) -> bool) {
        for entry in &mut self.0 {
            entry.take_if(|entry| !keep(&entry.source));
        }
    }

    /// Whether this layer decides what holds at a row.
    ///
    /// `bs` and `max_bs` are two ways to say one thing, so a layer that names either decides both. That makes layers
    /// associative, which dropping only a pair that disagrees would not.
    fn decides(&self, row: usize) -> bool {
        self.0[row].is_some() || twin(row).is_some_and(|twin| self.0[twin].is_some())
    }
}

/// What layers, lowest first, come to at one row.
pub(crate) struct Held<'l> {
    /// What holds, unless nobody names it.
    pub(crate) entry: Option<&'l Entry>,
    /// The twin of this row, where the highest layer names that one only.
    pub(crate) twin: Option<&'l Entry>,
    lower: &'l [Layer],
    row: usize,
}

impl<'l> Held<'l> {
    pub(crate) fn of(layers: &'l [Layer], row: usize) -> Self {
        match layers.iter().rposition(|layer| layer.decides(row)) {
            None => Self { entry: None, twin: None, lower: &[], row },
            Some(at) => {
                let entry = layers[at].0[row].as_ref();
                let twin = if entry.is_none() { twin(row).and_then(|twin| layers[at].0[twin].as_ref()) } else { None };
                Self { entry, twin, lower: &layers[..at], row }
            }
        }
    }

    /// What lower layers had named here, the highest first.
    pub(crate) fn overrode(&self) -> impl Iterator<Item = &'l Entry> {
        self.lower.iter().rev().filter_map(|layer| layer.0[self.row].as_ref())
    }
}

/// What one phase is, apart from its configuration.
pub(crate) type PhaseEntries = [Option<Entry>; PHASE_KEYS];
