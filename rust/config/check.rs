//! The validator. Every route ends here: JSON, TOML, mappings, keyword arguments, and the arguments of bucket lists.
//!
//! It walks the document by hand and goes on after a problem, so that one report has them all.

use super::keys::{
    BACKENDS, BS, COMPILERS, KEYS, Key, Kind, LARGEST_SIZE, MAX_BS, PADDING, PHASE_KEYS, Phase, Setting,
};
use crate::document::Value;
use crate::error::{Expected, Issue, Problem};
use crate::layers::{Entry, Layer};

/// What one source names, by row of the table; what it does not name is `None`.
pub(crate) type Named = [Option<Setting>; KEYS.len()];

/// What one source names of one phase.
pub(crate) type NamedOfPhase = [Option<Setting>; PHASE_KEYS];

/// Collects what is wrong.
#[derive(Default)]
pub(crate) struct Checker {
    issues: Vec<Issue>,
    /// Who says what is checked next, where the path does not tell.
    source: Option<String>,
}

impl Checker {
    /// The result, if nothing was wrong.
    pub(crate) fn finish<T>(self, result: T) -> Result<T, Vec<Issue>> {
        if self.issues.is_empty() { Ok(result) } else { Err(self.issues) }
    }

    pub(crate) fn report(&mut self, path: &str, value: &Value, problem: Problem) {
        self.push(Issue::new(path, value.clone(), problem));
    }

    pub(crate) fn push(&mut self, issue: Issue) {
        self.issues.push(Issue { source: self.source.clone(), ..issue });
    }

    /// Checks what one source says; its issues name it.
    pub(crate) fn of<T>(&mut self, source: &str, check: impl FnOnce(&mut Self) -> T) -> T {
        self.source = Some(source.to_owned());
        let result = check(self);
        self.source = None;
        result
    }

    /// A whole configuration.
    pub(crate) fn config(&mut self, value: &Value) -> Named {
        let mut named = Named::default();
        let known = || Phase::ALL.map(Phase::name).into_iter().chain([KEYS[PADDING].path]).collect::<Vec<_>>();
        let entries = self.entries("", value, known);
        for (i, entry) in entries.iter().enumerate() {
            let (name, value) = entry;
            if self.repeated(name, &entries[..i], entry) {
                continue;
            }
            if let Some(phase) = Phase::named(name) {
                let (path, rows) = (format!("{name}."), &mut named[phase.rows()]);
                rows.clone_from_slice(&self.phase(&path, &KEYS[phase.rows()], value));
            } else if name == KEYS[PADDING].path {
                named[PADDING] = self.setting(name, &KEYS[PADDING], value);
            } else if KEYS.iter().any(|key| key.name() == name) {
                self.report(name, value, Problem::MisplacedKey);
            } else if matches!(value, Value::Object(_)) {
                self.report(name, value, Problem::UnknownPhase);
            } else {
                self.report(name, value, Problem::UnknownKey { known: known() });
            }
        }
        named
    }

    /// One phase: an object with the names of `keys`. `prefix` ends in a dot, or is empty where the phase stands alone.
    pub(crate) fn phase(&mut self, prefix: &str, keys: &'static [Key], value: &Value) -> NamedOfPhase {
        let mut named = NamedOfPhase::default();
        let known = || keys.iter().map(Key::name).collect::<Vec<_>>();
        let entries = self.entries(prefix.trim_end_matches('.'), value, known);
        for (i, entry) in entries.iter().enumerate() {
            let (name, value) = entry;
            let path = format!("{prefix}{name}");
            if self.repeated(&path, &entries[..i], entry) {
                continue;
            }
            match keys.iter().position(|key| key.name() == name) {
                Some(row) => named[row] = self.setting(&path, &keys[row], value),
                None => self.report(&path, value, Problem::UnknownKey { known: known() }),
            }
        }
        if let (Some(Setting::Size(max_bs)), Some(Setting::Sizes(bs))) = (&named[MAX_BS], &named[BS]) {
            self.agree(&format!("{prefix}{}", keys[MAX_BS].name()), *max_bs, bs);
        }
        named
    }

    /// `max_bs` and `bs` that one source names must be about the same largest size.
    pub(crate) fn agree(&mut self, path: &str, max_bs: u32, bs: &[u32]) {
        if let Some(&largest) = bs.last().filter(|&&largest| largest != max_bs) {
            self.report(path, &Value::Int(max_bs.into()), Problem::SizesDisagree { largest });
        }
    }

    /// The same of what several options name in one layer.
    pub(crate) fn layer_agrees(&mut self, layer: &Layer) {
        for row in Phase::ALL.map(|phase| phase.rows().start + MAX_BS) {
            if let Some(Entry { value: Setting::Size(max_bs), source }) = &layer.0[row]
                && let Some(Entry { value: Setting::Sizes(bs), .. }) = &layer.0[row + BS - MAX_BS]
            {
                self.of(source.name(), |checker| checker.agree(KEYS[row].path, *max_bs, bs));
            }
        }
    }

