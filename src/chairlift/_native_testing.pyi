"""Single kernels and the peaks they are compared with; bound in native/testing/module.cpp. Not loaded by a server."""

import numpy as np
import numpy.typing as npt

from chairlift._native import PackedMatrix

_F32 = npt.NDArray[np.float32]
_I32 = npt.NDArray[np.int32]

def embed_row(matrix: PackedMatrix, row: int) -> _F32: ...
def matmul_rounded(
    isa: str,
    matrix: PackedMatrix,
    x: tuple[npt.NDArray[np.int16], _F32],
    bits: int,
    bias: _F32 | None = None,
    residual: _F32 | None = None,
) -> _F32: ...
def matmul_float(
    isa: str, matrix: PackedMatrix, x: _F32, bias: _F32 | None = None, residual: _F32 | None = None
) -> _F32: ...
def reduce_logits(
    isa: str,
    logits: _F32,
    record: npt.NDArray[np.uint8],
    bias: tuple[_I32, _F32],
    seen: tuple[_I32, _I32],
) -> tuple[int, float, _I32, _F32, bool]: ...
def peak(isa: str, unit: str, rounds: int) -> int: ...
def uniform(seed: int, choice: int, index: int) -> float: ...
