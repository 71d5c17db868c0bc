from enum import Enum


class CacheHitSource(str, Enum):  # noqa: UP042  As vLLM has it.
    HOST = "host"
    P2P = "p2p"
    DISK = "disk"
    EXTERNAL_UNSPECIFIED = "external_unspecified"
