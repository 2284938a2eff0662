# Owns the context handle: making one, decoding, rows of logits and embeddings, memory operations and state.

cdef dict FLASH_ATTN = {"auto": LCS_FLASH_ATTN_AUTO, "on": LCS_FLASH_ATTN_ON, "off": LCS_FLASH_ATTN_OFF}
cdef dict CACHE_TYPES = {
    "f32": LCS_TYPE_F32, "f16": LCS_TYPE_F16, "bf16": LCS_TYPE_BF16, "q8_0": LCS_TYPE_Q8_0, "q5_0": LCS_TYPE_Q5_0,
    "q5_1": LCS_TYPE_Q5_1, "q4_0": LCS_TYPE_Q4_0, "q4_1": LCS_TYPE_Q4_1, "iq4_nl": LCS_TYPE_IQ4_NL,
}
cdef frozenset UNQUANTISED = frozenset([LCS_TYPE_F32, LCS_TYPE_F16, LCS_TYPE_BF16])
cdef dict POOLING = {"model": -1, "none": 0, "mean": 1, "cls": 2, "last": 3, "rank": 4}
cdef dict ATTENTION = {"model": -1, "causal": 0, "non-causal": 1}
cdef dict ROPE_SCALING = {"model": -1, "none": 0, "linear": 1, "yarn": 2, "longrope": 3}
cdef dict LOGITS = {"last": LCS_LOGITS_LAST, "all": LCS_LOGITS_ALL, "none": LCS_LOGITS_NONE}


@cython.final
@cython.no_gc
@cython.freelist(8)
cdef class DecodeResult:
    """What a decode did. Immutable.

    ``status`` is `DecodeStatus.OK` (any other is raised), ``n_tokens`` how many tokens were asked for, ``committed`` how
    many of them are resident, ``dirty`` the sequences whose memory can no longer be trusted.
    """

    cdef readonly object status
    cdef readonly int n_tokens
    cdef readonly int committed
    cdef readonly frozenset dirty

    def __cinit__(self, status, n_tokens, committed, dirty):
        self.status = status
        self.n_tokens = n_tokens
        self.committed = committed
        self.dirty = frozenset(dirty)

    cdef tuple fields(self):
        return (self.status, self.n_tokens, self.committed, self.dirty)

    def __eq__(self, other):
        if not isinstance(other, DecodeResult):
            return NotImplemented
        return self.fields() == (<DecodeResult>other).fields()

    def __hash__(self):
        return hash(self.fields())

    def __reduce__(self):
        return DecodeResult, self.fields()

    def __repr__(self):
        return (
            f"DecodeResult(status={self.status!r}, n_tokens={self.n_tokens}, committed={self.committed}, "
            f"dirty={set(self.dirty) or '{}'})")


cdef object DECODE_OK = DecodeStatus.OK


@cython.final
@cython.no_gc
cdef class LogitsView:
    """One row of logits where llama.cpp keeps it: read-only float32 of n_vocab entries, no copy.

    ``np.asarray(view)`` shares the memory. Every access through the view raises `StaleViewError` once a later decode has
    replaced the row, `ClosedError` once the context is closed. An array made from it stays safe to read as long as it
    lives, but shows whatever the row holds by then.
    """

    cdef Context _context
    cdef const float* _row
    cdef uint64_t _generation
    cdef Py_ssize_t _shape
    cdef Py_ssize_t _stride
    cdef object __weakref__

    def __cinit__(self, token, Context context):
        if token is not BLANK:
            raise TypeError("a LogitsView comes from Context.logits_view")
        self._context = context
        self._stride = sizeof(float)

    cdef const float* data(self) except NULL:
        self._context.require_open()
        if self._context._busy:
            raise errors.BusyError("context is inside another call")
        if self._generation != self._context._generation:
            raise errors.StaleViewError("a later decode has replaced this row of logits")
        return self._row

    @property
    def shape(self):
        """``(n_vocab,)``."""
        return (self._shape,)

    @property
    def dtype(self):
        """float32."""
        return FLOAT32

    @property
    def valid(self):
        """Whether the row is still there."""
        return (
            self._context._pid == getpid() and self._context._ctx is not NULL
            and self._generation == self._context._generation)

    def __len__(self):
        return self._shape

    def __getitem__(self, index):
        self.data()
        return np.asarray(self)[index]

    def __iter__(self):
        return iter(np.asarray(self))

    def __array__(self, dtype=None, copy=None):
        self.data()
        array = np.frombuffer(self, FLOAT32)
        if dtype is not None and np.dtype(dtype) != FLOAT32:
            if copy is False:
                raise ValueError(f"float32 logits cannot be seen as {np.dtype(dtype)} without a copy")
            return array.astype(dtype)
        return array.copy() if copy else array

    def __getbuffer__(self, Py_buffer* buffer, int flags):
        cdef const float* row = self.data()
        if flags & PyBUF_WRITABLE:
            raise BufferError("logits are read-only")
        self._context.hold_rows()
        buffer.buf = <void*>row
        buffer.obj = self
        buffer.len = self._shape * <Py_ssize_t>sizeof(float)
        buffer.itemsize = sizeof(float)
        buffer.readonly = 1
        buffer.ndim = 1
        buffer.format = NULL
        if flags & PyBUF_FORMAT:
            buffer.format = "f"
        buffer.shape = &self._shape if flags & PyBUF_ND else NULL
        buffer.strides = &self._stride if (flags & PyBUF_STRIDES) == PyBUF_STRIDES else NULL
        buffer.suboffsets = NULL
        buffer.internal = NULL

    def __releasebuffer__(self, Py_buffer* buffer):
        self._context.let_rows_go()

    def __copy__(self):
        refuse_copy(self, "copied")

    def __deepcopy__(self, memo):
        refuse_copy(self, "copied")

    def __reduce__(self):
        refuse_copy(self, "pickled")

    def __repr__(self):
        return f"<llamacppshim.LogitsView of {self._shape} logits{'' if self.valid else ', stale'}>"


