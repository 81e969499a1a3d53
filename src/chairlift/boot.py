"""From a Config to a model that is ready to serve: find, open, plan, load. Server and terminal commands start here.

    config.model ──store──> path ──open_checkpoint──> Checkpoint ──plan.resolve──> Plan ──backend.load──> Loaded
                                 config.backend ──make_backend──> Backend ─┘

Owns the order of start-up and its timings. Decides nothing: sizes are the plan's, arithmetic is the cost module's.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from chairlift import BEGAN_S, __version__, store
from chairlift import machine as machines
from chairlift import plan as plans
from chairlift.config import Config
from chairlift.engine.detok import Detokenizer
from chairlift.engine.engine import Engine
from chairlift.engine.observer import Observer
from chairlift.engine.request import Output, Request
from chairlift.engine.sampling_params import SamplingParams
from chairlift.engine.stops import StopMatcher
from chairlift.errors import RequestError
from chairlift.kernels.backend import Backend, BackendFacts, KVLayout, LoadSpec, MemoryView, Model
from chairlift.kernels.backends import make_backend
from chairlift.models import registry
from chairlift.models.checkpoint import Checkpoint, GenerationDefaults, open_checkpoint
from chairlift.models.spec import ModelSpec, RawTensor
from chairlift.models.templates.chat_template import ChatTemplate
from chairlift.models.tokenizer import Tokenizer
from chairlift.plan import Plan

Progress = Callable[[str], None]
"""Takes one line for a person to read."""


@dataclass(frozen=True, slots=True)
class Loaded:
    """A model in memory, with all that serving it takes."""

    config: Config
    plan: Plan
    spec: ModelSpec
    tokenizer: Tokenizer
    template: ChatTemplate | None
    generation: GenerationDefaults
    model: Model
    backend: BackendFacts
    memory: MemoryView  # before loading
    names: tuple[str, ...]  # clients may ask for any of these; the first is the model's own
    num_parameters: int
    read_bytes: int  # weights that one token reads: all but an embedding table that is not the head too
    bandwidth: float  # bytes/s of memory, measured at start
    timings: dict[str, float] = field(default_factory=dict)  # seconds of each part of the start, in order

    @property
    def fingerprint(self) -> str:
        """All that an answer's bits depend on beside model and request: version, backend and type of KV."""
        return f"chairlift-{__version__}-{self.backend.fingerprint}-{self.plan.kv_dtype}"

    def request(
        self,
        id: str,
        prompt: Sequence[int],
        params: SamplingParams,
        *,
        stream: bool = False,
        salt: str = "",
        group: str = "",
        key_name: str = "",
    ) -> Request:
        """A request for this model, ready to be submitted to its engine."""
        return Request(
            id=id,
            prompt=tuple(prompt),
            params=params,
            eos_ids=self.tokenizer.eos_ids | self.generation.eos_ids,
            detok=Detokenizer(self.tokenizer.vocab_bytes, self.tokenizer.special_ids),
            stops=StopMatcher(params.stop),
            salt=salt,
            group=group,
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
    """Finds, opens, plans and loads the model that the config asks for, on this machine.

    `progress` gets a line per thing that may take long. Raises ConfigError, ModelError or DoesNotFit; nothing large is
    read before the plan says that it fits.
    """
    timings = {"python": time.perf_counter() - BEGAN_S}
    path = store.resolve(config.model, config.cache_dir, progress=progress)
    names = config.served_model_name or (_own_name(path, config.cache_dir),)
    with _timed(timings, "open"):
        checkpoint = open_checkpoint(path)
    with checkpoint:
        return load_checkpoint(config, checkpoint, names, timings=timings)


def load_checkpoint(
    config: Config, checkpoint: Checkpoint, names: tuple[str, ...], *, timings: dict[str, float] | None = None
) -> Loaded:
    """Plans and loads an open checkpoint, which is still the caller's to close. Errors as for `load`."""
    timings = {} if timings is None else timings
    with ThreadPoolExecutor(1) as beside:
        tokenizer = beside.submit(checkpoint.tokenizer)  # built beside all that follows
        machine = machines.detect()
        backend = make_backend(config.backend, config, machine)
        facts, memory = backend.facts(machine), backend.memory(machine)
        weights = Weights(registry.model_tensors(checkpoint.spec, checkpoint.tensors))
        on_disk = plans.ModelOnDisk(names[0], weights.format, weights.num_bytes, backend.packed_bytes(weights.distinct))
        offer = plans.BackendOffer(memory, backend.step_tokens, backend.working_bytes, facts.notes)
        plan = plans.resolve(config, checkpoint.spec, on_disk, offer)
        with _timed(timings, "bandwidth"):
            bandwidth = backend.read_speed(checkpoint.weight_file)
        model = _load_model(backend, plan, weights, timings)
        with _timed(timings, "tokenizer"):  # what was left of it
            template = _template(checkpoint.chat_template, tokenizer.result())
    return Loaded(
        config=config,
        plan=plan,
        spec=checkpoint.spec,
        tokenizer=tokenizer.result(),
        template=template,
        generation=checkpoint.generation,
        model=model,
        backend=facts,
        memory=memory,
        names=names,
        num_parameters=weights.num_parameters,
        read_bytes=weights.read_bytes,
        bandwidth=bandwidth,
        timings=timings,
    )


@dataclass(frozen=True, slots=True)
class Weights:
    """The tensors that a forward pass looks up, by name; a tied table stands under two names and counts once."""

    tensors: Mapping[str, RawTensor]

    @property
    def distinct(self) -> list[RawTensor]:
        """Each tensor once."""
        return list({id(tensor): tensor for tensor in self.tensors.values()}.values())

    @property
    def num_bytes(self) -> int:
        """Bytes in the container."""
        return sum(tensor.num_bytes for tensor in self.distinct)

    @property
    def num_parameters(self) -> int:
        """Elements of all tensors."""
        return sum(tensor.num_elements for tensor in self.distinct)

    @property
    def read_bytes(self) -> int:
        """Bytes that one token reads: all but an embedding table that is not the head too."""
        table = self.tensors[registry.EMBEDDING]
        return self.num_bytes - (0 if table is self.tensors[registry.HEAD] else table.num_bytes)

    @property
    def format(self) -> str:
        """The types of the matrices, those with most bytes first: "Q4_1 + Q8_0"."""
        sizes: Counter[str] = Counter()
        for tensor in self.distinct:
            if len(tensor.shape) > 1:
                sizes[tensor.type_name] += tensor.num_bytes
        return " + ".join(name for name, _ in sizes.most_common())


def _load_model(backend: Backend, plan: Plan, weights: Weights, timings: dict[str, float]) -> Model:
    """Has the backend load, and notes how long that took: the parts of it, where the backend tells them apart."""
    layout = KVLayout(plan.num_blocks, plan.block_size, plan.kv_dtype)
    forward = registry.forward_for(plan.spec.architecture)
    whole: dict[str, float] = {}
    with _timed(whole, "weights and KV"):
        model = backend.load(LoadSpec(plan.spec, forward, weights.tensors, layout, plan.max_num_batched_tokens))
    timings |= model.load_s or whole
    return model


@contextmanager
def _timed(timings: dict[str, float], part: str) -> Iterator[None]:
    start_s = time.perf_counter()
    yield
    timings[part] = time.perf_counter() - start_s


def _template(source: str | None, tokenizer: Tokenizer) -> ChatTemplate | None:
    return None if source is None else ChatTemplate(source, tokenizer.special_tokens)


def _own_name(path: Path, cache_dir: Path) -> str:
    """A packaged model's name, also when its file was given by path; else the file's, without its ending."""
    packaged = (model.name for model in store.CATALOGUE.values() if model.path_in(cache_dir) == path)
    return next(packaged, path.stem)
