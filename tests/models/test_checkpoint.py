"""The seam between containers and all that serves a model: a Checkpoint that is no GGUF answers like one that is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from chairlift import boot
from chairlift.boot import Loaded
from chairlift.config import Config
from chairlift.engine.sampling_params import SamplingParams
from chairlift.errors import ModelError, ModelFileError
from chairlift.kernels.backend import KVLayout, LoadSpec
from chairlift.kernels.ops import F32
from chairlift.kernels.reference import ReferenceBackend
from chairlift.models import registry
from chairlift.models.checkpoint import Checkpoint, GenerationDefaults, open_checkpoint
from chairlift.models.spec import ModelSpec, RawTensor
from chairlift.models.tokenizer import GPT2, Tokenizer, Vocabulary, VocabularyError
from chairlift.session import Session
from support.memory_checkpoint import MemoryCheckpoint, raw_tensor
from support.model_cases import CASES, TOKENS, gguf_tensors, hf_weights, write_case
from support.step_arrays import Part, make_step
from support.tiny_gguf import Shape

TinyGGUF = Callable[..., Path]
HELLO = [{"role": "user", "content": "Hello"}]


def answer(loaded: Loaded) -> tuple[str, list[float]]:
    """Text and log-probabilities of a greedy answer."""
    params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True, logprobs=0)
    with Session(loaded) as session:
        outputs = list(session.stream(loaded.encode_chat(HELLO), params))
    entries = [entry for output in outputs for entry in output.logprobs]
    return "".join(output.text for output in outputs), [entry.logprob for entry in entries]


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("weight_type", ["F32", "Q4_1"])
def test_a_checkpoint_in_memory_answers_like_the_file(tiny_gguf: TinyGGUF, architecture: str, weight_type: str) -> None:
    """A GGUF key or a path that somebody behind the seam still reads."""
    path = tiny_gguf(architecture, weight_type=weight_type)
    config = Config(model=str(path), backend="reference", max_num_seqs=2)
    with MemoryCheckpoint(Shape(architecture, weight_type=weight_type), path) as checkpoint:
        in_memory = boot.load_checkpoint(config, checkpoint, ("tiny",))
    assert checkpoint.is_closed
    from_file = boot.load(config)
    assert in_memory.spec == from_file.spec
    assert replace(in_memory.plan, model_name="") == replace(from_file.plan, model_name="")
    assert (in_memory.num_parameters, in_memory.read_bytes) == (from_file.num_parameters, from_file.read_bytes)
    assert in_memory.tokenizer.encode("the <|im_end|>", add_bos=True, parse_special=True) == (
        from_file.tokenizer.encode("the <|im_end|>", add_bos=True, parse_special=True)
    )
    text, logprobs = answer(in_memory)
    assert (text, logprobs) == answer(from_file)
    assert len(logprobs) == 12


def logits(spec: ModelSpec, tensors: dict[str, RawTensor]) -> F32:
    weights = registry.model_tensors(spec, tensors)
    load = LoadSpec(spec, registry.forward_for(spec.architecture), weights, KVLayout(3), 64)
    found = ReferenceBackend().load(load).run(make_step([Part(TOKENS, 0, [2, 0, 1], len(TOKENS))])).logits
    assert found is not None
    return found


def test_how_rotary_pairs_lie_is_the_container_s_matter(tmp_path: Path) -> None:
    """A family that knows how GGUF permutes its rows: weights as transformers stores them would answer wrongly."""
    case = CASES["llama"]
    with open_checkpoint(write_case(tmp_path / "m.gguf", case)) as checkpoint:
        spec, tensors = checkpoint.spec, dict(checkpoint.tensors)
        expected = logits(spec, tensors)
    plain = hf_weights(case)
    for index in range(case.layers):
        for part in "qk":
            name = f"blk.{index}.attn_{part}.weight"
            assert not (gguf_tensors(case)[name] == plain[f"model.layers.{index}.self_attn.{part}_proj.weight"]).all()
            tensors[name] = raw_tensor(name, plain[f"model.layers.{index}.self_attn.{part}_proj.weight"])
    layers = tuple(replace(layer, rope=replace(layer.rope, style="halves")) for layer in spec.layers)
    largest = np.abs(expected).max()
    assert np.abs(logits(replace(spec, layers=layers), tensors) - expected).max() < 0.02 * largest
    assert np.abs(logits(spec, tensors) - expected).max() > 0.1 * largest


def test_ends_that_the_container_names_end_an_answer(tiny_gguf: TinyGGUF) -> None:
    """Generation defaults that are read and then ignored: a model that talks on beyond its end."""
    path = tiny_gguf()
    config = Config(backend="reference")
    checkpoint = MemoryCheckpoint(Shape(), path)
    checkpoint.generation = GenerationDefaults(eos_ids=frozenset({65}))
    loaded = boot.load_checkpoint(config, checkpoint, ("tiny",))
    request = loaded.request("r", [1], SamplingParams())
    assert request.eos_ids == loaded.tokenizer.eos_ids | {65}


@pytest.mark.parametrize(("name", "says"), [("folder", "is a directory"), ("none", "does not exist")])
def test_what_is_no_container_is_named(tmp_path: Path, name: str, says: str) -> None:
    """A traceback for a path that holds no model."""
    (tmp_path / "folder").mkdir()
    with pytest.raises(ModelFileError, match=says):
        open_checkpoint(tmp_path / name)


def test_a_gguf_file_is_a_checkpoint(tiny_gguf: TinyGGUF) -> None:
    """Rotary factors among the weights, or tensors that outlive closing in the checkpoint itself."""
    path = tiny_gguf(rope_freqs=True)
    checkpoint: Checkpoint = open_checkpoint(path)
    assert "rope_freqs.weight" not in checkpoint.tensors
    assert checkpoint.spec.layers[0].rope.factors[-1] == 8
    assert checkpoint.weight_file == path
    assert checkpoint.generation == GenerationDefaults()
    assert "im_start" in (checkpoint.chat_template or "")
    checkpoint.close()
    assert checkpoint.tensors == {}


@pytest.mark.parametrize(
    ("vocabulary", "says"),
    [
        (Vocabulary(["a", "b", "a"], [], GPT2), "tokens: 'a' is there twice"),
        (Vocabulary(["a", "b"], [], GPT2, control=[0]), "control: 'a' is a control token and also one byte"),
        (Vocabulary(["a", "b"], [("a", "c")], GPT2), "merges: do not belong to these tokens"),
        (Vocabulary(["a", "b"], [], GPT2, add_bos=True), "bos_id: missing, though prompts"),
    ],
)
def test_a_vocabulary_that_contradicts_itself(vocabulary: Vocabulary, says: str) -> None:
    """A container whose reader relies on the tokenizer to notice: the error is a ModelError that names the part."""
    with pytest.raises(VocabularyError, match=says) as caught:
        Tokenizer(vocabulary)
    assert isinstance(caught.value, ModelError)
    assert says.startswith(caught.value.part)


def test_the_registry_and_the_families_know_no_container() -> None:
    """A key of one container in code that serves them all."""
    models = Path(registry.__file__).parent
    for file in (*models.glob("*.py"), *(models / "templates").glob("*.py")):
        text = file.read_text(encoding="utf-8")
        assert "tokenizer.ggml" not in text, file
        assert "general." not in text, file
        if file.name != "checkpoint.py":
            assert "models.gguf" not in text, file
