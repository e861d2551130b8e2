"""Block hashes: what names the KV of a full block, so that requests with the same beginning find it. It holds no KV.

The KV of a token depends on all tokens up to it, so the name of a block is a chain:

    root = H(model, salt)    hash[0] = H(root, tokens of block 0)    hash[i] = H(hash[i - 1], tokens of block i)

H is BLAKE2b (RFC 7693) with 32 bytes: nobody can make a prompt that takes another one's name, nor two of one name.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from hashlib import blake2b

DIGEST_SIZE = 32
TOKEN_BYTES = 8


def root_hash(model_id: str, salt: str) -> bytes:
    """Where the chains of one model and one salt begin."""
    digest = blake2b(digest_size=DIGEST_SIZE, person=b"pyengine KV")
    for part in (model_id, salt):
        data = part.encode("utf-8", "surrogatepass")
        digest.update(len(data).to_bytes(8, "little"))
        digest.update(data)
    return digest.digest()


def extend_hashes(hashes: list[bytes], root: bytes, token_ids: Sequence[int], num_blocks: int, block_size: int) -> None:
    """Append to `hashes`, those of the first blocks of `token_ids`, until there are `num_blocks`, all of them full."""
    first = len(hashes)
    if first >= num_blocks:
        return
    data = array("q", token_ids[first * block_size : num_blocks * block_size]).tobytes()
    parent = hashes[-1] if hashes else root
    size = block_size * TOKEN_BYTES
    for start in range(0, len(data), size):
        parent = blake2b(parent + data[start : start + size], digest_size=DIGEST_SIZE).digest()
        hashes.append(parent)
