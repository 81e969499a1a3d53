"""GGUF, a container of models in one file: its reader, and what the file says as a `Checkpoint`."""

from chairlift.models.gguf.ggml_types import GGML_TYPES
from chairlift.models.gguf.reader import DEFAULT_ALIGNMENT, MAGIC, GGUFFile

__all__ = ["DEFAULT_ALIGNMENT", "GGML_TYPES", "MAGIC", "GGUFFile"]
