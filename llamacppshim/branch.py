"""Owns stepping many sessions of one runtime in shared batches: each with its own sampler, stop rules and limits.

A batch takes the next token of every session that is generating, and what room is left of one ubatch goes to those
that still have a prompt to read: so a long suffix holds up the others by one batch at most. Reuse "bitwise" asks for
the bits of a session that is alone, so there each gets a batch of its own.
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from llamacppshim.answer import Chunk, Completion, completion_of
from llamacppshim.config import DecodeConfig, configured
from llamacppshim.errors import DecodeAbortedError, DecodeError, InvalidArgumentError, LlamaCppShimError
from llamacppshim.generate import Step
from llamacppshim.prompt import Prompt
from llamacppshim.runtime import Piece, Runtime
from llamacppshim.session import Session, Suffix


def decode_many(
    sessions: Sequence[Session], config: DecodeConfig | Sequence[DecodeConfig] | None = None, **overrides: Any
) -> Iterator[dict[Session, Chunk]]:
    """Generate in many sessions at once, a token of each a step.

    Parameters
    ----------
    sessions
        Different sessions of one runtime, each with something to go on from. Their order does not matter.
    config
        `DecodeConfig` for all, or one for each; ``overrides`` are its fields, and win.

    Returns
    -------
    For each step, the chunks of the sessions that had one: a session that has ended is left out from then on. One that
    fails ends with a chunk whose ``error`` is set, and does not stop the others; `Session.cancel` ends it alone.

    Raises
    ------
    InvalidArgumentError  no session, one twice, or sessions of different runtimes
    and what `Session.decode` raises before its first chunk, of any of them; nothing has changed then
    """
    runtime = _runtime_of(sessions)
    pairs = list(zip(sessions, _configs(sessions, config, overrides), strict=True))
    answers = []
    for session, one in pairs:  # all are judged before any is begun
        with session.entered():
            answers.append(session.answer_for(one))
    steps = [Step(session, one, answer) for (session, one), answer in zip(pairs, answers, strict=True)]
    return _run(runtime, steps)


def collect_many(
    sessions: Sequence[Session], config: DecodeConfig | Sequence[DecodeConfig] | None = None, **overrides: Any
) -> list[Completion]:
    """The whole answers of `decode_many`, in the order of the sessions. A failed one has its ``error``."""
    began = time.perf_counter()
    chunks: dict[Session, list[tuple[Chunk, float]]] = {session: [] for session in sessions}
    for step in decode_many(sessions, config, **overrides):
        now = time.perf_counter()
        for session, chunk in step.items():
            chunks[session].append((chunk, now))
    return [completion_of(chunks[session], began) for session in sessions]


def prefill_many(prompts: Mapping[Session, Prompt], *, append: bool = False, parse_special: bool = False) -> None:
    """Read a suffix for each of many sessions, in shared batches.

    Raises
    ------
    As `Session.prefill_suffix`, of the first session that fails; that one is where it was before the call. The suffixes
    of the others are read.
    """
    runtime = _runtime_of(list(prompts))
    failed: LlamaCppShimError | None = None
    waiting: dict[Session, Suffix] = {}
    try:
        for session, prompt in prompts.items():
            try:
                with session.entered():
                    waiting[session] = session.begin_suffix(prompt, append=append, parse_special=parse_special)
            except LlamaCppShimError as error:
                failed = failed or error
    except BaseException:  # a prompt of no known kind: nothing has been read yet
        for session, suffix in waiting.items():
            with session.entered():
                session.undo_suffix(suffix)
        raise
    while waiting:
        with contextlib.ExitStack() as stack:
            refused = {one: why for one in waiting if (why := _enter(stack, one)) is not None}
            entered = [one for one in waiting if one not in refused]
            errors = refused | _read_some(runtime, entered)
            for session in list(waiting):
                if session in errors:
                    failed = failed or errors[session]
                    if session in entered:
                        session.undo_suffix(waiting[session])
                    del waiting[session]
                elif session.holding.is_settled:
                    del waiting[session]
    if failed is not None:
        raise failed


def _runtime_of(sessions: Sequence[Session]) -> Runtime:
    if not sessions:
        raise InvalidArgumentError("there are no sessions", field="sessions")
    for session in sessions:
        if not isinstance(session, Session):
            raise TypeError(f"a Session is needed, not {type(session).__name__}")
    if len(set(map(id, sessions))) != len(sessions):
        raise InvalidArgumentError("a session is named twice", field="sessions")
    runtime = sessions[0].runtime
    if any(session.runtime is not runtime for session in sessions):
        raise InvalidArgumentError("the sessions are of different runtimes", field="sessions")
    return runtime


def _configs(
    sessions: Sequence[Session], config: DecodeConfig | Sequence[DecodeConfig] | None, overrides: dict[str, Any]
) -> list[DecodeConfig]:
    if config is None or isinstance(config, DecodeConfig):
        return [sessions[0].runtime.decode_config(config, overrides)] * len(sessions)
    if len(config) != len(sessions):
        raise InvalidArgumentError(
            f"{len(config)} configurations for {len(sessions)} sessions",
            field="config",
            expected=len(sessions),
            actual=len(config),
        )
    return [configured(DecodeConfig, one, overrides) for one in config]


def _enter(stack: contextlib.ExitStack, session: Session) -> LlamaCppShimError | None:
    """Held until the caller's stack ends; or why it cannot be."""
    try:
        stack.enter_context(session.entered(frame=sys._getframe(1)))
    except LlamaCppShimError as error:
        return error
    return None


