//! The validator, the merge and the export, against naive readings of the same rules; and every message.

#![expect(clippy::expect_used, reason = "a helper that panics is a test that fails")]

use std::hash::{DefaultHasher, Hash, Hasher};

use devicegraph::buckets::{Arguments, Buckets};
use devicegraph::config::{Config, Export, KEYS, Phase, PhaseConfig};
use devicegraph::document::Value;
use devicegraph::error::ConfigError;
use devicegraph::layers::Source;
use insta::assert_snapshot;
use proptest::prelude::*;

#[allow(dead_code, reason = "each test uses some of it")]
mod documents;

use documents::{SOURCE, any_document, good, good_document, naive, object, phase};

fn from_value(document: &Value) -> Result<Config, ConfigError> {
    Config::from_value(document, &SOURCE)
}

fn from_json(text: &str) -> Result<Config, ConfigError> {
    Config::from_json(text, &SOURCE)
}

fn export(config: &Config, export: Export) -> naive::Named {
    naive::named(&config.to_value(export))
}

proptest! {
    #[test]
    fn every_export_reads_back_as_an_equal_configuration(document in good_document()) {
        let config = good(&document);
        for kind in [Export::Differences, Export::Explicit, Export::Full] {
            let exported = config.to_value(kind);
            prop_assert_eq!(&good(&exported), &config);
            prop_assert_eq!(&from_json(&exported.to_string()).expect("good"), &config);
        }
    }

    #[test]
    fn an_explicit_export_names_what_was_named_and_a_plain_one_what_differs(document in good_document()) {
        let config = good(&document);
        let named = naive::named(&document);
        prop_assert_eq!(&export(&config, Export::Explicit), &named);
        let explicit: Vec<&str> = KEYS.iter().map(|key| key.path).filter(|path| named.contains_key(*path)).collect();
        prop_assert_eq!(config.explicit_keys(), explicit);
        let defaults = export(&Config::default(), Export::Full);
        let differing: naive::Named = named.into_iter().filter(|(key, value)| defaults.get(key) != Some(value)).collect();
        prop_assert_eq!(export(&config, Export::Differences), differing);
    }

    #[test]
    fn a_higher_source_wins_key_by_key(document in good_document(), higher in phase(Phase::Decode)) {
        let config = good(&document).with_phase(Phase::Decode, &higher, &SOURCE).expect("the source is good");
        let expected = naive::merged(&naive::named(&document), &naive::named(&object([("decode", higher)])));
        prop_assert_eq!(export(&config, Export::Explicit), expected);
    }

    #[test]
    fn merging_is_associative(document in good_document(), one in phase(Phase::Decode), two in phase(Phase::Decode)) {
        let stepwise = good(&document).with_phase(Phase::Decode, &one, &SOURCE).and_then(|c| c.with_phase(Phase::Decode, &two, &SOURCE));
        let both = Config::default().with_phase(Phase::Decode, &one, &SOURCE).and_then(|c| c.with_phase(Phase::Decode, &two, &SOURCE));
        let Value::Object(both) = both.expect("good").to_value(Export::Explicit) else { unreachable!() };
        let both = both.into_iter().next().map_or(Value::Null, |(_, decode)| decode);
        let at_once = good(&document).with_phase(Phase::Decode, &both, &SOURCE).expect("the source is good");
        let stepwise = stepwise.expect("the sources are good");
        prop_assert_eq!(export(&stepwise, Export::Explicit), export(&at_once, Export::Explicit));
    }

    #[test]
    fn whatever_is_accepted_round_trips_and_whatever_is_not_says_why(document in any_document()) {
        match from_value(&document) {
            Ok(config) => prop_assert_eq!(good(&config.to_value(Export::Differences)), config),
            Err(error) => {
                prop_assert!(!error.issues.is_empty());
                let text = error.to_string();
                prop_assert!(error.issues.iter().all(|issue| text.contains(&issue.to_string())));
            }
        }
    }

    #[test]
    fn a_text_is_refused_with_a_message_or_round_trips(text in r#"[{}\[\]",:=.0-9a-z\n é]{0,40}"#) {
        for result in [from_json(&text), Config::from_file("a.toml", text.as_bytes())] {
            match result {
                Ok(config) => prop_assert_eq!(good(&config.to_value(Export::Differences)), config),
                Err(error) => prop_assert!(error.to_string().contains(" [")),
            }
        }
    }
}