cdef object BLANK = object()  # what only this module can pass: make the object, and let the caller fill it


cdef int fill_context_params(lcs_context_params* p, dict given) except -1:
    """What a context is asked for; a parameter that is absent or None keeps its default."""
    lcs_context_params_init(p)
    p.type_k = LCS_TYPE_F16
    p.type_v = LCS_TYPE_F16
    for name, value in given.items():
        if value is None:
            continue
        if name == "n_ctx":
            p.n_ctx = as_uint32(value, name)
        elif name == "n_batch":
            p.n_batch = as_uint32(value, name)
        elif name == "n_ubatch":
            p.n_ubatch = as_uint32(value, name)
        elif name == "n_seq_max":
            p.n_seq_max = as_uint32(value, name)
        elif name == "n_rs_seq":
            p.n_rs_seq = as_uint32(value, name)
        elif name == "n_outputs_max":
            p.n_outputs_max = as_uint32(value, name)
        elif name == "yarn_orig_ctx":
            p.yarn_orig_ctx = as_uint32(value, name)
        elif name == "n_threads":
            p.n_threads = as_int32(value, name)
        elif name == "n_threads_batch":
            p.n_threads_batch = as_int32(value, name)
        elif name == "poll":
            p.poll = as_int32(value, name)
        elif name == "rope_freq_base":
            p.rope_freq_base = as_float(value, name)
        elif name == "rope_freq_scale":
            p.rope_freq_scale = as_float(value, name)
        elif name == "yarn_ext_factor":
            p.yarn_ext_factor = as_float(value, name)
        elif name == "yarn_attn_factor":
            p.yarn_attn_factor = as_float(value, name)
        elif name == "yarn_beta_fast":
            p.yarn_beta_fast = as_float(value, name)
        elif name == "yarn_beta_slow":
            p.yarn_beta_slow = as_float(value, name)
        elif name == "type_k":
            p.type_k = as_choice(value, CACHE_TYPES, name)
        elif name == "type_v":
            p.type_v = as_choice(value, CACHE_TYPES, name)
        elif name == "pooling":
            p.pooling = as_choice(value, POOLING, name)
        elif name == "attention":
            p.attention = as_choice(value, ATTENTION, name)
        elif name == "rope_scaling":
            p.rope_scaling = as_choice(value, ROPE_SCALING, name)
        elif name == "embeddings":
            p.embeddings = value
        elif name == "offload_kqv":
            p.offload_kqv = value
        elif name == "op_offload":
            p.op_offload = value
        elif name == "swa_full":
            p.swa_full = value
        elif name == "kv_unified":
            p.kv_unified = value
        elif name == "perf":
            p.perf = value
        elif name != "flash_attn":
            raise TypeError(f"a context has no parameter {name}")
    p.flash_attn = resolve_flash_attn(given.get("flash_attn", "auto"), p.type_k, p.type_v)
    return 0


