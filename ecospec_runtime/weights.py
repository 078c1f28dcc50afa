"""Tensors of safetensors files, read on demand into memory of their own.

transformers maps these files into memory: while it converts weights, the mapped pages and the converted copy are both
resident, twice the model. Plain reads leave nothing behind, so loading needs the weights and one conversion at a time.
"""

from __future__ import annotations

import ctypes
import json
import mmap
import struct
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from ecospec_runtime.errors import UserError

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
OWN_PAGES = 64 << 10  # bytes from which a tensor gets pages of its own
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # of glibc's mallopt
LARGEST = 32 << 20  # the most that glibc lets its own threshold grow to
TYPES: dict[str, torch.dtype] = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "I64": torch.int64,
    "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
    "U16": torch.uint16, "U32": torch.uint32, "U64": torch.uint64, "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "F8_E8M0": torch.float8_e8m0fnu,
}  # fmt: skip


@dataclass(frozen=True)
class StoredTensor:
    """One tensor of a safetensors file. Indexing reads it; the methods are those of a `safetensors` slice."""

    path: Path
    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int  # byte offset in the file

    def __str__(self) -> str:
        return f"{self.path.name}: {self.name}"

    def get_shape(self) -> list[int]:
        """Shape, as transformers asks for it."""
        return list(self.shape)

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return self.dtype.itemsize * int(torch.Size(self.shape).numel())

    def reshaped(self, *shape: int) -> StoredTensor:
        """The same data in another shape; one entry may be -1."""
        return replace(self, shape=tuple(torch.empty(self.shape, device="meta").reshape(shape).shape))

    def rows(self, first: int, last: int) -> Tensor:
        """Rows `first` to `last` (exclusive) of the first dimension."""
        row = self.nbytes // self.shape[0]
        return self._read(first * row, (last - first, *self.shape[1:]))

    def data(self, first: int, count: int) -> bytes:
        """`count` bytes of the tensor's data from byte `first` on."""
        return self._read(first, (count,), torch.uint8).numpy().tobytes()

    def __getitem__(self, index: Any) -> Tensor:
        tensor = self._read(0, self.shape)
        return tensor if index is Ellipsis else tensor[index].clone()

    def _read(self, offset: int, shape: tuple[int, ...], dtype: torch.dtype | None = None) -> Tensor:
        tensor = own_memory(shape, dtype or self.dtype)
        if not tensor.numel():
            return tensor
        view = memoryview(tensor.reshape(-1).view(torch.uint8).numpy())  # type: ignore[arg-type]
        with self.path.open("rb", buffering=0) as file:
            file.seek(self.start + offset)
            while len(view):
                count = file.readinto(view)
                if not count:
                    raise UserError(f"{self.path}: ends inside {self.name}; copy or download it again")
                view = view[count:]
        return tensor


@contextmanager
def own_pages() -> Iterator[None]:
    """In here malloc gives tensors pages of their own: on its heap, what conversions free stays between what they leave, up to
    half a model's size. Afterwards its thresholds are where freeing large tensors takes them anyway. glibc only."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if mallopt is None:
        yield
        return
    mallopt(M_MMAP_THRESHOLD, OWN_PAGES)
    try:
        yield
    finally:
        mallopt(M_MMAP_THRESHOLD, LARGEST)
        mallopt(M_TRIM_THRESHOLD, 2 * LARGEST)


def own_memory(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Uninitialised memory that goes back to the system as soon as it is freed, which malloc's own does not."""
    size = dtype.itemsize * int(torch.Size(shape).numel())
    if size < OWN_PAGES:
        return torch.empty(shape, dtype=dtype)
    private = {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS} if hasattr(mmap, "MAP_ANONYMOUS") else {}
    return torch.frombuffer(mmap.mmap(-1, size, **private), dtype=torch.uint8).view(dtype).reshape(shape)


def read_folder(paths: list[Path]) -> dict[str, StoredTensor]:
    """The tensors of these files by name; nothing is read but headers. Raises SafetensorError for a damaged file."""
    return {tensor.name: tensor for path in paths for tensor in _read_header(path)}


def _read_header(path: Path) -> Iterator[StoredTensor]:
    with safe_open(path, framework="pt"):  # checks header, offsets and length
        pass
    with path.open("rb") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        header = json.loads(file.read(length))
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        if entry["dtype"] not in TYPES:
            raise UserError(f"{path}: tensor {name} has type {entry['dtype']}, which is not supported")
        yield StoredTensor(
            path, name, TYPES[entry["dtype"]], tuple(entry["shape"]), 8 + length + entry["data_offsets"][0]
        )


def indexed_files(folder: Path) -> set[str]:
    """Names of the files in a folder's index; none without a readable one."""
    try:
        return {str(name) for name in json.loads((folder / INDEX).read_text(encoding="utf-8"))["weight_map"].values()}
    except (OSError, ValueError, KeyError, AttributeError, TypeError):
        return set()


def checkpoint_files(folder: Path, source: str) -> list[Path]:
    """The safetensors files that transformers would load: the single one or those of the index; [] if it has neither."""
    if (folder / SINGLE).is_file():
        return [folder / SINGLE]
    index = folder / INDEX
    if not index.is_file():
        return []
    try:
        names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
    except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
        raise UserError(f"target {source}: {INDEX} is not a readable index ({type(error).__name__})") from None
    for name in names:
        if not (folder / str(name)).is_file():
            raise UserError(f"target {source}: {name} is missing, {INDEX} names it; copy or download it again")
    return [folder / str(name) for name in names]
