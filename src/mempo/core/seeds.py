"""Seeds that depend on what is drawn and on nothing else."""

from __future__ import annotations

import hashlib


def derive_seed(*parts: int | str) -> int:
    """A seed in [0, 2**63) for one draw, named by its parts, e.g. (run seed, step, task id, rollout, turn).

    Draws with other names are independent, and adding a draw leaves all others as they were.

    >>> derive_seed(0, "rollout", 3) == derive_seed(0, "rollout", 3)
    True
    >>> derive_seed(0, "rollout", 3) == derive_seed(0, "rollout", 4)
    False
    >>> derive_seed(1, "23") == derive_seed(12, "3")
    False
    """
    name = "\x1f".join(f"{type(part).__name__}:{part}" for part in parts)
    return int.from_bytes(hashlib.blake2b(name.encode("utf-8", "surrogatepass"), digest_size=8).digest(), "big") >> 1
