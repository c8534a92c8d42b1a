"""The explanation of a configuration: value, source and what that overrode, for people and for machines."""

from __future__ import annotations

import json
import pickle
from typing import TYPE_CHECKING

import pytest

import devicegraph as dg
from devicegraph import CudaGraphConfig, PhaseConfig, Rule

if TYPE_CHECKING:
    from pathlib import Path


def _config() -> CudaGraphConfig:
    with pytest.warns(DeprecationWarning, match="deprecated"):
        config = dg.config_from_options(
            disable_cuda_graph=True,
            cuda_graph_max_bs=32,
            cuda_graph_bs_decode=[1, 2, 4],
            cuda_graph_config='{"prefill": {"backend": "breakable", "tc_compiler": "inductor"}}',
        )
    rule = Rule("stages", "prefill", ("breakable",), lambda facts: facts["stages"] > 1, False, "layers are spread out")
    return dg.resolve_config(config, {"stages": 2}, [rule])


TEXT = """\
key                  value             from
decode.backend       disabled          --disable-cuda-graph (deprecated)
                     not full          default
decode.max_bs        -                 --cuda-graph-bs-decode names `bs`
                     not 32            --cuda-graph-max-bs (deprecated)
decode.bs            1, 2, 4           --cuda-graph-bs-decode
decode.tc_compiler   eager             default
prefill.backend      breakable         --cuda-graph-config
                     not disabled      --disable-cuda-graph (deprecated)
                     not tc_piecewise  default
prefill.max_bs       -                 default
prefill.bs           -                 default
prefill.tc_compiler  inductor          --cuda-graph-config
                     not eager         default
padding              true              default
warning: prefill.tc_compiler (--cuda-graph-config): `"inductor"` has no effect beside the backend `breakable` \
[compiler-unused]
  hint: set `backend` to `tc_piecewise`, or leave `tc_compiler` out
warning: prefill.backend (--cuda-graph-config): `"breakable"` is used against advice: layers are spread out \
(rule `stages`) [rule-outweighed]
  hint: leave `backend` out, and the rule decides"""


def test_the_text_shows_value_source_what_was_overridden_and_warnings() -> None:
    config = _config()
    assert str(config.explain()) == TEXT
    assert repr(config.explain()) == f"<Explanation\n{TEXT}>"
    # All of it goes where the configuration goes.
    assert str(pickle.loads(pickle.dumps(config)).explain()) == TEXT


def test_the_data_has_the_same_for_every_key() -> None:
    explanation = _config().explain()
    data = explanation.to_dict()
    assert json.loads(explanation.to_json()) == data
    assert list(data["keys"]) == [
        f"{phase}.{key}" for phase in dg.Phase.ALL for key in ("backend", "max_bs", "bs", "tc_compiler")
    ] + ["padding"]
    default = {"value": "tc_piecewise", "source": "default", "kind": "default", "reason": None}
    off = {"value": "disabled", "source": "--disable-cuda-graph", "kind": "deprecated", "reason": None}
    assert data["keys"]["prefill.backend"] == {
        "value": "breakable",
        "source": "--cuda-graph-config",
        "kind": "config",
        "reason": None,
        "explicit": True,
        "overrode": [off, default],
    }
    assert data["keys"]["decode.bs"]["value"] == [1, 2, 4]
    assert data["keys"]["decode.bs"]["kind"] == "option"
    assert [warning["code"] for warning in data["warnings"]] == ["compiler-unused", "rule-outweighed"]
    assert set(data["warnings"][0]) == {"path", "value", "code", "message", "hint"}


def test_the_explanation_agrees_with_the_configuration() -> None:
    config = _config()
    keys = config.explain().to_dict()["keys"]
    full = config.to_dict(full=True)
    for path, explained in keys.items():
        *phase, key = path.split(".")
        assert explained["value"] == (full[phase[0]] if phase else full)[key]
        assert explained["explicit"] == (path in config.explicit_keys)


def test_every_call_is_a_source_by_its_name(tmp_path: Path) -> None:
    path = tmp_path / "engine.toml"
    path.write_text("[decode]\nmax_bs = 8\n")
    configs = {
        "from_json": CudaGraphConfig.from_json('{"decode": {"max_bs": 8}}'),
        "from_dict": CudaGraphConfig.from_dict({"decode": {"max_bs": 8}}),
        "CudaGraphConfig": CudaGraphConfig(decode={"max_bs": 8}),
        "PhaseConfig": CudaGraphConfig(decode=PhaseConfig(max_bs=8)),
        "with_phase": CudaGraphConfig().with_phase("decode", max_bs=8),
        str(path): CudaGraphConfig.from_file(path),
    }
    for source, config in configs.items():
        assert config.explain().to_dict()["keys"]["decode.max_bs"]["source"] == source
        # A phase that moves to another configuration was still named where it was named.
        moved = CudaGraphConfig(decode=config.decode)
        assert moved.explain().to_dict()["keys"]["decode.max_bs"]["source"] == source
        assert moved.explicit_keys == ("decode.max_bs",)


def test_a_rule_is_a_source_with_its_reason() -> None:
    config = dg.resolve_config(CudaGraphConfig(), {"pipeline_parallel_size": 2, "lora": True})
    assert config.explain().to_dict()["keys"]["prefill.backend"] == {
        "value": "disabled",
        "source": "lora",
        "kind": "rule",
        "reason": "which adapters a batch uses changes what is traced",
        "explicit": False,
        "overrode": [
            {
                "value": "disabled",
                "source": "pipeline-parallel",
                "kind": "rule",
                "reason": "what stages hand over has sizes of its own",
            },
            {"value": "tc_piecewise", "source": "default", "kind": "default", "reason": None},
        ],
    }
