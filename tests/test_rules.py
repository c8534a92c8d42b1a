"""Rules over an engine's facts: the four cases, the ready set, and what goes wrong with facts and rules."""

from __future__ import annotations

import pickle
import warnings
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import devicegraph as dg
from devicegraph import FACTS, READY_RULES, ConfigError, CudaGraphConfig, PhaseConfig, Rule, resolve_config

if TYPE_CHECKING:
    import random

#: A value of each fact under which every ready rule that reads nothing else holds.
HOLDS: dict[str, list[Any]] = {
    "all_to_all_backend": ["other"],
    "all_to_all_mode": ["normal"],
    "attention_backend": ["torch_native", "flex_attention", "trtllm_mla"],
    "context_parallel_size": [2],
    "decode_context_parallel_size": [2],
    "device": ["npu", "xpu", "rocm"],
    "disaggregation_role": ["prefill", "decode"],
    "pipeline_parallel_size": [2],
    "quantization": ["gguf"],
}
#: And one under which none holds.
QUIET: dict[str, Any] = {
    **dict.fromkeys(FACTS, False),
    "all_to_all_backend": "none",
    "all_to_all_mode": "low_latency",
    "attention_backend": "flashinfer",
    "context_parallel_size": 1,
    "decode_context_parallel_size": 1,
    "device": "cuda",
    "disaggregation_role": "both",
    "pipeline_parallel_size": 1,
    "quantization": "fp8",
}


def _rule(name: str = "shared", *, hard: bool, phase: str = "prefill", **parts: Any) -> Rule:
    backends = dg.ALLOWED_BACKENDS_PER_PHASE[phase]
    default: dict[str, Any] = {"backends": backends, "when": lambda facts: facts["shared"], "reason": "it is shared"}
    return Rule(name, phase, hard=hard, **(default | parts))


def test_a_default_backend_gives_way_to_a_soft_and_to_a_hard_rule_and_says_why() -> None:
    for hard in (False, True):
        config = resolve_config(CudaGraphConfig(), {"shared": True}, [_rule(hard=hard)])
        assert config.prefill.backend == "disabled"
        assert config.prefill.reason == "it is shared (rule `shared`)"
        assert config.explicit_keys == ()
        assert config.decode == CudaGraphConfig().decode
        assert config.decode.reason is None
        # The reason goes where the configuration goes, and where the phase goes.
        assert pickle.loads(pickle.dumps(config)).prefill.reason == config.prefill.reason
        assert CudaGraphConfig(prefill=config.prefill).prefill.reason == config.prefill.reason
        assert CudaGraphConfig(prefill=config.prefill).explicit_keys == ()


def test_an_explicit_backend_stays_with_a_warning_or_is_an_error_that_names_both() -> None:
    chosen = dg.config_from_options(cuda_graph_backend_prefill="tc_piecewise")
    assert chosen == CudaGraphConfig()  # explicit though it is the default
    kept = resolve_config(chosen, {"shared": True}, [_rule(hard=False)])
    assert kept == chosen
    (warning,) = kept.warnings
    assert (warning.path, warning.value, warning.code) == ("prefill.backend", "tc_piecewise", "rule-outweighed")
    assert pickle.loads(pickle.dumps(kept)).warnings == kept.warnings
    with pytest.raises(ConfigError) as raised:
        resolve_config(chosen, {"shared": True}, [_rule(hard=True)])
    assert str(raised.value) == (
        'prefill.backend (--cuda-graph-backend-prefill): `"tc_piecewise"` cannot be used: it is shared (rule `shared`) '
        "[rule-forbids]\n"
        "  hint: leave `backend` out, or set it to `disabled`"
    )


def test_disabled_by_a_person_has_no_rule_and_no_reason() -> None:
    config = CudaGraphConfig(prefill=PhaseConfig(backend="disabled"))
    resolved = resolve_config(config, {"shared": True}, [_rule(hard=True)])
    assert resolved == config
    assert resolved.prefill.reason is None
    assert resolved.warnings == ()


def test_the_warning_of_a_kept_backend_is_said_when_the_configuration_becomes_active() -> None:
    config = CudaGraphConfig(prefill=PhaseConfig(backend="breakable"))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        kept = resolve_config(config, {"shared": True}, [_rule(hard=False)])
    try:
        with pytest.warns(UserWarning, match=r"`\"breakable\"` is used against advice: it is shared"):
            dg.set_active_config(kept)
    finally:
        dg.set_active_config(None)


facts = st.fixed_dictionaries(
    {}, optional={name: st.sampled_from([*HOLDS.get(name, [True]), QUIET[name]]) for name in FACTS}
)
configs = st.fixed_dictionaries(
    {},
    optional={
        f"cuda_graph_backend_{phase}": st.sampled_from(dg.ALLOWED_BACKENDS_PER_PHASE[phase]) for phase in dg.Phase.ALL
    },
).map(lambda options: dg.config_from_options(**options))


def _outcome(config: CudaGraphConfig, facts: dict[str, Any], rules: list[Rule]) -> str:
    try:
        return str(resolve_config(config, facts, rules).explain())
    except ConfigError as error:
        return str(error)


@given(configs, facts, st.randoms())
def test_resolving_is_idempotent_and_the_order_of_rules_does_not_matter(
    config: CudaGraphConfig, facts: dict[str, Any], order: random.Random
) -> None:
    shuffled = list(READY_RULES)
    order.shuffle(shuffled)
    outcome = _outcome(config, facts, list(READY_RULES))
    assert _outcome(config, facts, shuffled) == outcome
    try:
        once = resolve_config(config, facts)
    except ConfigError:
        return
    assert str(resolve_config(once, facts).explain()) == outcome
    # Under other facts it is as if the first had never been.
    assert str(resolve_config(once, {}).explain()) == str(config.explain())


