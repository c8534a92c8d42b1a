//! Bytes that nobody meant as a configuration: never a panic, and what is accepted reads back.
//!
//! Inputs are mutated from a few seeds. One that is judged in a way not seen before (another set of codes, or of keys
//! that it names) becomes a seed itself, so that the search goes deeper than single mistakes. Without
//! `DEVICEGRAPH_FUZZ_SECONDS` it is a fixed number of rounds and the same on every machine; with it, as in CI, it goes
//! on for that long.

#![expect(clippy::expect_used, clippy::print_stdout, reason = "a test, and what a failed run leaves to read")]

use std::collections::HashSet;
use std::panic::{catch_unwind, resume_unwind};
use std::time::{Duration, Instant};

use devicegraph::buckets::{Arguments, Buckets};
use devicegraph::config::{Config, Export, Phase};
use devicegraph::document::Value;
use devicegraph::error::ConfigError;
use devicegraph::layers::Source;
use devicegraph::options::OPTIONS;
use devicegraph::rules::Rule;

const ROUNDS: usize = 6_000;

const SEEDS: [&str; 9] = [
    r#"{"decode": {"backend": "full", "max_bs": 64, "bs": [1, 2, 64]}, "prefill": null, "padding": true}"#,
    r#"{"prefill": {"backend": "tc_piecewise", "tc_compiler": "inductor", "bs": [4, 8]}, "padding": false}"#,
    r#"{"decode": {"max_bs": null, "bs": null}, "decode": {}}"#,
    r#"{"decode": {"bs": [1048576, 1.5, -1, "4", true, null, {}]}}"#,
    "padding = false\n[decode]\nbs = [1, 2, 4]\nmax_bs = 4\n[prefill]\nbackend = \"breakable\"\n",
    "[decode]\nmax_bs = 1979-05-27\nbs = [nan, inf, 0x10]\n",
    "decode.max_bs = 8\nprefill = { backend = 'disabled' }\n",
    "\u{feff}{}",
    "[[], []]",
];

/// What a mutation may write in one go.
const WORDS: [&str; 24] = [
    "decode",
    "prefill",
    "padding",
    "backend",
    "max_bs",
    "bs",
    "tc_compiler",
    "full",
    "disabled",
    "null",
    "true",
    "64",
    "1e999",
    "-0",
    "9223372036854775808",
    "\"",
    "{",
    "}",
    "[",
    "]",
    ":",
    ",",
    "\\u0000",
    "é",
];

/// Splitmix: a few bits of state, and the same numbers everywhere.
struct Numbers(u64);

impl Numbers {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mixed = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ (mixed >> 31)
    }

    fn below(&mut self, end: usize) -> usize {
        usize::try_from(self.next() % end.max(1) as u64).expect("below a usize")
    }

    fn mutated(&mut self, seeds: &[Vec<u8>]) -> Vec<u8> {
        let mut bytes = seeds[self.below(seeds.len())].clone();
        for _ in 0..=self.below(6) {
            let (at, to) = (self.below(bytes.len() + 1), self.below(bytes.len() + 1));
            match self.below(6) {
                0 => bytes.insert(at, self.next().to_le_bytes()[0]),
                1 if at < bytes.len() => bytes[at] ^= 1 << self.below(8),
                2 => drop(bytes.drain(at.min(to)..at.max(to).min(at.min(to) + 12))),
                3 => drop(bytes.splice(at..at, WORDS[self.below(WORDS.len())].bytes())),
                4 => {
                    let piece = bytes[at.min(to)..at.max(to)].to_vec();
                    bytes.splice(at..at, piece);
                }
                _ => {
                    let other = &seeds[self.below(seeds.len())];
                    bytes.truncate(at);
                    bytes.extend_from_slice(&other[self.below(other.len() + 1)..]);
                }
            }
        }
        bytes.truncate(4096);
        bytes
    }
}

/// How an input was judged, in as many words as make one judgement differ from another.
fn judge(result: Result<Config, ConfigError>) -> String {
    match result {
        Ok(config) => {
            reads_back(&config);
            format!("{:?}", config.explicit_keys())
        }
        Err(error) => {
            let (text, mut codes) = (error.to_string(), Vec::new());
            assert!(!error.issues.is_empty());
            for issue in &error.issues {
                assert!(text.contains(&issue.to_string()) && !issue.message().is_empty());
                codes.push(issue.code());
            }
            codes.dedup();
            codes.join(" ")
        }
    }
}

