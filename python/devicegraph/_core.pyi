"""The Rust core: configuration rules, buckets, planning and memory layout. Torch-free."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from os import PathLike
from typing import Any, Final, Literal, Protocol, SupportsIndex, final

from typing_extensions import Self

__all__ = [
    "ALLOWED_BACKENDS_PER_PHASE",
    "CONFIG_OPTIONS",
    "LARGE_PAD_BYTES",
    "Arena",
    "Buckets",
    "ConfigIssue",
    "ConfigOption",
    "CopyGroup",
    "CudaGraphConfig",
    "DroppedBucket",
    "Explanation",
    "FillKernel",
    "FillNode",
    "FillPlan",
    "FillPlanner",
    "FillTable",
    "FillTables",
    "HostRing",
    "OptimizedBuckets",
    "PhaseConfig",
    "PoolLedger",
    "SlotLayout",
    "__version__",
    "as_size",
    "check_rule",
    "config_schema",
    "decode_buckets",
    "is_slot_dtype",
    "merge_options",
    "optimize_buckets",
    "prefill_buckets",
    "read_argument",
    "resolve",
]

__version__: Final[str]

CONFIG_OPTIONS: Final[tuple[ConfigOption, ...]]
"""Every option of a command line, current ones first."""

ALLOWED_BACKENDS_PER_PHASE: Final[Mapping[str, tuple[str, ...]]]
"""The backends that each phase can have, by phase; the table that the validator uses, read-only."""

@final
class Arena:
    """Places of blocks in segments that never move: the lowest place with room, neighbours joined on release.

    It hands out offsets and holds no memory itself. Safe to use from several threads and from finalizers.
    """

    def __new__(cls, *, alignment: int, segment_bytes: int) -> Arena:
        """An empty arena.

        Args:
            alignment: bytes; every offset and size is a multiple of it. A power of two.
            segment_bytes: the least size of a segment that a request opens.

        Raises:
            ValueError: the alignment is not a power of two.
        """
    def allocate(self, bytes: int, /) -> tuple[int, int, int]:
        """Reserves a block at the lowest place with room and returns (segment, offset, bytes reserved).

        Raises:
            MemoryError: the request is larger than any arena can be.
        """
    def release(self, segment: int, offset: int, bytes: int, /) -> None:
        """Gives a block back, exactly as `allocate` returned it.

        Raises:
            ValueError: no such block is live; nothing changes.
        """
    @property
    def segments(self) -> list[int]:
        """Bytes of each segment, in the order in which they were opened."""
    @property
    def reserved_bytes(self) -> int:
        """Bytes in all segments."""
    @property
    def live_bytes(self) -> int:
        """Bytes that blocks reserve now."""
    @property
    def peak_bytes(self) -> int:
        """The most bytes that blocks reserved at once; no layout could do with less."""

@final
class ConfigIssue:
    """One thing wrong with a configuration, or to be warned of in it.

    Frozen, picklable, and equal where all of it is equal. `str()` gives `path (source): message [code]`, and the hint
    on a line of its own. They stand in `ConfigError.issues` and in `CudaGraphConfig.warnings`.
    """

    def __new__(
        cls,
        path: str,
        value: object,
        allowed: str | None,
        code: str,
        message: str,
        hint: str | None,
        source: str | None = None,
    ) -> Self: ...
    @property
    def path(self) -> str:
        """The key, such as `decode.bs[2]`; empty where it is the document as a whole."""

    @property
    def value(self) -> Any:
        """What stands there, as plain data; an object that no document can hold is its `repr`."""

    @property
    def allowed(self) -> str | None:
        """What would have been allowed, in words, where that can be said in a few."""

    @property
    def code(self) -> str:
        """The stable kebab-case word to branch on.

        Errors: `json-syntax`, `toml-syntax`, `not-utf8`, `unknown-file-type`, `wrong-type`, `out-of-range`,
        `empty-list`, `unknown-backend`, `backend-not-allowed`, `unknown-compiler`, `unknown-key`, `unknown-phase`,
        `repeated-key`, `sizes-disagree`, `unknown-option`, `options-disagree`, `rule-forbids`, `repeated-rule`; for
        buckets also `no-maximum`, `no-bytes`, `unknown-preset`, `empty-histogram`, `too-many-sizes`,
        `limit-below-alignment`, `budget-too-small`. Warnings: `compiler-unused`, `rule-outweighed`.
        """

    @property
    def message(self) -> str:
        """What is wrong, without path, code and hint. Reworded at will."""

    @property
    def hint(self) -> str | None:
        """What to do about it, or None."""

    @property
    def source(self) -> str | None:
        """Who says it, such as `--cuda-graph-max-bs-decode`, or None where the path tells."""

    def __getnewargs__(self) -> tuple[str, Any, str | None, str, str, str | None, str | None]: ...
    def __eq__(self, other: object, /) -> bool: ...
    def __hash__(self) -> int: ...

@final
class PhaseConfig:
    """How one phase is captured: frozen, hashable, picklable, and equal where the same values hold.

    Every argument may be None, which is "not given". One that is given is *explicit*, even where it equals the default.
    """

    def __new__(
        cls,
        backend: str | None = None,
        max_bs: SupportsIndex | None = None,
        bs: Sequence[SupportsIndex] | None = None,
        tc_compiler: str | None = "eager",
    ) -> Self:
        """Checks the settings of one phase.

        Args:
            backend: one of `Backend.ALL`; without one the phase's default, once it is known which phase this is.
            max_bs: the largest size to capture, in requests (decode) or tokens (prefill); from 1 to 1048576.
            bs: the sizes to capture, in any order; kept sorted and each once. Beside `max_bs` its largest entry must
                be that.
            tc_compiler: `eager` or `inductor`: what compiles the pieces of `tc_piecewise`.

        Raises:
            ConfigError: with everything that is wrong in `issues`.
        """

    @property
    def backend(self) -> str | None:
        """The backend; None only where none was given and the phase belongs to no configuration yet."""

    @property
    def max_bs(self) -> int | None:
        """The largest size to capture, or None: `bs` says it, or the engine decides."""

    @property
    def bs(self) -> tuple[int, ...] | None:
        """The sizes to capture, ascending, or None: a default list up to the maximum."""

    @property
    def tc_compiler(self) -> str:
        """What compiles the pieces of `tc_piecewise`."""

    @property
    def explicit_keys(self) -> tuple[str, ...]:
        """The keys that somebody named, such as `("max_bs",)`, even where the value is the default."""

    @property
    def reason(self) -> str | None:
        """Why a rule disabled the phase, with the rule's name; None where none did."""

    def __eq__(self, other: object, /) -> bool: ...
    def __hash__(self) -> int: ...

