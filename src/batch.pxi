# Owns the batch: tokens of several sequences, gathered for one llama_decode.

@cython.final
@cython.no_gc
cdef class Batch:
    """Tokens for `Context.decode_batch`, with position, sequences and wish for logits of each.

    Parameters
    ----------
    tokens, pos
        Equally long sequences of integers.
    seq_ids
        For each token one sequence id, or a sequence of them.
    logits
        For each token whether its row is wanted; None: none.

    It can be filled by `add` too, and used again after `clear`. What makes a valid batch is judged by the decode.
    """

    cdef Ints _tokens
    cdef Ints _pos
    cdef Ints _n_seq_id
    cdef Ints _seq_ids
    cdef Ints _logits   # 0 or 1
    cdef uint8_t* _want # the same as bytes, made for a decode
    cdef bint _busy
    cdef bint _closed

    def __cinit__(self, tokens=(), pos=(), seq_ids=(), logits=None):
        ids, positions, owners = list(tokens), list(pos), list(seq_ids)
        wanted = [False] * len(ids) if logits is None else list(logits)
        if not len(ids) == len(positions) == len(owners) == len(wanted):
            raise errors.InvalidArgumentError(
                f"lengths differ: {len(ids)} tokens, {len(positions)} pos, {len(owners)} seq_ids, {len(wanted)} logits")
        for token, position, owner, want in zip(ids, positions, owners, wanted):
            self.add(token, position, owner, want)

    def __dealloc__(self):
        self.release()

    cdef void release(self) noexcept:
        free(self._tokens.data)
        free(self._pos.data)
        free(self._n_seq_id.data)
        free(self._seq_ids.data)
        free(self._logits.data)
        free(self._want)
        memset(&self._tokens, 0, sizeof(Ints))
        memset(&self._pos, 0, sizeof(Ints))
        memset(&self._n_seq_id, 0, sizeof(Ints))
        memset(&self._seq_ids, 0, sizeof(Ints))
        memset(&self._logits, 0, sizeof(Ints))
        self._want = NULL

    cdef int require_free(self) except -1:
        if self._closed:
            raise errors.ClosedError("batch is closed")
        if self._busy:
            raise errors.BusyError("batch is being decoded")
        return 0

    cdef int lend(self, lcs_batch* to) except -1:
        """Give the arrays to a decode; until give_back() nothing may change them."""
        cdef size_t i, n = self._tokens.n
        self.require_free()
        if n > INT32_MAX:
            raise out_of_range("n_tokens", n, 1, INT32_MAX)
        cdef uint8_t* want = <uint8_t*>realloc(self._want, max(n, <size_t>1))
        if want is NULL:
            raise errors.OutOfMemoryError(f"no memory for a batch of {n} tokens")
        self._want = want
        for i in range(n):
            want[i] = self._logits.data[i] != 0
        to.n_tokens = <int32_t>n
        to.tokens = self._tokens.data
        to.pos = self._pos.data
        to.n_seq_id = self._n_seq_id.data
        to.seq_ids = self._seq_ids.data
        to.logits = want
        self._busy = True
        return 0

    cdef void give_back(self) noexcept:
        self._busy = False

    def add(self, token, pos, seq_ids, logits=False):
        """Append one token: its position, its sequence or sequences, and whether its logits are wanted."""
        cdef int32_t id = as_int32(token, "token")
        cdef int32_t position = as_int32(pos, "pos")
        cdef bint want = logits
        owners = tuple(seq_ids) if isinstance(seq_ids, (list, tuple, set, frozenset, np.ndarray)) else (seq_ids,)
        cdef list ids = [as_int32(owner, "seq_id") for owner in owners]
        cdef size_t i, n = self._tokens.n, n_ids = <size_t>len(ids)
        self.require_free()
        ints_reserve(&self._tokens, n + 1)
        ints_reserve(&self._pos, n + 1)
        ints_reserve(&self._n_seq_id, n + 1)
        ints_reserve(&self._logits, n + 1)
        ints_reserve(&self._seq_ids, self._seq_ids.n + max(n_ids, <size_t>1))  # none is the shim's to refuse
        # Nothing fails from here on: a token is in it whole, or not at all.
        self._tokens.data[n] = id
        self._pos.data[n] = position
        self._n_seq_id.data[n] = <int32_t>n_ids
        self._logits.data[n] = want
        for i in range(n_ids):
            self._seq_ids.data[self._seq_ids.n + i] = ids[i]
        self._seq_ids.n += n_ids
        self._tokens.n = self._pos.n = self._n_seq_id.n = self._logits.n = n + 1

    def clear(self):
        """Drop all tokens; the memory is kept."""
        self.require_free()
        self._tokens.n = self._pos.n = self._n_seq_id.n = self._seq_ids.n = self._logits.n = 0

    def close(self):
        """Free the memory. Safe to repeat; BusyError while it is being decoded."""
        if self._closed:
            return
        self.require_free()
        self._closed = True
        self.release()

    @property
    def closed(self):
        """Whether close() was called."""
        return self._closed

    def __len__(self):
        if self._closed:
            raise errors.ClosedError("batch is closed")
        return <Py_ssize_t>self._tokens.n

    def __enter__(self):
        self.require_free()
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
        return f"<llamacppshim.Batch of {self._tokens.n} tokens{', closed' if self._closed else ''}>"
