//! What rules make of a configuration, against the table of the four cases.

#![expect(clippy::expect_used, reason = "a helper that panics is a test that fails")]

use devicegraph::config::{Config, DISABLED, Phase, Setting};
use devicegraph::document::Value;
use devicegraph::rules::Rule;
use insta::assert_snapshot;
use proptest::collection::vec;
use proptest::prelude::*;
use proptest::sample::{select, subsequence};

#[allow(dead_code, reason = "each test uses some of it")]
mod documents;

use documents::{SOURCE, good, good_document};

/// The four cases, one phase at a time.
mod naive {
    use super::{Config, DISABLED, Phase, Rule, backend, explicit};

    #[derive(Debug, PartialEq)]
    pub(crate) enum Outcome {
        /// The phase keeps its backend, against the advice of these.
        Kept(Vec<String>),
        /// The phase is disabled; the hard rules first, in the order of their names.
        Disabled(Vec<String>),
        Forbidden(Vec<String>),
    }

    pub(crate) fn resolve(config: &Config, phase: Phase, rules: &[(Rule, bool)]) -> Outcome {
        let against = |rule: &Rule| rule.phase == phase && rule.backends.contains(&backend(config, phase));
        let names = |hard: bool| {
            let holding = rules.iter().filter(|(rule, holds)| *holds && rule.hard == hard && against(rule));
            let mut names: Vec<String> = holding.map(|(rule, _)| rule.name.clone()).collect();
            names.sort();
            names
        };
        let (hard, soft) = (names(true), names(false));
        match (backend(config, phase) == DISABLED || hard.is_empty() && soft.is_empty(), explicit(config, phase)) {
            (true, _) => Outcome::Kept(vec![]),
            (false, true) if hard.is_empty() => Outcome::Kept(soft),
            (false, true) => Outcome::Forbidden(hard),
            (false, false) => Outcome::Disabled([hard, soft].concat()),
        }
    }
}

use naive::Outcome;

fn backend(config: &Config, phase: Phase) -> &'static str {
    match config.phase(phase).get("backend") {
        Some(Setting::Word(word)) => word,
        other => unreachable!("{other:?}"),
    }
}

fn explicit(config: &Config, phase: Phase) -> bool {
    config.phase(phase).explicit_keys().contains(&"backend")
}

/// Rules with names of their own, each with whether it holds.
fn rules() -> impl Strategy<Value = Vec<(Rule, bool)>> {
    let rule = (select(&Phase::ALL[..]), any::<bool>(), any::<bool>()).prop_flat_map(|(phase, hard, holds)| {
        let backends = subsequence(phase.backends().to_vec(), 1..=phase.backends().len());
        backends.prop_map(move |backends| {
            (Rule { phase, name: String::new(), backends, hard, reason: "a reason".into() }, holds)
        })
    });
    (vec(rule, 0..8), vec(0..1000u32, 8)).prop_map(|(rules, numbers)| {
        let named = |(i, (rule, holds)): (usize, (Rule, bool))| {
            (Rule { name: format!("r{:03}-{i}", numbers[i]), ..rule }, holds)
        };
        rules.into_iter().enumerate().map(named).collect()
    })
}

/// The names after "rule" in a text, in order.
fn rule_names(text: &str) -> Vec<String> {
    text.split("rule `").skip(1).filter_map(|rest| rest.split('`').next()).map(str::to_owned).collect()
}

fn outcome(config: &Config, phase: Phase, rules: &[(Rule, bool)]) -> Outcome {
    // One phase alone, so that what is forbidden of the other does not hide this one.
    let of_phase: Vec<(Rule, bool)> = rules.iter().filter(|(rule, _)| rule.phase == phase).cloned().collect();
    let path = format!("{}.backend", phase.name());
    match config.resolve(&of_phase) {
        Err(error) => {
            assert!(error.issues.iter().all(|issue| issue.path == path && issue.code() == "rule-forbids"));
            Outcome::Forbidden(rule_names(&error.to_string()))
        }
        Ok(resolved) => {
            if let Some(reason) = resolved.phase(phase).reason() {
                let names = rule_names(&resolved.explain().to_string());
                assert_eq!(rule_names(&reason), names[..1]);
                assert!(!explicit(&resolved, phase) && backend(&resolved, phase) == DISABLED);
                return Outcome::Disabled(names);
            }
            assert_eq!(resolved, *config);
            let warnings = resolved.warnings().into_iter().filter(|issue| issue.code() == "rule-outweighed");
            Outcome::Kept(warnings.flat_map(|issue| rule_names(&issue.to_string())).collect())
        }
    }
}

