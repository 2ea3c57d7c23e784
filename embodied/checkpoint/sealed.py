"""JSON that proves itself unaltered, by the digest it carries. Any process."""

from __future__ import annotations

import hashlib
import json
import re
from typing import Any

from embodied.checkpoint.files import DIGEST_PREFIX, CheckpointError


def seal(content: Any) -> bytes:
    """Returns JSON that carries the digest of its own content."""
    # Surrogates are legal in a str, and this is how the two of a pair stay two.
    text = json.dumps(
        content, ensure_ascii=False, allow_nan=False, separators=(",", ":")
    ).encode("utf-8", "surrogatepass")
    digest = DIGEST_PREFIX + hashlib.sha256(text).hexdigest()
    return b'{"digest":"%s","content":%s}' % (digest.encode(), text)


def unseal(path: str, data: bytes | bytearray) -> Any:
    """Returns the content that `seal` was given; `path` is for the error."""
    sealed = re.fullmatch(
        rb'\{"digest":"(sha256:[0-9a-f]{64})","content":(.*)\}', data, re.DOTALL
    )
    if not sealed:
        raise CheckpointError(
            f"{path} is damaged: expected a JSON object with digest and content, "
            f"got {bytes(data[:40])!r}."
        )
    found = DIGEST_PREFIX + hashlib.sha256(sealed[2]).hexdigest()
    if found.encode() != sealed[1]:
        raise CheckpointError(
            f"{path} is damaged: its digest does not fit its content."
        )
    try:
        return json.loads(sealed[2].decode("utf-8", "surrogatepass"))
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} does not hold JSON: {error}.") from error
