//! The options of a command line, current and deprecated, and which keys they set.
//!
//! Lowest first: defaults, deprecated options, options of one key, a whole configuration. They merge key by key.

use std::borrow::Cow;

use crate::config::{BREAKABLE, COMPILERS, Checker, Config, DISABLED, KEYS, Key, Kind, Setting, TC_PIECEWISE, row};
use crate::document::Value;
use crate::error::{ConfigError, Problem, listed};
use crate::layers::{Entry, Layer, Source};

/// One option.
#[derive(Debug)]
pub struct ConfigOption {
    /// Its name as it is typed, such as `--cuda-graph-max-bs-decode`.
    pub flag: &'static str,
    /// The keys that it sets, by path; none where it holds a whole configuration.
    pub keys: &'static [&'static str],
    /// What comes after it.
    pub takes: Takes,
    /// Whether another option does the same by now.
    pub deprecated: bool,
}

/// What comes after an option.
#[derive(Debug)]
pub enum Takes {
    /// One value.
    One,
    /// Any number of values.
    Many,
    /// Nothing: the option itself says this.
    Nothing(Setting),
    /// A whole configuration.
    Config,
}

const fn option(flag: &'static str, keys: &'static [&'static str], takes: Takes) -> ConfigOption {
    ConfigOption { flag, keys, takes, deprecated: false }
}

const fn old(flag: &'static str, keys: &'static [&'static str], takes: Takes) -> ConfigOption {
    ConfigOption { flag, keys, takes, deprecated: true }
}

const fn says(word: &'static str) -> Takes {
    Takes::Nothing(Setting::Word(word))
}

const BOTH_BACKENDS: &[&str] = &["decode.backend", "prefill.backend"];
const BOTH_COMPILERS: &[&str] = &["decode.tc_compiler", "prefill.tc_compiler"];

/// Every option there is.
pub static OPTIONS: [ConfigOption; 20] = [
    option("--cuda-graph-config", &[], Takes::Config),
    option("--cuda-graph-backend-decode", &["decode.backend"], Takes::One),
    option("--cuda-graph-backend-prefill", &["prefill.backend"], Takes::One),
    option("--cuda-graph-max-bs-decode", &["decode.max_bs"], Takes::One),
    option("--cuda-graph-max-bs-prefill", &["prefill.max_bs"], Takes::One),
    option("--cuda-graph-bs-decode", &["decode.bs"], Takes::Many),
    option("--cuda-graph-bs-prefill", &["prefill.bs"], Takes::Many),
    option("--cuda-graph-tc-compiler", BOTH_COMPILERS, Takes::One),
    option("--disable-cuda-graph-padding", &["padding"], Takes::Nothing(Setting::Flag(false))),
    old("--disable-cuda-graph", BOTH_BACKENDS, says(DISABLED)),
    old("--disable-decode-cuda-graph", &["decode.backend"], says(DISABLED)),
    old("--disable-prefill-cuda-graph", &["prefill.backend"], says(DISABLED)),
    old("--cuda-graph-max-bs", &["decode.max_bs"], Takes::One),
    old("--cuda-graph-bs", &["decode.bs"], Takes::Many),
    old("--enable-breakable-cuda-graph", &["prefill.backend"], says(BREAKABLE)),
    old("--disable-piecewise-cuda-graph", &["prefill.backend"], says(DISABLED)),
    old("--enforce-piecewise-cuda-graph", &["prefill.backend"], says(TC_PIECEWISE)),
    old("--piecewise-cuda-graph-tokens", &["prefill.bs"], Takes::Many),
    old("--piecewise-cuda-graph-max-tokens", &["prefill.max_bs"], Takes::One),
    old("--piecewise-cuda-graph-compiler", &["prefill.tc_compiler"], Takes::One),
];

impl ConfigOption {
    /// Whether this is its name, typed (`--cuda-graph-bs`) or as a keyword argument (`cuda_graph_bs`).
    pub fn is_named(&self, name: &str) -> bool {
        self.flag == name || self.keyword() == name
    }

    /// Its name as a keyword argument.
    pub fn keyword(&self) -> String {
        self.flag.trim_start_matches('-').replace('-', "_")
    }

    fn source(&self) -> Source {
        let name = Cow::Borrowed(self.flag);
        match (&self.takes, self.deprecated) {
            (Takes::Config, _) => Source::Config(name),
            (_, true) => Source::Deprecated(name),
            (_, false) => Source::Option(name),
        }
    }

    /// The keys that it sets.
    fn rows(&self) -> impl Iterator<Item = (usize, &'static Key)> {
        self.keys.iter().filter_map(|path| row(path)).map(|row| (row, &KEYS[row]))
    }

    /// What to write instead of a deprecated option.
    pub fn replacement(&self) -> Option<String> {
        if !self.deprecated {
            return None;
        }
        let current = |path: &&str| {
            let option = OPTIONS.iter().find(|option| !option.deprecated && option.keys.contains(path))?;
            Some(match &self.takes {
                Takes::Nothing(Setting::Word(word)) => format!("{} {word}", option.flag),
                _ => option.flag.to_owned(),
            })
        };
        let options: Vec<String> = self.keys.iter().filter_map(current).collect();
        Some(listed(&options.iter().map(String::as_str).collect::<Vec<_>>(), "and"))
    }

    /// What a caller of a deprecated option is told.
    pub fn deprecation(&self) -> Option<String> {
        Some(format!("`{}` is deprecated; use {}", self.flag, self.replacement()?))
    }

    /// What stands for its value in a help text.
    pub fn metavar(&self) -> Option<String> {
        let words = |words: &[&str]| format!("{{{}}}", words.join(","));
        match (&self.takes, self.rows().next().map(|(_, key)| key.kind)) {
            (Takes::Nothing(_), _) => None,
            (Takes::Config, _) => Some("JSON".into()),
            (_, Some(Kind::Backend(phase))) => Some(words(phase.backends())),
            (_, Some(Kind::Compiler)) => Some(words(&COMPILERS)),
            _ => Some("N".into()),
        }
    }

    /// What a help text says of it, the default and the precedence among it.
    pub fn help(&self) -> String {
        if let Some(replacement) = self.replacement() {
            return format!("deprecated, every current option overrides it; use {replacement}");
        }
        let Some((_, key)) = self.rows().next() else {
            return "the whole configuration; overrides every other option, key by key (default: {})".into();
        };
        let about = match &self.takes {
            Takes::Nothing(_) => {
                "pad no size to the next larger one, so that other sizes than those captured run eager"
            }
            _ if self.keys.len() > 1 => "what compiles the pieces of `tc_piecewise`",
            _ => key.about,
        };
        let default = match &key.default {
            None => "the engine decides".into(),
            Some(Setting::Word(word)) => (*word).to_owned(),
            Some(Setting::Flag(_)) => "sizes are padded".into(),
            Some(other) => Value::from(other).to_string(),
        };
        format!("{about} (default: {default}); `{}` overrides it", OPTIONS[0].flag)
    }

    /// Reads its value into the layer that it belongs to.
    fn read(&self, checker: &mut Checker, value: &Value, layer: &mut Layer) {
        if let Takes::Config = self.takes {
            let parsed = if let Value::Text(text) = value { Value::from_json(text) } else { Ok(value.clone()) };
            match parsed {
                Ok(document) => *layer = Layer::named_by(&self.source(), checker.config(&document)),
                Err(error) => error.issues.into_iter().for_each(|issue| checker.push(issue)),
            }
            return;
        }
        for (row, key) in self.rows() {
            let setting = match &self.takes {
                Takes::Nothing(setting) => checker.flag("", value).filter(|given| *given).map(|_| setting.clone()),
                _ => checker.setting(key.path, key, value),
            };
            let Some(setting) = setting else { return };
            match &layer.0[row] {
                Some(other) if other.value != setting => {
                    let (path, other_value) = (key.path, Value::from(&other.value));
                    let problem = Problem::OptionsDisagree { other: other.source.name().to_owned(), other_value };
                    checker.report(path, &Value::from(&setting), problem);
                }
                Some(_) => {}
                None => layer.0[row] = Some(Entry { value: setting, source: self.source() }),
            }
        }
    }
}

impl Config {
    /// What options come to, and the deprecated ones among them.
    ///
    /// An option that is null is not given, and so is one that takes no value and is false. `whole` is a configuration
    /// given as an object, which goes where `--cuda-graph-config` goes.
    ///
    /// # Errors
    /// Everything that is wrong with any of them; two deprecated options that set one key to different values.
    pub fn from_options(
        given: &[(String, Value)],
        whole: Option<&Self>,
    ) -> Result<(Self, Vec<&'static ConfigOption>), ConfigError> {
        let mut checker = Checker::default();
        let mut values: [&Value; OPTIONS.len()] = [&Value::Null; OPTIONS.len()];
        for (name, value) in given {
            match OPTIONS.iter().position(|option| option.is_named(name)) {
                Some(at) => values[at] = value,
                None => checker.report(name, value, Problem::UnknownOption),
            }
        }
        let (mut deprecated, mut current, mut document) = (Layer::default(), Layer::default(), Layer::default());
        let mut used = Vec::new();
        for (option, value) in OPTIONS.iter().zip(values).filter(|(_, value)| **value != Value::Null) {
            let layer = match (&option.takes, option.deprecated) {
                (Takes::Config, _) => &mut document,
                (_, true) => &mut deprecated,
                (_, false) => &mut current,
            };
            checker.of(option.flag, |checker| option.read(checker, value, layer));
            let is_off = matches!((&option.takes, value), (Takes::Nothing(_), Value::Bool(false)));
            if option.deprecated && !is_off {
                used.push(option);
            }
        }
        for layer in [&deprecated, &current] {
            checker.layer_agrees(layer);
        }
        checker.finish(())?;
        let config = [deprecated, current, document].into_iter().fold(Self::default(), Self::with_layer);
        let config = if let Some(whole) = whole { config.with_config(whole) } else { config };
        Ok((config, used))
    }
}
