//! What can be wrong with a configuration, as a closed catalogue; the sentences are in `config`.

use crate::document::{Position, Value};

/// What can be wrong with a configuration, or with a request for buckets.
#[derive(Clone, Debug, PartialEq)]
pub enum Problem {
    /// The text is not JSON.
    JsonSyntax {
        /// Where reading stopped.
        position: Position,
        /// Why.
        reason: String,
    },
    /// The text is not TOML.
    TomlSyntax {
        /// Where reading stopped.
        position: Position,
        /// Why.
        reason: String,
    },
    /// The file is not text.
    NotUtf8 {
        /// The first byte that starts no character, counted from 0.
        offset: usize,
    },
    /// The file's suffix says neither JSON nor TOML.
    UnknownFileType,
    /// A value of another type.
    WrongType(Expected),
    /// A number that is no size.
    OutOfRange,
    /// A list of sizes without a size.
    EmptyList,
    /// A word that no phase has as a backend.
    UnknownBackend {
        /// The phase's backends.
        allowed: &'static [&'static str],
    },
    /// A backend that this phase cannot have.
    BackendNotAllowed {
        /// The phase's backends.
        allowed: &'static [&'static str],
    },
    /// A word that is no compiler.
    UnknownCompiler,
    /// An entry that is no key of its object.
    UnknownKey {
        /// The object's keys.
        known: Vec<&'static str>,
    },
    /// A phase's key outside a phase.
    MisplacedKey,
    /// An object that is no phase.
    UnknownPhase,
    /// A key that its object already has.
    RepeatedKey,
    /// `max_bs` beside a `bs` whose largest entry is another.
    SizesDisagree {
        /// The largest entry of `bs`.
        largest: u32,
    },
    /// A compiler beside a backend that compiles nothing.
    CompilerUnused {
        /// That backend.
        backend: &'static str,
    },
    /// An option that there is not.
    UnknownOption,
    /// A deprecated option that sets a key to another value than an earlier one does.
    OptionsDisagree {
        /// The earlier option.
        other: String,
        /// What it says.
        other_value: Value,
    },
    /// An explicit backend that a hard rule is against.
    RuleForbids {
        /// The rule.
        rule: String,
        /// Its reason.
        reason: String,
    },
    /// An explicit backend that a soft rule is against.
    RuleOutweighed {
        /// The rule.
        rule: String,
        /// Its reason.
        reason: String,
    },
    /// Two rules with one name about one phase.
    RepeatedRule,
    /// A bucket list that is bounded by nothing.
    NoMaximum {
        /// The argument that gives the maximum.
        argument: &'static str,
    },
    /// A budget of bytes without the bytes of a graph.
    NoBytesPerSize,
    /// A table of bytes without one of the sizes.
    NoBytesOfSize,
    /// A number of bytes, or of steps, below zero.
    NegativeCount,
    /// A word that no default list has as a name.
    UnknownPreset,
    /// Two alignments whose common multiple is above every size.
    StepTooLarge {
        /// That multiple.
        step: u64,
    },
    /// A limit with no multiple of the alignment within it.
    LimitBelowAlignment {
        /// That alignment.
        alignment: u32,
    },
    /// A histogram that counts nothing.
    NoSteps,
    /// More sizes than a list of so many graphs can be chosen from.
    TooManySizes {
        /// The sizes.
        sizes: usize,
        /// The graphs.
        graphs: usize,
    },
    /// A budget of bytes below what the largest graph takes.
    BudgetTooSmall {
        /// The largest size.
        size: u32,
        /// What its graph takes.
        bytes: u64,
    },
}

/// A type of value, as an error names it.
#[derive(Clone, Debug, PartialEq)]
pub enum Expected {
    /// One of some words.
    Word(&'static [&'static str]),
    /// A size.
    Size,
    /// Any integer.
    Integer,
    /// A list of sizes.
    Sizes,
    /// A boolean.
    Flag,
    /// An object with some keys.
    Object(Vec<&'static str>),
    /// Text that says something.
    Text,
    /// A list of backends.
    Words,
    /// What pickle keeps of a configuration.
    State,
    /// A number of bytes, or of steps.
    Count,
    /// The bytes of a graph, by size.
    BytesPerSize,
    /// The steps of each live size.
    Histogram,
}
