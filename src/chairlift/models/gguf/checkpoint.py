"""A GGUF file as a `Checkpoint`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import TracebackType

from chairlift.models.checkpoint import GenerationDefaults
from chairlift.models.gguf.metadata import read_spec, weights
from chairlift.models.gguf.reader import GGUFFile
from chairlift.models.gguf.vocabulary import read_tokenizer
from chairlift.models.spec import RawTensor
from chairlift.models.tokenizer import Tokenizer

_TEMPLATE_KEY = "tokenizer.chat_template"


class GGUFCheckpoint:
    """One open file whose metadata and tensors have been checked. GGUF says nothing of how answers are drawn."""

    def __init__(self, file: GGUFFile) -> None:
        """Raises ModelError for a model that cannot be served."""
        self.spec = read_spec(file.metadata, file.tensors)
        self.generation = GenerationDefaults()
        self._file = file

    @classmethod
    def open(cls, path: Path) -> GGUFCheckpoint:
        """Opens a file. Raises ModelFileError for a damaged or foreign file, ModelError for an unsupported model."""
        file = GGUFFile.open(path)
        try:
            return cls(file)
        except BaseException:
            file.close()
            raise

    @property
    def tensors(self) -> Mapping[str, RawTensor]:
        """The weights, as views into the memory map."""
        return weights(self._file.tensors)

    @property
    def weight_file(self) -> Path:
        """The file itself."""
        return self._file.path

    @property
    def chat_template(self) -> str | None:
        """The template's source; None where the file has none."""
        source = self._file.metadata.get(_TEMPLATE_KEY)
        return source if isinstance(source, str) else None

    def tokenizer(self) -> Tokenizer:
        """Builds the tokenizer. Raises ModelError naming the field that cannot be honoured."""
        return read_tokenizer(self._file.metadata)

    def close(self) -> None:
        """Lets go of the tensors; metadata stays."""
        self._file.close()

    def __enter__(self) -> GGUFCheckpoint:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()
