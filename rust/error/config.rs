//! How what is wrong with a configuration reads.

use std::fmt;

use super::{Expected, Problem};
use crate::buckets::PRESETS;
use crate::config::{BACKENDS, COMPILERS, LARGEST_SIZE, PHASES, TC_PIECEWISE};
use crate::document::Value;
use crate::layers::Source;
use crate::options::{ConfigOption, OPTIONS};

/// What stands beside the phases, and in none.
const OUTSIDE: [&str; 3] = [PHASES[0], PHASES[1], "padding"];

/// One thing wrong with a configuration: where, with which value, and what would have been allowed.
#[derive(Clone, Debug, PartialEq)]
pub struct Issue {
    /// The key's path, such as `decode.bs[2]`; empty for the document as a whole.
    pub path: String,
    /// What stands there.
    pub value: Value,
    /// What is wrong with it.
    pub problem: Problem,
    /// Who says it, such as `--cuda-graph-max-bs`, where the path does not tell.
    pub source: Option<String>,
}

impl fmt::Display for Expected {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Word(words) => f.write_str(&one_of(words)),
            Self::Size => write!(f, "an integer from 1 to {LARGEST_SIZE}"),
            Self::Integer => f.write_str("an integer"),
            Self::Sizes => write!(f, "a list of integers from 1 to {LARGEST_SIZE}"),
            Self::Flag => f.write_str("`true` or `false`"),
            Self::Object(keys) => write!(f, "an object with the keys {}", listed(keys, "and")),
            Self::Text => f.write_str("text with words in it"),
            Self::Words => f.write_str("a list of at least one backend"),
            Self::Count => f.write_str("an integer of at least 0"),
            Self::BytesPerSize => {
                f.write_str("an integer, a mapping from sizes to integers, or a function of the size")
            }
            Self::Histogram => f.write_str("a mapping from live sizes to numbers of steps"),
            Self::State => f.write_str("the state of a configuration, as pickle keeps it"),
        }
    }
}

impl Issue {
    pub(crate) fn new(path: &str, value: Value, problem: Problem) -> Self {
        Self { path: path.to_owned(), value, problem, source: None }
    }

    /// The same, with who said the value.
    pub(crate) fn said_by(self, source: &Source) -> Self {
        Self { source: Some(source.name().to_owned()).filter(|name| !name.is_empty()), ..self }
    }

