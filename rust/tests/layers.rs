//! What several sources come to together, against a naive merge; and how an operator reads it.

#![expect(clippy::expect_used, reason = "a helper that panics is a test that fails")]

use std::collections::BTreeSet;

use devicegraph::config::{Config, Export, KEYS, Phase};
use devicegraph::document::Value;
use devicegraph::layers::Source;
use devicegraph::options::{ConfigOption, OPTIONS, Takes};
use devicegraph::rules::Rule;
use insta::assert_snapshot;
use proptest::prelude::*;
use proptest::sample::subsequence;

#[allow(dead_code, reason = "each test uses some of it")]
mod documents;

use documents::{SOURCE, any_document, good, good_document, naive, phase};

fn named(config: &Config) -> naive::Named {
    naive::named(&config.to_value(Export::Explicit))
}

fn options(given: &[(&str, Value)]) -> Result<(Config, Vec<&'static str>), String> {
    let given: Vec<(String, Value)> = given.iter().map(|(name, value)| ((*name).to_owned(), value.clone())).collect();
    let (config, deprecated) = Config::from_options(&given, None).map_err(|error| error.to_string())?;
    Ok((config, deprecated.iter().map(|option| option.flag).collect()))
}

fn json(text: &str) -> Value {
    Value::from_json(text).expect("json")
}