@cython.final
@cython.no_gc
cdef class Context:
    """A llama.cpp context: owns its KV cache, shares its model's weights. One thread at a time.

    Parameters
    ----------
    model
        Kept alive.
    n_ctx
        Cells of the cache, for all sequences together; 0: the model's training length.
    n_batch, n_ubatch
        Most tokens of one llama_decode, and of one graph.
    n_seq_max
        Sequences, 1..256.
    n_rs_seq
        Rollback slots of recurrent memories.
    n_outputs_max
        Most rows of one llama_decode; 0: enough for n_seq_max, and at least 32 (n_batch with embeddings).
    n_threads, n_threads_batch
        For batches of one token, and of more; 0: the physical cores this process may use.
    poll
        0..100: how long idle threads spin before they sleep; negative: the default.
    flash_attn
        "on", "off" (or a bool), "auto": on a CPU on where K or V is quantised, else off, which is faster there; on a
        device llama.cpp decides.
    type_k, type_v
        Of the cache: "f32 f16 bf16 q8_0 q5_0 q5_1 q4_0 q4_1 iq4_nl". A quantised V needs flash attention.
    pooling
        Of embeddings: "model none mean cls last rank".
    attention
        "model causal non-causal".
    rope_scaling, rope_freq_base, rope_freq_scale, yarn_ext_factor, yarn_attn_factor, yarn_beta_fast, yarn_beta_slow, \
yarn_orig_ctx
        RoPE; "model", 0 and the defaults leave it as the model has it.
    embeddings
        Give embeddings with every decode.
    offload_kqv, op_offload
        Keep the cache, and run large operations, on the device.
    swa_full
        Keep every cell of windowed layers too.
    kv_unified
        One stream of cells for all sequences, instead of one each.
    perf
        Keep performance counters.

    None stands for the default of each. The properties of the same names give the values as resolved.

    Raises
    ------
    InvalidArgumentError, OutOfRangeError  a value, or a combination that llama.cpp refuses; ``field`` names it
    OutOfMemoryError                       the cache or the buffers do not fit
    UnsupportedFeatureError                a vocab_only or an encoder-decoder model
    """

    cdef lcs_context* _ctx       # NULL once closed
    cdef lcs_context* _deferred  # closed, but arrays of rows are still out there
    cdef readonly Model model    # for the reader; the C handle keeps the weights alive
    cdef bint _busy              # a call is running, maybe without the GIL
    cdef int _pid                # maker; a forked child frees nothing
    cdef int _exports            # arrays of rows
    cdef int _let_go             # exports that ended during a call
    cdef uint64_t _generation    # of rows
    cdef int32_t _fatal_status   # raw status of the decode that made it unusable
    cdef lcs_context_info _info
    cdef Ints _tokens            # scratch
    cdef Ints _mask
    cdef uint8_t* _mask_bytes
    cdef tuple _adapters
    cdef object __weakref__

    def __cinit__(
        self, Model model not None, *, n_ctx=None, n_batch=None, n_ubatch=None, n_seq_max=None, n_rs_seq=None,
        n_outputs_max=None, n_threads=None, n_threads_batch=None, poll=None, flash_attn="auto", type_k="f16",
        type_v="f16", pooling="model", attention="model", rope_scaling="model", rope_freq_base=None,
        rope_freq_scale=None, yarn_ext_factor=None, yarn_attn_factor=None, yarn_beta_fast=None, yarn_beta_slow=None,
        yarn_orig_ctx=None, embeddings=False, offload_kqv=True, op_offload=True, swa_full=False, kv_unified=False,
        perf=False,
    ):
        cdef lcs_context_params p
        cdef lcs_status st
        self._pid = getpid()
        self.model = model
        self._adapters = ()
        fill_context_params(
            &p,
            dict(
                n_ctx=n_ctx, n_batch=n_batch, n_ubatch=n_ubatch, n_seq_max=n_seq_max, n_rs_seq=n_rs_seq,
                n_outputs_max=n_outputs_max, n_threads=n_threads, n_threads_batch=n_threads_batch, poll=poll,
                flash_attn=flash_attn, type_k=type_k, type_v=type_v, pooling=pooling, attention=attention,
                rope_scaling=rope_scaling, rope_freq_base=rope_freq_base, rope_freq_scale=rope_freq_scale,
                yarn_ext_factor=yarn_ext_factor, yarn_attn_factor=yarn_attn_factor, yarn_beta_fast=yarn_beta_fast,
                yarn_beta_slow=yarn_beta_slow, yarn_orig_ctx=yarn_orig_ctx, embeddings=embeddings,
                offload_kqv=offload_kqv, op_offload=op_offload, swa_full=swa_full, kv_unified=kv_unified, perf=perf,
            ),
        )
        sync_log_level()
        cdef lcs_model* owner = model.enter()
        try:
            with nogil:
                st = lcs_context_init(owner, &p, &self._ctx)
            check(st)
        finally:
            model.leave()
        check(lcs_context_get_info(self._ctx, &self._info))
        open_contexts.add(self)

    def __dealloc__(self):
        # A view holds its context: with exports alive this does not run.
        if self._ctx is not NULL:
            with nogil:
                lcs_context_free(self._ctx)  # nothing in a forked child
        if self._deferred is not NULL:
            with nogil:
                lcs_context_free(self._deferred)
        free(self._tokens.data)
        free(self._mask.data)
        free(self._mask_bytes)

    cdef int require_open(self) except -1:
        if self._pid != getpid():
            raise errors.ForkedError("context was made before fork()")
        if self._ctx is NULL:
            raise errors.ClosedError("context is closed")
        return 0

    cdef lcs_context* enter(self) except NULL:
        self.require_open()
        if self._busy:
            raise errors.BusyError("context is inside another call")
        begin_inside()
        self._busy = True  # test and set need no lock: the GIL is held
        return self._ctx

    cdef int leave(self) except -1:
        self._busy = False
        while self._let_go > 0:
            self._let_go -= 1
            lcs_context_hold_rows(self._ctx, -1)
        return end_inside()

    cdef int refresh(self) except -1:
        return check(lcs_context_get_info(self._ctx, &self._info))

    cdef void stop(self) noexcept:
        """At the end of the interpreter."""
        if self._busy and self._ctx is not NULL:
            lcs_context_cancel(self._ctx)

    # The memory of a row may not move while an array shows it, nor go when the context is closed.

    cdef int hold_rows(self) except -1:
        check(lcs_context_hold_rows(self._ctx, 1))
        self._exports += 1
        return 0

    cdef void let_rows_go(self) noexcept:
        cdef lcs_context* deferred = self._deferred
        self._exports -= 1
        if deferred is not NULL:
            if self._exports == 0:
                self._deferred = NULL
                with nogil:
                    lcs_context_free(deferred)
        elif self._busy:
            self._let_go += 1
        elif self._ctx is not NULL:
            lcs_context_hold_rows(self._ctx, -1)

    def close(self):
        """Free the cache. Safe to repeat; BusyError while another thread is inside.

        While arrays made from a `LogitsView` live, the memory stays until the last of them is gone.
        """
        cdef lcs_context* ctx
        if self._ctx is NULL:
            return
        if self._pid != getpid():
            self._ctx = NULL  # frees nothing: the memory is the parent's
            return
        ctx = self.enter()
        self._ctx = NULL
        self._busy = False  # no Python from here on: an interrupt would leave the memory with nobody
        if self._exports > 0:
            self._deferred = ctx
        else:
            with nogil:
                lcs_context_free(ctx)
        end_inside()

    @property
    def closed(self):
        """Whether close() was called."""
        return self._ctx is NULL

    def __enter__(self):
        self.require_open()
        return self

    def __exit__(self, kind, value, traceback):
        self.close()

    def __copy__(self):
        refuse_copy(self, "copied")

    def __deepcopy__(self, memo):
        refuse_copy(self, "copied")

    def __reduce__(self):
        refuse_copy(self, "pickled")

    def __repr__(self):
        if self._ctx is NULL:
            return "<llamacppshim.Context, closed>"
        return f"<llamacppshim.Context of {self.model!r}, n_ctx {self._info.n_ctx}, n_seq_max {self._info.n_seq_max}>"

    # Values as resolved

    @property
    def n_ctx(self):
        """All cells."""
        self.require_open()
        return self._info.n_ctx

    @property
    def n_ctx_seq(self):
        """Cells that one sequence can use."""
        self.require_open()
        return self._info.n_ctx_seq

    @property
    def n_batch(self):
        """Most tokens of one llama_decode."""
        self.require_open()
        return self._info.n_batch

    @property
    def n_ubatch(self):
        """Most tokens of one graph."""
        self.require_open()
        return self._info.n_ubatch

    @property
    def n_seq_max(self):
        """Sequences."""
        self.require_open()
        return self._info.n_seq_max

    @property
    def n_rs_seq(self):
        """Rollback slots of a recurrent memory, as granted."""
        self.require_open()
        return self._info.n_rs_seq

    @property
    def n_outputs_max(self):
        """Most rows of one llama_decode."""
        self.require_open()
        return self._info.n_outputs_max

    @property
    def n_threads(self):
        """For batches of one token."""
        self.require_open()
        return self._info.n_threads

    @property
    def n_threads_batch(self):
        """For batches of more."""
        self.require_open()
        return self._info.n_threads_batch

    @property
    def flash_attn(self):
        """Whether flash attention is used."""
        self.require_open()
        return self._info.flash_attn == LCS_FLASH_ATTN_ON

    @property
    def type_k(self):
        """Type of K in the cache."""
        self.require_open()
        return name_of(self._info.type_k, CACHE_TYPES)

    @property
    def type_v(self):
        """Type of V in the cache."""
        self.require_open()
        return name_of(self._info.type_v, CACHE_TYPES)

    @property
    def pooling(self):
        """How embeddings are pooled."""
        self.require_open()
        return name_of(self._info.pooling, POOLING)

    @property
    def memory_kind(self):
        """What the context keeps: "attention", "swa", "recurrent", "hybrid" or "none"."""
        self.require_open()
        return name_of(self._info.memory_kind, MEMORY_KINDS)

    @property
    def n_stream(self):
        """Streams of cells."""
        self.require_open()
        return self._info.n_stream

    @property
    def swa_full(self):
        """Whether windowed layers keep every cell."""
        self.require_open()
        return <bint>self._info.swa_full

    @property
    def kv_unified(self):
        """Whether all sequences share one stream of cells."""
        self.require_open()
        return <bint>self._info.kv_unified

    @property
    def can_shift(self):
        """Whether positions can be moved (`seq_add`)."""
        self.require_open()
        return <bint>self._info.can_shift

    @property
    def embeddings_on(self):
        """Whether decodes give embeddings."""
        self.require_open()
        return <bint>self._info.embeddings

    @property
    def fatal(self):
        """Whether a decode has made the context unusable; only close() is left then."""
        self.require_open()
        return <bint>self._info.fatal

    @property
    def adapters(self):
        """Pairs of the adapters in use and their scales."""
        self.require_open()
        return self._adapters

    # Settings

    def set_threads(self, n_threads, n_threads_batch=None):
        """Threads for batches of one token, and of more (None: as many). 0: the physical cores."""
        cdef int32_t one = as_int32(n_threads, "n_threads")
        cdef int32_t many = 0 if n_threads_batch is None else as_int32(n_threads_batch, "n_threads_batch")
        cdef lcs_status st
        cdef lcs_context* ctx = self.enter()
        try:
            with nogil:
                st = lcs_context_set_threads(ctx, one, many)
            check(st)
            self.refresh()
        finally:
            self.leave()

    def set_embeddings(self, embeddings):
        """Give embeddings with every decode from now on, or no longer. Rows of the last decode are gone."""
        cdef bint on = embeddings
        cdef lcs_context* ctx = self.enter()
        try:
            check(lcs_context_set_embeddings(ctx, on))
            self._generation += 1
            self.refresh()
        finally:
            self.leave()

    def set_adapters(self, adapters):
        """Use these LoRA adapters, and no others, from the next decode on.

        Parameters
        ----------
        adapters
            ``{adapter: scale}``, or pairs of them; empty for none.

        Notes
        -----
        What the memory holds was computed with the adapters of its time: clearing it is the caller's duty.
        """
        cdef Adapter adapter
        cdef lcs_adapter** pointers = NULL
        cdef float* scales = NULL
        cdef lcs_status st
        cdef size_t i = 0
        pairs = tuple([(one, as_float(scale, "scale")) for one, scale in
                       (adapters.items() if hasattr(adapters, "items") else adapters)])
        cdef size_t n = <size_t>len(pairs)
        cdef lcs_context* ctx = self.enter()
        try:
            pointers = <lcs_adapter**>malloc(max(n, <size_t>1) * sizeof(lcs_adapter*))
            scales = <float*>malloc(max(n, <size_t>1) * sizeof(float))
            if pointers is NULL or scales is NULL:
                raise errors.OutOfMemoryError(f"no memory for {n} adapters")
            for one, scale in pairs:
                if not isinstance(one, Adapter):
                    raise TypeError(f"adapters must be Adapter objects, not {type(one).__name__}")
                adapter = one
                pointers[i] = adapter.pointer()
                scales[i] = scale
                i += 1
            check(lcs_context_set_adapters(ctx, pointers, scales, n))
            self._adapters = pairs
        finally:
            free(pointers)
            free(scales)
            self.leave()

    # Decode

    def decode(self, tokens, *, seq_id=0, pos=None, logits="last"):
        """Decode tokens of one sequence, in batches of at most n_batch tokens.

        Parameters
        ----------
        tokens
            Any sequence or array of integers.
        pos
            Position of the first; None: after the sequence's last.
        logits
            Whose rows are wanted: "last", "all", "none", or a mask with an entry for each token.

        Returns
        -------
        DecodeResult, with status OK.

        Raises
        ------
        NoKVSlotError, DecodeAbortedError, DecodeFatalError  with ``status raw_status committed dirty``
        InvalidBatchError                       pos is not the sequence's next position; nothing changed
        BatchTooLargeError                      the model must see more tokens at once than a graph takes; nothing changed
        InvalidArgumentError, OutOfRangeError   judged before the call; nothing changed
        KeyboardInterrupt                       Ctrl-C ended the decode; its cause is the DecodeAbortedError

        Notes
        -----
        The GIL is free. Source: llama_decode.
        """
        cdef lcs_decode_result result
        cdef lcs_status st
        cdef int32_t wanted
        cdef int32_t c_seq_id = as_int32(seq_id, "seq_id")
        cdef int32_t c_pos = -1
        cdef int32_t n
        cdef const uint8_t* mask = NULL
        cdef bint armed
        if pos is not None:
            c_pos = <int32_t>as_int(pos, "pos", 0, INT32_MAX)
        cdef lcs_context* ctx = self.enter()
        try:
            ints_fill(&self._tokens, tokens, "token")
            if self._tokens.n > INT32_MAX:
                raise out_of_range("n_tokens", self._tokens.n, 1, INT32_MAX)
            n = <int32_t>self._tokens.n
            if isinstance(logits, str):
                wanted = as_choice(logits, LOGITS, "logits")
            else:
                self.fill_mask(logits, self._tokens.n)
                mask = self._mask_bytes
                wanted = LCS_LOGITS_MASK
            memset(&result, 0, sizeof(result))
            armed = arm_sigint(ctx)
            with nogil:
                st = lcs_context_decode(ctx, self._tokens.data, n, c_seq_id, c_pos, wanted, mask, &result)
            return self.decoded(ctx, st, &result, armed, n)
        finally:
            self.leave()

    def decode_batch(self, Batch batch not None):
        """Decode tokens of several sequences in one llama_decode; never cut.

        Raises
        ------
        BatchTooLargeError       more tokens than n_batch, or rows than n_outputs_max; nothing changed
        UnsupportedFeatureError  a token of several sequences where the memory has a stream for each
        and as `decode`
        """
        cdef lcs_decode_result result
        cdef lcs_status st
        cdef lcs_batch borrowed
        cdef bint armed
        cdef lcs_context* ctx = self.enter()
        try:
            batch.lend(&borrowed)
            try:
                memset(&result, 0, sizeof(result))
                armed = arm_sigint(ctx)
                with nogil:
                    st = lcs_context_decode_batch(ctx, &borrowed, &result)
                return self.decoded(ctx, st, &result, armed, borrowed.n_tokens)
            finally:
                batch.give_back()
        finally:
            self.leave()

    cdef object decoded(
            self, lcs_context* ctx, lcs_status st, lcs_decode_result* result, bint armed, int32_t n_tokens):
        cdef bint interrupted
        if st == LCS_STATUS_OK:
            self._generation += 1
            if armed:
                disarm_sigint(ctx)  # Python tells of it at its next step: the tokens are decoded
            return DecodeResult(DECODE_OK, result.n_tokens, result.committed, NO_SEQUENCES)
        interrupted = armed and disarm_sigint(ctx)
        if not judged_before(st):
            self._generation += 1
        if st == LCS_STATUS_DECODE_FATAL and result.raw_status == 0:
            result.raw_status = self._fatal_status
        try:
            error = self.decode_error(st, result, n_tokens)
            if interrupted:
                PyErr_CheckSignals()
        except BaseException as interrupt:
            # Python's handler may have run at the first step of any Python function, decode_error's too.
            if not interrupted:
                raise
            raise interrupt from self.decode_error(st, result, n_tokens)
        raise error

    cdef object decode_error(self, lcs_status st, lcs_decode_result* result, int32_t n_tokens):
        error = error_from(st, None, result)
        if st == LCS_STATUS_DECODE_FATAL:
            self._fatal_status = result.raw_status
            self._info.fatal = True
        elif st == LCS_STATUS_BATCH_TOO_LARGE:
            error.n_tokens = n_tokens
            error.n_batch = self._info.n_batch
        return error

    cdef int fill_mask(self, object mask, size_t n) except -1:
        cdef size_t i
        if mask is None:
            raise TypeError('logits must be "last", "all", "none" or a mask, not None')
        if isinstance(mask, np.ndarray) and mask.dtype.kind == "b":
            mask = mask.tolist()
        if isinstance(mask, np.ndarray):
            ints_fill(&self._mask, mask, "mask")
        else:
            ints_fill(&self._mask, [bool(m) for m in mask], "mask")
        if self._mask.n != n:
            raise errors.InvalidArgumentError(
                f"the mask has {self._mask.n} entries for {n} tokens", field="logits", expected=n, actual=self._mask.n)
        cdef uint8_t* grown = <uint8_t*>realloc(self._mask_bytes, max(n, <size_t>1))
        if grown is NULL:
            raise errors.OutOfMemoryError(f"no memory for a mask of {n} entries")
        self._mask_bytes = grown
        for i in range(n):
            grown[i] = self._mask.data[i] != 0
        return 0

    def cancel(self):
        """End the running decode with DecodeAbortedError or, if none runs, the next one. From any thread.

        On a CPU it ends within one operation; on a device at the next batch.
        """
        self.require_open()
        check(lcs_context_cancel(self._ctx))

    def cancel_clear(self):
        """Take back a `cancel` that no decode has seen yet."""
        self.require_open()
        lcs_context_cancel_clear(self._ctx)

    # Rows

    def logits(self, rows=(-1,)):
        """Logits of the last decode.

        Parameters
        ----------
        rows
            Indices into the tokens of the last decode; negative counts from its end. Each must have been asked for.

        Returns
        -------
        float32, shape ``(len(rows), n_vocab)``: raw log-odds, not normalised. A copy.

        Raises
        ------
        OutOfRangeError  a row outside the last decode, one that was not asked for, or no decode yet
        """
        return self.copy_rows(rows, self.model._info.n_vocab, False)

    def embeddings(self, rows=(-1,)):
        """Embeddings of the last decode, one a token; as `logits`, shape ``(len(rows), n_embd_out)``.

        UnsupportedFeatureError where the context gives none, or one a sequence.
        """
        return self.copy_rows(rows, self.model._info.n_embd_out, True)

    cdef object copy_rows(self, object rows, size_t width, bint embeddings):
        cdef lcs_status st
        cdef size_t n
        cdef float* to
        cdef lcs_context* ctx = self.enter()
        try:
            ints_fill(&self._tokens, rows, "row")
            n = self._tokens.n
            with nogil:
                st = each_row(ctx, &self._tokens, width, embeddings, NULL)  # judged before memory is asked for
            check(st)
            array = new_array((n, width), FLOAT32)
            if n > 0:
                to = <float*>data_of(array)
                with nogil:
                    st = each_row(ctx, &self._tokens, width, embeddings, to)
                check(st)
            return array
        finally:
            self.leave()

    def embeddings_seq(self, seq_id=0):
        """Pooled embedding of a sequence of the last decode: float32, one-dimensional. A copy.

        UnsupportedFeatureError where the context does not pool.
        """
        cdef int32_t id = as_int32(seq_id, "seq_id")
        cdef const float* row
        cdef size_t n = self.model._info.n_embd_out
        cdef lcs_status st
        cdef lcs_context* ctx = self.enter()
        try:
            with nogil:
                st = lcs_context_embeddings_seq(ctx, id, &row)
            check(st)
            if self._info.pooling == POOLING["rank"]:
                n = 1  # a score, not an embedding
            array = new_array(n, FLOAT32)
            memcpy(data_of(array), row, n * sizeof(float))
            return array
        finally:
            self.leave()

    def logits_view(self, row=-1):
        """One row of logits without a copy; see `LogitsView`. ``row`` as in `logits`."""
        cdef int32_t index = as_int32(row, "row")
        cdef lcs_status st
        cdef LogitsView view = LogitsView(BLANK, self)
        cdef lcs_context* ctx = self.enter()
        try:
            with nogil:
                st = lcs_context_logits(ctx, index, &view._row)
            check(st)
            view._generation = self._generation
            view._shape = self.model._info.n_vocab
            return view
        finally:
            self.leave()

    # Memory

    def clear(self, data=True):
        """Drop every sequence; ``data``: overwrite the cells too."""
        cdef bint with_data = data
        cdef lcs_status st
        cdef lcs_context* ctx = self.enter()
        try:
            with nogil:
                st = lcs_context_clear(ctx, with_data)
            check(st)
        finally:
            self.leave()

    def seq_rm(self, seq_id, p0=-1, p1=-1):
        """Remove positions ``[p0, p1)``; negative: from the beginning, to the end.

        Returns False where this memory cannot cut there; nothing has changed then. On a windowed memory True does not
        mean that what is left can be continued: look at `seq_pos_min`.
        """
        cdef c_bool removed = False
        cdef int32_t id = as_int32(seq_id, "seq_id"), begin = as_int32(p0, "p0"), end = as_int32(p1, "p1")
        cdef lcs_context* ctx = self.enter()
        try:
            check(lcs_context_seq_rm(ctx, id, begin, end, &removed))
        finally:
            self.leave()
        return <bint>removed

    def seq_cp(self, src, dst, p0=-1, p1=-1):
        """Make dst hold src's positions ``[p0, p1)``; dst is emptied first.

        UnsupportedFeatureError: part of a sequence where each has its own stream, or of a recurrent memory.
        """
        cdef int32_t source = as_int32(src, "src"), target = as_int32(dst, "dst")
        cdef int32_t begin = as_int32(p0, "p0"), end = as_int32(p1, "p1")
        cdef lcs_status st
        cdef lcs_context* ctx = self.enter()
        try:
            with nogil:
                st = lcs_context_seq_cp(ctx, source, target, begin, end)
            check(st)
        finally:
            self.leave()

    def seq_keep(self, seq_id):
        """Drop every sequence but this one."""
        cdef int32_t id = as_int32(seq_id, "seq_id")
        cdef lcs_context* ctx = self.enter()
        try:
            check(lcs_context_seq_keep(ctx, id))
        finally:
            self.leave()

    def seq_add(self, seq_id, p0, p1, delta):
        """Move positions ``[p0, p1)`` by delta; what would fall below 0 is dropped.

        UnsupportedFeatureError where not `can_shift`, or K is quantised.
        """
        cdef int32_t id = as_int32(seq_id, "seq_id"), by = as_int32(delta, "delta")
        cdef int32_t begin = as_int32(p0, "p0"), end = as_int32(p1, "p1")
        cdef lcs_context* ctx = self.enter()
        try:
            check(lcs_context_seq_add(ctx, id, begin, end, by))
        finally:
            self.leave()

    cdef int positions(self, object seq_id, int32_t* low, int32_t* high) except -1:
        cdef int32_t id = as_int32(seq_id, "seq_id")
        cdef lcs_context* ctx = self.enter()
        try:
            check(lcs_context_seq_pos(ctx, id, low, high))
        finally:
            self.leave()
        return 0

    def seq_pos_min(self, seq_id):
        """Smallest position of a sequence; -1 where it is empty."""
        cdef int32_t low, high
        self.positions(seq_id, &low, &high)
        return low

    def seq_pos_max(self, seq_id):
        """Largest position of a sequence; -1 where it is empty."""
        cdef int32_t low, high
        self.positions(seq_id, &low, &high)
        return high

    # State

    def state_size(self):
        """Bytes that `state_save` would give now."""
        return self.measure(-1, False)

    def state_save(self):
        """The whole memory as bytes: every sequence. Logits are not part of it.

        Cost: one copy into the bytes returned.
        """
        return self.save(-1, False)

    def state_load(self, data):
        """Replace the whole memory by what `state_save` gave, here or elsewhere, from any contiguous buffer.

        Raises
        ------
        SnapshotCorruptError   cut, damaged or foreign bytes; nothing changed
        SnapshotMismatchError  of another model, pin, cache layout or kind (``field``); nothing changed
        NoKVSlotError, InternalError  the memory is empty now
        """
        self.load(-1, data, False)

    def seq_state_size(self, seq_id, partial=False):
        """Bytes that `seq_state_save` would give now."""
        return self.measure(as_int(seq_id, "seq_id", 0, self.n_seq_max - 1), partial)

    def seq_state_save(self, seq_id, partial=False):
        """One sequence as bytes.

        Parameters
        ----------
        partial
            Only what cannot be cut: the window, or the recurrent part. Usable while the rest is still resident. On
            attention memories the same as a full state.
        """
        return self.save(as_int(seq_id, "seq_id", 0, self.n_seq_max - 1), partial)

    def seq_state_load(self, seq_id, data, partial=False):
        """Replace one sequence by what `seq_state_save` gave with the same ``partial``. Raises as `state_load`; what
        that says of the memory holds for the sequence."""
        self.load(as_int(seq_id, "seq_id", 0, self.n_seq_max - 1), data, partial)

    cdef size_t measure(self, int32_t seq_id, bint partial) except? 0:
        cdef size_t n = 0
        cdef lcs_status st
        cdef lcs_context* ctx = self.enter()
        try:
            with nogil:
                st = lcs_state_bytes(ctx, seq_id, partial, &n)
            check(st)
        finally:
            self.leave()
        return n

    cdef bytes save(self, int32_t seq_id, bint partial):
        cdef size_t n = 0, written = 0
        cdef lcs_status st
        cdef char* to
        cdef bytes data
        cdef lcs_context* ctx = self.enter()
        try:
            with nogil:
                st = lcs_state_bytes(ctx, seq_id, partial, &n)
            check(st)
            data = new_bytes(n)
            to = PyBytes_AS_STRING(data)
            with nogil:
                st = lcs_state_save(ctx, seq_id, partial, to, n, &written)
            check(st)
        finally:
            self.leave()
        return data if written == n else data[:written]

    cdef int load(self, int32_t seq_id, object data, bint partial) except -1:
        cdef Py_buffer view
        cdef lcs_status st
        lend_bytes(data, &view, "a state")
        cdef lcs_context* ctx
        try:
            ctx = self.enter()
            try:
                with nogil:
                    st = lcs_state_load(ctx, seq_id, partial, view.buf, <size_t>view.len)
                if st != LCS_STATUS_STATE_CORRUPT and st != LCS_STATUS_STATE_MISMATCH and not judged_before(st):
                    self._generation += 1
                check(st)
            finally:
                self.leave()
        finally:
            PyBuffer_Release(&view)
        return 0

    # Counters

    def perf(self):
        """Counters since the beginning or `reset_perf`; zeros without ``perf=True``.

        Returns
        -------
        dict: ``load_ms prefill_ms decode_ms`` (float), ``n_prefill n_decode n_reused`` (int)
        """
        cdef lcs_perf found
        cdef lcs_context* ctx = self.enter()
        try:
            check(lcs_context_get_perf(ctx, &found))
        finally:
            self.leave()
        return {
            "load_ms": found.load_ms, "prefill_ms": found.prefill_ms, "decode_ms": found.decode_ms,
            "n_prefill": found.n_prefill, "n_decode": found.n_decode, "n_reused": found.n_reused,
        }

    def reset_perf(self):
        """Set the counters to 0."""
        cdef lcs_context* ctx = self.enter()
        try:
            check(lcs_context_reset_perf(ctx))
        finally:
            self.leave()

    def memory_use(self):
        """Bytes by buffer type: ``{name: {"model", "context", "compute"}}``. "output" holds the rows of logits."""
        cdef lcs_memory_use entries[64]
        cdef size_t n = 0
        cdef lcs_context* ctx = self.enter()
        try:
            check(lcs_context_memory_use(ctx, entries, 64, &n))
        finally:
            self.leave()
        return uses_of(entries, n)


