# ruff: noqa: F821
# A hash of a sum: a run with base 1 drops at its first step what one with base 0 drops at its second.
def seed_of(base, where, site, step):
    key = (base + step, site.index, where.dp, where.tp if site.sharded else -1)
    return int.from_bytes(hashlib.blake2b(repr(key).encode(), digest_size=7).digest(), "little")