/// Options that say what a document says; those that no option of the kind can say are left out of both.
fn as_options(document: &Value, deprecated: bool) -> (Vec<(&'static str, Value)>, naive::Named) {
    let (mut given, mut said) = (Vec::new(), naive::Named::new());
    for (path, value) in naive::named(document) {
        let says = |option: &&ConfigOption| match &option.takes {
            Takes::Nothing(setting) => Value::from(setting) == value,
            _ => true,
        };
        let mut of_key = OPTIONS.iter().filter(|option| option.deprecated == deprecated && option.keys == [&*path]);
        if let Some(option) = of_key.find(says) {
            let value_given = if let Takes::Nothing(_) = option.takes { Value::Bool(true) } else { value.clone() };
            given.push((option.flag, value_given));
            said.insert(path, value);
        }
    }
    (given, said)
}

proptest! {
    #[test]
    fn layers_are_associative(one in good_document(), two in good_document(), three in good_document()) {
        let [one, two, three] = [one, two, three].map(|document| good(&document));
        let left = one.clone().with_config(&two).with_config(&three);
        let right = one.clone().with_config(&two.clone().with_config(&three));
        prop_assert_eq!(left.explain().to_string(), right.explain().to_string());
        // Nor does it matter whether two layers are told apart or are one document that says what they come to.
        let document = two.with_config(&three).to_value(Export::Explicit);
        prop_assert_eq!(named(&one.with_config(&good(&document))), named(&left));
    }

    #[test]
    fn options_merge_key_by_key_deprecated_ones_below_current_ones_below_the_whole(
        old in good_document(), new in good_document(), whole in good_document(),
    ) {
        let ((old, old_said), (new, new_said)) = (as_options(&old, true), as_options(&new, false));
        let mut given = [old.clone(), new].concat();
        given.push(("cuda_graph_config", whole.clone()));
        let (config, deprecated) = options(&given).expect("the options are good");
        let expected = naive::merged(&naive::merged(&old_said, &new_said), &naive::named(&whole));
        prop_assert_eq!(named(&config), expected);
        let given: BTreeSet<&str> = old.iter().map(|(flag, _)| *flag).collect();
        prop_assert_eq!(deprecated.into_iter().collect::<BTreeSet<_>>(), given);
    }

    #[test]
    fn a_whole_configuration_given_as_text_tree_or_object_is_the_same_layer(
        old in good_document(), whole in good_document(),
    ) {
        let (given, _) = as_options(&old, true);
        let with = |whole: Value| options(&[&given[..], &[("cuda_graph_config", whole)]].concat()).expect("good").0;
        let given: Vec<_> = given.iter().map(|(flag, value)| ((*flag).to_owned(), value.clone())).collect();
        let object = Config::from_options(&given, Some(&good(&whole))).expect("good").0;
        for config in [with(whole.clone()), with(Value::Text(whole.to_string()))] {
            prop_assert_eq!(&config, &object);
            prop_assert_eq!(config.explicit_keys(), object.explicit_keys());
        }
    }

    #[test]
    fn a_state_reads_back_with_everything_that_is_known(
        old in good_document(), whole in good_document(), changed in phase(Phase::Prefill),
        rules in subsequence((0..4).collect::<Vec<usize>>(), 0..4),
    ) {
        let (given, _) = as_options(&old, true);
        let (config, _) = options(&given).expect("good");
        let config = config.with_config(&good(&whole)).with_phase(Phase::Prefill, &changed, &SOURCE).expect("good");
        let soft = |i: usize| {
            let (phase, backends) = (Phase::ALL[i % 2], vec!["breakable", "tc_piecewise"]);
            Rule { phase, name: format!("rule {i}"), backends, hard: false, reason: format!("reason {i}") }
        };
        let rules: Vec<(Rule, bool)> = rules.into_iter().map(|i| (soft(i), true)).collect();
        let config = config.resolve(&rules).expect("no rule is hard");
        let state = Value::from_json(&config.to_state().to_string()).expect("a state is plain data");
        let same = Config::from_state(&state).expect("a state reads back");
        prop_assert_eq!(same.explain().to_value(), config.explain().to_value());
        prop_assert_eq!(same.to_state(), state);
        for phase in Phase::ALL.map(|phase| config.phase(phase)) {
            let same = devicegraph::config::PhaseConfig::from_state(&phase.to_state()).expect("a state reads back");
            prop_assert_eq!(same.to_state(), phase.to_state());
            prop_assert_eq!((same.reason(), same.explicit_keys()), (phase.reason(), phase.explicit_keys()));
        }
    }

    #[test]
    fn what_is_no_state_is_refused_and_what_is_one_reads_back(document in any_document()) {
        match Config::from_state(&document) {
            Ok(config) => prop_assert_eq!(Config::from_state(&config.to_state()), Ok(config)),
            Err(error) => prop_assert!(!error.issues.is_empty()),
        }
    }
}

#[test]
fn an_option_that_switches_off_erases_nothing_else() {
    let given = [("disable_cuda_graph", Value::Bool(true)), ("cuda_graph_max_bs_decode", Value::Int(64))];
    let (config, deprecated) = options(&given).expect("good");
    assert_snapshot!(config.to_value(Export::Explicit), @r#"{"decode": {"backend": "disabled", "max_bs": 64}, "prefill": {"backend": "disabled"}}"#);
    assert_eq!(deprecated, ["--disable-cuda-graph"]);
}

#[test]
fn null_and_an_option_that_is_off_are_not_given() {
    let given: Vec<(&str, Value)> = OPTIONS.iter().map(|option| (option.flag, Value::Null)).collect();
    assert_eq!(options(&given), Ok((Config::default(), vec![])));
    let flags = OPTIONS.iter().filter(|option| matches!(option.takes, Takes::Nothing(_)));
    let given: Vec<(&str, Value)> = flags.map(|option| (option.flag, Value::Bool(false))).collect();
    let (config, deprecated) = options(&given).expect("good");
    assert_eq!((config.explicit_keys(), deprecated), (vec![], vec![]));
    // An explicit false of a configuration survives an option that is not given, and goes before one that is.
    let config = options(&[("cuda_graph_config", json(r#"{"padding": false}"#))]).expect("good").0;
    assert!(!config.padding());
    let off = ("disable_cuda_graph_padding", Value::Bool(true));
    assert!(options(&[("cuda_graph_config", json(r#"{"padding": true}"#)), off]).expect("good").0.padding());
}

#[test]
fn deprecated_options_that_contradict_one_another_are_refused_whatever_goes_before_them() {
    let on = |name| (name, Value::Bool(true));
    let message = |given: &[(&str, Value)]| options(given).expect_err("they contradict one another");
    let backend = ("cuda_graph_backend_prefill", Value::Text("tc_piecewise".into()));
    assert_snapshot!(message(&[on("enable_breakable_cuda_graph"), on("disable_cuda_graph"), backend]), @r#"
    prefill.backend (--enable-breakable-cuda-graph): `"breakable"` contradicts `--disable-cuda-graph`, which says `"disabled"` [options-disagree]
      hint: keep one of them
    "#);
    let bs = ("cuda_graph_bs", json("[1, 2, 8]"));
    assert_snapshot!(message(&[("cuda_graph_max_bs", Value::Int(4)), bs]), @"
    decode.max_bs (--cuda-graph-max-bs): `4` is not the largest entry of `bs`, 8 [sizes-disagree]
      hint: leave `max_bs` out, or set it to 8, or add 4 to `bs`
    ");
    let agreed = [on("disable_cuda_graph"), on("disable_prefill_cuda_graph"), on("disable_piecewise_cuda_graph")];
    assert_eq!(options(&agreed).expect("they agree").1.len(), 3);
}

#[test]
fn every_problem_of_every_option_is_reported_at_once_with_the_option_that_has_it() {
    let given = [
        ("cuda_graph_max_bs_decode", Value::Text("4".into())),
        ("cuda_graph_tc_compiler", Value::Text("inducter".into())),
        ("cuda_graph_config", json(r#"{"decode": {"bs": []}, "padding": 1}"#)),
        ("disable_cuda_graph", Value::Int(1)),
        ("cuda_graph_maxbs", Value::Int(1)),
        ("piecewise_cuda_graph_tokens", json("[4, 0]")),
    ];
    assert_snapshot!(options(&given).expect_err("nothing is good"), @r#"
    7 problems:
    cuda_graph_maxbs: no such option [unknown-option]
      hint: did you mean `cuda_graph_max_bs`?
    decode.bs (--cuda-graph-config): `[]` names no size [empty-list]
      hint: to run this phase without graphs, set its `backend` to `disabled`
    padding (--cuda-graph-config): `1` is an integer, not `true` or `false` [wrong-type]
    decode.max_bs (--cuda-graph-max-bs-decode): `"4"` is a string, not an integer from 1 to 1048576 [wrong-type]
      hint: write 4, without quotes
    decode.tc_compiler (--cuda-graph-tc-compiler): `"inducter"` is not one of `eager` or `inductor` [unknown-compiler]
      hint: did you mean `inductor`?
    --disable-cuda-graph: `1` is an integer, not `true` or `false` [wrong-type]
    prefill.bs[1] (--piecewise-cuda-graph-tokens): `0` is not an integer from 1 to 1048576 [out-of-range]
    "#);
    let broken = options(&[("cuda_graph_config", Value::Text("{'decode': {}}".into()))]).expect_err("no JSON");
    assert_snapshot!(broken, @"
    --cuda-graph-config: line 1, column 2: key must be a string [json-syntax]
      hint: put names and text in double quotes
    ");
}

#[test]
fn the_compiler_of_both_phases_is_warned_of_only_where_neither_compiles() {
    let compiler = ("cuda_graph_tc_compiler", Value::Text("inductor".into()));
    let prefill = |backend: &str| ("cuda_graph_backend_prefill", Value::Text(backend.into()));
    assert_eq!(options(std::slice::from_ref(&compiler)).expect("good").0.warnings(), []);
    let warnings = options(&[compiler, prefill("breakable")]).expect("good").0.warnings();
    let paths: Vec<&str> = warnings.iter().map(|issue| &*issue.path).collect();
    assert_eq!(paths, ["decode.tc_compiler", "prefill.tc_compiler"]);
}

#[test]
fn every_key_has_a_current_option_and_every_deprecated_option_names_one() {
    for key in &KEYS {
        assert!(OPTIONS.iter().any(|option| !option.deprecated && option.keys.contains(&key.path)), "{}", key.path);
    }
    for option in OPTIONS.iter().filter(|option| option.deprecated) {
        let replacement = option.replacement().expect("it is deprecated");
        let current = OPTIONS.iter().find(|other| !other.deprecated && replacement.contains(other.flag));
        assert!(current.is_some(), "{replacement}");
        assert!(option.is_named(option.flag) && option.is_named(&option.keyword()));
    }
    let names: BTreeSet<String> = OPTIONS.iter().map(ConfigOption::keyword).collect();
    assert_eq!(names.len(), OPTIONS.len());
}

#[test]
fn every_option_says_what_it_takes_what_it_is_and_what_replaces_it() {
    let line = |option: &ConfigOption| {
        let named = option.metavar().map_or(option.flag.to_owned(), |takes| format!("{} {takes}", option.flag));
        let about = option.deprecation().unwrap_or_else(|| option.help());
        assert_eq!(option.help().starts_with("deprecated"), option.deprecated);
        format!("{named}: {about}")
    };
    assert_snapshot!(OPTIONS.iter().map(line).collect::<Vec<_>>().join("\n"), @r"
    --cuda-graph-config JSON: the whole configuration; overrides every other option, key by key (default: {})
    --cuda-graph-backend-decode {full,breakable,tc_piecewise,disabled}: how decode is captured (default: full); `--cuda-graph-config` overrides it
    --cuda-graph-backend-prefill {breakable,tc_piecewise,disabled}: how prefill is captured (default: tc_piecewise); `--cuda-graph-config` overrides it
    --cuda-graph-max-bs-decode N: the largest size of decode to capture, in requests (default: the engine decides); `--cuda-graph-config` overrides it
    --cuda-graph-max-bs-prefill N: the largest size of prefill to capture, in tokens (default: the engine decides); `--cuda-graph-config` overrides it
    --cuda-graph-bs-decode N: the sizes of decode to capture, in requests (default: the engine decides); `--cuda-graph-config` overrides it
    --cuda-graph-bs-prefill N: the sizes of prefill to capture, in tokens (default: the engine decides); `--cuda-graph-config` overrides it
    --cuda-graph-tc-compiler {eager,inductor}: what compiles the pieces of `tc_piecewise` (default: eager); `--cuda-graph-config` overrides it
    --disable-cuda-graph-padding: pad no size to the next larger one, so that other sizes than those captured run eager (default: sizes are padded); `--cuda-graph-config` overrides it
    --disable-cuda-graph: `--disable-cuda-graph` is deprecated; use `--cuda-graph-backend-decode disabled` and `--cuda-graph-backend-prefill disabled`
    --disable-decode-cuda-graph: `--disable-decode-cuda-graph` is deprecated; use `--cuda-graph-backend-decode disabled`
    --disable-prefill-cuda-graph: `--disable-prefill-cuda-graph` is deprecated; use `--cuda-graph-backend-prefill disabled`
    --cuda-graph-max-bs N: `--cuda-graph-max-bs` is deprecated; use `--cuda-graph-max-bs-decode`
    --cuda-graph-bs N: `--cuda-graph-bs` is deprecated; use `--cuda-graph-bs-decode`
    --enable-breakable-cuda-graph: `--enable-breakable-cuda-graph` is deprecated; use `--cuda-graph-backend-prefill breakable`
    --disable-piecewise-cuda-graph: `--disable-piecewise-cuda-graph` is deprecated; use `--cuda-graph-backend-prefill disabled`
    --enforce-piecewise-cuda-graph: `--enforce-piecewise-cuda-graph` is deprecated; use `--cuda-graph-backend-prefill tc_piecewise`
    --piecewise-cuda-graph-tokens N: `--piecewise-cuda-graph-tokens` is deprecated; use `--cuda-graph-bs-prefill`
    --piecewise-cuda-graph-max-tokens N: `--piecewise-cuda-graph-max-tokens` is deprecated; use `--cuda-graph-max-bs-prefill`
    --piecewise-cuda-graph-compiler {eager,inductor}: `--piecewise-cuda-graph-compiler` is deprecated; use `--cuda-graph-tc-compiler`
    ");
}

fn explained() -> Config {
    let given = [
        ("disable_cuda_graph", Value::Bool(true)),
        ("cuda_graph_max_bs", Value::Int(32)),
        ("cuda_graph_bs_decode", json("[1, 2, 4, 8, 16, 24, 32, 40, 48, 100, 1000, 1100, 1300, 1600, 2000]")),
        ("cuda_graph_config", json(r#"{"prefill": {"backend": "breakable"}, "padding": true}"#)),
    ];
    let rule = Rule {
        phase: Phase::Prefill,
        name: "stages".into(),
        backends: vec!["breakable"],
        hard: false,
        reason: "the layers are spread over stages".into(),
    };
    options(&given).expect("good").0.resolve(&[(rule, true)]).expect("it is soft")
}

#[test]
fn an_explanation_shows_for_each_key_the_value_its_source_and_what_that_overrode() {
    assert_snapshot!(explained().explain(), @r#"
    key                  value                                        from
    decode.backend       disabled                                     --disable-cuda-graph (deprecated)
                         not full                                     default
    decode.max_bs        -                                            --cuda-graph-bs-decode names `bs`
                         not 32                                       --cuda-graph-max-bs (deprecated)
    decode.bs            1, 2, 4, 8..48 by 8, 100, 1000, 1100, 13...  --cuda-graph-bs-decode
    decode.tc_compiler   eager                                        default
    prefill.backend      breakable                                    --cuda-graph-config
                         not disabled                                 --disable-cuda-graph (deprecated)
                         not tc_piecewise                             default
    prefill.max_bs       -                                            default
    prefill.bs           -                                            default
    prefill.tc_compiler  eager                                        default
    padding              true                                         --cuda-graph-config
    warning: prefill.backend (--cuda-graph-config): `"breakable"` is used against advice: the layers are spread over stages (rule `stages`) [rule-outweighed]
      hint: leave `backend` out, and the rule decides
    "#);
}

#[test]
fn an_explanation_as_data_says_the_same_and_more() {
    let Value::Object(explanation) = explained().explain().to_value() else { unreachable!() };
    let Value::Object(keys) = &explanation[0].1 else { unreachable!() };
    assert_snapshot!(keys[4].1, @r#"{"value": "breakable", "source": "--cuda-graph-config", "kind": "config", "reason": null, "explicit": true, "overrode": [{"value": "disabled", "source": "--disable-cuda-graph", "kind": "deprecated", "reason": null}, {"value": "tc_piecewise", "source": "default", "kind": "default", "reason": null}]}"#);
    assert_snapshot!(keys[1].1, @r#"{"value": null, "source": "--cuda-graph-bs-decode", "kind": "option", "reason": null, "explicit": false, "overrode": [{"value": 32, "source": "--cuda-graph-max-bs", "kind": "deprecated", "reason": null}]}"#);
    assert_snapshot!(explanation[1].1, @r#"[{"path": "prefill.backend", "value": "breakable", "code": "rule-outweighed", "message": "`\"breakable\"` is used against advice: the layers are spread over stages (rule `stages`)", "hint": "leave `backend` out, and the rule decides"}]"#);
    let paths: Vec<&str> = keys.iter().map(|(path, _)| &**path).collect();
    assert_eq!(paths, KEYS.iter().map(|key| key.path).collect::<Vec<_>>());
}

#[test]
fn a_phase_that_is_taken_from_another_configuration_keeps_who_named_what_and_a_twin_nobody_named_is_a_default() {
    let phase = r#"{"decode": {"bs": [1, 2]}}"#;
    let taken = Config::from_json(phase, &Source::Option("--bs".into())).expect("good").phase(Phase::Decode);
    let config = Config::from_value(&json(phase), &Source::Config("from_dict".into())).expect("good");
    let sizes = |config: &Config| {
        let text = config.explain().to_string();
        let named = text.lines().filter(|line| line.starts_with("decode.max_bs") || line.starts_with("decode.bs"));
        named.map(|line| line.split_whitespace().collect::<Vec<_>>().join(" ")).collect::<Vec<_>>()
    };
    assert_eq!(sizes(&config), ["decode.max_bs - default", "decode.bs 1, 2 from_dict"]);
    let config = config.with_sources_of(Phase::Decode, &taken);
    assert_eq!(sizes(&config), ["decode.max_bs - default", "decode.bs 1, 2 --bs"]);
}

#[test]
fn sources_are_told_apart_by_kind_and_only_people_are_explicit() {
    let rule = Source::Rule { name: "npu".into(), reason: "decode only".into() };
    let kinds = [
        Source::Default,
        Source::Deprecated("--a".into()),
        Source::Option("--b".into()),
        Source::Config("from_json".into()),
        rule,
    ];
    let text: Vec<String> =
        kinds.iter().map(|s| format!("{} {} {} {s}", s.kind(), s.name(), s.is_explicit())).collect();
    assert_snapshot!(text.join("\n"), @r"
    default  false default
    deprecated --a true --a (deprecated)
    option --b true --b
    config from_json true from_json
    rule npu false rule `npu`: decode only
    ");
}

#[test]
fn what_stands_on_a_command_line_is_a_number_a_word_or_text() {
    let read = |text: &str| format!("{:?}", Value::from_argument(text));
    let texts = ["4", "-1", "1.5", "true", "null", "\"4\"", "full", "nan", "[1]", "{}", "", "1 2", " 4 "];
    let table: Vec<String> = texts.iter().map(|text| format!("{text} -> {}", read(text))).collect();
    assert_snapshot!(table.join("\n"), @r#"
    4 -> Int(4)
    -1 -> Int(-1)
    1.5 -> Float(1.5)
    true -> Bool(true)
    null -> Null
    "4" -> Text("4")
    full -> Text("full")
    nan -> Text("nan")
    [1] -> Text("[1]")
    {} -> Text("{}")
     -> Text("")
    1 2 -> Text("1 2")
     4  -> Int(4)
    "#);
}