@given(configs, facts)
def test_a_resolved_phase_has_a_backend_that_no_hard_rule_is_against(
    config: CudaGraphConfig, facts: dict[str, Any]
) -> None:
    against = [rule for rule in READY_RULES if rule.hard and rule.holds(facts)]
    forbidden = {
        f"{rule.phase}.backend"
        for rule in against
        if config[rule.phase].backend in rule.backends and f"{rule.phase}.backend" in config.explicit_keys
    }
    if forbidden:
        with pytest.raises(ConfigError) as raised:
            resolve_config(config, facts)
        assert {(issue.path, issue.code) for issue in raised.value.issues} == {
            (path, "rule-forbids") for path in forbidden
        }
        return
    resolved = resolve_config(config, facts)
    assert all(resolved[rule.phase].backend not in rule.backends for rule in against)
    for phase in dg.Phase.ALL:
        kept = resolved[phase].backend == config[phase].backend
        assert kept or resolved[phase].reason is not None


def test_ready_rules_are_off_without_facts_and_under_quiet_ones() -> None:
    for facts in ({}, dict.fromkeys(FACTS), QUIET):
        assert [rule.name for rule in READY_RULES if rule.holds(facts)] == []
        assert resolve_config(CudaGraphConfig(), facts).warnings == ()


@pytest.mark.parametrize("rule", READY_RULES, ids=lambda rule: f"{rule.phase}-{rule.name}")
def test_each_ready_rule_holds_under_a_fact_of_the_table_and_disables_its_phase_with_its_reason(rule: Rule) -> None:
    single = [{name: value} for name in FACTS for value in HOLDS.get(name, [True])]
    situation = next(filter(rule.holds, [*single, {"diffusion_lm": True, "device": "rocm"}]))
    for backend in rule.backends:
        # As an engine's default, which no person named.
        base = CudaGraphConfig(**{rule.phase: PhaseConfig(backend=backend)})
        if rule.hard:
            with pytest.raises(ConfigError, match="rule-forbids"):
                resolve_config(base, situation, [rule])
        else:
            assert resolve_config(base, situation, [rule]).warnings
    if CudaGraphConfig()[rule.phase].backend in rule.backends:
        assert (
            resolve_config(CudaGraphConfig(), situation, [rule])[rule.phase].reason
            == f"{rule.reason} (rule `{rule.name}`)"
        )


def test_every_fact_of_the_table_is_read_and_none_else() -> None:
    read: set[str] = set()

    class Recording(dict[str, Any]):
        def __getitem__(self, name: str) -> Any:
            read.add(name)
            return {**QUIET, "diffusion_lm": True}[name]

    for rule in READY_RULES:
        rule.when(Recording())
    assert read == set(FACTS)


def test_a_fact_that_is_missing_or_none_turns_off_the_rule_that_indexes_it() -> None:
    rule = _rule(hard=True)
    assert not rule.holds({})
    assert not rule.holds({"shared": None})
    assert not rule.holds({"shared": 0})
    assert rule.holds({"shared": 1})
    assert _rule(hard=True, when=lambda facts: facts.get("shared", True)).holds({})
    assert _rule(hard=True, when=lambda facts: "other" in facts and len(list(facts)) == 1).holds({"other": 1})


def test_a_rule_that_fails_is_named_and_its_error_chained() -> None:
    rule = _rule("broken", hard=False, when=lambda facts: facts["shared"] > 1)
    with pytest.raises(ConfigError) as raised:
        resolve_config(CudaGraphConfig(), {"shared": "two"}, [rule])
    assert str(raised.value).startswith("rule `broken` of prefill failed: TypeError: '>' not supported")
    assert raised.value.code == "rule-failed"
    assert isinstance(raised.value.__cause__, TypeError)


def test_a_fact_that_no_rule_reads_is_warned_of_where_it_is_nearly_one() -> None:
    with pytest.warns(UserWarning, match=r"no rule reads the fact `pipline_parallel_size`; did you mean `pipeline_par"):
        resolve_config(CudaGraphConfig(), {"pipline_parallel_size": 2})
    assert resolve_config(CudaGraphConfig(), {"something_else": 2}) == CudaGraphConfig()


def test_the_parts_of_a_rule_are_checked_at_once_when_it_is_made() -> None:
    with pytest.raises(ConfigError) as raised:
        Rule("", "prefil", ("ful",), lambda facts: True, "yes", "")  # type: ignore[arg-type]
    assert [issue.path for issue in raised.value.issues] == ["name", "phase", "backends[0]", "hard", "reason"]
    with pytest.raises(ConfigError, match="when: `3` is not a function of the facts"):
        _rule(hard=True, when=3)
    with pytest.raises(ConfigError, match="backend-not-allowed"):
        _rule(hard=True, backends=("full",))
    assert _rule(hard=True, backends=["breakable"]).backends == ("breakable",)
    with pytest.raises(ConfigError, match="two rules have the name"):
        resolve_config(CudaGraphConfig(), {}, [_rule(hard=True), _rule(hard=False)])
    both = [_rule(hard=True), _rule(hard=True, phase="decode")]
    assert resolve_config(CudaGraphConfig(), {"shared": True}, both).decode.backend == "disabled"
