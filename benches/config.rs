//! Reading and resolving a configuration. The budget is 20 us for each: an engine does it at start, a tool for thousands.

#![expect(clippy::expect_used, reason = "a benchmark")]

use std::hint::black_box;

use criterion::{Criterion, criterion_group, criterion_main};
use devicegraph::config::{Config, Phase};
use devicegraph::document::Value;
use devicegraph::layers::Source;
use devicegraph::rules::Rule;

/// As much as a deployment says: both phases, and lists as long as the default ones.
const TEXT: &str = r#"{
    "decode": {"backend": "full", "max_bs": 256, "bs": [1, 2, 4, 8, 12, 16, 24, 32, 40, 48, 56, 64, 72, 80, 88, 96, 104,
        112, 120, 128, 136, 144, 152, 160, 168, 176, 184, 192, 200, 208, 216, 224, 232, 240, 248, 256]},
    "prefill": {"backend": "tc_piecewise", "tc_compiler": "inductor", "max_bs": 8192},
    "padding": true
}"#;

fn rules() -> Vec<(Rule, bool)> {
    let rule = |i: usize| Rule {
        phase: Phase::ALL[i % 2],
        name: format!("rule-{i}"),
        backends: vec!["breakable", "tc_piecewise"],
        hard: false,
        reason: "what stages hand over has sizes of its own".into(),
    };
    (0..40).map(|i| (rule(i), i % 10 == 0)).collect()
}

fn benches(criterion: &mut Criterion) {
    let source = Source::Config("a benchmark".into());
    let tree = Value::from_json(TEXT).expect("JSON");
    let config = Config::from_value(&tree, &source).expect("good");
    let bad = Value::from_json(&TEXT.replace("\"full\"", "\"ful\"").replace("256]", "\"256\"]")).expect("JSON");
    let options = [
        ("disable_cuda_graph".to_owned(), Value::Bool(true)),
        ("cuda_graph_max_bs_decode".to_owned(), Value::Int(64)),
        ("cuda_graph_config".to_owned(), tree.clone()),
    ];
    let rules = rules();
    criterion.bench_function("parse and validate", |b| b.iter(|| Config::from_json(black_box(TEXT), &source)));
    criterion.bench_function("validate", |b| b.iter(|| Config::from_value(black_box(&tree), &source)));
    criterion.bench_function("refuse", |b| b.iter(|| Config::from_value(black_box(&bad), &source)));
    criterion.bench_function("layer options", |b| b.iter(|| Config::from_options(black_box(&options), None)));
    criterion.bench_function("resolve under 40 rules", |b| b.iter(|| black_box(&config).resolve(&rules)));
    criterion.bench_function("explain", |b| b.iter(|| black_box(&config).explain().to_string()));
}

criterion_group!(all, benches);
criterion_main!(all);
