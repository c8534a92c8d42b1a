//! Every sentence that a configuration or a request for buckets can be refused with, in one table.

#![expect(clippy::too_many_lines, reason = "one table")]

use std::collections::BTreeSet;

use devicegraph::buckets::Reason;
use devicegraph::config::{COMPILERS, Phase};
use devicegraph::document::{Position, Value};
use devicegraph::error::{Expected, Issue, Problem};
use insta::assert_snapshot;

/// A number for each kind of problem. Whoever adds a kind is stopped here by the compiler, and below by the test until
/// there is a sample of it.
fn number(problem: &Problem) -> usize {
    match problem {
        Problem::JsonSyntax { .. } => 0,
        Problem::TomlSyntax { .. } => 1,
        Problem::NotUtf8 { .. } => 2,
        Problem::UnknownFileType => 3,
        Problem::WrongType(expected) => 4 + number_of_type(expected),
        Problem::OutOfRange => 15,
        Problem::EmptyList => 16,
        Problem::UnknownBackend { .. } => 17,
        Problem::BackendNotAllowed { .. } => 18,
        Problem::UnknownCompiler => 19,
        Problem::UnknownKey { .. } => 20,
        Problem::MisplacedKey => 21,
        Problem::UnknownPhase => 22,
        Problem::RepeatedKey => 23,
        Problem::SizesDisagree { .. } => 24,
        Problem::CompilerUnused { .. } => 25,
        Problem::UnknownOption => 26,
        Problem::OptionsDisagree { .. } => 27,
        Problem::RuleForbids { .. } => 28,
        Problem::RuleOutweighed { .. } => 29,
        Problem::RepeatedRule => 30,
        Problem::NoMaximum { .. } => 31,
        Problem::NoBytesPerSize => 32,
        Problem::NoBytesOfSize => 33,
        Problem::NegativeCount => 34,
        Problem::UnknownPreset => 35,
        Problem::StepTooLarge { .. } => 36,
        Problem::LimitBelowAlignment { .. } => 38,
        Problem::NoSteps => 39,
        Problem::TooManySizes { .. } => 40,
        Problem::BudgetTooSmall { .. } => 41,
    }
}

fn number_of_type(expected: &Expected) -> usize {
    match expected {
        Expected::Word(_) => 0,
        Expected::Size => 1,
        Expected::Sizes => 2,
        Expected::Flag => 3,
        Expected::Object(_) => 4,
        Expected::Text => 5,
        Expected::Words => 6,
        Expected::State => 7,
        Expected::Count => 8,
        Expected::BytesPerSize => 9,
        Expected::Integer => 10,
        Expected::Histogram => 33,
    }
}

fn text(text: &str) -> Value {
    Value::Text(text.into())
}

