"""From a Config to a model that is ready to serve: find, open, size, load. Server and terminal commands start here.

    config.model ──store──> file ──registry──> spec ──plan.resolve──> plan ──backend.load──> Loaded
                                                  machine ─┘

Owns the order of start-up and its timings; decides nothing itself: sizes are the plan's, arithmetic the cost module's.
"""

from __future__ import annotations

import queue
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType

from chairlift import BEGAN_S, store
from chairlift import machine as machines
from chairlift import plan as plans
from chairlift.config import Config
from chairlift.engine.detok import Detokenizer
from chairlift.engine.engine import Engine
from chairlift.engine.observer import Observer
from chairlift.engine.request import Output, Request, SamplingParams
from chairlift.engine.stops import StopMatcher
from chairlift.errors import ConfigError, RequestError
from chairlift.kernels.backend import Backend, KVLayout, LoadSpec, Model
from chairlift.machine import Machine
from chairlift.models import registry
from chairlift.models.checkpoint import open_checkpoint
from chairlift.models.spec import ModelSpec, RawTensor
from chairlift.models.templates.chat_template import ChatTemplate
from chairlift.models.tokenizer import Tokenizer
from chairlift.plan import Plan

Progress = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Loaded:
    """A model in memory, with all that serving it takes."""

    config: Config
    plan: Plan
    spec: ModelSpec
    tokenizer: Tokenizer
    template: ChatTemplate | None
    model: Model
    path: Path
    machine: Machine
    names: tuple[str, ...]  # clients may ask for any of these; the first is the model's own
    num_parameters: int
    read_bytes: int  # weights that one token reads: all but an embedding table that is not the head too
    bandwidth: float  # bytes/s of memory, measured at start
    timings: dict[str, float] = field(default_factory=dict)  # seconds of each part of the start, in order

    def request(
        self,
        id: str,
        prompt: Sequence[int],
        params: SamplingParams,
        *,
        stream: bool = False,
        salt: str = "",
        key_name: str = "",
    ) -> Request:
        """A request for this model, ready to be submitted to its engine."""
        return Request(
            id=id,
            prompt=tuple(prompt),
            params=params,
            eos_ids=self.tokenizer.eos_ids,
            detok=Detokenizer(self.tokenizer.vocab_bytes, self.tokenizer.special_ids),
            stops=StopMatcher(params.stop),
            salt=salt,
            key_name=key_name,
            stream=stream,
        )

    def engine(self, deliver: Callable[[list[Output]], None], observers: Sequence[Observer] = ()) -> Engine:
        """An engine on this model; one at a time, since they would share its KV pool."""
        return Engine(self.plan, self.model, deliver=deliver, observers=observers)

    def encode(self, text: str, *, parse_special: bool = False) -> list[int]:
        """Token ids of plain text, with BOS where the model's prompts begin with it."""
        return self.tokenizer.encode(text, add_bos=self.tokenizer.add_bos, parse_special=parse_special)

    def encode_chat(self, messages: list[dict[str, str]]) -> list[int]:
        """Token ids of a conversation, up to where the assistant's answer begins."""
        if self.template is None:
            raise RequestError(f"{self.plan.model_name} has no chat template", hint="use it with plain text")
        text = self.template.render(messages)
        return self.tokenizer.encode(text, add_bos=self.tokenizer.add_bos, parse_special=True)