proptest! {
    #[test]
    fn rules_decide_by_the_table_of_the_four_cases(document in good_document(), rules in rules()) {
        let config = good(&document);
        for phase in Phase::ALL {
            prop_assert_eq!(outcome(&config, phase, &rules), naive::resolve(&config, phase, &rules));
        }
    }

    #[test]
    fn the_order_of_rules_does_not_matter(
        document in good_document(), (one, other) in rules().prop_flat_map(|r| (Just(r.clone()), Just(r).prop_shuffle())),
    ) {
        let resolve = |rules: &[(Rule, bool)]| match good(&document).resolve(rules) {
            Ok(config) => config.to_state().to_string(),
            Err(error) => error.to_string(),
        };
        prop_assert_eq!(resolve(&one), resolve(&other));
    }

    #[test]
    fn resolving_twice_is_resolving_once_and_other_facts_start_afresh(
        document in good_document(), first in rules(), second in rules(),
    ) {
        let config = good(&document);
        if let Ok(once) = config.resolve(&first) {
            prop_assert_eq!(once.resolve(&first).expect("as before").to_state(), once.to_state());
            let afresh = config.resolve(&second).map(|config| config.to_state());
            prop_assert_eq!(once.resolve(&second).map(|config| config.to_state()), afresh);
            prop_assert_eq!(once.resolve(&[]).expect("no rule").to_state(), config.to_state());
        }
    }
}

fn rule(name: &str, hard: bool) -> Rule {
    let (name, reason) = (name.to_owned(), format!("the reason of {name}"));
    Rule { phase: Phase::Prefill, name, backends: vec!["breakable", "tc_piecewise"], hard, reason }
}