    /// The entries of an object; of anything else, a report.
    fn entries<'v>(
        &mut self,
        path: &str,
        value: &'v Value,
        known: impl Fn() -> Vec<&'static str>,
    ) -> &'v [(String, Value)] {
        match value {
            Value::Object(entries) => return entries,
            // A phase may be null, which is "not given"; a document is there or not.
            Value::Null if !path.is_empty() => {}
            other => self.report(path, other, Problem::WrongType(Expected::Object(known()))),
        }
        &[]
    }

    /// Whether an entry has the name of an earlier one.
    fn repeated(&mut self, path: &str, earlier: &[(String, Value)], (name, value): &(String, Value)) -> bool {
        let repeated = earlier.iter().any(|(earlier, _)| earlier == name);
        if repeated {
            self.report(path, value, Problem::RepeatedKey);
        }
        repeated
    }

    pub(crate) fn setting(&mut self, path: &str, key: &Key, value: &Value) -> Option<Setting> {
        match key.kind {
            Kind::Backend(phase) => self.backend(path, phase, value).map(Setting::Word),
            Kind::Compiler => self.word(path, &COMPILERS, value, Problem::UnknownCompiler).map(Setting::Word),
            Kind::Size => self.size(path, value).map(Setting::Size),
            Kind::Sizes => self.sizes(path, value).map(Setting::Sizes),
            Kind::Flag => self.flag(path, value).map(Setting::Flag),
        }
    }

    fn backend(&mut self, path: &str, phase: Phase, value: &Value) -> Option<&'static str> {
        let allowed = phase.backends();
        let problem = match value {
            Value::Text(word) if BACKENDS.contains(&word.as_str()) => Problem::BackendNotAllowed { allowed },
            _ => Problem::UnknownBackend { allowed },
        };
        self.word(path, allowed, value, problem)
    }

    /// One of some words; null is none.
    pub(crate) fn word(
        &mut self,
        path: &str,
        words: &'static [&'static str],
        value: &Value,
        otherwise: Problem,
    ) -> Option<&'static str> {
        match value {
            Value::Null => None,
            Value::Text(text) => {
                let word = words.iter().copied().find(|word| word == text);
                if word.is_none() {
                    self.report(path, value, otherwise);
                }
                word
            }
            _ => {
                self.report(path, value, Problem::WrongType(Expected::Word(words)));
                None
            }
        }
    }

    /// A size; null is none.
    pub(crate) fn size(&mut self, path: &str, value: &Value) -> Option<u32> {
        size(value).unwrap_or_else(|problem| {
            self.report(path, value, problem);
            None
        })
    }

    /// A number of bytes; null is none.
    pub(crate) fn count(&mut self, path: &str, value: &Value) -> Option<u64> {
        let problem = match value {
            Value::Null => return None,
            Value::Int(number) => match u64::try_from(*number) {
                Ok(bytes) => return Some(bytes),
                Err(_) => Problem::NegativeCount,
            },
            _ => Problem::WrongType(Expected::Count),
        };
        self.report(path, value, problem);
        None
    }

    /// A list of sizes, sorted, each once; null is none.
    pub(crate) fn sizes(&mut self, path: &str, value: &Value) -> Option<Vec<u32>> {
        let items = match value {
            Value::Null => return None,
            Value::List(items) if items.is_empty() => {
                self.report(path, value, Problem::EmptyList);
                return None;
            }
            Value::List(items) => items,
            _ => {
                self.report(path, value, Problem::WrongType(Expected::Sizes));
                return None;
            }
        };
        let (mut sizes, found) = (Vec::with_capacity(items.len()), self.issues.len());
        for (i, item) in items.iter().enumerate() {
            match size(item) {
                Ok(Some(size)) => sizes.push(size),
                Ok(None) => self.report(&format!("{path}[{i}]"), item, Problem::WrongType(Expected::Size)),
                Err(problem) => self.report(&format!("{path}[{i}]"), item, problem),
            }
        }
        sizes.sort_unstable();
        sizes.dedup();
        (self.issues.len() == found).then_some(sizes)
    }

    /// Backends of a phase.
    pub(crate) fn backends(&mut self, path: &str, phase: Phase, value: &Value) -> Option<Vec<&'static str>> {
        let items = match value {
            Value::Null => return None,
            Value::List(items) if !items.is_empty() => items,
            _ => {
                self.report(path, value, Problem::WrongType(Expected::Words));
                return None;
            }
        };
        let backend = |(i, item): (usize, &Value)| {
            let path = format!("{path}[{i}]");
            self.given(&path, item, Expected::Word(phase.backends()));
            self.backend(&path, phase, item)
        };
        // All of them before the first that is none ends it: each has its report.
        let backends: Vec<Option<_>> = items.iter().enumerate().map(backend).collect();
        backends.into_iter().collect()
    }

    /// Text that says something.
    pub(crate) fn text(&mut self, path: &str, value: &Value) -> Option<String> {
        match value {
            Value::Text(text) if !text.trim().is_empty() => Some(text.clone()),
            _ => {
                self.report(path, value, Problem::WrongType(Expected::Text));
                None
            }
        }
    }

    /// Anything but null, where that is not "not given" but a mistake.
    pub(crate) fn given(&mut self, path: &str, value: &Value, expected: Expected) {
        if *value == Value::Null {
            self.report(path, value, Problem::WrongType(expected));
        }
    }

    /// A boolean; null is none.
    pub(crate) fn flag(&mut self, path: &str, value: &Value) -> Option<bool> {
        match value {
            Value::Null => None,
            Value::Bool(flag) => Some(*flag),
            _ => {
                self.report(path, value, Problem::WrongType(Expected::Flag));
                None
            }
        }
    }
}

fn size(value: &Value) -> Result<Option<u32>, Problem> {
    // An integer that fits no i64 was read as a float, in every route alike.
    const BEYOND_I64: f64 = 9.2e18;
    match value {
        Value::Null => Ok(None),
        Value::Int(number) => match u32::try_from(*number) {
            Ok(size @ 1..=LARGEST_SIZE) => Ok(Some(size)),
            _ => Err(Problem::OutOfRange),
        },
        Value::Float(number) if number.is_finite() && number.abs() > BEYOND_I64 => Err(Problem::OutOfRange),
        _ => Err(Problem::WrongType(Expected::Size)),
    }
}
