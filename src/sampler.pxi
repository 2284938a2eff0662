# Owns the sampler handle.

@cython.final
@cython.no_gc
cdef class Sampler:
    """A chain that chooses tokens. One thread at a time.

    In order: bias, penalties, DRY, top-n-sigma, top-k, typical, top-p, min-p, XTC, temperature, choice. Mirostat replaces
    everything from top-n-sigma on, but temperature. The defaults of all are the values that do nothing, and temperature
    0 is greedy: the most likely token after bias and penalties.

    Parameters
    ----------
    logit_bias
        ``{token: bias}`` or pairs; ``-inf`` forbids a token.
    dry_breakers
        Texts that end a repetition.
    seed
        None: drawn; read it back with `seed`.
    grammar, grammar_root
        GBNF, and the rule to begin with.
    grammar_prefix
        Text that is there before the first choice, and that the grammar begins with: the end of a prompt.
    grammar_lazy, trigger_patterns, trigger_tokens
        The grammar sleeps until one of the tokens is chosen, or one of the regular expressions fits the output so far.

    Raises
    ------
    InvalidArgumentError, OutOfRangeError  a value outside its range
    GrammarError                           the grammar does not parse, exceeds its limits, or begins otherwise
    """

    cdef lcs_sampler* _sampler
    cdef bint _busy
    cdef int _pid
    cdef object __weakref__

    def __cinit__(
        self, model, *, temperature=0.0, dynatemp_range=None, dynatemp_exponent=None, top_k=None, top_p=None, min_p=None,
        typical_p=None, top_n_sigma=None, xtc_probability=None, xtc_threshold=None, penalty_repeat=None,
        penalty_freq=None, penalty_present=None, penalty_last_n=None, dry_multiplier=None, dry_base=None,
        dry_allowed_length=None, dry_penalty_last_n=None, dry_breakers=None, mirostat=None, mirostat_tau=None,
        mirostat_eta=None, min_keep=None, seed=None, logit_bias=None, grammar=None, grammar_root=None,
        grammar_prefix=None, grammar_lazy=False, trigger_patterns=(), trigger_tokens=(),
    ):
        cdef lcs_sampler_params p
        cdef lcs_status st
        cdef _CTexts breakers, patterns
        cdef Ints triggers
        cdef lcs_logit_bias* biases = NULL
        cdef size_t i = 0
        cdef lcs_model* owner
        self._pid = getpid()
        if model is BLANK:
            return
        if not isinstance(model, Model):
            raise TypeError(f"model must be a Model, not {type(model).__name__}")
        memset(&triggers, 0, sizeof(triggers))
        lcs_sampler_params_init(&p)
        p.temperature = as_float(temperature, "temperature")
        if dynatemp_range is not None:
            p.dynatemp_range = as_float(dynatemp_range, "dynatemp_range")
        if dynatemp_exponent is not None:
            p.dynatemp_exponent = as_float(dynatemp_exponent, "dynatemp_exponent")
        if top_k is not None:
            p.top_k = as_int32(top_k, "top_k")
        if top_p is not None:
            p.top_p = as_float(top_p, "top_p")
        if min_p is not None:
            p.min_p = as_float(min_p, "min_p")
        if typical_p is not None:
            p.typical_p = as_float(typical_p, "typical_p")
        if top_n_sigma is not None:
            p.top_n_sigma = as_float(top_n_sigma, "top_n_sigma")
        if xtc_probability is not None:
            p.xtc_probability = as_float(xtc_probability, "xtc_probability")
        if xtc_threshold is not None:
            p.xtc_threshold = as_float(xtc_threshold, "xtc_threshold")
        if penalty_repeat is not None:
            p.penalty_repeat = as_float(penalty_repeat, "penalty_repeat")
        if penalty_freq is not None:
            p.penalty_freq = as_float(penalty_freq, "penalty_freq")
        if penalty_present is not None:
            p.penalty_present = as_float(penalty_present, "penalty_present")
        if penalty_last_n is not None:
            p.penalty_last_n = as_int32(penalty_last_n, "penalty_last_n")
        if dry_multiplier is not None:
            p.dry_multiplier = as_float(dry_multiplier, "dry_multiplier")
        if dry_base is not None:
            p.dry_base = as_float(dry_base, "dry_base")
        if dry_allowed_length is not None:
            p.dry_allowed_length = as_int32(dry_allowed_length, "dry_allowed_length")
        if dry_penalty_last_n is not None:
            p.dry_penalty_last_n = as_int32(dry_penalty_last_n, "dry_penalty_last_n")
        if mirostat is not None:
            p.mirostat = as_int32(mirostat, "mirostat")
        if mirostat_tau is not None:
            p.mirostat_tau = as_float(mirostat_tau, "mirostat_tau")
        if mirostat_eta is not None:
            p.mirostat_eta = as_float(mirostat_eta, "mirostat_eta")
        if min_keep is not None:
            p.min_keep = as_uint32(min_keep, "min_keep")
        if seed is not None:
            p.seed = as_uint32(seed, "seed")
        if dry_breakers is not None:
            breakers = _CTexts(dry_breakers, "dry_breakers")
            p.dry_breakers = breakers.data
            p.n_dry_breakers = breakers.n
        patterns = _CTexts(trigger_patterns, "trigger_patterns")
        p.trigger_patterns = patterns.data
        p.n_trigger_patterns = patterns.n
        cdef bytes grammar_text = None if grammar is None else as_c_text(grammar, "grammar")
        cdef bytes root_text = None if grammar_root is None else as_c_text(grammar_root, "grammar_root")
        if grammar_text is not None:
            p.grammar = PyBytes_AS_STRING(grammar_text)
        cdef bytes prefix_text = None if grammar_prefix is None else as_c_text(grammar_prefix, "grammar_prefix")
        if root_text is not None:
            p.grammar_root = PyBytes_AS_STRING(root_text)
        if prefix_text is not None:
            p.grammar_prefix = PyBytes_AS_STRING(prefix_text)
        p.grammar_lazy = grammar_lazy
        bias_pairs = [] if logit_bias is None else list(
            logit_bias.items() if hasattr(logit_bias, "items") else logit_bias)
        try:
            ints_fill(&triggers, trigger_tokens, "trigger_token")
            p.trigger_tokens = triggers.data
            p.n_trigger_tokens = triggers.n
            biases = <lcs_logit_bias*>malloc(max(len(bias_pairs), 1) * sizeof(lcs_logit_bias))
            if biases is NULL:
                raise errors.OutOfMemoryError(f"no memory for {len(bias_pairs)} biases")
            for token, bias in bias_pairs:
                biases[i].token = as_int32(token, "logit_bias token")
                biases[i].bias = as_float(bias, "logit_bias")
                i += 1
            p.logit_bias = biases
            p.n_logit_bias = i
            owner = (<Model>model).enter()
            try:
                with nogil:
                    st = lcs_sampler_init(owner, &p, &self._sampler)
                check(st)
            finally:
                (<Model>model).leave()
        finally:
            free(triggers.data)
            free(biases)

    def __dealloc__(self):
        if self._sampler is not NULL:
            with nogil:
                lcs_sampler_free(self._sampler)  # nothing in a forked child

    cdef int require_open(self) except -1:
        if self._pid != getpid():
            raise errors.ForkedError("sampler was made before fork()")
        if self._sampler is NULL:
            raise errors.ClosedError("sampler is closed")
        return 0

    cdef lcs_sampler* enter(self) except NULL:
        self.require_open()
        if self._busy:
            raise errors.BusyError("sampler is inside another call")
        begin_inside()
        self._busy = True
        return self._sampler

    cdef int leave(self) except -1:
        self._busy = False
        return end_inside()

    def close(self):
        """Free it. Safe to repeat; BusyError while another thread is inside."""
        cdef lcs_sampler* sampler
        if self._sampler is NULL:
            return
        if self._pid != getpid():
            self._sampler = NULL
            return
        sampler = self.enter()
        self._sampler = NULL
        with nogil:
            lcs_sampler_free(sampler)
        self.leave()

    @property
    def closed(self):
        """Whether close() was called."""
        return self._sampler is NULL

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
        return f"<llamacppshim.Sampler{', closed' if self._sampler is NULL else ''}>"

    @property
    def seed(self):
        """The seed in use; 0 for greedy."""
        cdef uint32_t seed
        self.require_open()
        check(lcs_sampler_seed(self._sampler, &seed))
        return seed

    def sample(self, Context ctx not None, row=-1):
        """Choose a token from a row of the context's last decode, and accept it.

        Raises
        ------
        OutOfRangeError  as `Context.logits`; or the context's model has another vocabulary
        InternalError    the row holds a NaN, or nothing that may be chosen
        GrammarError     the grammar allows no token
        """
        cdef int32_t index = as_int32(row, "row")
        cdef int32_t token
        cdef lcs_status st
        cdef lcs_context* context
        cdef lcs_sampler* sampler = self.enter()
        try:
            context = ctx.enter()
            try:
                with nogil:
                    st = lcs_sampler_sample(sampler, context, index, &token)
                check(st)
            finally:
                ctx.leave()
        finally:
            self.leave()
        return token

    def sample_row(self, logits):
        """The same from n_vocab logits of the caller's: float32, one-dimensional; anything else is converted."""
        cdef Py_buffer view
        cdef int32_t token
        cdef int32_t n
        cdef lcs_status st
        row = float_row(logits, "logits")
        if len(row) > INT32_MAX:
            raise out_of_range("n_vocab", len(row), 1, INT32_MAX)
        cdef lcs_sampler* sampler = self.enter()
        try:
            PyObject_GetBuffer(row, &view, PyBUF_SIMPLE)
            n = <int32_t>(view.len // 4)
            with nogil:
                st = lcs_sampler_sample_row(sampler, <const float*>view.buf, n, &token)
            PyBuffer_Release(&view)
            check(st)
        finally:
            self.leave()
        return token

    def accept(self, token):
        """Tell of a token that it did not choose. GrammarError where the grammar does not allow it; nothing changed."""
        cdef int32_t id = as_int32(token, "token")
        cdef lcs_status st
        cdef lcs_sampler* sampler = self.enter()
        try:
            with nogil:
                st = lcs_sampler_accept(sampler, id)
            check(st)
        finally:
            self.leave()

    def reset(self):
        """Back to the beginning, with the same seed."""
        cdef lcs_status st
        cdef lcs_sampler* sampler = self.enter()
        try:
            with nogil:
                st = lcs_sampler_reset(sampler)
            check(st)
        finally:
            self.leave()

    def clone(self):
        """A copy that goes on as the original would: same draws, same history, same grammar state."""
        cdef Sampler copy = Sampler(BLANK)
        cdef lcs_status st
        cdef lcs_sampler* sampler = self.enter()
        try:
            with nogil:
                st = lcs_sampler_clone(sampler, &copy._sampler)
            check(st)
        finally:
            self.leave()
        return copy

    def draws_save(self):
        """The state of the random draws, as bytes for `draws_load`; about 13,000. Not the history nor the grammar."""
        cdef size_t n = 0
        cdef bytes data
        cdef lcs_status st
        cdef lcs_sampler* sampler = self.enter()
        try:
            st = lcs_sampler_save_draws(sampler, NULL, 0, &n)
            if st != LCS_STATUS_BUFFER:
                check(st)
            data = new_bytes(n)
            check(lcs_sampler_save_draws(sampler, PyBytes_AS_STRING(data), n, &n))
        finally:
            self.leave()
        return data

    def draws_load(self, data):
        """Go on drawing as the sampler whose `draws_save` this is.

        A sampler with the same settings that has accepted the same tokens then goes on as that one would.

        Raises
        ------
        SnapshotCorruptError  cut or damaged bytes; nothing changed
        """
        cdef Py_buffer view
        cdef lcs_sampler* sampler
        lend_bytes(data, &view, "draws")
        try:
            sampler = self.enter()
            try:
                check(lcs_sampler_load_draws(sampler, <const char*>view.buf, <size_t>view.len))
            finally:
                self.leave()
        finally:
            PyBuffer_Release(&view)