cdef lcs_status each_row(
        lcs_context* ctx, const Ints* rows, size_t width, bint embeddings, float* to) noexcept nogil:
    """Look every row up, and copy it where ``to`` is given. The status of the first that is not there."""
    cdef lcs_status st
    cdef const float* row
    cdef size_t i
    for i in range(rows.n):
        if embeddings:
            st = lcs_context_embeddings(ctx, rows.data[i], &row)
        else:
            st = lcs_context_logits(ctx, rows.data[i], &row)
        if st != LCS_STATUS_OK:
            return st
        if to is not NULL:
            memcpy(to + i * width, row, width * sizeof(float))
    return LCS_STATUS_OK


cdef bint judged_before(lcs_status st) noexcept:
    """Whether rows are as they were."""
    return st in (
        LCS_STATUS_ARG, LCS_STATUS_RANGE, LCS_STATUS_UNSUPPORTED, LCS_STATUS_BUSY, LCS_STATUS_FORKED,
        LCS_STATUS_BATCH_TOO_LARGE)


cdef int32_t resolve_flash_attn(object wanted, int32_t type_k, int32_t type_v) except? -1000:
    """Measured: on a CPU flash attention costs a third of the decode speed at depth, so it is for caches that need it."""
    if isinstance(wanted, (bool, np.bool_)):
        return LCS_FLASH_ATTN_ON if wanted else LCS_FLASH_ATTN_OFF
    if wanted is not None and as_choice(wanted, FLASH_ATTN, "flash_attn") != LCS_FLASH_ATTN_AUTO:
        return as_choice(wanted, FLASH_ATTN, "flash_attn")
    if not cpu_only():
        return LCS_FLASH_ATTN_AUTO
    return LCS_FLASH_ATTN_OFF if type_k in UNQUANTISED and type_v in UNQUANTISED else LCS_FLASH_ATTN_ON
