//! What somebody wrote, before any rule has looked at it: one tree for JSON, TOML and Python objects.

use std::fmt;

use serde::de::{Deserialize, Deserializer, MapAccess, SeqAccess, Visitor};

use crate::error::{ConfigError, Issue, Problem};

/// One value of a document.
///
/// An object keeps every entry in the order written, repeated names included, so that a report can name them.
#[derive(Clone, Debug, Default, PartialEq)]
pub enum Value {
    /// `null` or `None`: not given.
    #[default]
    Null,
    /// `true` or `false`.
    Bool(bool),
    /// An integer; one that does not fit is a `Float`, and out of every range here.
    Int(i64),
    /// Any other number.
    Float(f64),
    /// Text.
    Text(String),
    /// A TOML date, time or both, as text.
    Date(String),
    /// A list.
    List(Vec<Value>),
    /// An object, a TOML table or a Python mapping.
    Object(Vec<(String, Value)>),
    /// A Python object that no document can hold.
    Foreign {
        /// The name of its class.
        kind: String,
        /// Its `repr`.
        repr: String,
    },
}

impl Value {
    /// Reads JSON text.
    ///
    /// # Errors
    /// `json-syntax`, with line and column.
    pub fn from_json(text: &str) -> Result<Self, ConfigError> {
        // Editors on Windows may put a byte order mark first; nobody sees it, so nobody could find the fault.
        let text = text.trim_start_matches('\u{feff}');
        serde_json::from_str(text).map_err(|error| {
            let position = Position::of(text, error.line(), error.column());
            let mut reason = error.to_string();
            if let Some(end) = reason.rfind(" at line ") {
                reason.truncate(end);
            }
            Issue::new("", Value::Null, Problem::JsonSyntax { position, reason }).into()
        })
    }

    /// Reads TOML text.
    ///
    /// # Errors
    /// `toml-syntax`, with line and column.
    pub fn from_toml(text: &str) -> Result<Self, ConfigError> {
        let text = text.trim_start_matches('\u{feff}');
        toml::from_str(text).map(Self::with_dates).map_err(|error| {
            let offset = error.span().map_or(0, |span| span.start);
            let before = text.get(..offset).unwrap_or(text);
            let line = before.matches('\n').count() + 1;
            let column = before.len() - before.rfind('\n').map_or(0, |newline| newline + 1) + 1;
            let position = Position::of(text, line, column);
            let reason = error.message().replace('\n', "; ");
            Issue::new("", Value::Null, Problem::TomlSyntax { position, reason }).into()
        })
    }

    /// With its dates as such: the parser hands each on as an object with one key of its own.
    fn with_dates(self) -> Self {
        const DATE: &str = "$__toml_private_datetime";
        match self {
            Self::Object(mut entries) => match entries.as_mut_slice() {
                [(name, Self::Text(date))] if name == DATE => Self::Date(std::mem::take(date)),
                _ => Self::Object(entries.into_iter().map(|(name, value)| (name, value.with_dates())).collect()),
            },
            Self::List(items) => Self::List(items.into_iter().map(Self::with_dates).collect()),
            other => other,
        }
    }

    /// The same where what no JSON document can hold is text.
    #[cfg(feature = "python")]
    pub(crate) fn plain(self) -> Self {
        match self {
            Self::Date(text) | Self::Foreign { repr: text, .. } => Self::Text(text),
            Self::Object(entries) => {
                Self::Object(entries.into_iter().map(|(name, value)| (name, value.plain())).collect())
            }
            Self::List(items) => Self::List(items.into_iter().map(Self::plain).collect()),
            other => other,
        }
    }

    /// Reads what stands after an option on a command line: a number, a boolean, null or text.
    ///
    /// What JSON reads as one of those is that, so that `4` is the same size on every route; text needs no quotes.
    pub fn from_argument(text: &str) -> Self {
        match serde_json::from_str(text) {
            Ok(scalar @ (Self::Null | Self::Bool(_) | Self::Int(_) | Self::Float(_) | Self::Text(_))) => scalar,
            _ => Self::Text(text.to_owned()),
        }
    }

