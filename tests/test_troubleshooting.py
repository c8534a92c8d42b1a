"""The page on symptoms is followed: each fault is staged, the page's commands are run, and they say what it says."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

import devicegraph as dg
from engines import CountsSteps, ShortOfMemory, ToyEngine, ToyPrefill, config
from leaks import KINDS, WithSlots

if TYPE_CHECKING:
    from collections.abc import Callable

PAGE = (Path(__file__).parent.parent / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
#: By symptom: what is above its first cause, and its causes by title.
SYMPTOMS = {
    (parts := re.split(r"^### (.*)\n", section, flags=re.MULTILINE))[0].split("\n")[0]: (
        parts[0],
        dict(zip(parts[1::2], parts[2::2], strict=True)),
    )
    for section in re.split(r"^## ", PAGE, flags=re.MULTILINE)[1:]
}


def blocks(text: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", text, flags=re.MULTILINE | re.DOTALL)


def follow(symptom: str, cause: str, names: dict[str, Any], printed: pytest.CaptureFixture[str]) -> None:
    """Runs the symptom's commands and the cause's, and holds what they print to what the page shows."""
    above, causes = SYMPTOMS[symptom]
    names = {"torch": torch, "dg": dg, **names}
    for source in blocks(above, "python"):
        exec(compile(source, "troubleshooting.md", "exec"), names)
    says = printed.readouterr().out
    for shown in blocks(causes[cause], "text")[:1]:
        assert shown.strip() in says, says
    for source in blocks(causes[cause], "python"):
        exec(compile(source, "troubleshooting.md", "exec"), names)
    says = printed.readouterr().out
    for shown in blocks(causes[cause], "text")[1:]:
        assert shown.strip() in says, says


def staged(engine: Any, bs: list[int], **options: Any) -> dict[str, Any]:
    registry = getattr(engine, "registry", None)
    runner = dg.DecodeCudaGraphRunner(engine, config=config(bs=bs), registry=registry, **options)
    return {"engine": engine, "runner": runner}


def captured(engine: Any, bs: list[int], **options: Any) -> dict[str, Any]:
    names = staged(engine, bs, **options)
    names["runner"].capture()
    return {**names, "batches": [engine.batch([3, 5, 2], 1), engine.batch([9, 4, 4], 2, rows=[4, 1, 2])]}


# My output is wrong.


class Noisy(ToyEngine):
    def forward(self, batch: Any) -> torch.Tensor:
        logits = super().forward(batch)
        return logits + torch.rand_like(logits)


def leaking() -> dict[str, Any]:
    class Mixes(ToyEngine):
        def forward(self, batch: Any) -> torch.Tensor:
            return super().forward(batch) + (batch.positions + 1).sum()

    return captured(Mixes(max_bs=4), [4])


def stale() -> dict[str, Any]:
    engine = WithSlots({"bias": KINDS["KEEP_PAD_float32"]}, {})
    names = captured(engine, [3])
    names["runner"].run(engine.batch([2, 2, 2]))
    for batch in names["batches"]:
        batch.bias = None
    engine.kinds["bias"] = KINDS["by_hook"]  # what an eager step does without the field
    return names


def overwritten() -> dict[str, Any]:
    return captured(ToyEngine(max_bs=4), [4])


WRONG: dict[str, Callable[[], dict[str, Any]]] = {
    "Padding leaks": leaking,
    "Something stale is read": stale,
    "A replay is not what eager gives": lambda: captured(CountsSteps(max_bs=4), [3]),
    "Two replays differ": lambda: captured(Noisy(max_bs=4), [3]),
    "Nothing is found": overwritten,
}


@pytest.mark.parametrize("cause", WRONG)
def test_a_wrong_output_leads_to_its_cause(cause: str, capsys: pytest.CaptureFixture[str]) -> None:
    follow("My output is wrong", cause, WRONG[cause](), capsys)


# It runs eager.


class Refusing(dg.FullCudaGraphBackend):
    def can_run(self, forward_batch: Any, shape_key: Any) -> bool:
        return False


class Labelled(ToyEngine):
    variants = (None, "lora")

    def variant(self, batch: Any) -> str | None:
        return batch.extras.get("variant")


def live(engine: ToyEngine, lengths: list[int], **fields: Any) -> Any:
    batch = engine.batch(lengths)
    vars(batch).update(fields)
    return batch


def decode(lengths: list[int], *, bs: list[int], engine: Any = None, fields: Any = None, **options: Any) -> Any:
    def stage() -> tuple[Any, Any]:
        toy = engine() if engine is not None else ToyEngine(max_bs=8)
        runner = dg.DecodeCudaGraphRunner(toy, config=config(bs=bs), **options)
        runner.capture()
        return runner, live(toy, lengths, **(fields or {}))

    return stage


def not_captured() -> tuple[Any, Any]:
    engine = ToyEngine(max_bs=8)
    return dg.DecodeCudaGraphRunner(engine, config=config(bs=[4])), engine.batch([3])


def disabled() -> tuple[Any, Any]:
    engine = ToyEngine(max_bs=8)
    return dg.DecodeCudaGraphRunner(engine, config=config(backend="disabled")), engine.batch([3])


def unpadded() -> tuple[Any, Any]:
    engine = ToyEngine(max_bs=8)
    runner = dg.DecodeCudaGraphRunner(engine, config=dg.CudaGraphConfig(decode={"bs": [4]}, padding=False))
    runner.capture()
    return runner, engine.batch([3, 3])


def prefill(requests: list[tuple[int, int, int]]) -> Callable[[], tuple[Any, Any]]:
    def stage() -> tuple[Any, Any]:
        engine = ToyPrefill(max_bs=8)
        engine.limits = dg.Limits(max_bs=2, max_num_tokens=64)
        buckets = dg.CudaGraphConfig(prefill={"backend": "breakable", "bs": [16]})
        runner = dg.PrefillCudaGraphRunner(engine, config=buckets)
        runner.capture()
        return runner, engine.chunks(requests)

    return stage


class Biased(ToyEngine):
    """Its graph reads `bias`, or does not."""

    exposes = True

    def make_batch(self, views: dict[str, torch.Tensor], key: dg.ShapeKey) -> Any:
        batch = super().make_batch(views, key)
        if self.exposes:
            batch.bias = views["bias"]
        return batch


def with_field(*, required: bool, given: bool) -> Callable[[], tuple[Any, Any]]:
    def stage() -> tuple[Any, Any]:
        engine = Biased(max_bs=4)
        engine.exposes = required
        registry = dg.build_decode_registry(device="cpu", max_bs=4, max_num_token=4, seq_len_fill_value=1)
        registry.register_slot(
            dg.GraphSlot("bias", lambda bs, tokens: (bs,), torch.float32, axis="bs", required=required)
        )
        runner = dg.DecodeCudaGraphRunner(engine, config=config(bs=[4]), registry=registry)
        runner.capture()
        return runner, live(engine, [3, 5], **({"bias": torch.ones(2)} if given else {}))

    return stage


def uneven() -> tuple[Any, Any]:
    engine = ToyEngine(max_bs=4, tokens_per_request=2)
    runner = dg.DecodeCudaGraphRunner(engine, config=config(bs=[4]), num_tokens_per_bs=2)
    runner.capture()
    engine.tokens_per_request = 1  # the eager step takes them as they come
    return runner, engine.batch([3, 5, 4])


def encoded(lengths: torch.Tensor) -> Any:
    def make() -> tuple[Any, Any]:
        engine = ToyEngine(max_bs=4)
        registry = dg.build_decode_registry(
            device="cpu", max_bs=4, max_num_token=4, seq_len_fill_value=1, is_encoder_decoder=True
        )
        runner = dg.DecodeCudaGraphRunner(engine, config=config(bs=[4]), registry=registry)
        runner.capture()
        batch = engine.batch([3, 5])
        batch.encoder_lens = lengths
        return runner, batch

    return make


def outvoted() -> tuple[Any, Any]:
    engine = ToyEngine(max_bs=4)
    runner = dg.DecodeCudaGraphRunner(engine, config=config(bs=[4]))
    runner.capture()
    runner.hooks.vote = lambda proposal: dg.Proposal(False, proposal.size)
    return runner, engine.batch([3])


def short(*, most: int) -> ShortOfMemory:
    engine = ShortOfMemory(max_bs=8)
    engine.most = most
    return engine


def memory_short() -> tuple[Any, Any]:
    engine = short(most=4)
    runner = dg.DecodeCudaGraphRunner(engine, config=config(bs=[4, 8]))
    runner.capture()
    engine.most = 8
    return runner, engine.batch([3] * 8)


def backend_of_ones_own() -> tuple[Any, Any]:
    engine = ToyEngine(max_bs=8)
    backend = Refusing(dg.get_device_adapter("cpu"), phase="decode")
    runner = dg.DecodeCudaGraphRunner(engine, config=config(bs=[4]), backend=backend)
    runner.capture()
    return runner, engine.batch([3])


def nothing_left() -> tuple[Any, Any]:
    engine = short(most=0)
    runner = dg.DecodeCudaGraphRunner(engine, config=config(bs=[4]))
    runner.capture()
    engine.most = 8
    return runner, engine.batch([3])


EAGER = {
    "disabled": disabled,
    "not-captured": not_captured,
    "nothing-captured": nothing_left,
    "idle": decode([], bs=[4]),
    "above-largest": decode([3] * 5, bs=[4]),
    "too-many-requests": prefill([(1, 0, 3), (2, 0, 3), (3, 0, 3)]),
    "no-exact-bucket": unpadded,
    "padding-too-large": prefill([(1, 0, 3)]),
    "bucket-dropped": memory_short,
    "variant-unknown": decode([3], bs=[4], engine=lambda: Labelled(max_bs=4), fields={"extras": {"variant": "other"}}),
    "not-uniform": uneven,
    "encoder-lens-mixed": encoded(torch.tensor([0, 7], dtype=torch.int32)),
    "encoder-lens-unknown": encoded(torch.empty(2, dtype=torch.int32, device="meta")),
    "field-missing": with_field(required=True, given=False),
    "field-unexpected": with_field(required=False, given=True),
    "backend-refused": backend_of_ones_own,
    "voted-eager": outvoted,
}


@pytest.mark.parametrize("code", EAGER)
def test_an_eager_step_leads_to_its_code(code: str, capsys: pytest.CaptureFixture[str]) -> None:
    runner, batch = EAGER[code]()
    names = {"runner": runner, "batch": batch, "dg": dg}
    (source,) = blocks(SYMPTOMS["It runs eager"][0], "python")
    exec(compile(source, "troubleshooting.md", "exec"), names)
    said, counted = capsys.readouterr().out.splitlines()
    assert said.startswith(f"{code}: {dg.DECISION_CODES[code]}")
    assert counted == f"{{'{code}': 1}}"


def test_the_table_of_codes_is_that_of_the_decisions() -> None:
    rows = re.findall(r"^\| `([\w-]+)` \|", SYMPTOMS["It runs eager"][0], flags=re.MULTILINE)
    assert rows == [code for code in dg.DECISION_CODES if code != "graph"] == list(EAGER)


# It runs out of memory; capture fails.


class Reads(ToyEngine):
    """Takes a number of the device to the host."""

    def scale(self, logits: torch.Tensor) -> torch.Tensor:
        return logits * self.cache.sum().item()

    def forward(self, batch: Any) -> torch.Tensor:
        return self.scale(super().forward(batch))


class Demanding(ToyEngine):
    """Takes no request without tokens."""

    def prepare_metadata(self, batch: Any, key: Any) -> None:
        if not batch.seq_lens.all():
            raise ValueError("a request without a length")

    seq_len_fill_value = 0


class Square(ToyEngine):
    def forward(self, batch: Any) -> torch.Tensor:
        logits = super().forward(batch)
        return logits @ logits.t()


def unverified() -> dict[str, Any]:
    engine = WithSlots({"bias": KINDS["ZERO_float32"]}, {"sum": lambda batch: batch.bias.sum()})
    engine.turn_on("sum")
    return staged(engine, [4], verify_on_capture=True)


FAILS: dict[str, Callable[[], dict[str, Any]]] = {
    "The forward does what a capture cannot": lambda: staged(Reads(max_bs=4), [4]),
    "The forward fails on padding": lambda: staged(Demanding(max_bs=4), [4]),
    "The rows of the output cannot be told": lambda: staged(Square(max_bs=4), [2, 4]),
    "The graphs do not pass verification": unverified,
}


@pytest.mark.parametrize("cause", FAILS)
def test_a_capture_that_fails_leads_to_its_cause(cause: str, capsys: pytest.CaptureFixture[str]) -> None:
    follow("Capture fails", cause, FAILS[cause](), capsys)


def test_memory_that_runs_out_leads_to_the_bucket_and_what_helps(capsys: pytest.CaptureFixture[str]) -> None:
    follow("It runs out of memory", "A bucket is dropped", staged(short(most=4), [4, 8]), capsys)


def test_every_cause_on_the_page_is_staged() -> None:
    causes = {symptom: set(causes) for symptom, (_, causes) in SYMPTOMS.items()}
    assert causes == {
        "My output is wrong": set(WRONG),
        "It runs eager": set(),
        "It runs out of memory": {"A bucket is dropped"},
        "Capture fails": set(FAILS),
    }


def test_what_the_page_advises_for_a_leak_is_a_slot_that_helps(capsys: pytest.CaptureFixture[str]) -> None:
    class Masked(ToyEngine):
        def make_batch(self, views: dict[str, torch.Tensor], key: dg.ShapeKey) -> Any:
            batch = super().make_batch(views, key)
            batch.live = views["live"]
            return batch

        def forward(self, batch: Any) -> torch.Tensor:
            rows = torch.arange(len(batch.positions), device=self.device) < getattr(
                batch, "live", torch.tensor(batch.batch_size)
            )
            return super().forward(batch) + (batch.positions + 1).where(rows, 0).sum()

    engine = Masked(max_bs=4)
    engine.registry = dg.build_decode_registry(device="cpu", max_bs=4, max_num_token=4, seq_len_fill_value=1)
    names: dict[str, Any] = {"dg": dg, "torch": torch}
    exec(blocks(SYMPTOMS["My output is wrong"][1]["Padding leaks"], "python")[0], names)
    engine.registry.register_slot(names["live"])
    stage = captured(engine, [4])
    assert dg.verify(stage["runner"], stage["batches"], state={"cache": engine.cache})