/// One sample of each kind, and more where a hint depends on the value.
fn samples() -> Vec<Issue> {
    let position = Position { line: 3, column: 14 };
    let decode = Phase::Decode.backends();
    let prefill = Phase::Prefill.backends();
    let keys = || vec!["backend", "max_bs", "bs", "tc_compiler"];
    let (rule, reason) =
        (|| "pipeline-parallel".to_owned(), || "what stages hand over has sizes of its own".to_owned());
    let backend = "prefill.backend";
    let samples = [
        ("", Value::Null, Problem::JsonSyntax { position, reason: "expected `:`".into() }),
        ("", Value::Null, Problem::JsonSyntax { position, reason: "key must be a string".into() }),
        ("", Value::Null, Problem::TomlSyntax { position, reason: "duplicate key".into() }),
        ("", Value::Null, Problem::NotUtf8 { offset: 11 }),
        ("", text("engine.yaml"), Problem::UnknownFileType),
        ("decode.tc_compiler", Value::Int(1), Problem::WrongType(Expected::Word(&COMPILERS))),
        ("decode.max_bs", text("four"), Problem::WrongType(Expected::Size)),
        ("decode.max_bs", text("4"), Problem::WrongType(Expected::Size)),
        ("decode.bs", Value::Int(4), Problem::WrongType(Expected::Sizes)),
        ("decode.max_bs", Value::Date("1979-05-27".into()), Problem::WrongType(Expected::Size)),
        ("raw", Value::Float(1.5), Problem::WrongType(Expected::Integer)),
        ("padding", Value::Int(1), Problem::WrongType(Expected::Flag)),
        ("decode", Value::List(vec![]), Problem::WrongType(Expected::Object(keys()))),
        ("decode", text("disabled"), Problem::WrongType(Expected::Object(keys()))),
        ("reason", text(""), Problem::WrongType(Expected::Text)),
        ("backends", Value::List(vec![]), Problem::WrongType(Expected::Words)),
        ("", Value::Null, Problem::WrongType(Expected::State)),
        ("max_bytes", Value::Float(1.5), Problem::WrongType(Expected::Count)),
        ("bytes_per_size", text("1 GiB"), Problem::WrongType(Expected::BytesPerSize)),
        ("decode.bs[2]", Value::Int(0), Problem::OutOfRange),
        ("decode.bs", Value::List(vec![]), Problem::EmptyList),
        ("decode.backend", text("ful"), Problem::UnknownBackend { allowed: decode }),
        ("decode.backend", text("cuda"), Problem::UnknownBackend { allowed: decode }),
        (backend, text("full"), Problem::BackendNotAllowed { allowed: prefill }),
        ("decode.tc_compiler", text("inducter"), Problem::UnknownCompiler),
        ("decode.maxbs", Value::Int(4), Problem::UnknownKey { known: keys() }),
        ("decode.prefill", Value::Null, Problem::UnknownKey { known: keys() }),
        ("max_bs", Value::Int(4), Problem::MisplacedKey),
        ("prefil", Value::Object(vec![]), Problem::UnknownPhase),
        ("decode.bs", Value::Int(4), Problem::RepeatedKey),
        ("decode.max_bs", Value::Int(64), Problem::SizesDisagree { largest: 32 }),
        ("decode.tc_compiler", text("inductor"), Problem::CompilerUnused { backend: "full" }),
        ("cuda_graph_maxbs", Value::Int(4), Problem::UnknownOption),
        (
            backend,
            text("breakable"),
            Problem::OptionsDisagree { other: "--disable-cuda-graph".into(), other_value: text("disabled") },
        ),
        (backend, text("breakable"), Problem::RuleForbids { rule: rule(), reason: reason() }),
        (backend, text("breakable"), Problem::RuleOutweighed { rule: rule(), reason: reason() }),
        ("prefill", text("lora"), Problem::RepeatedRule),
        ("max_bs", Value::Null, Problem::NoMaximum { argument: "max_bs" }),
        ("max_bytes", Value::Int(1 << 30), Problem::NoBytesPerSize),
        ("bytes_per_size[24]", Value::Null, Problem::NoBytesOfSize),
        ("max_bytes", Value::Int(-1), Problem::NegativeCount),
        ("preset", text("dens"), Problem::UnknownPreset),
        ("alignment", Value::Int(48), Problem::StepTooLarge { step: 1 << 30 }),
        ("histogram", Value::List(vec![]), Problem::WrongType(Expected::Histogram)),
        ("limit", Value::Int(6), Problem::LimitBelowAlignment { alignment: 8 }),
        ("histogram", Value::Object(vec![]), Problem::NoSteps),
        ("histogram", Value::Null, Problem::TooManySizes { sizes: 100_000, graphs: 5000 }),
        ("bytes", Value::Int(5), Problem::BudgetTooSmall { size: 64, bytes: 7 << 20 }),
    ];
    let issue = |(path, value, problem): (&str, Value, Problem)| Issue {
        path: path.into(),
        value,
        source: matches!(problem, Problem::OptionsDisagree { .. }).then(|| "--enable-breakable-cuda-graph".into()),
        problem,
    };
    samples.into_iter().map(issue).collect()
}

fn reasons() -> [(u32, Reason); 5] {
    [
        (500, Reason::NotAligned(8)),
        (3, Reason::NotAligned(8)),
        (900, Reason::OverLimit(600)),
        (24, Reason::OverBudget(3)),
        (24, Reason::OverBytes(3 << 29)),
    ]
}

#[test]
fn there_is_a_sample_of_every_problem() {
    let numbers: BTreeSet<usize> = samples().iter().map(|issue| number(&issue.problem)).collect();
    assert_eq!(numbers, (0..42).collect());
    // The same for the reasons why a size is dropped.
    let kinds: BTreeSet<u8> = reasons()
        .iter()
        .map(|(_, reason)| match reason {
            Reason::NotAligned(_) => 0,
            Reason::OverLimit(_) => 1,
            Reason::OverBudget(_) => 2,
            Reason::OverBytes(_) => 3,
        })
        .collect();
    assert_eq!(kinds, (0..4).collect());
}