#[test]
fn configurations_are_equal_and_hash_alike_where_the_same_values_hold_and_only_there() {
    let hash = |config: &Config| {
        let mut state = DefaultHasher::new();
        config.hash(&mut state);
        state.finish()
    };
    let (default, named) = (Config::default(), from_json(r#"{"padding": true}"#).expect("good"));
    assert_eq!((&default, hash(&default)), (&named, hash(&named)), "whoever named them");
    let other = from_json(r#"{"padding": false}"#).expect("good");
    assert!(default != other && hash(&default) != hash(&other));

    let hash = |phase: &PhaseConfig| {
        let mut state = DefaultHasher::new();
        phase.hash(&mut state);
        state.finish()
    };
    let phase = |json: &str| PhaseConfig::from_value(&Value::from_json(json).expect("json"), &SOURCE).expect("good");
    let (nothing, named) = (PhaseConfig::default(), phase(r#"{"tc_compiler": "eager"}"#));
    assert_eq!((&nothing, hash(&nothing)), (&named, hash(&named)), "of a phase, too");
    let other = phase(r#"{"max_bs": 8}"#);
    assert!(nothing != other && hash(&nothing) != hash(&other));
}

fn refused(json: &str) -> String {
    from_json(json).expect_err("something in it is wrong").to_string()
}

#[test]
fn every_problem_is_reported_at_once() {
    let json = r#"{
        "decode": {"backend": "ful", "max_bs": true, "bs": [1, "4", 0, 1.5, null], "maxbs": 3, "tc_compiler": 1},
        "prefil": {"max_bs": 4},
        "prefill": {"backend": "full", "tc_compiler": "inducter", "bs": [], "max_bs": -1},
        "max_bs": 3, "padding": 1, "paddin": true
    }"#;
    assert_snapshot!(refused(json), @r#"
    16 problems:
    decode.backend: `"ful"` is not one of `full`, `breakable`, `tc_piecewise` or `disabled` [unknown-backend]
      hint: did you mean `full`?
    decode.max_bs: `true` is a boolean, not an integer from 1 to 1048576 [wrong-type]
    decode.bs[1]: `"4"` is a string, not an integer from 1 to 1048576 [wrong-type]
      hint: write 4, without quotes
    decode.bs[2]: `0` is not an integer from 1 to 1048576 [out-of-range]
    decode.bs[3]: `1.5` is a float, not an integer from 1 to 1048576 [wrong-type]
    decode.bs[4]: `null` is null, not an integer from 1 to 1048576 [wrong-type]
    decode.maxbs: no such key; the keys here are `backend`, `max_bs`, `bs` and `tc_compiler` [unknown-key]
      hint: did you mean `max_bs`?
    decode.tc_compiler: `1` is an integer, not one of `eager` or `inductor` [wrong-type]
    prefil: no such phase; the phases are `decode` and `prefill` [unknown-phase]
      hint: did you mean `prefill`?
    prefill.backend: `"full"` needs the same shapes on every replay, and those of this phase vary [backend-not-allowed]
      hint: use `breakable`, `tc_piecewise` or `disabled`
    prefill.tc_compiler: `"inducter"` is not one of `eager` or `inductor` [unknown-compiler]
      hint: did you mean `inductor`?
    prefill.bs: `[]` names no size [empty-list]
      hint: to run this phase without graphs, set its `backend` to `disabled`
    prefill.max_bs: `-1` is not an integer from 1 to 1048576 [out-of-range]
    max_bs: a key of a phase, outside a phase [unknown-key]
      hint: write it inside `decode` or `prefill`
    padding: `1` is an integer, not `true` or `false` [wrong-type]
    paddin: no such key; the keys here are `decode`, `prefill` and `padding` [unknown-key]
      hint: did you mean `padding`?
    "#);
}

#[test]
fn what_is_wrong_with_a_document_as_a_whole() {
    for json in ["null", "[]", "3", "\"decode\"", "true"] {
        let error = from_json(json).expect_err("no object");
        assert_eq!(error.issues[0].code(), "wrong-type");
    }
    assert_snapshot!(refused("[1]"), @"`[1]` is a list, not an object with the keys `decode`, `prefill` and `padding` [wrong-type]");
    assert_snapshot!(refused(r#"{"decode": [1], "prefill": "disabled"}"#), @r#"
    2 problems:
    decode: `[1]` is a list, not an object with the keys `backend`, `max_bs`, `bs` and `tc_compiler` [wrong-type]
    prefill: `"disabled"` is a string, not an object with the keys `backend`, `max_bs`, `bs` and `tc_compiler` [wrong-type]
      hint: write `{"backend": "disabled"}`
    "#);
}

#[test]
fn only_a_backend_in_place_of_a_phase_is_told_how_to_be_written() {
    let hint = |json: &str| from_json(json).expect_err("no object").issues[0].hint();
    assert_eq!(hint(r#"{"decode": "breakable"}"#).as_deref(), Some(r#"write `{"backend": "breakable"}`"#));
    assert_eq!(hint(r#"{"decode": "fast"}"#), None);
}

#[test]
fn syntax_errors_give_line_and_column() {
    assert_snapshot!(refused("{\"decode\": {\n  \"max_bs\" 64}}"), @"line 2, column 12: expected `:` [json-syntax]");
    assert_snapshot!(refused(""), @r#"
    line 1, column 1: EOF while parsing a value [json-syntax]
      hint: write JSON, such as `{"decode": {"max_bs": 64}}`; `CudaGraphConfig.from_file` reads a file
    "#);
    assert_snapshot!(refused("engine.toml"), @r#"
    line 1, column 1: expected value [json-syntax]
      hint: write JSON, such as `{"decode": {"max_bs": 64}}`; `CudaGraphConfig.from_file` reads a file
    "#);
    assert_snapshot!(refused("{'decode': {}}"), @"
    line 1, column 2: key must be a string [json-syntax]
      hint: put names and text in double quotes
    ");
    assert_snapshot!(refused("{\"é\": é}"), @"line 1, column 7: expected value [json-syntax]");
    assert_snapshot!(refused("{\"decode\": {\"max_bs\": NaN}}"), @"line 1, column 23: expected value [json-syntax]");
    assert_snapshot!(refused("{} {}"), @"line 1, column 4: trailing characters [json-syntax]");
}

#[test]
fn a_repeated_key_is_an_error_wherever_it_is() {
    assert_snapshot!(refused(r#"{"decode": {"bs": [1], "bs": [2]}, "padding": true, "decode": {}, "padding": true}"#), @"
    3 problems:
    decode.bs: the key is given more than once [repeated-key]
      hint: keep one of them
    decode: the key is given more than once [repeated-key]
      hint: keep one of them
    padding: the key is given more than once [repeated-key]
      hint: keep one of them
    ");
}

#[test]
fn numbers_outside_every_range_are_no_sizes() {
    let code = |number: &str| {
        let error = from_json(&format!(r#"{{"decode": {{"max_bs": {number}}}}}"#)).expect_err("no size");
        error.issues.iter().map(devicegraph::error::Issue::code).collect::<Vec<_>>().join(" ")
    };
    for number in ["0", "-1", "1048577", "9223372036854775808", "-9223372036854775809", "1e30"] {
        assert_eq!(code(number), "out-of-range", "{number}");
    }
    for number in ["1.0", "1e3", "-0.0", "true", "\"4\"", "[4]", "{}"] {
        assert_eq!(code(number), "wrong-type", "{number}");
    }
    assert_eq!(good(&Value::from_json(r#"{"decode": {"max_bs": 1048576}}"#).expect("json")).explicit_keys().len(), 1);
}

#[test]
fn sizes_of_one_source_must_agree() {
    assert_snapshot!(refused(r#"{"decode": {"max_bs": 64, "bs": [32, 1]}}"#), @"
    decode.max_bs: `64` is not the largest entry of `bs`, 32 [sizes-disagree]
      hint: leave `max_bs` out, or set it to 32, or add 64 to `bs`
    ");
    let config = from_json(r#"{"decode": {"max_bs": 32, "bs": [32, 1, 32]}}"#).expect("they agree");
    assert_eq!(config.to_value(Export::Differences).to_string(), r#"{"decode": {"max_bs": 32, "bs": [1, 32]}}"#);
    // A bad entry is reported alone: what the list's largest entry would be is not known.
    let error = from_json(r#"{"decode": {"max_bs": 64, "bs": [1, "64"]}}"#).expect_err("a bad entry");
    assert_eq!(error.issues.len(), 1);
}

#[test]
fn null_never_wipes_a_lower_value() {
    let config = from_json(r#"{"decode": {"max_bs": 256}}"#).expect("good");
    let higher = Value::from_json(r#"{"backend": "full", "max_bs": null, "bs": null}"#).expect("json");
    let merged = config.with_phase(Phase::Decode, &higher, &SOURCE).expect("good");
    assert_eq!(merged, config);
    assert_eq!(merged.explicit_keys(), ["decode.backend", "decode.max_bs"]);
    let nothing = from_json(r#"{"decode": null, "prefill": null, "padding": null}"#).expect("null is not given");
    assert_eq!((&nothing, nothing.explicit_keys()), (&Config::default(), vec![]));
}

#[test]
fn a_compiler_beside_another_backend_is_kept_and_warned_of() {
    let config = from_json(r#"{"decode": {"tc_compiler": "inductor"}}"#).expect("a warning is no error");
    assert_eq!(config.to_value(Export::Differences).to_string(), r#"{"decode": {"tc_compiler": "inductor"}}"#);
    let warnings = config.warnings();
    assert_eq!(warnings.len(), 1);
    assert_snapshot!(warnings[0], @r#"
    decode.tc_compiler (a test): `"inductor"` has no effect beside the backend `full` [compiler-unused]
      hint: set `backend` to `tc_piecewise`, or leave `tc_compiler` out
    "#);
    let piecewise = Value::from_json(r#"{"backend": "tc_piecewise"}"#).expect("json");
    assert_eq!(config.with_phase(Phase::Decode, &piecewise, &SOURCE).expect("good").warnings(), []);
    assert_eq!(Config::default().warnings(), []);
    let compiler = r#"{"tc_compiler": "inductor"}"#;
    let both = from_json(&format!(r#"{{"decode": {compiler}, "prefill": {compiler}}}"#)).expect("good");
    let paths: Vec<String> = both.warnings().into_iter().map(|issue| issue.path).collect();
    assert_eq!(paths, ["decode.tc_compiler"], "a document names the compiler of each phase apart");
}

#[test]
fn a_phase_in_a_configuration_knows_its_backend() {
    let text = |phase| format!("{:?}", Config::default().phase(phase).get("backend"));
    assert_snapshot!(text(Phase::Decode), @r#"Some(Word("full"))"#);
    assert_snapshot!(text(Phase::Prefill), @r#"Some(Word("tc_piecewise"))"#);
    assert_eq!(PhaseConfig::default().get("backend"), None);
    assert_eq!(Config::default().phase(Phase::Decode).explicit_keys(), Vec::<&str>::new());
}

#[test]
fn the_default_export_names_every_key_of_the_table() {
    assert_snapshot!(Config::default().to_value(Export::Full), @r#"{"decode": {"backend": "full", "max_bs": null, "bs": null, "tc_compiler": "eager"}, "prefill": {"backend": "tc_piecewise", "max_bs": null, "bs": null, "tc_compiler": "eager"}, "padding": true}"#);
    assert_snapshot!(Config::default().to_value(Export::Differences), @"{}");
}

fn from_file(name: &str, content: &[u8]) -> Result<Config, ConfigError> {
    Config::from_file(name, content)
}

#[test]
fn files_are_json_or_toml_by_suffix() {
    let json = from_file("a.JSON", b"\xef\xbb\xbf{\"decode\": {\"bs\": [1, 2]}, \"padding\": false}").expect("good");
    let toml = from_file("dir/a.toml", b"padding = false\n[decode]\nbs = [2, 1]\n").expect("good");
    assert_eq!(json, toml);
    let message = |name: &str, content: &[u8]| from_file(name, content).expect_err("not good").to_string();
    assert_snapshot!(message("conf.yaml", b"decode:"), @r#"
    conf.yaml: `"conf.yaml"` is a file of unknown type [unknown-file-type]
      hint: use a name that ends in `.json` or `.toml`
    "#);
    assert_snapshot!(message("conf", b"{}"), @r#"
    conf: `"conf"` is a file of unknown type [unknown-file-type]
      hint: use a name that ends in `.json` or `.toml`
    "#);
    assert_snapshot!(message("conf.json", b"{\"decode\": \xff}"), @"conf.json: byte 11 starts no UTF-8 character [not-utf8]");
    assert_snapshot!(message("conf.json", b"{\"decode\": }"), @"conf.json: line 1, column 12: expected value [json-syntax]");
    assert_snapshot!(message("conf.toml", b"[decode]\nmax_bs = 1\nmax_bs = 2\n"), @"conf.toml: line 3, column 1: duplicate key [toml-syntax]");
    assert_snapshot!(message("conf.toml", b"[decode]\nmax_bs = \n"), @"conf.toml: line 2, column 10: string values must be quoted, expected literal string [toml-syntax]");
    assert_snapshot!(message("conf.toml", b"[decode]\nmax_bs = nan\nbs = [1979-05-27]\n"), @r#"
    2 problems in `conf.toml`:
    decode.max_bs: `NaN` is a float, not an integer from 1 to 1048576 [wrong-type]
    decode.bs[0]: `1979-05-27` is a date or time, not an integer from 1 to 1048576 [wrong-type]
    "#);
}

#[test]
fn a_date_or_time_is_shown_as_one() {
    let toml = "padding = 07:32:00\n[decode]\nmax_bs = 1979-05-27T07:32:00Z\nbs = 1979-05-27T07:32:00.5\n[prefil]\n\
                x = {y = [1979-05-27]}\n";
    assert_snapshot!(from_file("a.toml", toml.as_bytes()).expect_err("not good"), @r#"
    4 problems in `a.toml`:
    padding: `07:32:00` is a date or time, not `true` or `false` [wrong-type]
    decode.max_bs: `1979-05-27T07:32:00Z` is a date or time, not an integer from 1 to 1048576 [wrong-type]
    decode.bs: `1979-05-27T07:32:00.5` is a date or time, not a list of integers from 1 to 1048576 [wrong-type]
    prefil: no such phase; the phases are `decode` and `prefill` [unknown-phase]
      hint: did you mean `prefill`?
    "#);
    let nested = Value::from_toml(toml).expect("toml").to_string();
    assert!(nested.ends_with(r#""prefil": {"x": {"y": [1979-05-27]}}}"#), "{nested}");
    // What the parser calls a date is nothing special in another format.
    let json = r#"{"padding": {"$__toml_private_datetime": "1979-05-27"}}"#;
    assert_eq!(Value::from_json(json).expect("json").to_string(), json);
}

#[test]
fn routes_agree_on_verdict_code_and_message() {
    let values = ["\"four\"", "\"4\"", "-1", "0", "true", "1.5", "[]", "[true]", "7", "[3, 1]", "{}", "\"full\""];
    for key in KEYS.iter().map(|key| key.path) {
        for value in values {
            let (path, toml) = (key.split('.').collect::<Vec<_>>(), format!("{key} = {value}"));
            let json = match path[..] {
                [phase, name] => format!(r#"{{"{phase}": {{"{name}": {value}}}}}"#),
                _ => format!(r#"{{"{key}": {value}}}"#),
            };
            let (json, toml) = (from_json(&json), Value::from_toml(&toml).expect("toml"));
            assert_eq!(json, from_value(&toml), "{key} = {value}");
        }
    }
}

#[test]
fn a_long_value_does_not_drown_its_message() {
    let error = refused(&format!(r#"{{"padding": "{}"}}"#, "é".repeat(500)));
    assert!(error.chars().count() < 200, "{error}");
}

#[test]
fn buckets_take_what_a_phase_says() {
    let config = from_json(r#"{"decode": {"bs": [1, 3, 200]}}"#).expect("good");
    let phase = config.phase(Phase::Decode);
    let value = |name: &str| phase.get(name).map_or(Value::Null, Value::from);
    let arguments =
        Arguments { maximum: value("max_bs"), bs: value("bs"), limit: Value::Int(100), ..Arguments::default() };
    assert_eq!(Buckets::decode(&arguments).expect("good").sizes(), [1, 3, 100]);
}

#[test]
fn a_word_is_taken_for_one_that_differs_by_a_third_of_its_letters_and_one_more() {
    let hint = |document: &str| {
        let error = Config::from_json(document, &Source::Config("from_json".into())).expect_err("it is wrong");
        error.issues[0].hint().unwrap_or_default()
    };
    for (word, expected) in [("fulllll", "did you mean `full`?"), ("fullllll", "")] {
        assert_eq!(hint(&format!(r#"{{"decode": {{"backend": "{word}"}}}}"#)), expected);
    }
    for (key, expected) in [("b", "did you mean `bs`?"), ("q", "")] {
        assert_eq!(hint(&format!(r#"{{"decode": {{"{key}": [1]}}}}"#)), expected);
    }
}