    /// The stable word to branch on.
    pub fn code(&self) -> &'static str {
        match self.problem {
            Problem::JsonSyntax { .. } => "json-syntax",
            Problem::TomlSyntax { .. } => "toml-syntax",
            Problem::NotUtf8 { .. } => "not-utf8",
            Problem::UnknownFileType => "unknown-file-type",
            Problem::WrongType(_) => "wrong-type",
            Problem::OutOfRange | Problem::StepTooLarge { .. } | Problem::NegativeCount => "out-of-range",
            Problem::EmptyList => "empty-list",
            Problem::UnknownBackend { .. } => "unknown-backend",
            Problem::BackendNotAllowed { .. } => "backend-not-allowed",
            Problem::UnknownCompiler => "unknown-compiler",
            Problem::UnknownKey { .. } | Problem::MisplacedKey => "unknown-key",
            Problem::UnknownPhase => "unknown-phase",
            Problem::RepeatedKey => "repeated-key",
            Problem::SizesDisagree { .. } => "sizes-disagree",
            Problem::CompilerUnused { .. } => "compiler-unused",
            Problem::UnknownOption => "unknown-option",
            Problem::OptionsDisagree { .. } => "options-disagree",
            Problem::RuleForbids { .. } => "rule-forbids",
            Problem::RuleOutweighed { .. } => "rule-outweighed",
            Problem::RepeatedRule => "repeated-rule",
            Problem::NoMaximum { .. } => "no-maximum",
            Problem::NoBytesPerSize | Problem::NoBytesOfSize => "no-bytes",
            Problem::UnknownPreset => "unknown-preset",
            Problem::LimitBelowAlignment { .. } => "limit-below-alignment",
            Problem::NoSteps => "empty-histogram",
            Problem::TooManySizes { .. } => "too-many-sizes",
            Problem::BudgetTooSmall { .. } => "budget-too-small",
        }
    }

    /// What is wrong, without path, code and hint.
    pub fn message(&self) -> String {
        let value = shown(&self.value);
        match &self.problem {
            Problem::JsonSyntax { position, reason } | Problem::TomlSyntax { position, reason } => {
                format!("{position}: {reason}")
            }
            Problem::NotUtf8 { offset } => format!("byte {offset} starts no UTF-8 character"),
            Problem::UnknownFileType => format!("{value} is a file of unknown type"),
            Problem::WrongType(expected) => {
                format!("{value} is {}, not {expected}", self.value.kind())
            }
            Problem::OutOfRange => format!("{value} is not {}", Expected::Size),
            Problem::EmptyList => format!("{value} names no size"),
            Problem::UnknownBackend { allowed } => {
                format!("{value} is not {}", one_of(allowed))
            }
            Problem::BackendNotAllowed { .. } => {
                format!("{value} needs the same shapes on every replay, and those of this phase vary")
            }
            Problem::UnknownCompiler => format!("{value} is not {}", one_of(&COMPILERS)),
            Problem::UnknownKey { known } => {
                format!("no such key; the keys here are {}", listed(known, "and"))
            }
            Problem::MisplacedKey => "a key of a phase, outside a phase".into(),
            Problem::UnknownPhase => {
                format!("no such phase; the phases are {}", listed(&PHASES, "and"))
            }
            Problem::RepeatedKey => "the key is given more than once".into(),
            Problem::SizesDisagree { largest } => {
                format!("{value} is not the largest entry of `bs`, {largest}")
            }
            Problem::CompilerUnused { backend } => {
                format!("{value} has no effect beside the backend `{backend}`")
            }
            Problem::UnknownOption => "no such option".into(),
            Problem::OptionsDisagree { other, other_value } => {
                format!("{value} contradicts `{other}`, which says {}", shown(other_value))
            }
            Problem::RuleForbids { rule, reason } => format!("{value} cannot be used: {reason} (rule `{rule}`)"),
            Problem::RuleOutweighed { rule, reason } => {
                format!("{value} is used against advice: {reason} (rule `{rule}`)")
            }
            Problem::RepeatedRule => format!("two rules have the name {value}"),
            Problem::NoMaximum { .. } => "nothing says how large the largest bucket is".into(),
            Problem::NoBytesPerSize => "nothing says how many bytes a graph takes".into(),
            Problem::NoBytesOfSize => "nothing says how many bytes the graph of this size takes".into(),
            Problem::NegativeCount => format!("{value} is not {}", Expected::Count),
            Problem::UnknownPreset => format!("{value} is not {}", one_of(&PRESETS)),
            Problem::LimitBelowAlignment { alignment } => {
                format!("no multiple of the alignment {alignment} is within {value}")
            }
            Problem::NoSteps => format!("{value} counts no step"),
            Problem::TooManySizes { sizes, graphs } => {
                format!("lists of up to {graphs} of {sizes} sizes are too many to choose from in memory")
            }
            Problem::BudgetTooSmall { size, bytes } => {
                format!("{value} is less than the graph of the largest size, {size}, takes: {bytes}")
            }
            Problem::StepTooLarge { step } => {
                format!("every size would have to be a multiple of {step}, and the largest is {LARGEST_SIZE}")
            }
        }
    }

    /// What would have been allowed, where that can be said in a few words.
    pub fn allowed(&self) -> Option<String> {
        match &self.problem {
            Problem::WrongType(expected) => Some(expected.to_string()),
            Problem::OutOfRange => Some(Expected::Size.to_string()),
            Problem::EmptyList => Some(Expected::Sizes.to_string()),
            Problem::UnknownBackend { allowed } | Problem::BackendNotAllowed { allowed } => Some(one_of(allowed)),
            Problem::UnknownCompiler => Some(one_of(&COMPILERS)),
            Problem::UnknownKey { known } => Some(one_of(known)),
            Problem::UnknownPhase => Some(one_of(&PHASES)),
            Problem::NegativeCount => Some(Expected::Count.to_string()),
            Problem::UnknownPreset => Some(one_of(&PRESETS)),
            Problem::UnknownFileType => Some("a name that ends in `.json` or `.toml`".into()),
            Problem::SizesDisagree { largest } => Some(largest.to_string()),
            _ => None,
        }
    }

    /// What to do about it.
    pub fn hint(&self) -> Option<String> {
        match (&self.problem, &self.value) {
            (Problem::WrongType(Expected::Size), Value::Text(text)) if text.parse::<u32>().is_ok() => {
                Some(format!("write {text}, without quotes"))
            }
            (Problem::WrongType(Expected::Sizes), Value::Int(size)) => Some(format!("write `[{size}]`")),
            (Problem::WrongType(Expected::Object(_)), Value::Text(word)) if BACKENDS.contains(&word.as_str()) => {
                Some(format!("write `{{\"backend\": \"{word}\"}}`"))
            }
            (Problem::JsonSyntax { reason, .. }, _) if reason == "key must be a string" => {
                Some("put names and text in double quotes".into())
            }
            (Problem::JsonSyntax { position, .. }, _) if (position.line, position.column) == (1, 1) => Some(
                "write JSON, such as `{\"decode\": {\"max_bs\": 64}}`; `CudaGraphConfig.from_file` reads a file".into(),
            ),
            (Problem::UnknownFileType, _) => Some("use a name that ends in `.json` or `.toml`".into()),
            (Problem::EmptyList, _) => Some("to run this phase without graphs, set its `backend` to `disabled`".into()),
            (Problem::UnknownBackend { allowed }, _) => self.did_you_mean(allowed),
            (Problem::BackendNotAllowed { allowed }, _) => Some(format!("use {}", listed(allowed, "or"))),
            (Problem::UnknownCompiler, _) => self.did_you_mean(&COMPILERS),
            (Problem::UnknownKey { .. }, _) if self.path.contains('.') && OUTSIDE.contains(&self.key()) => {
                Some("write it outside the phase; a mapping of phases goes to `CudaGraphConfig.from_dict`".into())
            }
            (Problem::UnknownKey { known }, _) => self.did_you_mean(known),
            (Problem::MisplacedKey, _) => Some(format!("write it inside {}", listed(&PHASES, "or"))),
            (Problem::UnknownPhase, _) => self.did_you_mean(&PHASES),
            (Problem::RepeatedKey | Problem::OptionsDisagree { .. }, _) => Some("keep one of them".into()),
            (Problem::SizesDisagree { largest }, size) => {
                let key = self.key();
                Some(format!("leave `{key}` out, or set it to {largest}, or add {size} to `bs`"))
            }
            (Problem::CompilerUnused { .. }, _) => {
                Some(format!("set `backend` to `{TC_PIECEWISE}`, or leave `tc_compiler` out"))
            }
            (Problem::UnknownOption, _) => {
                let keywords: Vec<String> = OPTIONS.iter().map(ConfigOption::keyword).collect();
                self.did_you_mean(&keywords.iter().map(String::as_str).collect::<Vec<_>>())
            }
            (Problem::RuleForbids { .. }, _) => Some("leave `backend` out, or set it to `disabled`".into()),
            (Problem::RuleOutweighed { .. }, _) => Some("leave `backend` out, and the rule decides".into()),
            (Problem::RepeatedRule, _) => Some("give each rule of a phase a name of its own".into()),
            (Problem::NoMaximum { argument }, _) => Some(format!("give `{argument}`, `bs` or `limit`")),
            (Problem::NoBytesPerSize, _) => Some("give `bytes_per_size`".into()),
            (Problem::TooManySizes { .. }, _) => Some("ask for fewer graphs, or set an `alignment`".into()),
            (Problem::BudgetTooSmall { .. }, _) => Some("lower `maximum`, or leave the graphs more memory".into()),
            (Problem::UnknownPreset, _) => self.did_you_mean(&PRESETS),
            _ => None,
        }
    }

    /// The last name of the path.
    fn key(&self) -> &str {
        self.path.rsplit('.').next().unwrap_or_default()
    }

    /// The known word nearest to what was written, if one is near enough to have been meant.
    fn did_you_mean(&self, words: &[&str]) -> Option<String> {
        let written = match (&self.problem, &self.value) {
            (Problem::UnknownPhase, Value::Text(word)) => word,
            (Problem::UnknownKey { .. } | Problem::UnknownPhase | Problem::UnknownOption, _) => self.key(),
            (_, Value::Text(word)) => word,
            _ => return None,
        };
        let written = written.to_lowercase().replace('-', "_");
        let near_enough = 1 + written.chars().count() / 3;
        let (distance, nearest) =
            words.iter().map(|word| (strsim::damerau_levenshtein(&written, word), word)).min_by_key(|pair| pair.0)?;
        (distance <= near_enough).then(|| format!("did you mean `{nearest}`?"))
    }
}