    /// What kind of value this is, with its article.
    pub(crate) fn kind(&self) -> String {
        match self {
            Self::Null => "null".into(),
            Self::Bool(_) => "a boolean".into(),
            Self::Int(_) => "an integer".into(),
            Self::Float(_) => "a float".into(),
            Self::Text(_) => "a string".into(),
            Self::Date(_) => "a date or time".into(),
            Self::List(_) => "a list".into(),
            Self::Object(_) => "an object".into(),
            Self::Foreign { kind, .. } => format!("of type `{kind}`"),
        }
    }
}

/// As JSON text, which is also what `to_json` gives.
impl fmt::Display for Value {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let quoted = |text: &str| serde_json::Value::from(text).to_string();
        match self {
            Self::Null => f.write_str("null"),
            Self::Bool(flag) => write!(f, "{flag}"),
            Self::Int(number) => write!(f, "{number}"),
            Self::Float(number) => write!(f, "{number:?}"),
            Self::Text(text) => f.write_str(&quoted(text)),
            Self::List(items) => {
                f.write_str("[")?;
                for (i, item) in items.iter().enumerate() {
                    write!(f, "{}{item}", if i == 0 { "" } else { ", " })?;
                }
                f.write_str("]")
            }
            Self::Object(entries) => {
                f.write_str("{")?;
                for (i, (name, value)) in entries.iter().enumerate() {
                    write!(f, "{}{}: {value}", if i == 0 { "" } else { ", " }, quoted(name))?;
                }
                f.write_str("}")
            }
            Self::Date(text) | Self::Foreign { repr: text, .. } => f.write_str(text),
        }
    }
}

/// A place in a text, counted from 1, the column in characters as editors count it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Position {
    /// The line.
    pub line: usize,
    /// The character within the line.
    pub column: usize,
}

impl Position {
    /// Both parsers count a column in bytes.
    fn of(text: &str, line: usize, byte_column: usize) -> Self {
        let content = text.split('\n').nth(line.saturating_sub(1)).unwrap_or_default();
        let bytes = byte_column.clamp(1, content.len() + 1) - 1;
        let column = content.char_indices().take_while(|(at, _)| *at < bytes).count() + 1;
        Self { line: line.max(1), column }
    }
}

impl fmt::Display for Position {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "line {}, column {}", self.line, self.column)
    }
}

impl<'de> Deserialize<'de> for Value {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(AsWritten)
    }
}

struct AsWritten;

impl<'de> Visitor<'de> for AsWritten {
    type Value = Value;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a value")
    }

    fn visit_unit<E>(self) -> Result<Value, E> {
        Ok(Value::Null)
    }

    fn visit_bool<E>(self, flag: bool) -> Result<Value, E> {
        Ok(Value::Bool(flag))
    }

    fn visit_i64<E>(self, number: i64) -> Result<Value, E> {
        Ok(Value::Int(number))
    }

    fn visit_u64<E>(self, number: u64) -> Result<Value, E> {
        #[expect(clippy::cast_precision_loss, reason = "far out of every range; only its size is reported")]
        Ok(i64::try_from(number).map_or(Value::Float(number as f64), Value::Int))
    }

    fn visit_f64<E>(self, number: f64) -> Result<Value, E> {
        Ok(Value::Float(number))
    }

    fn visit_str<E>(self, text: &str) -> Result<Value, E> {
        Ok(Value::Text(text.to_owned()))
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<Value, A::Error> {
        let mut items = Vec::new();
        while let Some(item) = seq.next_element()? {
            items.push(item);
        }
        Ok(Value::List(items))
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Value, A::Error> {
        let mut entries = Vec::new();
        while let Some(entry) = map.next_entry()? {
            entries.push(entry);
        }
        Ok(Value::Object(entries))
    }
}
