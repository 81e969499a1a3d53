"""Random models with real dimensions: any reader takes them, and numbers stay finite through them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import gguf
import numpy as np
import pytest

from chairlift.errors import ChairliftError
from chairlift.kernels.native import NativeBackend
from chairlift.microbench import random_weights, shapes
from chairlift.models import quant
from chairlift.models.gguf import GGUFFile
from chairlift.models.gguf.metadata import read_spec
from chairlift.models.spec import RawTensor
from support import tiny_native as native_case
from support.tiny_gguf import tiny_model, tokenizer_metadata, write_gguf

SHAPE = shapes.Shape(hidden=128, layers=3, heads=4, kv_heads=2, head_dim=32, ffn=192, tied=False, context=256)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("source") / "tiny.gguf", vocab=320, add_bos=True)


@pytest.mark.parametrize("weight_type", shapes.FILE_TYPES)
@pytest.mark.parametrize("tied", [False, True])
def test_the_model_loads_and_its_logits_are_finite(source: Path, tmp_path: Path, weight_type: str, tied: bool) -> None:
    """A tensor that is missing or of other extents; scales that overflow after some layers, or that leave all equal."""
    path = tmp_path / "shape.gguf"
    wide = {"hidden": 256, "head_dim": 64, "ffn": 256} if weight_type.endswith("_K") else {}
    shapes.write_shape(path, replace(SHAPE, tied=tied, **wide), weight_type, source)
    model = native_case.load(NativeBackend(), path)
    logits = native_case.whole(model, native_case.tokens_of(1, 20), range(2))
    assert np.isfinite(logits).all()
    assert 0.3 < logits.std() < 3


def test_the_vocabulary_is_the_source_s(source: Path, tmp_path: Path) -> None:
    """A tokenizer written with other types than it was read: numbers become other numbers, or strings bytes."""
    path = tmp_path / "shape.gguf"
    shapes.write_shape(path, SHAPE, "Q4_0", source)
    with GGUFFile.open(source) as original, GGUFFile.open(path) as written:
        keys = [key for key in original.metadata if key.startswith("tokenizer.")]
        assert len(keys) > 5
        assert [written.metadata[key] for key in keys] == [original.metadata[key] for key in keys]
        spec = read_spec(written.metadata, written.tensors)
    assert (spec.vocab_size, spec.hidden_size, spec.layers[0].head_dim, spec.context_length) == (320, 128, 32, 256)


def test_another_reader_finds_the_same(source: Path, tmp_path: Path) -> None:
    """A writer and a reader of ours that share a mistake about the format."""
    path = tmp_path / "shape.gguf"
    shapes.write_shape(path, SHAPE, "Q4_1", source)
    reader = gguf.GGUFReader(path)
    with GGUFFile.open(path) as ours:
        assert {tensor.name for tensor in reader.tensors} == set(ours.tensors)
        for tensor in reader.tensors:
            assert tensor.data.tobytes() == ours.tensors[tensor.name].data.tobytes(), tensor.name
    assert reader.fields["tokenizer.ggml.token_type"].types[-1] == gguf.GGUFValueType.INT32
    assert reader.fields["llama.block_count"].contents() == 3


@pytest.mark.parametrize("weight_type", ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K"])
def test_rows_have_length_near_one(weight_type: str) -> None:
    """A mean that is not zero adds up over layers; a wrong deviation makes activations grow or vanish."""
    rng = np.random.default_rng(0)
    data = np.concatenate(list(random_weights.draw(rng, weight_type, (400, 4096))))
    weights = quant.dequantise(RawTensor("drawn", (400, 4096), weight_type, data))
    assert np.linalg.norm(weights, axis=1) == pytest.approx(1, abs=0.25)
    assert abs(weights.mean()) < 0.03 * weights.std()


def test_a_tensor_larger_than_a_chunk_is_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last, shorter chunk dropped or written twice: every tensor after it would be shifted."""
    monkeypatch.setattr(random_weights, "CHUNK_BYTES", 1000)
    chunks = list(random_weights.draw(np.random.default_rng(0), "Q4_0", (40, 64)))
    assert [len(chunk) for chunk in chunks] == [990, 450]


def test_progress_ends_at_the_size_of_the_file(source: Path, tmp_path: Path) -> None:
    """A bar that stops at 97 %."""
    told: list[tuple[int, int]] = []
    path = tmp_path / "shape.gguf"
    shapes.write_shape(path, SHAPE, "Q8_0", source, progress=lambda done, total: told.append((done, total)))
    assert told[-1] == (path.stat().st_size, path.stat().st_size)


def test_a_source_without_a_vocabulary_is_refused(tmp_path: Path) -> None:
    """A file that no server can load, found out only there."""
    path = write_gguf(tmp_path / "bare.gguf", {"general.architecture": "llama"}, {})
    with pytest.raises(ChairliftError, match="vocabulary"):
        shapes.write_shape(tmp_path / "shape.gguf", SHAPE, "Q4_0", path)


def test_the_command_line_writes_what_was_asked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A script whose arguments have drifted from the code below it."""
    source = write_gguf(tmp_path / "vocabulary.gguf", tokenizer_metadata(320), {})
    path = tmp_path / "shape.gguf"
    assert shapes.main(["1b", "Q4_0", str(path), "--layers", "1", "--like", str(source)]) == 0
    with GGUFFile.open(path) as file:
        spec = read_spec(file.metadata, file.tensors)
    assert (spec.num_layers, spec.hidden_size, spec.ffn_size, spec.vocab_size) == (1, 2048, 8192, 320)
    assert "100 %" in capsys.readouterr().err
    assert shapes.main(["1b", "Q4_0", str(path), "--like", str(tmp_path / "none")]) == 1
