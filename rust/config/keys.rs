//! The table of keys: what a configuration can say. The validator, the merge and the export all read it.

use std::ops::Range;

/// The phases, in the order of the table.
pub const PHASES: [&str; 2] = ["decode", "prefill"];

const FULL: &str = "full";
/// The backend that runs part of the model eagerly between its graphs.
pub const BREAKABLE: &str = "breakable";
/// The backend that compiles, and so the one that a compiler belongs to.
pub const TC_PIECEWISE: &str = "tc_piecewise";
/// The backend that captures nothing.
pub const DISABLED: &str = "disabled";

/// The ways to capture a phase.
pub const BACKENDS: [&str; 4] = [FULL, BREAKABLE, TC_PIECEWISE, DISABLED];

/// What a `tc_piecewise` capture may be compiled by.
pub const COMPILERS: [&str; 2] = ["eager", "inductor"];

/// The largest size of a bucket. No step is near it; a mistyped number is refused before it becomes a list.
pub const LARGEST_SIZE: u32 = 1 << 20;

/// One of the two kinds of step that are captured apart.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Phase {
    /// One or a few tokens for each request.
    Decode,
    /// Whole prompts, or chunks of them.
    Prefill,
}

impl Phase {
    /// Both, in the order of the table.
    pub const ALL: [Self; 2] = [Self::Decode, Self::Prefill];

    /// The phase of that name.
    pub fn named(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|phase| phase.name() == name)
    }

    /// The word for it.
    pub fn name(self) -> &'static str {
        PHASES[self as usize]
    }

    /// The backends it can be captured by.
    pub fn backends(self) -> &'static [&'static str] {
        match self {
            Self::Decode => &BACKENDS,
            Self::Prefill => &[BREAKABLE, TC_PIECEWISE, DISABLED],
        }
    }

    /// Its rows of the table.
    pub(crate) fn rows(self) -> Range<usize> {
        let start = self as usize * PHASE_KEYS;
        start..start + PHASE_KEYS
    }
}

/// The value of one key.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Setting {
    /// A backend or a compiler.
    Word(&'static str),
    /// A size: requests in decode, tokens in prefill.
    Size(u32),
    /// Sizes, ascending, each once.
    Sizes(Vec<u32>),
    /// On or off.
    Flag(bool),
}

/// The type of a key's value, and which values of that type it takes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// One of the phase's backends.
    Backend(Phase),
    /// One of `COMPILERS`.
    Compiler,
    /// An integer from 1 to `LARGEST_SIZE`.
    Size,
    /// A list of such integers, with at least one.
    Sizes,
    /// A boolean.
    Flag,
}

/// One row of the table.
#[derive(Debug)]
pub struct Key {
    /// Where it stands, such as `decode.max_bs`.
    pub path: &'static str,
    /// What it takes.
    pub kind: Kind,
    /// What holds where nobody says anything; nothing where the engine decides.
    pub default: Option<Setting>,
    /// What it is, as help texts and the schema say it.
    pub about: &'static str,
}

impl Key {
    /// The key's name within its object.
    pub fn name(&self) -> &'static str {
        self.path.rsplit_once('.').map_or(self.path, |(_, name)| name)
    }
}

const fn key(path: &'static str, kind: Kind, default: Option<Setting>, about: &'static str) -> Key {
    Key { path, kind, default, about }
}

/// Every key there is. The phases come first, with the same keys in the same order, and the rest after them.
pub static KEYS: [Key; 9] = [
    key("decode.backend", Kind::Backend(Phase::Decode), Some(Setting::Word(FULL)), "how decode is captured"),
    key("decode.max_bs", Kind::Size, None, "the largest size of decode to capture, in requests"),
    key("decode.bs", Kind::Sizes, None, "the sizes of decode to capture, in requests"),
    key("decode.tc_compiler", Kind::Compiler, COMPILER, "what compiles the pieces of a `tc_piecewise` decode"),
    key("prefill.backend", Kind::Backend(Phase::Prefill), Some(Setting::Word(TC_PIECEWISE)), "how prefill is captured"),
    key("prefill.max_bs", Kind::Size, None, "the largest size of prefill to capture, in tokens"),
    key("prefill.bs", Kind::Sizes, None, "the sizes of prefill to capture, in tokens"),
    key("prefill.tc_compiler", Kind::Compiler, COMPILER, "what compiles the pieces of a `tc_piecewise` prefill"),
    key("padding", Kind::Flag, Some(Setting::Flag(true)), "whether a size in between is padded to the next larger one"),
];
const COMPILER: Option<Setting> = Some(Setting::Word(COMPILERS[0]));

/// The row of a path.
pub(crate) fn row(path: &str) -> Option<usize> {
    KEYS.iter().position(|key| key.path == path)
}

/// How many rows a phase has.
pub(crate) const PHASE_KEYS: usize = 4;
/// The row of `padding`.
pub(crate) const PADDING: usize = 2 * PHASE_KEYS;

/// Rows within a phase.
pub(crate) const BACKEND: usize = 0;
pub(crate) const MAX_BS: usize = 1;
pub(crate) const BS: usize = 2;
pub(crate) const TC_COMPILER: usize = 3;

/// The row that says the same thing in another way: `max_bs` of `bs`, and `bs` of `max_bs`.
pub(crate) fn twin(row: usize) -> Option<usize> {
    match (row < PADDING, row % PHASE_KEYS) {
        (true, MAX_BS) => Some(row + BS - MAX_BS),
        (true, BS) => Some(row + MAX_BS - BS),
        _ => None,
    }
}