#[test]
fn every_sentence_reads_as_in_this_table() {
    let allowed = |issue: &Issue| issue.allowed().map_or(String::new(), |allowed| format!("\n  allowed: {allowed}"));
    let issues = samples().into_iter().map(|issue| format!("{issue}{}", allowed(&issue)));
    let dropped = reasons().into_iter().map(|(size, reason)| {
        let hint = reason.hint(size).map_or(String::new(), |hint| format!("\n  hint: {hint}"));
        format!("{size} is {reason} [{}]{hint}", reason.code())
    });
    assert_snapshot!(issues.chain(dropped).collect::<Vec<_>>().join("\n"), @r##"
    line 3, column 14: expected `:` [json-syntax]
    line 3, column 14: key must be a string [json-syntax]
      hint: put names and text in double quotes
    line 3, column 14: duplicate key [toml-syntax]
    byte 11 starts no UTF-8 character [not-utf8]
    `"engine.yaml"` is a file of unknown type [unknown-file-type]
      hint: use a name that ends in `.json` or `.toml`
      allowed: a name that ends in `.json` or `.toml`
    decode.tc_compiler: `1` is an integer, not one of `eager` or `inductor` [wrong-type]
      allowed: one of `eager` or `inductor`
    decode.max_bs: `"four"` is a string, not an integer from 1 to 1048576 [wrong-type]
      allowed: an integer from 1 to 1048576
    decode.max_bs: `"4"` is a string, not an integer from 1 to 1048576 [wrong-type]
      hint: write 4, without quotes
      allowed: an integer from 1 to 1048576
    decode.bs: `4` is an integer, not a list of integers from 1 to 1048576 [wrong-type]
      hint: write `[4]`
      allowed: a list of integers from 1 to 1048576
    decode.max_bs: `1979-05-27` is a date or time, not an integer from 1 to 1048576 [wrong-type]
      allowed: an integer from 1 to 1048576
    raw: `1.5` is a float, not an integer [wrong-type]
      allowed: an integer
    padding: `1` is an integer, not `true` or `false` [wrong-type]
      allowed: `true` or `false`
    decode: `[]` is a list, not an object with the keys `backend`, `max_bs`, `bs` and `tc_compiler` [wrong-type]
      allowed: an object with the keys `backend`, `max_bs`, `bs` and `tc_compiler`
    decode: `"disabled"` is a string, not an object with the keys `backend`, `max_bs`, `bs` and `tc_compiler` [wrong-type]
      hint: write `{"backend": "disabled"}`
      allowed: an object with the keys `backend`, `max_bs`, `bs` and `tc_compiler`
    reason: `""` is a string, not text with words in it [wrong-type]
      allowed: text with words in it
    backends: `[]` is a list, not a list of at least one backend [wrong-type]
      allowed: a list of at least one backend
    `null` is null, not the state of a configuration, as pickle keeps it [wrong-type]
      allowed: the state of a configuration, as pickle keeps it
    max_bytes: `1.5` is a float, not an integer of at least 0 [wrong-type]
      allowed: an integer of at least 0
    bytes_per_size: `"1 GiB"` is a string, not an integer, a mapping from sizes to integers, or a function of the size [wrong-type]
      allowed: an integer, a mapping from sizes to integers, or a function of the size
    decode.bs[2]: `0` is not an integer from 1 to 1048576 [out-of-range]
      allowed: an integer from 1 to 1048576
    decode.bs: `[]` names no size [empty-list]
      hint: to run this phase without graphs, set its `backend` to `disabled`
      allowed: a list of integers from 1 to 1048576
    decode.backend: `"ful"` is not one of `full`, `breakable`, `tc_piecewise` or `disabled` [unknown-backend]
      hint: did you mean `full`?
      allowed: one of `full`, `breakable`, `tc_piecewise` or `disabled`
    decode.backend: `"cuda"` is not one of `full`, `breakable`, `tc_piecewise` or `disabled` [unknown-backend]
      allowed: one of `full`, `breakable`, `tc_piecewise` or `disabled`
    prefill.backend: `"full"` needs the same shapes on every replay, and those of this phase vary [backend-not-allowed]
      hint: use `breakable`, `tc_piecewise` or `disabled`
      allowed: one of `breakable`, `tc_piecewise` or `disabled`
    decode.tc_compiler: `"inducter"` is not one of `eager` or `inductor` [unknown-compiler]
      hint: did you mean `inductor`?
      allowed: one of `eager` or `inductor`
    decode.maxbs: no such key; the keys here are `backend`, `max_bs`, `bs` and `tc_compiler` [unknown-key]
      hint: did you mean `max_bs`?
      allowed: one of `backend`, `max_bs`, `bs` or `tc_compiler`
    decode.prefill: no such key; the keys here are `backend`, `max_bs`, `bs` and `tc_compiler` [unknown-key]
      hint: write it outside the phase; a mapping of phases goes to `CudaGraphConfig.from_dict`
      allowed: one of `backend`, `max_bs`, `bs` or `tc_compiler`
    max_bs: a key of a phase, outside a phase [unknown-key]
      hint: write it inside `decode` or `prefill`
    prefil: no such phase; the phases are `decode` and `prefill` [unknown-phase]
      hint: did you mean `prefill`?
      allowed: one of `decode` or `prefill`
    decode.bs: the key is given more than once [repeated-key]
      hint: keep one of them
    decode.max_bs: `64` is not the largest entry of `bs`, 32 [sizes-disagree]
      hint: leave `max_bs` out, or set it to 32, or add 64 to `bs`
      allowed: 32
    decode.tc_compiler: `"inductor"` has no effect beside the backend `full` [compiler-unused]
      hint: set `backend` to `tc_piecewise`, or leave `tc_compiler` out
    cuda_graph_maxbs: no such option [unknown-option]
      hint: did you mean `cuda_graph_max_bs`?
    prefill.backend (--enable-breakable-cuda-graph): `"breakable"` contradicts `--disable-cuda-graph`, which says `"disabled"` [options-disagree]
      hint: keep one of them
    prefill.backend: `"breakable"` cannot be used: what stages hand over has sizes of its own (rule `pipeline-parallel`) [rule-forbids]
      hint: leave `backend` out, or set it to `disabled`
    prefill.backend: `"breakable"` is used against advice: what stages hand over has sizes of its own (rule `pipeline-parallel`) [rule-outweighed]
      hint: leave `backend` out, and the rule decides
    prefill: two rules have the name `"lora"` [repeated-rule]
      hint: give each rule of a phase a name of its own
    max_bs: nothing says how large the largest bucket is [no-maximum]
      hint: give `max_bs`, `bs` or `limit`
    max_bytes: nothing says how many bytes a graph takes [no-bytes]
      hint: give `bytes_per_size`
    bytes_per_size[24]: nothing says how many bytes the graph of this size takes [no-bytes]
    max_bytes: `-1` is not an integer of at least 0 [out-of-range]
      allowed: an integer of at least 0
    preset: `"dens"` is not one of `default` or `dense` [unknown-preset]
      hint: did you mean `dense`?
      allowed: one of `default` or `dense`
    alignment: every size would have to be a multiple of 1073741824, and the largest is 1048576 [out-of-range]
    histogram: `[]` is a list, not a mapping from live sizes to numbers of steps [wrong-type]
      allowed: a mapping from live sizes to numbers of steps
    limit: no multiple of the alignment 8 is within `6` [limit-below-alignment]
    histogram: `{}` counts no step [empty-histogram]
    histogram: lists of up to 5000 of 100000 sizes are too many to choose from in memory [too-many-sizes]
      hint: ask for fewer graphs, or set an `alignment`
    bytes: `5` is less than the graph of the largest size, 64, takes: 7340032 [budget-too-small]
      hint: lower `maximum`, or leave the graphs more memory
    500 is not a multiple of the alignment 8 [bucket-not-aligned]
      hint: use 496 or 504
    3 is not a multiple of the alignment 8 [bucket-not-aligned]
      hint: use 8
    900 is above the limit 600 [bucket-over-limit]
    24 is beyond the budget of 3 graphs [bucket-over-budget]
    24 is beyond the budget of 1.5 GiB [bucket-over-budget]
    "##);
}

#[test]
fn the_documentation_lists_every_code_and_no_other() {
    let page = concat!(env!("CARGO_MANIFEST_DIR"), "/docs/configuration.md");
    let page = std::fs::read_to_string(page).expect("the page is there");
    let (_, codes) = page.split_once("## Codes").expect("the page has the table");
    let listed: BTreeSet<&str> = codes.lines().filter_map(|line| line.strip_prefix("| `")?.split('`').next()).collect();
    let samples = samples();
    let issues = samples.iter().map(Issue::code);
    let codes: BTreeSet<&str> = issues.chain(reasons().iter().map(|(_, reason)| reason.code())).collect();
    assert_eq!(listed, codes);
}
