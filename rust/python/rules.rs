//! The parts of a rule, and what rules make of a configuration.

use pyo3::prelude::*;

use super::config::PyConfig;
use super::value::to_value;
use crate::rules::Rule;

fn read(rule: &Bound<'_, PyAny>) -> PyResult<Rule> {
    let part = |name| to_value(&rule.getattr(name)?);
    Ok(Rule::from_values(&part("name")?, &part("phase")?, &part("backends")?, &part("hard")?, &part("reason")?)?)
}

/// Checks the parts of a rule.
#[pyfunction]
#[pyo3(signature = (rule, /))]
pub(super) fn check_rule(rule: &Bound<'_, PyAny>) -> PyResult<()> {
    read(rule).map(drop)
}

/// What rules make of a configuration.
#[pyfunction]
#[pyo3(signature = (config, rules, /))]
#[expect(clippy::needless_pass_by_value, reason = "as a function of Python takes it")]
pub(super) fn resolve(config: &Bound<'_, PyConfig>, rules: Vec<(Bound<'_, PyAny>, bool)>) -> PyResult<PyConfig> {
    let rules = rules.iter().map(|(rule, holds)| Ok((read(rule)?, *holds))).collect::<PyResult<Vec<_>>>()?;
    Ok(PyConfig(config.get().0.resolve(&rules)?))
}