/// The issue as a user reads it: `path: message [code]`, and the hint on a line of its own.
impl fmt::Display for Issue {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let place = place(&self.path, self.source.as_deref());
        write_issue(f, &place, &self.message(), self.code(), self.hint().as_deref())
    }
}

/// Where an issue is: the path, and who says it.
pub(crate) fn place(path: &str, source: Option<&str>) -> String {
    match (path, source) {
        (path, None) => path.to_owned(),
        ("", Some(source)) => source.to_owned(),
        (path, Some(source)) => format!("{path} ({source})"),
    }
}

/// Writes an issue from its parts, which is all that the Python class of an issue keeps.
pub(crate) fn write_issue(
    f: &mut impl fmt::Write,
    place: &str,
    message: &str,
    code: &str,
    hint: Option<&str>,
) -> fmt::Result {
    if !place.is_empty() {
        write!(f, "{place}: ")?;
    }
    write!(f, "{message} [{code}]")?;
    hint.map_or(Ok(()), |hint| write!(f, "\n  hint: {hint}"))
}

/// A configuration that cannot be used, with every problem in it.
#[derive(Clone, Debug, PartialEq)]
pub struct ConfigError {
    /// All problems found, in document order.
    pub issues: Vec<Issue>,
    /// The file they were found in, if it was one.
    pub file: Option<String>,
}