def load(config: Config, *, progress: Progress | None = None) -> Loaded:
    """Loads the model that the config asks for, on this machine.

    `progress` gets a line per thing that may take long. Raises ConfigError, ModelError or DoesNotFit; nothing large is
    read before the plan says that it fits.
    """
    timings = {"python": time.perf_counter() - BEGAN_S}
    path = store.resolve(config.model, config.cache_dir, progress=progress)
    with _timed(timings, "open"):
        checkpoint = open_checkpoint(path)
    with checkpoint, ThreadPoolExecutor(1) as beside:
        spec = checkpoint.spec
        tokenizer = beside.submit(checkpoint.tokenizer)
        isa = _isa(config)
        machine = machines.detect()
        names = config.served_model_name or (_own_name(path, config.cache_dir),)
        tensors = registry.model_tensors(spec, checkpoint.tensors)
        distinct = list({id(tensor): tensor for tensor in tensors.values()}.values())
        on_disk = plans.ModelOnDisk(names[0], _format(distinct), sum(tensor.data.nbytes for tensor in distinct))
        plan = plans.resolve(config, spec, machine, on_disk, isa=isa)
        with _timed(timings, "bandwidth"):
            bandwidth = machines.measure_bandwidth(checkpoint.weight_file, plan.threads)
        loading: dict[str, float] = {}
        with _timed(loading, "weights and KV"):
            backend = _backend(config, plan)
            layout = KVLayout(plan.num_blocks, plan.block_size, plan.kv_dtype)
            forward = registry.forward_for(spec.architecture)
            model = backend.load(LoadSpec(spec, forward, tensors, layout, plan.max_num_batched_tokens))
        timings |= model.load_s or loading  # the parts, where the backend tells them apart
        with _timed(timings, "tokenizer"):  # built meanwhile; this is what was left of it
            template = _template(checkpoint.chat_template, tokenizer.result())
    tied = tensors[registry.HEAD] is tensors[registry.EMBEDDING]
    return Loaded(
        config=config,
        plan=plan,
        spec=spec,
        tokenizer=tokenizer.result(),
        template=template,
        model=model,
        path=path,
        machine=machine,
        names=names,
        num_parameters=sum(tensor.num_elements for tensor in distinct),
        read_bytes=on_disk.weight_bytes - (0 if tied else tensors[registry.EMBEDDING].data.nbytes),
        bandwidth=bandwidth,
        timings=timings,
    )


class Session:
    """An engine without a server, for one caller at a time: what `generate`, `chat` and `eval` run on."""

    def __init__(self, loaded: Loaded) -> None:
        self._loaded = loaded
        self._outputs: queue.SimpleQueue[list[Output]] = queue.SimpleQueue()
        self._engine = loaded.engine(self._outputs.put)
        self._num_requests = 0

    def __enter__(self) -> Session:
        with _timed(self._loaded.timings, "warm-up"):
            self._engine.warm_up()
        self._engine.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._engine.stop()

    def stream(self, prompt: Sequence[int], params: SamplingParams) -> Iterator[Output]:
        """Runs one request to its end. Leaving the iterator early cancels it. Raises what the request ended with."""
        self._num_requests += 1
        request = self._loaded.request(str(self._num_requests), prompt, params, stream=True)
        self._engine.submit([request])
        try:
            while True:
                for output in self._outputs.get():
                    if output.request is not request:
                        continue  # the last of one that was left early
                    if output.error is not None:
                        raise output.error
                    yield output
                    if output.finish_reason is not None:
                        return
        finally:
            self._engine.cancel([request])


@contextmanager
def _timed(timings: dict[str, float], part: str) -> Iterator[None]:
    start = time.perf_counter()
    yield
    timings[part] = time.perf_counter() - start


def _template(source: str | None, tokenizer: Tokenizer) -> ChatTemplate | None:
    return None if source is None else ChatTemplate(source, tokenizer.special_tokens)


def _backend(config: Config, plan: Plan) -> Backend:
    """The kernels, on as many threads as the plan says."""
    if config.backend == "reference":
        from chairlift.kernels.reference import ReferenceBackend

        return ReferenceBackend(plan.activation_bits)
    from chairlift.kernels.native import NativeBackend

    return NativeBackend(plan.isa, threads=plan.threads, activation_bits=plan.activation_bits)


def _isa(config: Config) -> str:
    """The name of the kernels' instruction set."""
    if config.backend == "reference":
        if config.isa is not None:
            raise ConfigError(f"--isa {config.isa} chooses among compiled kernels; --backend reference has none")
        return "numpy"
    try:
        from chairlift.kernels.native import NativeBackend
    except ImportError as error:
        raise ConfigError(
            f"the compiled kernels are missing: {error}",
            hint="build them with `pip install .` (needs a C++20 compiler), or use --backend reference, which is slow",
        ) from None
    return NativeBackend(config.isa).isa


def _own_name(path: Path, cache_dir: Path) -> str:
    """A packaged model's name, also when its file was given by path; else the file's, without its ending."""
    packaged = (model.name for model in store.CATALOGUE.values() if model.path_in(cache_dir) == path)
    return next(packaged, path.stem)


def _format(tensors: Sequence[RawTensor]) -> str:
    """The types of the matrices, those with most bytes first: "Q4_1 + Q8_0"."""
    sizes: Counter[str] = Counter()
    for tensor in tensors:
        if len(tensor.shape) > 1:
            sizes[tensor.type_name] += tensor.data.nbytes
    return " + ".join(name for name, _ in sizes.most_common())