fn reads_back(config: &Config) {
    let source = Source::Config("fuzz".into());
    for kind in [Export::Differences, Export::Explicit, Export::Full] {
        let document = config.to_value(kind);
        assert_eq!(Config::from_value(&document, &source).as_ref(), Ok(config));
        assert_eq!(Config::from_json(&document.to_string(), &source).as_ref(), Ok(config));
    }
    let state = Value::from_json(&config.to_state().to_string()).expect("a state is plain data");
    assert_eq!(Config::from_state(&state).map(|config| config.to_state()), Ok(state));
    assert_eq!(Config::default().with_config(config).explicit_keys(), config.explicit_keys());
    let rule = |phase: Phase, hard| Rule {
        phase,
        name: "fuzz".into(),
        backends: phase.backends().to_vec(),
        hard,
        reason: "fuzz".into(),
    };
    if let Ok(once) = config.resolve(&[(rule(Phase::Decode, true), true), (rule(Phase::Prefill, false), true)]) {
        assert_eq!(once.resolve(&[]).map(|config| config.to_state()), Ok(config.to_state()));
        assert!(once.explain().to_string().lines().count() >= 10);
    }
    for phase in Phase::ALL.map(|phase| config.phase(phase)) {
        let value = |name: &str| phase.get(name).map_or(Value::Null, Value::from);
        let limit = Value::Int(64);
        let arguments = Arguments { maximum: value("max_bs"), bs: value("bs"), limit, ..Arguments::default() };
        let buckets = Buckets::decode(&arguments).expect("what a configuration holds makes buckets");
        assert!(buckets.maximum() <= 64 && buckets.sizes().is_sorted());
    }
}

/// Through every route that takes bytes, or a tree of values.
fn run(bytes: &[u8]) -> String {
    let source = Source::Config("fuzz".into());
    let mut judgement = ["a.json", "a.toml", "a"].map(|name| judge(Config::from_file(name, bytes))).join("|");
    let text = String::from_utf8_lossy(bytes);
    for tree in [Value::from_json(&text), Value::from_toml(&text)].into_iter().flatten() {
        drop(judge(Config::from_value(&tree, &source)));
        drop(judge(Config::from_state(&tree)));
        drop(Rule::from_values(&tree, &tree, &tree, &tree, &tree));
        let options: Vec<_> = OPTIONS.iter().map(|option| (option.flag.to_owned(), tree.clone())).collect();
        judgement.push_str(&judge(Config::from_options(&options, None).map(|(config, _)| config)));
    }
    drop(Value::from_argument(&text));
    judgement
}

#[test]
fn no_bytes_panic_and_what_is_accepted_reads_back() {
    let seconds = std::env::var("DEVICEGRAPH_FUZZ_SECONDS").ok().map(|text| text.parse().expect("a number of seconds"));
    let deadline = seconds.map(|seconds| Instant::now() + Duration::from_secs(seconds));
    let mut seeds: Vec<Vec<u8>> = SEEDS.iter().map(|seed| seed.as_bytes().to_vec()).collect();
    let mut seen: HashSet<String> = seeds.iter().map(|seed| run(seed)).collect();
    let (mut numbers, mut rounds) = (Numbers(1), 0);
    while deadline.map_or(rounds < ROUNDS, |deadline| Instant::now() < deadline) {
        let bytes = numbers.mutated(&seeds);
        let judged = catch_unwind(|| run(&bytes));
        let judgement = judged.unwrap_or_else(|panic| {
            println!("this input panics: {:?}", String::from_utf8_lossy(&bytes));
            resume_unwind(panic)
        });
        if seen.insert(judgement) {
            seeds.push(bytes);
        }
        rounds += 1;
    }
    // The search is worth something only if it finds its way past the first mistake.
    assert!(seen.len() > 40, "{} judgements in {rounds} rounds", seen.len());
    println!("{rounds} rounds, {} judgements", seen.len());
}