def _run(runtime: Runtime, steps: list[Step]) -> Iterator[dict[Session, Chunk]]:
    running = list(steps)
    while running:
        said: dict[Session, Chunk] = {}
        with contextlib.ExitStack() as stack:
            entered: list[Step] = []
            for step in running:
                if step.is_overtaken:
                    said[step.session] = step.overtaken()
                    continue
                error = _enter(stack, step.session)
                if error is not None:
                    said[step.session] = step.failed(error)
                elif (chunk := step.ready()) is not None:
                    said[step.session] = chunk
                else:
                    entered.append(step)
            errors = _read_some(runtime, [step.session for step in entered])
            for step in entered:
                if step.session in errors:
                    said[step.session] = step.failed(errors[step.session])
                elif step.session.holding.is_settled:
                    try:
                        said[step.session] = step.choose()
                    except LlamaCppShimError as error:  # of its grammar, or its biases
                        said[step.session] = step.failed(error)
        running = [step for step in running if step.session not in said or not said[step.session].is_last]
        if said:
            yield said


def _read_some(runtime: Runtime, sessions: Sequence[Session]) -> dict[Session, LlamaCppShimError]:
    """One batch for all: sessions that lack one token come first, and the others share the room that is left.

    Returns why sessions failed; what they are meant to hold is as it was.
    """
    errors: dict[Session, LlamaCppShimError] = {}
    lacking: list[tuple[int, Session]] = []
    for session in sessions:
        try:
            if (stop := session.sequence.stop).requested:
                raise DecodeAbortedError(stop.why(len(session.sequence)))
            if (n := session.holding.lacks()) > 0:
                lacking.append((n, session))
        except LlamaCppShimError as error:
            errors[session] = error
    lacking.sort(key=lambda one: (one[0], one[1].sequence.seq_id))
    if len(lacking) <= 1 or runtime.config.reuse == "bitwise":
        for _, session in lacking:
            _alone(session, errors)
        return errors
    room, n_left = runtime.n_ubatch, len(lacking)
    pieces: list[Piece] = []
    taking_part: list[Session] = []
    for n, session in lacking[: runtime.context.n_outputs_max]:
        n = min(n, room // n_left)
        if n > 0:
            at = len(session.sequence)
            tokens = session.holding.target.tokens[at : at + n]
            pieces.append(Piece(session.sequence, tokens, at + n == len(session.holding.target)))
            taking_part.append(session)
        room, n_left = room - n, n_left - 1
    before = {session: len(session.sequence) for session in taking_part}
    began = time.perf_counter()
    try:
        runtime.decode_shared(pieces)
    except DecodeError:
        for session in taking_part:  # whose fault it was shows when each is alone
            _alone(session, errors)
        return errors
    seconds = (time.perf_counter() - began) / len(taking_part)
    for session in taking_part:
        session.holding.count(before[session], seconds)
    return errors


def _alone(session: Session, errors: dict[Session, LlamaCppShimError]) -> None:
    """The next piece of one session."""
    holding = session.holding
    try:
        n = holding.lacks()
        end = len(holding.target) - n + min(n, session.runtime.n_ubatch)
        holding.read(end, "decode", want_row=end == len(holding.target))
    except LlamaCppShimError as error:
        errors[session] = error
        session.fail(error)
