"""llamacppshim: an in-process llama.cpp whose context is a durable asset. The public names, nothing else."""

from __future__ import annotations

from pathlib import Path as _Path

from llamacppshim._native import (
    Adapter,
    Batch,
    ChatMessage,
    ChatTemplate,
    Context,
    DecodeResult,
    LogitsView,
    Model,
    Rendered,
    Sampler,
    ToolCall,
    argmax,
    build_info,
    hash_bytes,
    json_schema_to_grammar,
    live_counts,
)
from llamacppshim.answer import Chunk, Completion, TokenLogprob
from llamacppshim.assemble import (
    Admission,
    Assembled,
    ContextPolicy,
    Explanation,
    Priority,
    Segment,
    TokenCounter,
    admit,
    assemble_context,
)
from llamacppshim.branch import collect_many, decode_many, prefill_many
from llamacppshim.chat import Reply
from llamacppshim.config import AdapterConfig, DecodeConfig, RuntimeConfig
from llamacppshim.errors import (
    BatchTooLargeError,
    BufferTooSmallError,
    BusyError,
    ClosedError,
    ContextOverflowError,
    DecodeAbortedError,
    DecodeAllocError,
    DecodeComputeError,
    DecodeError,
    DecodeFatalError,
    DecodeStatus,
    ForkedError,
    GrammarError,
    InternalError,
    InvalidArgumentError,
    InvalidBatchError,
    LlamaCppShimError,
    LoadCancelledError,
    ManifestMismatchError,
    ModelLoadError,
    NoKVSlotError,
    OutOfMemoryError,
    OutOfRangeError,
    SessionClosedError,
    SessionFatalError,
    SessionUnavailableError,
    SnapshotCorruptError,
    SnapshotError,
    SnapshotMismatchError,
    StaleViewError,
    TemplateError,
    TokenMismatchError,
    UnsupportedFeatureError,
)
from llamacppshim.folders import read_folder
from llamacppshim.gguf_files import FoundModel, ModelSource
from llamacppshim.header import GgufHeader, read_gguf_header
from llamacppshim.machine import machine_budget
from llamacppshim.manager import SessionManager
from llamacppshim.manifest import ContextManifest, Identity, SegmentRecord
from llamacppshim.memory import Fit, MemoryEstimate, estimate_memory, largest_context
from llamacppshim.profile import Profile, PromptConfig, ToolsConfig
from llamacppshim.report import ContextReport, ManagerReport, PrefixStatus, ResidentSession, SuffixStatus, Work
from llamacppshim.reuse import ReusePlan
from llamacppshim.runtime import Runtime
from llamacppshim.session import Session
from llamacppshim.snapshot import Snapshot
from llamacppshim.sources import list_models, resolve_model
from llamacppshim.store import SnapshotStore

__all__ = [
    "Adapter",
    "AdapterConfig",
    "Admission",
    "Assembled",
    "Batch",
    "BatchTooLargeError",
    "BufferTooSmallError",
    "BusyError",
    "ChatMessage",
    "ChatTemplate",
    "Chunk",
    "ClosedError",
    "Completion",
    "Context",
    "ContextManifest",
    "ContextOverflowError",
    "ContextPolicy",
    "ContextReport",
    "DecodeAbortedError",
    "DecodeAllocError",
    "DecodeComputeError",
    "DecodeConfig",
    "DecodeError",
    "DecodeFatalError",
    "DecodeResult",
    "DecodeStatus",
    "Explanation",
    "Fit",
    "ForkedError",
    "FoundModel",
    "GgufHeader",
    "GrammarError",
    "Identity",
    "InternalError",
    "InvalidArgumentError",
    "InvalidBatchError",
    "LlamaCppShimError",
    "LoadCancelledError",
    "LogitsView",
    "ManagerReport",
    "ManifestMismatchError",
    "MemoryEstimate",
    "Model",
    "ModelLoadError",
    "ModelSource",
    "NoKVSlotError",
    "OutOfMemoryError",
    "OutOfRangeError",
    "PrefixStatus",
    "Priority",
    "Profile",
    "PromptConfig",
    "Rendered",
    "Reply",
    "ResidentSession",
    "ReusePlan",
    "Runtime",
    "RuntimeConfig",
    "Sampler",
    "Segment",
    "SegmentRecord",
    "Session",
    "SessionClosedError",
    "SessionFatalError",
    "SessionManager",
    "SessionUnavailableError",
    "Snapshot",
    "SnapshotCorruptError",
    "SnapshotError",
    "SnapshotMismatchError",
    "SnapshotStore",
    "StaleViewError",
    "SuffixStatus",
    "TemplateError",
    "TokenCounter",
    "TokenLogprob",
    "TokenMismatchError",
    "ToolCall",
    "ToolsConfig",
    "UnsupportedFeatureError",
    "Work",
    "admit",
    "argmax",
    "assemble_context",
    "build_info",
    "collect_many",
    "decode_many",
    "estimate_memory",
    "get_include",
    "hash_bytes",
    "json_schema_to_grammar",
    "largest_context",
    "list_models",
    "live_counts",
    "machine_budget",
    "prefill_many",
    "read_folder",
    "read_gguf_header",
    "resolve_model",
]

__version__: str = build_info()["version"]


def get_include() -> str:
    """The folder of lcs.h and lcs_capi.h, for the C compiler of a Cython module."""
    return str(_Path(__file__).parent / "include")
