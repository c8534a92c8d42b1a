//! Rules over an engine's facts: which backends do not go with what else the engine does.
//!
//! Whether a rule holds is the engine's to say; what follows is decided here:
//!
//! | the backend is | soft rule | hard rule |
//! | --- | --- | --- |
//! | the default | the phase is disabled | the phase is disabled |
//! | explicit | it is kept, with a warning | an error |

use crate::config::{BACKEND, Checker, Config, DISABLED, KEYS, Outweighed, PHASES, Phase};
use crate::document::Value;
use crate::error::{ConfigError, Expected, Issue, Problem};
use crate::layers::Source;

/// That some backends of a phase do not go with something the engine does.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Rule {
    /// The phase it is about.
    pub phase: Phase,
    /// A word for it, unique within its phase.
    pub name: String,
    /// The backends it is against.
    pub backends: Vec<&'static str>,
    /// Whether even somebody who names the backend cannot have it.
    pub hard: bool,
    /// Why, in a few words.
    pub reason: String,
}

impl Rule {
    /// Checks the parts of a rule.
    ///
    /// # Errors
    /// Everything that is wrong with them.
    pub fn from_values(
        name: &Value,
        phase: &Value,
        backends: &Value,
        hard: &Value,
        reason: &Value,
    ) -> Result<Self, ConfigError> {
        let mut checker = Checker::default();
        for (path, value, expected) in [
            ("phase", phase, Expected::Word(&PHASES)),
            ("backends", backends, Expected::Words),
            ("hard", hard, Expected::Flag),
        ] {
            checker.given(path, value, expected);
        }
        let name = checker.text("name", name);
        let phase = checker.word("phase", &PHASES, phase, Problem::UnknownPhase).and_then(Phase::named);
        // Without its phase, all that can be said of a backend is whether there is one of that name.
        let backends = checker.backends("backends", phase.unwrap_or(Phase::Decode), backends);
        let hard = checker.flag("hard", hard);
        let reason = checker.text("reason", reason);
        // What could not be read was reported, so nothing that stands in for it gets out.
        let rule = Self {
            name: name.unwrap_or_default(),
            phase: phase.unwrap_or(Phase::Decode),
            backends: backends.unwrap_or_default(),
            hard: hard.unwrap_or_default(),
            reason: reason.unwrap_or_default(),
        };
        Ok(checker.finish(rule)?)
    }

    fn source(&self) -> Source {
        Source::Rule { name: self.name.clone().into(), reason: self.reason.clone().into() }
    }
}

impl Config {
    /// What rules make of a configuration; each comes with whether it holds.
    ///
    /// The outcome depends on the set of rules alone, not on their order, and replaces the outcome of an earlier call:
    /// what a rule disabled then is what it was before that, unless a rule disables it now.
    ///
    /// # Errors
    /// Hard rules that hold against an explicit backend; two rules of one name about one phase.
    pub fn resolve(&self, rules: &[(Rule, bool)]) -> Result<Self, ConfigError> {
        let mut config = self.without_rules();
        let mut sorted: Vec<&(Rule, bool)> = rules.iter().collect();
        sorted.sort();
        let same = |one: &Rule, other: &Rule| (one.phase, &one.name) == (other.phase, &other.name);
        let mut issues: Vec<Issue> = Vec::new();
        for group in sorted.chunk_by(|one, other| same(&one.0, &other.0)).filter(|group| group.len() > 1) {
            let rule = &group[0].0;
            issues.push(Issue::new(rule.phase.name(), Value::Text(rule.name.clone()), Problem::RepeatedRule));
        }
        let mut outweighed = Vec::new();
        for phase in Phase::ALL {
            let (backend, source) = config.backend(phase);
            let against = |rule: &Rule| rule.phase == phase && rule.backends.contains(&backend) && backend != DISABLED;
            let holding = sorted.iter().filter(|(rule, holds)| *holds && against(rule)).map(|(rule, _)| rule);
            if source.is_explicit() {
                for rule in holding {
                    let (name, reason) = (rule.name.clone(), rule.reason.clone());
                    if rule.hard {
                        let problem = Problem::RuleForbids { rule: name, reason };
                        let path = KEYS[phase.rows().start + BACKEND].path;
                        issues.push(Issue::new(path, Value::Text(backend.into()), problem).said_by(source));
                    } else {
                        outweighed.push(Outweighed { phase, rule: name, reason });
                    }
                }
            } else {
                // The last word is the first hard rule's, or else the first soft one's; the others can be read below it.
                let mut disabling: Vec<&Rule> = holding.collect();
                disabling.sort_by_key(|rule| !rule.hard);
                let sources: Vec<Source> = disabling.into_iter().rev().map(Rule::source).collect();
                config = sources.into_iter().fold(config, |config, source| config.disabled_by(phase, source));
            }
        }
        if issues.is_empty() { Ok(config.outweighing(outweighed)) } else { Err(issues.into()) }
    }
}
