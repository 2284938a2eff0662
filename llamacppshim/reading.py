"""Owns prompts on their way to tokens: BOS, the seam between prefix and suffix, and the manifest of a prefix."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from llamacppshim.errors import OutOfRangeError, TokenMismatchError
from llamacppshim.ledger import Tokens, as_tokens
from llamacppshim.manifest import ContextManifest, Identity, SegmentRecord
from llamacppshim.prompt import Prefix, Prompt, parts_of, segment_kinds, segment_records, utf8

if TYPE_CHECKING:
    from llamacppshim.runtime import Runtime


class PromptReader:
    """For one runtime."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime

    def prefix(self, prompt: Prompt, parse_special: bool, last: Prefix | None) -> Prefix:
        """A prompt's beginning; the last one itself, where it is the same."""
        kind, parts = parts_of(prompt)
        if kind == "tokens":
            tokens = self._require_vocabulary(as_tokens(parts))
            if last is not None and last.text is None and np.array_equal(tokens, last.tokens):
                return last
            return Prefix(None, None, tokens, 0)
        kinds = segment_kinds(prompt, len(parts))
        key = (tuple(parts), tuple(kinds), parse_special, kind)
        if last is not None and last.key == key:
            return last
        texts = [utf8(part) for part in parts]
        tokens, starts = self._runtime.tokenizer.segments(texts, parse_special)
        tokens, starts, n_bos = self._runtime.with_bos(tokens, starts)
        prefix = Prefix(key, b"".join(texts), tokens, n_bos)
        self.describe(prefix, tuple(segment_records(texts, kinds, starts, tokens)))
        return prefix

    def suffix(self, prompt: Prompt, parse_special: bool, prefix: Prefix | None, before: Tokens) -> tuple[int, Tokens]:
        """How many of the tokens before give way, and the ones to read.

        Parameters
        ----------
        prefix
            What the tokens before are, where the suffix follows its text at once.

        Raises
        ------
        TokenMismatchError  a token would reach over the seam, and that is refused
        """
        kind, parts = parts_of(prompt)
        if kind == "tokens":
            return 0, self._require_vocabulary(as_tokens(parts))
        text = b"".join(utf8(part) for part in parts)
        tokenizer = self._runtime.tokenizer
        if prefix is None or prefix.text is None:
            return 0, tokenizer.after(before, text, parse_special)
        joint = tokenizer.follow(prefix.text, prefix.tokens[prefix.n_bos :], text, parse_special)
        if joint.n_back and self._runtime.config.seam == "refuse":
            seam = len(prefix.tokens) - joint.n_back
            raise TokenMismatchError(
                f"a token of the joint text reaches over the seam: prefix token {seam} would be "
                f"{int(joint.tokens[0]) if len(joint.tokens) else 'gone'}, is {int(prefix.tokens[seam])}; "
                "end the prefix with one newline, or set seam to reread"
            )
        return joint.n_back, joint.tokens

    def describe(self, prefix: Prefix, segments: Sequence[SegmentRecord] = ()) -> None:
        """Gives it the manifest of the runtime as it is now; the one it has, where that is the same."""
        identity = self._runtime.identity()
        if prefix.manifest is not None:
            if prefix.manifest.compatible(identity) is None:
                prefix.describe(prefix.manifest)
                return
            segments = prefix.manifest.segments
        n_bytes = len(prefix.text or b"")
        manifest = ContextManifest(
            **{name: getattr(identity, name) for name in Identity.__struct_fields__},
            stable_bytes=n_bytes,
            total_bytes=n_bytes,
            stable_byte_hash=prefix.byte_hash,
            stable_token_hash=prefix.token_hash,
            segments=tuple(segments),
        )
        prefix.describe(manifest)

    def _require_vocabulary(self, tokens: Tokens) -> Tokens:
        n_vocab = self._runtime.model.n_vocab
        if len(tokens) and int(tokens.max()) >= n_vocab:
            token = int(tokens.max())
            raise OutOfRangeError(f"token {token} is outside 0..{n_vocab - 1}", field="token", actual=token)
        return tokens