#[test]
fn a_hard_rule_against_an_explicit_backend_is_an_error_that_names_both() {
    let config = good(&Value::from_json(r#"{"prefill": {"backend": "breakable"}}"#).expect("json"));
    let rules =
        [(rule("b", true), true), (rule("a", true), true), (rule("soft", false), true), (rule("c", true), false)];
    assert_snapshot!(config.resolve(&rules).expect_err("forbidden"), @r#"
    2 problems:
    prefill.backend (a test): `"breakable"` cannot be used: the reason of a (rule `a`) [rule-forbids]
      hint: leave `backend` out, or set it to `disabled`
    prefill.backend (a test): `"breakable"` cannot be used: the reason of b (rule `b`) [rule-forbids]
      hint: leave `backend` out, or set it to `disabled`
    "#);
}

#[test]
fn a_soft_rule_against_an_explicit_backend_is_a_warning_until_another_backend_is_named() {
    let config = good(&Value::from_json(r#"{"prefill": {"backend": "breakable"}}"#).expect("json"));
    let resolved = config.resolve(&[(rule("soft", false), true)]).expect("it is soft");
    assert_snapshot!(resolved.warnings()[0], @r#"
    prefill.backend (a test): `"breakable"` is used against advice: the reason of soft (rule `soft`) [rule-outweighed]
      hint: leave `backend` out, and the rule decides
    "#);
    let change = |json: &str| {
        let value = Value::from_json(json).expect("json");
        resolved.with_phase(Phase::Prefill, &value, &SOURCE).expect("good").warnings().len()
    };
    assert_eq!((change(r#"{"max_bs": 8}"#), change(r#"{"backend": "disabled"}"#)), (1, 0));
}

#[test]
fn a_phase_that_a_rule_disabled_says_why_and_a_person_can_still_name_another_backend() {
    let rules = [(rule("b", true), true), (rule("a", false), true)];
    let resolved = Config::default().resolve(&rules).expect("nobody named a backend");
    assert_eq!(resolved.phase(Phase::Prefill).reason().as_deref(), Some("the reason of b (rule `b`)"));
    assert_eq!(resolved.phase(Phase::Decode).reason(), None);
    assert_snapshot!(resolved.explain(), @"
    key                  value             from
    decode.backend       full              default
    decode.max_bs        -                 default
    decode.bs            -                 default
    decode.tc_compiler   eager             default
    prefill.backend      disabled          rule `b`: the reason of b
                         also disabled     rule `a`: the reason of a
                         not tc_piecewise  default
    prefill.max_bs       -                 default
    prefill.bs           -                 default
    prefill.tc_compiler  eager             default
    padding              true              default
    ");
    let named = Value::from_json(r#"{"backend": "breakable"}"#).expect("json");
    let named = resolved.with_phase(Phase::Prefill, &named, &SOURCE).expect("good");
    assert_eq!((backend(&named, Phase::Prefill), named.phase(Phase::Prefill).reason()), ("breakable", None));
    assert_eq!(named.resolve(&rules).expect_err("b is hard").issues.len(), 1);
}

#[test]
fn two_rules_of_one_name_about_one_phase_are_refused() {
    let other_phase = Rule { phase: Phase::Decode, ..rule("a", true) };
    let rules = [(rule("a", true), false), (rule("a", false), false), (other_phase, false)];
    assert_snapshot!(Config::default().resolve(&rules).expect_err("two of one name"), @r#"
    prefill: two rules have the name `"a"` [repeated-rule]
      hint: give each rule of a phase a name of its own
    "#);
}

#[test]
fn every_part_of_a_rule_is_checked() {
    let text = |text: &str| Value::Text(text.to_owned());
    let check = |name, phase, backends, hard, reason| {
        Rule::from_values(&name, &phase, &backends, &hard, &reason).map_err(|error| error.to_string())
    };
    let list = |json: &str| Value::from_json(json).expect("json");
    let nothing = Value::Null;
    assert_snapshot!(
        check(text(" "), text("prefil"), list(r#"["full", "brekable", 1]"#), Value::Int(1), Value::Int(3)).expect_err("bad"), @r#"
    6 problems:
    name: `" "` is a string, not text with words in it [wrong-type]
    phase: no such phase; the phases are `decode` and `prefill` [unknown-phase]
      hint: did you mean `prefill`?
    backends[1]: `"brekable"` is not one of `full`, `breakable`, `tc_piecewise` or `disabled` [unknown-backend]
      hint: did you mean `breakable`?
    backends[2]: `1` is an integer, not one of `full`, `breakable`, `tc_piecewise` or `disabled` [wrong-type]
    hard: `1` is an integer, not `true` or `false` [wrong-type]
    reason: `3` is an integer, not text with words in it [wrong-type]
    "#);
    assert_snapshot!(check(nothing.clone(), nothing.clone(), nothing.clone(), nothing.clone(), nothing).expect_err("bad"), @"
    5 problems:
    phase: `null` is null, not one of `decode` or `prefill` [wrong-type]
    backends: `null` is null, not a list of at least one backend [wrong-type]
    hard: `null` is null, not `true` or `false` [wrong-type]
    name: `null` is null, not text with words in it [wrong-type]
    reason: `null` is null, not text with words in it [wrong-type]
    ");
    assert_snapshot!(check(text("a"), text("prefill"), list(r#"["full", null]"#), Value::Bool(true), text("b")).expect_err("bad"), @r#"
    2 problems:
    backends[0]: `"full"` needs the same shapes on every replay, and those of this phase vary [backend-not-allowed]
      hint: use `breakable`, `tc_piecewise` or `disabled`
    backends[1]: `null` is null, not one of `breakable`, `tc_piecewise` or `disabled` [wrong-type]
    "#);
    assert!(check(text("a"), text("decode"), list(r#"["full"]"#), Value::Bool(true), text("b")).is_ok());
    assert!(check(text("a"), text("decode"), list("[]"), Value::Bool(true), text("b")).is_err());
}
