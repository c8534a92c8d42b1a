"""The piecewise backend: a forward that torch.compile traces once, split at operators that must run eagerly.

The trace is cut at the registered operators into pieces. Each piece is compiled once, for all sizes, and captured for
every bucket. A replay launches the captured pieces and calls the operators in between. Nothing of torch.compile runs in
it: no guard is checked, and nothing can recompile while serving.
"""

from __future__ import annotations

import copy
import functools
import weakref
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, ClassVar, cast

import torch
import torch._dynamo
from torch.fx.passes.split_module import split_module

from devicegraph.backends.breaks import Break
from devicegraph.backends.segmented import SegmentedBackend
from devicegraph.backends.split_ops import OLDEST_TORCH_FOR_PIECES, split_operators
from devicegraph.devices.adapter import dropped_on_failure
from devicegraph.errors import BackendError, CaptureError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from devicegraph.backends.segmented import Steps
    from devicegraph.runners.capturing import CapturingRunner

__all__ = ["TcPiecewiseCudaGraphBackend"]

#: Where pieces that run now are captured to; None while they only run.
_capturing: ContextVar[tuple[TcPiecewiseCudaGraphBackend, Steps] | None] = ContextVar(
    "devicegraph.pieces", default=None
)


class TcPiecewiseCudaGraphBackend(SegmentedBackend):
    """Captures the pieces of a compiled forward; see `register_split_op`.

    What is compiled is the forward that was given to `wrap_forward`, of one batch; whatever else runs in a capture is
    captured where it was given to `wrap_prepare`, and else runs at capture only.

    Args:
        tc_compiler: `eager` runs the pieces' operators as traced, `inductor` compiles them into kernels.
        compile_mode: called with True before the forward is traced and with False after it, for engines whose fused
            operators have another form for torch.compile.

    The other arguments are those of `BaseCudaGraphBackend`.

    Raises:
        BackendError: `tc-compiler-unknown`; `torch-too-old` for a torch that this has not been held to.

    Attributes:
        traces: how often torch.compile has traced the forward: once, whatever the number of buckets, unless its Python
            depends on their sizes. Never while serving.
    """

    name: ClassVar[str] = "tc_piecewise"

    def __init__(
        self,
        *args: Any,
        tc_compiler: str = "eager",
        compile_mode: Callable[[bool], None] | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        if torch.__version__ < OLDEST_TORCH_FOR_PIECES:
            raise BackendError(
                f"`tc_piecewise` needs torch {OLDEST_TORCH_FOR_PIECES}, this is {torch.__version__}",
                code="torch-too-old",
                hint="use the backend `breakable`",
            )
        if tc_compiler not in ("eager", "inductor"):
            raise BackendError(
                f"tc_compiler: {tc_compiler!r} is not one of eager, inductor", code="tc-compiler-unknown"
            )
        self.tc_compiler = tc_compiler
        self._compile_mode = compile_mode
        self._has_run_pieces = False

    @classmethod
    def options_from(cls, runner: CapturingRunner) -> dict[str, Any]:
        """See `BaseCudaGraphBackend.options_from`."""
        return {"tc_compiler": runner.config[runner.phase].tc_compiler, "compile_mode": runner.hooks.compile_mode}

    def mark_rows(self, tensor: torch.Tensor, axis: int) -> None:
        """See `BaseCudaGraphBackend.mark_rows`."""
        # Not `mark_dynamic`: sizes of 1, and sizes that equal another dimension of the model, would be traced anew.
        torch._dynamo.decorators.mark_unbacked(tensor, axis)

    def wrap_forward(self, forward: Callable[[Any], Any]) -> Callable[[Any], Any]:
        """See `BaseCudaGraphBackend.wrap_forward`."""
        compiled = self._compiled(forward)
        split_at = split_operators()

        @functools.wraps(forward)
        def run(batch: Any) -> Any:
            nonlocal compiled, split_at
            if split_at != split_operators():
                compiled, split_at = self._compiled(forward), split_operators()
            if self._compile_mode is not None:
                self._compile_mode(True)
            self._has_run_pieces = False
            try:
                output = compiled(batch)
            except torch._dynamo.exc.TorchDynamoException as error:
                raise self._not_compilable(_reason_of(error)) from error
            finally:
                if self._compile_mode is not None:
                    self._compile_mode(False)
            if not self._has_run_pieces:
                raise self._not_compilable("it is switched off (`torch.compiler.set_stance`, or a setting of Dynamo)")
            return output

        return run

    def wrap_prepare(self, prepare: Callable[..., None]) -> Callable[..., None]:
        """See `BaseCudaGraphBackend.wrap_prepare`."""

        @functools.wraps(prepare)
        def run(*args: Any) -> None:
            capturing = _capturing.get()
            if capturing is None:
                prepare(*args)
            else:
                capturing[0]._segment(capturing[1], functools.partial(prepare, *args))

        return run

    def _capture(self, forward_fn: Callable[[], Any], steps: Steps) -> Any:
        token = _capturing.set((self, steps))
        try:
            output = forward_fn()
        finally:
            _capturing.reset(token)
        return self._segment(steps, functools.partial(self._shared.store, output))

    def _segment(self, steps: Steps, function: Callable[[], Any]) -> Any:
        graph = self.adapter.graph()
        with dropped_on_failure(graph):
            with self.adapter.capture(
                graph, pool=self.graph_pool, stream=self._stream, capture_error_mode=self.capture_error_mode
            ):
                output = function()
            steps.add_graph(graph)
        return output

    def _compiled(self, forward: Callable[[Any], Any]) -> Callable[[Any], Any]:
        # torch keeps what it was given to compile with as long as the process lives.
        weak_self = weakref.ref(self)

        def compile_trace(graph: torch.fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
            """What torch.compile calls with a trace; what it returns is called with the trace's inputs."""
            backend = weak_self()
            assert backend is not None  # it is its wrapped forward that runs
            backend.traces += 1
            pieces = _Pieces(graph, backend)
            # A function of its own: torch leaves marks on it, which a method would share with those of other runners.
            return lambda *args: pieces.run(*args)

        try:
            return torch.compile(_with_own_code(forward), backend=compile_trace, fullgraph=True)
        except RuntimeError as error:  # not for this platform, or this Python
            raise BackendError(
                f"torch.compile cannot be used here: {error}", code="not-compilable", hint="use the backend `breakable`"
            ) from error

    def _not_compilable(self, reason: str) -> CaptureError:
        return CaptureError(
            f"torch.compile cannot trace the forward as one graph: {reason}",
            code="not-compilable",
            hint="register what stops it as a split operator (`register_split_op`), or use the backend `breakable`"
            + (
                "; if a compiler is missing, `tc_compiler` `eager` needs none" if self.tc_compiler == "inductor" else ""
            ),
        )


class _Pieces(torch.fx.Interpreter):
    """A trace in pieces. Running it runs them; running it while a capture is made captures them one by one."""

    def __init__(self, graph: torch.fx.GraphModule, backend: TcPiecewiseCudaGraphBackend) -> None:
        names = split_operators()
        parts: dict[torch.fx.Node, int] = {}
        part = 0
        eager: dict[int, str] = {}
        for node in graph.graph.nodes:
            operator = _operator_of(node)
            if operator in names:
                part += 1
                eager[part] = operator
                parts[node] = part
                part += 1
            else:
                parts[node] = part
        # Names of parts are those that `split_module` gives them.
        super().__init__(split_module(graph, graph, parts.__getitem__, keep_original_order=True))
        # Weakly: torch keeps compiled code for longer than a runner lives.
        self._backend = weakref.ref(backend)
        self._eager = {f"submod_{number}": operator for number, operator in eager.items()}
        self._compiled: dict[str, Callable[..., Any]] = {}
        self._problem = (
            _problem_of(graph, backend.tc_compiler)
            if eager
            else CaptureError(
                f"the forward calls none of the split operators ({', '.join(names)})",
                code="no-split-ops",
                hint="register the operator that its attention is, or use the backend `breakable`",
            )
        )
        if backend.tc_compiler == "inductor" and self._problem is None:
            # The layers of a model are mostly alike, and compiling is what a capture spends most of its time on.
            alike: dict[Any, Callable[..., Any]] = {}
            for name, piece in self.module.named_children():
                if name not in self._eager:
                    form = _form_of(piece)
                    if form not in alike:
                        alike[form] = _compile_piece(piece)
                    self._compiled[name] = alike[form]

    def run(self, *args: Any, **options: Any) -> Any:
        """Runs the trace, and keeps nothing of it: arguments are an engine's buffers, results are the pool's."""
        backend = self._backend()
        assert backend is not None  # it is its wrapped forward that runs
        backend._has_run_pieces = True
        if self._problem is not None:  # raised here, since torch would wrap it where it traces
            raise self._problem
        try:
            return super().run(*args, **options)
        finally:
            self.args_iter = iter(())
            self.env = {}

    def call_module(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Runs a part, or captures it."""
        # `forward` itself: calling the module would look for hooks that nobody can have registered.
        traced = getattr(self.module, target).forward
        capturing = _capturing.get()
        if target in self._eager:
            output = traced(*args)
            if capturing is not None:
                step = Break(traced, args, {}, output, name=self._eager[target])
                capturing[1].add_break(step)
                return step.output
            return output
        compiled = self._compiled.get(target)
        if capturing is None:
            return (compiled or traced)(*args)
        backend, steps = capturing
        if compiled is None:
            return backend._segment(steps, functools.partial(traced, *args))
        return backend._segment(steps, functools.partial(backend.adapter.opaque_call, compiled, args, shapes=traced))


def _with_own_code(forward: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """The same forward for torch.compile, which limits the traces of one code object, not those of one `compile`.

    Runners of one model class share its code: without this, the ninth of a process would be refused.
    """

    def run(batch: Any) -> Any:
        return forward(batch)

    run.__code__ = run.__code__.replace()
    return run


def _reason_of(error: Exception) -> str:
    """What torch says stopped a trace: the first line, and the one behind it where the first says nothing."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    says_more = len(lines) > 1 and (lines[0].endswith(":") or lines[1].startswith("Explanation:"))
    return " ".join(lines[: 2 if says_more else 1])


def _operator_of(node: torch.fx.Node) -> str | None:
    """The operator that a node calls, as `namespace::name`."""
    if node.op != "call_function" or not isinstance(node.target, (torch._ops.OpOverload, torch._ops.OpOverloadPacket)):
        return None
    return "::".join(str(node.target).split(".")[:2])


def _problem_of(graph: torch.fx.GraphModule, compiler: str) -> CaptureError | None:
    names = (getattr(node.target, "__name__", None) for node in graph.graph.nodes)
    if compiler == "inductor" and "_enter_inference_mode" in names:
        # Cut in two it would leave torch in the mode.
        return CaptureError(
            "the forward enters `inference_mode`, which pieces compiled by inductor cannot",
            code="not-compilable",
            hint="call the runner in `inference_mode` instead, or set `tc_compiler` to `eager`",
        )
    return None


def _form_of(piece: Any) -> tuple[Any, ...]:
    """What two pieces have in common that can share compiled code: all but the values of their inputs."""
    numbers = {node: f"%{number}" for number, node in enumerate(piece.graph.nodes)}
    storages: dict[int, int] = {}
    form: list[Any] = []
    for node in piece.graph.nodes:
        if node.op == "placeholder":
            form.append(_kind_of(node.meta["example_value"], storages))
            continue
        calls = node.op in ("call_function", "call_method", "output")
        # What a piece holds itself is its own.
        target = node.target if calls else (id(piece), node.target)
        args, kwargs = torch.fx.node.map_arg((node.args, node.kwargs), numbers.__getitem__)
        form.append((node.op, target, repr(args), repr(kwargs)))
    return tuple(form)


def _kind_of(value: Any, storages: dict[int, int]) -> tuple[Any, ...]:
    """What is compiled into code about an input; `storages` numbers what inputs share memory with each other."""
    if not isinstance(value, torch.Tensor):
        return (type(value), str(value))
    storage = storages.setdefault(value.untyped_storage()._cdata, len(storages))
    layout = str((tuple(value.shape), value.stride(), value.storage_offset()))
    bits = (value.is_neg(), value.is_conj(), value.requires_grad)
    return (type(value), layout, value.dtype, value.device, bits, storage)


def _compile_piece(piece: Any) -> Callable[..., Any]:
    from torch._inductor.compile_fx import compile_fx

    inputs = [node.meta["example_value"] for node in piece.graph.nodes if node.op == "placeholder"]
    # The compiler changes what it is given, and the piece as traced is still needed for its shapes.
    given = torch.fx.GraphModule(piece, copy.deepcopy(piece.graph))
    return cast("Callable[..., Any]", compile_fx(given, inputs))
