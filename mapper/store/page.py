"""The page format: a 128-byte header, then K and V of every layer, layer-major.

mapper/README.md specifies it to the byte. Everything that can be checked is checked
before a byte of the payload is used; sizes come from the reader's own layout, never
from the file.
"""

from __future__ import annotations

import enum
import hashlib
import struct
from dataclasses import dataclass

import torch

from mapper.errors import BadPage
from mapper.spec import KV_DTYPES, ModelSpec

MAGIC = b"BATONKV\x00"
VERSION = 1
HEADER_BYTES = 128
# magic, version, fingerprint, layers, kv_heads, head_first, head_count, head_dim,
# dtype code, page_size, provenance, payload bytes, SHA-256
_HEADER = struct.Struct("<8sI4x8sHHHHHHIB7xQ40x32s")
_CHECKSUM_OFFSET = HEADER_BYTES - 32
_DTYPE_CODES = {"float32": 1, "bfloat16": 2, "float16": 3}
assert _HEADER.size == HEADER_BYTES

BAD_PAGE_REASONS = ("truncated", "not_a_page", "version", "foreign", "checksum", "unreadable")


class Provenance(enum.IntEnum):
    """How a page came to be; a mapped page is never mapped a second time."""

    COMPUTED = 0
    MAPPED = 1


@dataclass(frozen=True)
class PageLayout:
    """Shape of one page object: the model's pages as one tensor-parallel rank holds them."""

    fingerprint: str
    layers: int
    kv_heads: int
    head_dim: int
    dtype: str
    page_size: int
    rank: int = 0
    tp_size: int = 1

    def __post_init__(self) -> None:
        if len(self.fingerprint) != 16 or set(self.fingerprint) - set("0123456789abcdef"):
            raise ValueError(f"fingerprint must be 16 hex digits, not {self.fingerprint!r}")
        if self.dtype not in KV_DTYPES:
            raise ValueError(f"dtype must be one of {', '.join(KV_DTYPES)}, not {self.dtype!r}")
        if not 0 <= self.rank < self.tp_size:
            raise ValueError(f"rank {self.rank} is outside 0..{self.tp_size - 1}")
        if self.kv_heads % self.tp_size:
            # SGLang replicates heads then; two ranks would own the same head.
            raise ValueError(f"{self.kv_heads} KV heads do not divide over {self.tp_size} ranks")

    @classmethod
    def of(cls, spec: ModelSpec, rank: int = 0, tp_size: int = 1) -> PageLayout:
        return cls(
            spec.fingerprint,
            spec.layers,
            spec.kv_heads,
            spec.head_dim,
            spec.kv_dtype,
            spec.page_size,
            rank,
            tp_size,
        )

    @property
    def heads(self) -> int:
        """KV heads held by this rank."""
        return self.kv_heads // self.tp_size

    @property
    def shape(self) -> tuple[int, int, int, int, int]:
        """[layers, K|V, tokens, heads, head_dim]"""
        return (self.layers, 2, self.page_size, self.heads, self.head_dim)

    @property
    def torch_dtype(self) -> torch.dtype:
        return getattr(torch, self.dtype)

    @property
    def payload_bytes(self) -> int:
        layers, two, tokens, heads, dim = self.shape
        return layers * two * tokens * heads * dim * KV_DTYPES[self.dtype]

    @property
    def object_bytes(self) -> int:
        return HEADER_BYTES + self.payload_bytes

    @property
    def _shape_fields(self) -> tuple[int, ...]:
        """What the header says of the payload's shape, in its order."""
        return (
            self.layers,
            self.kv_heads,
            self.rank * self.heads,
            self.heads,
            self.head_dim,
            _DTYPE_CODES[self.dtype],
            self.page_size,
        )

    def header(self, payload: memoryview, provenance: Provenance) -> bytes:
        """The header of a page with this payload."""
        unsigned = _HEADER.pack(
            MAGIC,
            VERSION,
            bytes.fromhex(self.fingerprint),
            *self._shape_fields,
            provenance,
            self.payload_bytes,
            bytes(32),
        )
        return unsigned[:_CHECKSUM_OFFSET] + _checksum(unsigned[:_CHECKSUM_OFFSET], payload)

    def encode(self, page: torch.Tensor, provenance: Provenance) -> tuple[bytes, memoryview]:
        """Header and payload of `page`, a contiguous CPU tensor of `shape` and dtype.

        Raises:
            ValueError: shape, dtype, device or memory layout is not this layout's.
        """
        if page.shape != self.shape or page.dtype != self.torch_dtype:
            raise ValueError(
                f"page is {page.dtype} {tuple(page.shape)}; expected {self.dtype} {self.shape}"
            )
        payload = memoryview(page.reshape(-1).view(torch.uint8).numpy())
        return self.header(payload, provenance), payload

    def decode(self, content: memoryview) -> tuple[torch.Tensor, Provenance]:
        """The page in `content`, without copying it, and its provenance.

        Raises:
            BadPage: not a whole, unaltered page of this layout.
        """
        provenance = self.check_header(content[:HEADER_BYTES], len(content))
        payload = content[HEADER_BYTES:]
        checksum = _checksum(bytes(content[:_CHECKSUM_OFFSET]), payload)
        if checksum != content[_CHECKSUM_OFFSET:HEADER_BYTES]:
            raise BadPage("checksum", "the content is not what was written")
        page = torch.frombuffer(payload, dtype=self.torch_dtype).view(self.shape)
        return page, provenance

    def check_header(self, header: memoryview | bytes, size: int) -> Provenance:
        """Checks everything but the checksum; `size` is the object's size in bytes."""
        if size < HEADER_BYTES or len(header) < HEADER_BYTES:
            raise BadPage("truncated", f"{size} bytes cannot hold a header")
        fields = _HEADER.unpack(header)
        magic, version, fingerprint = fields[:3]
        if magic != MAGIC:
            raise BadPage("not_a_page", f"starts with {magic!r}")
        if version != VERSION:
            raise BadPage("version", f"format {version}; this build reads {VERSION}")
        if fingerprint.hex() != self.fingerprint:
            raise BadPage("foreign", f"made by {fingerprint.hex()}, not {self.fingerprint}")
        if fields[3:10] != self._shape_fields or fields[11] != self.payload_bytes:
            raise BadPage("foreign", f"shape {fields[3:10]}, expected {self._shape_fields}")
        if size != self.object_bytes:
            raise BadPage("truncated", f"{size} bytes, expected {self.object_bytes}")
        try:
            return Provenance(fields[10])
        except ValueError as error:
            raise BadPage("foreign", str(error)) from None


def _checksum(signed_header: bytes, payload: memoryview) -> bytes:
    digest = hashlib.sha256(signed_header)
    digest.update(payload)
    return digest.digest()