impl From<Vec<Issue>> for ConfigError {
    fn from(issues: Vec<Issue>) -> Self {
        Self { issues, file: None }
    }
}

impl From<Issue> for ConfigError {
    fn from(issue: Issue) -> Self {
        vec![issue].into()
    }
}

impl std::error::Error for ConfigError {}

impl fmt::Display for ConfigError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match (self.issues.len(), &self.file) {
            (1, None) => {}
            (1, Some(file)) => write!(f, "{file}: ")?,
            (count, None) => writeln!(f, "{count} problems:")?,
            (count, Some(file)) => writeln!(f, "{count} problems in `{file}`:")?,
        }
        for (i, issue) in self.issues.iter().enumerate() {
            write!(f, "{}{issue}", if i == 0 { "" } else { "\n" })?;
        }
        Ok(())
    }
}

fn one_of(words: &[&str]) -> String {
    format!("one of {}", listed(words, "or"))
}

/// "`a`, `b` or `c`".
pub(crate) fn listed(words: &[&str], joiner: &str) -> String {
    let quoted: Vec<String> = words.iter().map(|word| format!("`{word}`")).collect();
    match quoted.split_last() {
        Some((last, rest)) if !rest.is_empty() => format!("{} {joiner} {last}", rest.join(", ")),
        _ => quoted.concat(),
    }
}

/// A value between backticks, cut where it would drown the sentence.
fn shown(value: &Value) -> String {
    format!("`{}`", cut(&value.to_string()))
}

pub(super) fn cut(text: &str) -> String {
    const WIDTH: usize = 60;
    match text.char_indices().nth(WIDTH) {
        Some((end, _)) => format!("{}...", &text[..end]),
        None => text.to_owned(),
    }
}
