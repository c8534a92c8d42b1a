//! A configuration as an operator reads it: for each key the value, who said it, and what that replaced.

use std::fmt;

use crate::buckets::Runs;
use crate::config::{Config, KEYS, Key, Setting, twin};
use crate::document::Value;
use crate::error::Issue;
use crate::layers::{Entry, Source};

/// What a configuration holds and where that came from.
#[derive(Clone, Debug)]
pub struct Explanation {
    keys: Vec<Explained>,
    warnings: Vec<Issue>,
}

#[derive(Clone, Debug)]
struct Explained {
    path: &'static str,
    value: Option<Setting>,
    source: Source,
    /// What the source names instead of this key, where `bs` stands for `max_bs` or the other way round.
    instead: Option<&'static str>,
    /// The highest first.
    overrode: Vec<Entry>,
}

impl Config {
    /// What holds, and where that came from.
    pub fn explain(&self) -> Explanation {
        let explained = |(row, key): (usize, &'static Key)| {
            let held = self.held(row);
            let lower: Vec<Entry> = held.overrode().cloned().collect();
            let default = key.default.clone().map(|value| Entry { value, source: Source::Default });
            let (value, source, instead, overrode) = match (held.entry, held.twin) {
                (Some(Entry { value, source }), _) => {
                    let default = default.filter(|default| default.value != *value);
                    (Some(value.clone()), source.clone(), None, lower.into_iter().chain(default).collect())
                }
                // Whoever names one of the pair has said something about the other only if that one was named before.
                (None, Some(Entry { source, .. })) if !lower.is_empty() => (None, source.clone(), twin(row), lower),
                _ => (key.default.clone(), Source::Default, None, Vec::new()),
            };
            let instead = instead.map(|row| KEYS[row].name());
            Explained { path: key.path, value, source, instead, overrode }
        };
        Explanation { keys: KEYS.iter().enumerate().map(explained).collect(), warnings: self.warnings() }
    }
}

impl Explanation {
    /// The same as plain data.
    pub fn to_value(&self) -> Value {
        let text = |text: &str| Value::Text(text.to_owned());
        let said = |value: Option<&Setting>, source: &Source| {
            vec![
                ("value".to_owned(), value.map_or(Value::Null, Value::from)),
                ("source".to_owned(), text(if *source == Source::Default { "default" } else { source.name() })),
                ("kind".to_owned(), text(source.kind())),
                ("reason".to_owned(), source.reason().map_or(Value::Null, text)),
            ]
        };
        let keys = self.keys.iter().map(|key| {
            let overrode = key.overrode.iter().map(|entry| Value::Object(said(Some(&entry.value), &entry.source)));
            let mut object = said(key.value.as_ref(), &key.source);
            object.push(("explicit".to_owned(), Value::Bool(key.value.is_some() && key.source.is_explicit())));
            object.push(("overrode".to_owned(), Value::List(overrode.collect())));
            (key.path.to_owned(), Value::Object(object))
        });
        let warnings = self.warnings.iter().map(|issue| {
            Value::Object(vec![
                ("path".to_owned(), text(&issue.path)),
                ("value".to_owned(), issue.value.clone()),
                ("code".to_owned(), text(issue.code())),
                ("message".to_owned(), text(&issue.message())),
                ("hint".to_owned(), issue.hint().map_or(Value::Null, |hint| text(&hint))),
            ])
        });
        Value::Object(vec![
            ("keys".to_owned(), Value::Object(keys.collect())),
            ("warnings".to_owned(), Value::List(warnings.collect())),
        ])
    }
}

/// Columns for a terminal: below each key what it overrode, the highest first; at the end the warnings.
impl fmt::Display for Explanation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let header = ["key", "value", "from"].map(str::to_owned);
        let rows: Vec<[String; 3]> = [header].into_iter().chain(self.keys.iter().flat_map(Explained::rows)).collect();
        let width = |column: usize| rows.iter().map(|row| row[column].chars().count()).max().unwrap_or_default();
        let (key, value) = (width(0), width(1));
        for (i, row) in rows.iter().enumerate() {
            write!(f, "{}{:key$}  {:value$}  {}", if i == 0 { "" } else { "\n" }, row[0], row[1], row[2])?;
        }
        for issue in &self.warnings {
            write!(f, "\nwarning: {issue}")?;
        }
        Ok(())
    }
}

impl Explained {
    fn rows(&self) -> Vec<[String; 3]> {
        let value = self.value.as_ref().map_or("-".into(), plain);
        let from = match self.instead {
            Some(instead) => format!("{} names `{instead}`", self.source),
            None => self.source.to_string(),
        };
        let overrode = |entry: &Entry| {
            let verb = if Some(&entry.value) == self.value.as_ref() { "also" } else { "not" };
            [String::new(), format!("{verb} {}", plain(&entry.value)), entry.source.to_string()]
        };
        [[self.path.to_owned(), value, from]].into_iter().chain(self.overrode.iter().map(overrode)).collect()
    }
}

/// A value in few characters, so that the columns stay within a terminal.
fn plain(value: &Setting) -> String {
    const WIDTH: usize = 40;
    let text = match value {
        Setting::Word(word) => (*word).to_owned(),
        Setting::Sizes(sizes) => Runs(sizes).to_string(),
        other => Value::from(other).to_string(),
    };
    match text.char_indices().nth(WIDTH) {
        Some((end, _)) => format!("{}...", &text[..end]),
        None => text,
    }
}