@final
class CudaGraphConfig:
    """The settings of both phases, checked: frozen, hashable, picklable, and equal where the same values hold.

    `config["decode"]` and `config["prefill"]` are the phases; another name is a `KeyError`. Iteration gives the two
    names, and `in` knows them.
    """

    def __new__(
        cls,
        decode: PhaseConfig | Mapping[str, object] | None = None,
        prefill: PhaseConfig | Mapping[str, object] | None = None,
        padding: bool | None = True,
    ) -> Self:
        """Checks a configuration.

        Args:
            decode: the settings of decode; without a backend, `full`.
            prefill: the settings of prefill; without a backend, `tc_piecewise`. Not `full`: its shapes vary.
            padding: whether a size in between may be padded to the next larger captured one.

        Raises:
            ConfigError: with everything that is wrong in `issues`.
        """

    @classmethod
    def from_dict(cls, document: Mapping[str, object]) -> Self:
        """Checks a mapping with the keys `decode`, `prefill` and `padding`.

        A phase is a mapping too, or a `PhaseConfig`; None is "not given".

        Raises:
            ConfigError: with everything that is wrong in `issues`.
        """

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Reads JSON text.

        Raises:
            ConfigError: with everything that is wrong in `issues`; a syntax error (`json-syntax`) says line and column.
        """

    @classmethod
    def from_file(cls, path: str | PathLike[str]) -> Self:
        """Reads a file, as JSON or TOML by its suffix.

        Raises:
            ConfigError: with everything that is wrong in `issues`; the message names the file.
            OSError: the file cannot be read.
        """

    def to_dict(self, *, explicit: bool = False, full: bool = False) -> dict[str, Any]:
        """Exports plain data that `from_dict` reads back as an equal configuration.

        Args:
            explicit: with the keys that somebody named, and not only those whose value differs from the default.
            full: with every key; None where the engine decides.
        """

    def to_json(self, *, explicit: bool = False, full: bool = False) -> str:
        """Exports what `to_dict` does, as JSON text on one line."""

    def with_phase(
        self,
        phase: str,
        *,
        backend: str | None = None,
        max_bs: SupportsIndex | None = None,
        bs: Sequence[SupportsIndex] | None = None,
        tc_compiler: str | None = None,
    ) -> CudaGraphConfig:
        """A copy in which some keys of a phase are set; None leaves a key as it is.

        `bs` and `max_bs` are two ways to say one thing: naming either drops what the other was.

        Raises:
            ConfigError: with everything that is wrong in `issues`.
        """

    @property
    def decode(self) -> PhaseConfig:
        """The settings of decode, its backend among them."""

    @property
    def prefill(self) -> PhaseConfig:
        """The settings of prefill, its backend among them."""

    @property
    def padding(self) -> bool:
        """Whether a size in between may be padded to the next larger captured one."""

    @property
    def explicit_keys(self) -> tuple[str, ...]:
        """The paths that somebody named, such as `("decode.max_bs",)`, even where the value is the default."""

    @property
    def warnings(self) -> tuple[ConfigIssue, ...]:
        """What is no error, and still worth a word.

        A `tc_compiler` beside a backend that compiles nothing (`compiler-unused`); a backend that somebody named and a
        soft rule is against (`rule-outweighed`).
        """

    def explain(self) -> Explanation:
        """What holds for each key, who said it, and what that overrode."""

    def __getitem__(self, phase: str, /) -> PhaseConfig: ...
    def __contains__(self, phase: object, /) -> bool: ...
    def __iter__(self) -> Iterator[str]: ...
    def __len__(self) -> int: ...
    def __eq__(self, other: object, /) -> bool: ...
    def __hash__(self) -> int: ...

@final
class Explanation:
    """A configuration as an operator reads it. `str()` gives it in columns, the warnings below them."""

    def to_dict(self) -> dict[str, Any]:
        """The same as plain data.

        Returns:
            `keys`: by path, such as `decode.max_bs`: `value`; `source`, the option, file or call that said it;
            `kind`, which is `default`, `deprecated`, `option`, `config` or `rule`; `reason`, of a rule; `explicit`;
            and `overrode`, what lower sources had said, the highest first, each with value, source, kind and reason.
            `warnings`: each with `path`, `value`, `code`, `message` and `hint`.
        """

    def to_json(self) -> str:
        """What `to_dict` gives, as JSON text on one line."""

@final
class ConfigOption:
    """One option of a command line, and of the keyword arguments of `config_from_options`."""

    @property
    def flag(self) -> str:
        """Its name as it is typed, such as `--cuda-graph-max-bs-decode`."""

    @property
    def keyword(self) -> str:
        """Its name as a keyword argument, such as `cuda_graph_max_bs_decode`."""

    @property
    def keys(self) -> tuple[str, ...]:
        """The paths that it sets; empty for `--cuda-graph-config`, which may set any."""

    @property
    def takes(self) -> Literal["one", "many", "nothing", "config"]:
        """What comes after it."""

    @property
    def says(self) -> str | bool | None:
        """What it sets its keys to, where nothing comes after it."""

    @property
    def replacement(self) -> str | None:
        """What to write instead of a deprecated option; None for a current one."""

    @property
    def metavar(self) -> str | None:
        """What stands for its value in a help text."""

    @property
    def help(self) -> str:
        """What a help text says of it: the default and the precedence among it."""

def merge_options(options: dict[str, Any]) -> tuple[CudaGraphConfig, tuple[str, ...]]:
    """What options come to, by their keywords, and a sentence for each deprecated one.

    Raises:
        ConfigError: with everything that is wrong in `issues`.
    """

def read_argument(text: str, /) -> str | int | float | bool | None:
    """What stands after an option on a command line: a number, boolean or null as JSON writes it, or else text."""

class _RuleParts(Protocol):
    @property
    def name(self) -> str: ...
    @property
    def phase(self) -> str: ...
    @property
    def backends(self) -> Sequence[str]: ...
    @property
    def hard(self) -> bool: ...
    @property
    def reason(self) -> str: ...

def check_rule(rule: _RuleParts, /) -> None:
    """Checks the parts of a rule.

    Raises:
        ConfigError: with everything that is wrong in `issues`.
    """

def resolve(config: CudaGraphConfig, rules: Sequence[tuple[_RuleParts, bool]], /) -> CudaGraphConfig:
    """What rules make of a configuration; each comes with whether it holds. See `resolve_config`.

    Raises:
        ConfigError: with everything that is wrong in `issues`: `rule-forbids`, `repeated-rule`.
    """

def config_schema() -> dict[str, Any]:
    """The JSON Schema (draft 4) of a configuration, from the table that the validator uses."""

@final
class DroppedBucket:
    """A size that was asked for and is not captured."""

    @property
    def size(self) -> int:
        """The size."""

    @property
    def code(self) -> str:
        """`bucket-over-limit`, `bucket-not-aligned` or `bucket-over-budget`."""

    @property
    def message(self) -> str:
        """Why, as a sentence. Reworded at will."""

    @property
    def hint(self) -> str | None:
        """What would have been kept, or None."""

    def __eq__(self, other: object, /) -> bool: ...
    def __hash__(self) -> int: ...

@final
class Buckets:
    """The sizes to capture, ascending, and how that list came about.

    Frozen, hashable and picklable; `len`, `in` and iteration are those of `sizes`. Two are equal where every live size
    has the same bucket. `str()` says what was asked, kept and dropped, and why.
    """

    def __new__(
        cls,
        bs: Sequence[SupportsIndex],
        *,
        padding: bool | None = True,
        alignment: SupportsIndex | None = 1,
        limit: SupportsIndex | None = None,
        max_graphs: SupportsIndex | None = None,
        max_bytes: SupportsIndex | None = None,
        bytes_per_size: SupportsIndex | Mapping[int, SupportsIndex] | Callable[[int], SupportsIndex] | None = None,
    ) -> Self:
        """An explicit list, of requests or tokens.

        Args:
            bs: the sizes asked for, in any order.
            padding: whether a size in between may be padded to the next larger bucket.
            alignment: what every size must be a multiple of. Entries that are not are dropped.
            limit: the largest size that the engine can run. Entries above it are dropped, and with padding the largest
                size within it is added, so that a full batch has a bucket.
            max_graphs: how many sizes to keep: the smallest, the largest, and between them those that grow most evenly
                by ratio; of one, the largest.
            max_bytes: how many bytes the graphs may take together. As many sizes are kept as fit, chosen as above;
                where the largest does not even fit alone, the largest that does takes its place.
            bytes_per_size: the bytes of one graph: a number, a table that has each size, or a function of the size.

        Raises:
            ConfigError: with everything that is wrong in `issues`. What does not fit is no error: see `dropped`.
        """

    def fit(self, raw: SupportsIndex) -> int | None:
        """The bucket of a live size, in constant time.

        Args:
            raw: requests or tokens, as in `sizes`.

        Returns:
            The smallest bucket that holds it, or without padding the one that equals it; None where there is none, and
            for 0 and less.

        Raises:
            ConfigError: `wrong-type`: no integer, nor an object that stands for one.
        """

    @property
    def sizes(self) -> tuple[int, ...]:
        """The sizes to capture, ascending; empty where nothing that was asked for fits."""

    @property
    def maximum(self) -> int:
        """The largest of `sizes`, or 0 where there is none."""

    @property
    def asked(self) -> tuple[int, ...]:
        """The sizes asked for, ascending; of a default list all of it, up to the maximum asked for."""

    @property
    def dropped(self) -> tuple[DroppedBucket, ...]:
        """The sizes asked for that are not captured, ascending."""

    @property
    def padding(self) -> bool:
        """Whether a size in between is padded to the next larger bucket."""

    @property
    def total_bytes(self) -> int | None:
        """The bytes of all graphs together; None where those of each were not given."""

    def __len__(self) -> int: ...
    def __iter__(self) -> Iterator[int]: ...
    def __contains__(self, size: object, /) -> bool: ...
    def __getnewargs_ex__(self) -> tuple[tuple[tuple[int, ...]], dict[str, Any]]: ...
    def __eq__(self, other: object, /) -> bool: ...
    def __hash__(self) -> int: ...

def decode_buckets(
    max_bs: SupportsIndex | None = None,
    *,
    bs: Sequence[SupportsIndex] | None = None,
    padding: bool | None = True,
    num_tokens_per_bs: SupportsIndex | None = 1,
    alignment: SupportsIndex | None = 1,
    token_alignment: SupportsIndex | None = 1,
    limit: SupportsIndex | None = None,
    max_graphs: SupportsIndex | None = None,
    max_bytes: SupportsIndex | None = None,
    bytes_per_size: SupportsIndex | Mapping[int, SupportsIndex] | Callable[[int], SupportsIndex] | None = None,
    preset: str | None = "default",
) -> Buckets:
    """The buckets of decode, in requests.

    The default list is 1, 2, 4, 8, 12, 16..256 by 8, 272..496 by 16, then by 32; with several tokens a request 1..8,
    10..32 by 2, 40..64 by 4, 72..256 by 8, then by 16; without padding 1, 2, 3 and so on. The `dense` one is 1..32,
    34..64 by 2, 68..128 by 4, 136..256 by 8, then by 16. The maximum is always in it, exactly. Its entries are rounded
    up to the alignment.

    `phase.max_bs` and `phase.bs` of a `PhaseConfig` go in as they are, with the engine's own maximum as `limit`.

    Args:
        max_bs: the largest size; without one, the largest of `bs`, or the limit.
        bs: an explicit list instead of the default one, as `Buckets` takes it. Beside `max_bs` its largest entry must
            be that.
        padding: whether a size in between may be padded to the next larger bucket.
        num_tokens_per_bs: tokens for each request: more than one in speculative decoding.
        alignment: what every size must be a multiple of, in requests (two-batch overlap: 2).
        token_alignment: what every size times `num_tokens_per_bs` must be a multiple of (tensor-parallel ranks that
            share out the tokens: their number).
        limit: the largest size that the engine can run.
        max_graphs: how many sizes to keep, as `Buckets` does.
        max_bytes: how many bytes the graphs may take together, as `Buckets` takes it.
        bytes_per_size: the bytes of one graph, as `Buckets` takes them.
        preset: which default list, where `bs` is not given: `default`, or `dense` for less padding with more graphs.

    Raises:
        ConfigError: with everything that is wrong in `issues`; nothing that says how large is `no-maximum`.
    """

def prefill_buckets(
    max_tokens: SupportsIndex | None = None,
    *,
    bs: Sequence[SupportsIndex] | None = None,
    padding: bool | None = True,
    alignment: SupportsIndex | None = 1,
    limit: SupportsIndex | None = None,
    max_graphs: SupportsIndex | None = None,
    max_bytes: SupportsIndex | None = None,
    bytes_per_size: SupportsIndex | Mapping[int, SupportsIndex] | Callable[[int], SupportsIndex] | None = None,
    preset: str | None = "default",
) -> Buckets:
    """The buckets of prefill, in tokens.

    The default list is 4..32 by 4, 48..256 by 16, 288..512 by 32, 576..1024 by 64, 1280..4096 by 256, then by 512. The
    maximum is always in it, exactly. Its entries are rounded up to the alignment. The `dense` one is 4..64 by 4,
    72..256 by 8, 272..512 by 16, 544..1024 by 32, 1088..2048 by 64, 2176..4096 by 128, then by 256. Without padding
    the list is the same and only these exact numbers of tokens have a bucket.

    Args:
        max_tokens: the largest size; without one, the largest of `bs`, or the limit.
        bs: an explicit list instead of the default one, as `Buckets` takes it. Beside `max_tokens` its largest entry
            must be that.
        padding: whether a size in between may be padded to the next larger bucket.
        alignment: what every size must be a multiple of.
        limit: the largest size that the engine can run.
        max_graphs: how many sizes to keep, as `Buckets` does.
        max_bytes: how many bytes the graphs may take together, as `Buckets` takes it.
        bytes_per_size: the bytes of one graph, as `Buckets` takes them.
        preset: which default list, where `bs` is not given: `default`, or `dense` for less padding with more graphs.

    Raises:
        ConfigError: with everything that is wrong in `issues`; nothing that says how large is `no-maximum`.
    """

@final
class OptimizedBuckets:
    """The list of sizes that pads the least for traffic that was seen, and what that traffic comes to with it.

    Frozen, and equal where list and traffic are. `str()` says it in a few lines; `sizes` goes into a configuration's
    `bs`.
    """

    @property
    def sizes(self) -> tuple[int, ...]:
        """The sizes to capture, ascending."""

    @property
    def steps(self) -> int:
        """The steps that have a bucket."""

    @property
    def eager_steps(self) -> int:
        """The steps above the largest size: they run eager, and count for nothing else here."""

    @property
    def raw_rows(self) -> int:
        """Real rows in the steps that have a bucket: requests in decode, tokens in prefill."""

    @property
    def padded_rows(self) -> int:
        """Rows that are computed for nothing in these steps."""

    @property
    def waste(self) -> float:
        """The share of computed rows that is padding."""

    @property
    def total_bytes(self) -> int | None:
        """The bytes of all graphs together; None where those of each were not given."""

    @property
    def curve(self) -> tuple[int, ...]:
        """The padded rows of the best list of 1, 2, 3, ... graphs, without regard to bytes.

        It ends where nothing is padded any more, or at `max_graphs`, or at 64 where that is more.
        """

    def padded_rows_with(self, bs: Sequence[SupportsIndex]) -> int:
        """The padded rows of the same steps with another list; steps above its largest size are left out.

        Raises:
            ConfigError: with everything that is wrong in `issues`.
        """

    def __eq__(self, other: object, /) -> bool: ...

def optimize_buckets(
    histogram: Mapping[int, SupportsIndex],
    max_graphs: SupportsIndex | None = None,
    bytes: SupportsIndex | None = None,
    *,
    bytes_per_size: SupportsIndex | Mapping[int, SupportsIndex] | Callable[[int], SupportsIndex] | None = None,
    maximum: SupportsIndex | None = None,
    alignment: SupportsIndex | None = 1,
    limit: SupportsIndex | None = None,
) -> OptimizedBuckets:
    """The list of sizes that pads the least for the steps of each live size: no list of as many graphs pads less.

    Exact, in a few hundredths of a second for 2,000 sizes. Where the bytes of graphs differ and the budget of bytes is
    what binds, it is exact as well, and takes seconds for as many sizes; an `alignment` makes them fewer.

    Args:
        histogram: the steps of each live size, as `StepMetrics.histogram` and `read_histogram` have them.
        max_graphs: how many sizes there may be; without it, as many as padding asks for.
        bytes: how many bytes the graphs may take together. What they share, such as the largest one's activations in a
            common graph memory pool, does not depend on the list: take it off first.
        bytes_per_size: the bytes of one graph, as `Buckets` takes them: a number where each costs the same (a full
            graph's executable), a function such as `lambda size: per_graph + per_row * size` where it also holds
            tensors of its own (`breakable`, `tc_piecewise`), or a table of what was measured. They must not fall as
            the size grows, else a list with other sizes than those seen could be better.
        maximum: the largest size, which is always in the list, rounded up to the alignment; without it the limit, and
            without that the largest size seen.
        alignment: what every size must be a multiple of.
        limit: the largest size that the engine can run.

    Raises:
        ConfigError: with everything that is wrong in `issues`: `empty-histogram`, `no-bytes`, `budget-too-small` where
            the largest size does not even fit alone, `limit-below-alignment`, and `too-many-sizes` for what cannot be
            solved in memory.
    """

LARGE_PAD_BYTES: Final[int]
"""The bytes below which padding is copied from a constant rather than written by a call of its own."""

def as_size(argument: str, value: object, /) -> int:
    """A size as a plain integer: one itself, or what stands for one by `__index__`; no boolean.

    Raises:
        SlotError: `not-a-size`: something else, or more than 64 bits.
    """

def is_slot_dtype(name: str, /) -> bool:
    """Whether a slot can have elements of that dtype: torch's name, or an alias, with or without `torch.`."""

@final
class SlotLayout:
    """A registered slot as plain values: what planning has to know of it."""

    def __new__(
        cls,
        name: str,
        *,
        axis: str,
        policy: str,
        dtype: str,
        shape: Sequence[int],
        strides: Sequence[int],
        dim: int,
        rows: tuple[int, int, int],
        capacity: int,
        feed: str,
        device: str,
        source_device: str,
        required: bool,
        allow_narrowing: bool,
        prefix: bool,
    ) -> SlotLayout:
        """A slot that is known to be possible.

        Args:
            name: as messages have it.
            axis: `bs`, `tokens` or `none`.
            policy: the value of a `PaddingPolicy`.
            dtype: torch's name, with or without `torch.`; aliases such as `long` count as what they stand for.
            shape: of the whole buffer.
            strides: of the whole buffer, in elements.
            dim: the dimension that has the rows; of no meaning where the axis is none.
            rows: `(base, step, unit)`: there are `base + step * (size // unit)` rows at a size.
            capacity: the largest size along the axis.
            feed: where the live rows come from: a `field` of the batch, a `function`, or `elsewhere`.
            device: where the buffer is, in full: `cuda:0`, `cpu`.
            source_device: where a source may be: `own`, `cpu` or `any`.
            required: refuse a step without the field, unless it is idle.
            allow_narrowing: cast sources whose dtype holds values that this one does not.
            prefix: accept sources that are shorter along the last dimension.

        Raises:
            SlotError: `unknown-word`, `unsupported-dtype`, `empty-shape`, `shared-elements`, `capacity-too-small` or
                `no-trailing-axis`.
        """
    def padded_rows(self, padded_bs: int, padded_num_tokens: int, /) -> int:
        """The rows of a bucket; 0 where the axis is none.

        Raises:
            SlotError: `not-a-size`, `negative-size`, `above-capacity` or `bucket-not-divisible`.
        """
    def live_rows(self, raw_bs: int, raw_num_tokens: int, /) -> int:
        """The rows of a live size, whole units only; 0 where the axis is none.

        Raises:
            SlotError: `not-a-size` or `negative-size`.
        """

@final
class FillPlanner:
    """The slots of a registry, ready to be planned for."""

    def __new__(cls, slots: Sequence[SlotLayout], *, max_bs: int, max_num_tokens: int) -> FillPlanner:
        """A planner for these slots, whose buffers hold that many requests and tokens."""
    def check_bucket(self, padded_bs: int, padded_num_tokens: int, /) -> None:
        """Refuses a bucket that the buffers, or the rows of some slot, do not allow.

        Raises:
            SlotError: `not-a-size`, `negative-size`, `above-capacity` or `bucket-not-divisible`.
        """
    def plan(
        self,
        sources: Sequence[tuple[str, Sequence[int], str, Sequence[int]] | None],
        *,
        raw_bs: int,
        padded_bs: int,
        raw_num_tokens: int,
        padded_num_tokens: int,
        unread: bool,
    ) -> FillPlan:
        """Checks a step and says what to carry out, in the fewest calls.

        A source fits where it has the live rows and otherwise the slot's shape (a length of 1 is not repeated), is
        where the slot allows, and has a dtype whose values the slot's holds: integers in wider integers and in floats
        with enough digits, booleans in everything but bare exponents, floats in floats with no fewer digits and no
        smaller range.

        Args:
            sources: for each slot None, or (dtype, shape, device in full, strides).
            raw_bs: live requests.
            padded_bs: requests of the bucket.
            raw_num_tokens: live tokens.
            padded_num_tokens: tokens of the bucket.
            unread: there was no batch to read: slots with a function are padded whole, not left alone.

        Raises:
            SlotError: a size (`not-a-size`, `negative-size`, `raw-above-padded`, `above-capacity`,
                `bucket-not-divisible`) or the first slot whose source does not fit (`field-missing`, `wrong-rows`,
                `wrong-shape`, `too-many-rows`, `too-wide`, `wrong-device`, `narrowing-cast`, `unsupported-dtype`).
        """

@final
class FillKernel:
    """The fill kernel, loaded on a CUDA device. The driver is found at run time; nothing else of CUDA is needed."""

    def __new__(cls, index: int, /) -> FillKernel:
        """Opens the device of that number, as torch counts, and loads the kernel. Costs tens of milliseconds.

        Raises:
            BackendError: `cuda-driver`: no driver, one from before CUDA 12.0, or one that cannot load the kernel.
        """
    def fill_node(self, *, graph: int, executable: int) -> FillNode | None:
        """The node of a captured graph that runs the fill kernel; None where there is not exactly one.

        Args:
            graph: the `cudaGraph_t`.
            executable: its `cudaGraphExec_t`; it has to outlive the node.

        Raises:
            BackendError: `cuda-driver`.
        """
    def replace_memsets(self, *, graph: int) -> tuple[int, int]:
        """Makes the memsets of a graph kernels that write the same bytes, between the same nodes.

        The driver hands a memset over by itself on every launch, about a microsecond of host time each, and a graph of
        kernels alone at once, however many they are. What stays: a memset of another device's memory, of more than 16
        MiB, or tied to other nodes by anything but a full wait, and all of a graph with allocations of its own.

        Args:
            graph: the `cudaGraph_t`; executables that were made of it before keep theirs.

        Returns:
            How many memsets there were, and how many of them are left.

        Raises:
            BackendError: `cuda-driver`.
        """
    def update_executable(self, *, executable: int, graph: int) -> bool:
        """Makes a graph's executable one of another graph of the same topology, for its next launch.

        Args:
            executable: the `cudaGraphExec_t`.
            graph: the other `cudaGraph_t`.

        Returns:
            Whether it could be; where not, the executable is as it was.

        Raises:
            BackendError: `cuda-driver`.
        """
    def launch_empty(self, stream: int, /) -> None:
        """Queues the fill kernel with nothing to do: in a capture, the node to be pointed at each step's sources.

        Raises:
            BackendError: `cuda-driver`.
        """

@final
class FillNode:
    """The fill kernel as a node of a graph's executable. What it is pointed at takes effect with the next launch."""

    def clear(self) -> None:
        """Makes the node write nothing.

        Raises:
            BackendError: `cuda-driver`.
        """
    def launched(self) -> None:
        """Lets go of the sources that the launch just queued reads: its place in the stream keeps their memory.

        Raises:
            BackendError: `cuda-driver`.
        """

@final
class HostRing:
    """Pinned host memory in blocks that take turns; a block is written again only once the device has read it."""

    def __new__(cls, memory: object, address: int, *, block_bytes: int, blocks: int, kernel: FillKernel) -> HostRing:
        """A ring.

        Args:
            memory: what keeps the memory alive.
            address: of its first byte; there have to be `blocks` times `block_bytes`.
            block_bytes: of one block.
            blocks: how many steps can be on their way before the host waits.
            kernel: what reads it.

        Raises:
            BackendError: `cuda-driver`.
        """

@final
class FillTables:
    """The tables of a set of slots: what steps write, for the core to carry out itself."""

    def __new__(
        cls,
        planner: FillPlanner,
        buffers: Sequence[tuple[int, int, int]],
        *,
        fields: Sequence[str | None],
        kinds: Sequence[type],
        exchange: object | None,
        kernel: tuple[int, FillKernel] | None,
        stream_of: Callable[[int], int] | None,
        ring: HostRing | None,
    ) -> FillTables:
        """Tables for the planner's slots.

        Args:
            planner: checks steps.
            buffers: for each slot the address of its buffer, the bytes that it spans, and the bits of its pad value.
            fields: for each slot the field of a batch that is its source, if it has such a one.
            kinds: the classes whose objects are read by their memory.
            exchange: their DLPack exchange table, a capsule; None where Python has to read and check.
            kernel: the number of the CUDA device of the slots that are on one, and its kernel.
            stream_of: the current stream of a device, where the exchange table does not tell.
            ring: for sources on the host of slots on the device; None where there are none.

        Raises:
            ValueError: a capsule of another kind.
        """
    def compile(
        self,
        sources: Sequence[tuple[str, Sequence[int], str, Sequence[int], bool] | None],
        *,
        raw_bs: int,
        padded_bs: int,
        raw_num_tokens: int,
        padded_num_tokens: int,
        unread: bool,
    ) -> tuple[FillTable, FillPlan]:
        """The table of a step, and the plan of what it has no entry for.

        Args:
            sources: as for `FillPlanner.plan`, and whether it is a number, which stands for a tensor of that form.
            raw_bs: live requests.
            padded_bs: requests of the bucket.
            raw_num_tokens: live tokens.
            padded_num_tokens: tokens of the bucket.
            unread: there was no batch to read.

        Raises:
            SlotError: as `FillPlanner.plan` does.
        """

@final
class FillTable:
    """What a step writes, as one table. It does not keep buffers or sources alive.

    Writing does not wait for the device, but where the ring of sources on the host is full.
    """

    @property
    def checks(self) -> bool:
        """Whether the core can tell if sources are such as the table was made for."""
    def matches(self, sources: list[Any], /) -> bool:
        """Whether sources are such as the table was made for.

        Args:
            sources: one for each slot; None, a tensor, or a number.
        """
    def read_batch(self, batch: object, /) -> tuple[list[Any], bool]:
        """A batch's fields (attributes, or items of a dictionary), and whether they are such as the table was made for.

        Returns:
            One for each slot, None where the batch has none; and what `matches` says of them.
        """
    @property
    def launches(self) -> int:
        """How many kernel launches it takes."""
    def attempt(self, sources: list[Any], /) -> bool:
        """Writes a step, if its sources are such as the table was made for: else nothing is written.

        Args:
            sources: one for each slot; None, a tensor, or a number.

        Raises:
            BackendError: `cuda-driver`.
        """
    def attempt_batch(self, batch: object, /) -> list[Any] | None:
        """As `attempt`, with a batch's fields: attributes, or the items of a dictionary.

        Returns:
            None where the step was carried out; else the fields that were read, one for each slot.

        Raises:
            BackendError: `cuda-driver`.
        """
    def attempt_in(self, sources: list[Any], node: FillNode, /) -> bool:
        """As `attempt`, but what is to be written on the device is left to the next launch of a node.

        The node keeps the sources until `launched`. The table has to take at most one launch.

        Raises:
            BackendError: `cuda-driver`.
        """
    def attempt_batch_in(self, batch: object, node: FillNode, /) -> list[Any] | None:
        """As `attempt_in`, with a batch's fields; returns what `attempt_batch` does.

        Raises:
            BackendError: `cuda-driver`.
        """
    def carry_out(self, sources: list[Any], /) -> None:
        """Writes a step with sources that were checked to be such as the table was made for.

        Raises:
            BackendError: `cuda-driver`.
        """
    def carry_out_in(self, sources: list[Any], node: FillNode, /) -> None:
        """As `carry_out`, but what is to be written on the device is left to the next launch of a node.

        Raises:
            BackendError: `cuda-driver`.
        """

@final
class FillPlan:
    """What a fill carries out: fills, then groups, then copies. Slots are named by position.

    Regions do not overlap, but for one case: rows that are padded whole because their source is narrower than the slot
    are then copied into, which is why copies come last.
    """

    @property
    def fills(self) -> list[tuple[tuple[int, int, list[int], list[int]], bool]]:
        """Regions written with one value: (slot, offset, shape, strides) in elements; True for zeros, False for the
        slot's pad value.
        """
    @property
    def groups(self) -> list[CopyGroup]:
        """Grouped copies, one call each."""
    @property
    def copies(self) -> list[tuple[int, int, list[int], list[int]]]:
        """Regions that take a whole source by a call of their own: (slot, offset, shape, strides) in elements."""
    @property
    def calls(self) -> int:
        """How many calls all of it takes."""
    def __eq__(self, other: object, /) -> bool: ...
    def __ne__(self, other: object, /) -> bool: ...

@final
class CopyGroup:
    """One grouped copy call. Where it casts, `writes` and `reads` differ; else they are a type to move bytes in."""

    @property
    def device(self) -> str:
        """Where all of it is."""
    @property
    def writes(self) -> str:
        """The dtype to write as."""
    @property
    def reads(self) -> str:
        """The dtype to read as."""
    @property
    def tails(self) -> list[tuple[int, list[int], int, bool]]:
        """Padding: (slot, where each run starts, elements of a run, zeros or the slot's pad value), in elements."""
    @property
    def heads(self) -> list[tuple[int, list[int], list[int], int]]:
        """Live rows: (slot, the source's shape, where each run starts, elements of a run), in the slot's elements.

        The runs take the source's elements in row-major order.
        """
    def __eq__(self, other: object, /) -> bool: ...
    def __ne__(self, other: object, /) -> bool: ...

@final
class PoolLedger:
    """Who shares which input buffer. It holds no memory; safe to use from several threads and from finalizers."""

    def __new__(cls) -> PoolLedger:
        """An empty ledger."""
    def join(
        self,
        name: str,
        *,
        dtype: str,
        device: str,
        current_index: int,
        shape: Sequence[int],
        policy: str,
        pad: bytes,
        rewrites: bool,
        fed: bool,
        owner: str,
    ) -> tuple[int, int, bool]:
        """Adds a user: to the first memory of this name, size, dtype and device that it can share, else to a new one.

        Two users can share where both rewrite what they read; where they keep rows by the same policy, pad value and
        shape; or where one is `foreach_copy` and the other rewrites rows of the same shape and pads with zeros.

        Args:
            name: of the input.
            dtype: torch's name, or an alias.
            device: with or without its number.
            current_index: the number that a device without one means.
            shape: of the buffer.
            policy: the value of a `PaddingPolicy`.
            pad: the bytes of the pad value.
            rewrites: each fill writes all rows that are then read.
            fed: fills write live rows.
            owner: who it is, for the printed ledger.

        Returns:
            The memory, the user, and whether the memory is new. Numbers are never used again.

        Raises:
            SlotError: `unsupported-dtype`, `bad-device` or `unknown-word`; nothing changed.
        """
    def leave(self, user: int, /) -> int | None:
        """Removes a user, and returns its memory where that has no other. An unknown user is nobody's last."""
    def owners(self, memory: int, /) -> list[str]:
        """The owners of a memory's users, in the order in which they came; none where there is no such memory."""
    @property
    def total_bytes(self) -> int:
        """Bytes of all memories."""
    @property
    def saved_bytes(self) -> int:
        """Bytes that the users would take besides, if each had its own."""
    def __len__(self) -> int:
        """How many memories there are."""
