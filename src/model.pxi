# Owns the model handle: loading, what a model says of itself, its vocabulary.

cdef dict SPLIT_MODES = {"none": 0, "layer": 1, "row": 2, "tensor": 3}
cdef dict MEMORY_KINDS = {"none": 0, "attention": 1, "swa": 2, "recurrent": 3, "hybrid": 4}
cdef dict VOCAB_TYPES = {"none": 0, "spm": 1, "bpe": 2, "wpm": 3, "ugm": 4, "rwkv": 5, "plamo2": 6}

# Below this, handing the GIL over costs more than tokenising.
cdef size_t LONG_TEXT_BYTES = 2048


cdef struct Progress:
    PyObject* callback  # borrowed; NULL: none
    PyObject* error     # owned; what the callback, or Ctrl-C, raised
    bint armed          # SIGINT is looked for


cdef c_bool on_progress(float fraction, void* data) noexcept nogil:
    cdef Progress* progress = <Progress*>data
    if exiting or progress.error is not NULL:
        return False
    if progress.callback is NULL and not (progress.armed and lcsn_sigint_seen != 0):
        return True
    with gil:
        return ask_progress(fraction, progress)


cdef bint ask_progress(float fraction, Progress* progress) noexcept:
    try:
        if progress.armed and lcsn_sigint_take() != 0:
            PyErr_CheckSignals()
        if progress.callback is not NULL:
            answer = (<object>progress.callback)(fraction)
            return answer is None or bool(answer)
        return True
    except BaseException as e:
        Py_INCREF(e)
        progress.error = <PyObject*>e
        return False


@cython.final
cdef class _LoadParams:
    """How a model is loaded, with the lists that the C parameters point to."""

    cdef lcs_model_params params
    cdef dict options  # those that change where and in which form weights lie, as resolved
    cdef _CTexts _names
    cdef object _shares

    def __cinit__(self, dict given):
        lcs_model_params_init(&self.params)
        self.options = {}
        for name, value in given.items():
            if name == "n_gpu_layers":
                self.params.n_gpu_layers = value = as_int32(value, name)
            elif name == "main_gpu":
                self.params.main_gpu = value = as_int32(value, name)
            elif name == "split_mode":
                self.params.split_mode = as_choice(value, SPLIT_MODES, name)
            elif name == "devices":
                if value is not None:
                    self._names = _CTexts(value, name)
                    self.params.devices = self._names.data
                    self.params.n_devices = self._names.n
                    value = tuple(value)
            elif name == "tensor_split":
                if value is not None:
                    self._shares = float_row(value, name).copy()
                    self.params.tensor_split = <const float*>data_of(self._shares)
                    self.params.n_tensor_split = <size_t>len(self._shares)
                    value = tuple(self._shares.tolist())
            elif name == "use_mmap":
                self.params.use_mmap = value = bool(value)
            elif name == "use_mlock":
                self.params.use_mlock = value = bool(value)
            elif name == "check_tensors":
                self.params.check_tensors = value = bool(value)
            elif name == "use_extra_bufts":
                self.params.use_extra_bufts = value = bool(value)
            elif name == "load_mtp":
                self.params.load_mtp = value
                continue
            else:
                raise TypeError(f"a model has no parameter {name}")
            self.options[name] = value


@cython.final
@cython.no_gc
cdef class Model:
    """A model's weights and vocabulary. Any number of threads may use one at once.

    Parameters
    ----------
    path
        A GGUF file of any suffix; of a split model, its first part.
    n_gpu_layers
        How many layers go to devices; negative: all. No effect in a CPU build.
    devices
        Names of backend devices to use ("CUDA0"); None: all.
    split_mode
        How layers are shared between devices: "none", "layer", "row", "tensor".
    main_gpu
        The device for ``split_mode="none"``.
    tensor_split
        Share of each device; None: by free memory.
    use_mmap, use_mlock
        Map the file instead of reading it; keep it in memory.
    check_tensors
        Read every tensor, and refuse NaNs and broken blocks.
    use_extra_bufts
        Repack weights for faster kernels: more memory, and other last bits.
    vocab_only
        Tokenizer and metadata only; no context can be made.
    load_mtp
        Load the layers of multi-token prediction too.
    progress
        Called with 0..1 on the loading thread; False cancels the load, an exception cancels it and propagates.

    Raises
    ------
    ModelLoadError      the file is missing, short, foreign or damaged (``reason``); LoadCancelledError if cancelled
    InvalidArgumentError, OutOfRangeError, OutOfMemoryError, UnsupportedFeatureError

    Notes
    -----
    The weights live until the last handle made from them is closed, whatever the order. The GIL is free during the load,
    and Ctrl-C ends it.
    """

    cdef lcs_model* _model
    cdef int _users       # calls running without the GIL
    cdef bint _closed
    cdef int _pid
    cdef lcs_model_info _info
    cdef lcs_vocab_specials _specials
    cdef str _path
    cdef str _name
    cdef tuple _files     # file_identity of each, when loaded
    cdef str _tokenizer_digest
    cdef dict _load_options
    cdef object __weakref__

    def __cinit__(
        self, path, *, n_gpu_layers=-1, devices=None, split_mode="layer", main_gpu=0, tensor_split=None, use_mmap=True,
        use_mlock=False, check_tensors=False, use_extra_bufts=True, vocab_only=False, load_mtp=False, progress=None,
    ):
        cdef lcs_model_params params
        cdef lcs_status st
        cdef Progress asked
        self._pid = getpid()
        self._path = file_path(path)
        cdef bytes raw = file_path_bytes(self._path)
        cdef const char* c_path = PyBytes_AS_STRING(raw)
        cdef _LoadParams load = _LoadParams(dict(
            n_gpu_layers=n_gpu_layers, devices=devices, split_mode=split_mode, main_gpu=main_gpu,
            tensor_split=tensor_split, use_mmap=use_mmap, use_mlock=use_mlock, check_tensors=check_tensors,
            use_extra_bufts=use_extra_bufts, load_mtp=load_mtp))
        params = load.params
        params.vocab_only = vocab_only
        self._load_options = load.options
        if progress is not None and not callable(progress):
            raise TypeError(f"progress must be callable, not {type(progress).__name__}")
        asked.callback = NULL if progress is None else <PyObject*>progress
        asked.error = NULL
        params.progress = on_progress
        params.progress_data = &asked
        sync_log_level()
        begin_inside()
        try:
            asked.armed = arm_sigint(NULL)
            with nogil:
                st = lcs_model_load(c_path, &params, &self._model)
            if asked.armed:
                disarm_sigint(NULL)
            if asked.error is not NULL:
                error = <object>asked.error
                Py_DECREF(error)
                raise error
            if st != LCS_STATUS_OK:
                raise_for(st, self._path)
        finally:
            end_inside()
        check(lcs_model_get_info(self._model, &self._info))
        if lcs_vocab_get_specials(self._model, &self._specials) != LCS_STATUS_OK:
            memset(&self._specials, 0xff, sizeof(lcs_vocab_specials))  # every id -1
            self._specials.add_bos = self._specials.add_eos = self._specials.add_sep = False
        metadata = self.metadata
        self._name = (
            metadata.get("general.basename") or metadata.get("general.name")
            or os.path.splitext(os.path.basename(self._path))[0])
        count = metadata.get("split.count", "1")
        try:
            parts = split_paths(self._path, int(count)) if count.isdecimal() else [self._path]
            self._files = tuple([file_identity(part) for part in parts])
        except OSError as e:
            raise errors.ModelLoadError(path=self._path, reason=e.strerror or str(e)) from None

    def __dealloc__(self):
        if self._model is not NULL:
            with nogil:
                lcs_model_free(self._model)  # nothing in a forked child

    cdef int require_open(self) except -1:
        if self._pid != getpid():
            raise errors.ForkedError("model was made before fork()")
        if self._closed:
            raise errors.ClosedError("model is closed")
        return 0

    cdef lcs_model* enter(self) except NULL:
        """For a call that lets the GIL go. close() in another thread then leaves the handle to leave()."""
        self.require_open()
        begin_inside()
        self._users += 1
        return self._model

    cdef int leave(self) except -1:
        self._users -= 1
        self.free_if_unused()
        return end_inside()

    cdef void free_if_unused(self) noexcept:
        cdef lcs_model* model = self._model
        if self._closed and self._users == 0 and model is not NULL:
            self._model = NULL
            with nogil:
                lcs_model_free(model)

    def close(self):
        """Give up the handle. Safe to repeat. The weights go with the last context, sampler or call that uses them."""
        self._closed = True
        if self._pid == getpid():
            self.free_if_unused()

    @property
    def closed(self):
        """Whether close() was called."""
        return self._closed

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
        if self._closed:
            return f"<llamacppshim.Model {self._name!r}, closed>"
        return f"<llamacppshim.Model {self._name!r}, {self._info.n_params / 1e6:.1f}M parameters>"

    @property
    def path(self):
        """As given."""
        self.require_open()
        return self._path

    @property
    def name(self):
        """general.basename, else general.name, else the file's stem."""
        self.require_open()
        return self._name

    @property
    def description(self):
        """Size and type in a few words, as llama.cpp puts it."""
        self.require_open()
        return text_of(lcs_model_description(self._model))

    @property
    def architecture(self):
        """general.architecture."""
        self.require_open()
        return text_of(lcs_model_architecture(self._model))

    @property
    def metadata(self):
        """Scalar GGUF metadata, as text. A new dict."""
        cdef const char* key
        cdef const char* value
        cdef int32_t i
        self.require_open()
        found = {}
        for i in range(lcs_model_meta_count(self._model)):
            check(lcs_model_meta_at(self._model, i, &key, &value))
            found[text_of(key)] = text_of(value)
        return found

    @property
    def chat_template(self):
        """The Jinja source in the file, or None."""
        self.require_open()
        cdef const char* source = lcs_model_chat_template(self._model, NULL)
        return None if source is NULL else text_of(source)

    @property
    def digest(self):
        """SHA-256 of the file, or of the parts of a split model one after the other; hex.

        Cost: reads everything once a process, in bounded memory and without the GIL; kept by path, size, time of change
        and inode. ModelLoadError if a file has changed since the load.
        """
        self.require_open()
        return digest_of(self._files)

    @property
    def load_options(self):
        """How it was loaded: the parameters of this class that change where and in which form its weights lie. A copy."""
        return dict(self._load_options)

    @property
    def tokenizer_digest(self):
        """SHA-256 of everything that text becomes tokens by: settings, tokens, scores, attributes, merges; hex.

        UnsupportedFeatureError where the model has no vocabulary.
        """
        cdef size_t n = 0
        cdef bytes description
        cdef char* data
        cdef lcs_status st
        cdef lcs_model* model
        if self._tokenizer_digest is None:
            model = self.enter()
            try:
                with nogil:
                    st = lcs_vocab_describe(model, NULL, 0, &n)
                if st != LCS_STATUS_BUFFER:
                    check(st)
                description = new_bytes(n)
                data = PyBytes_AS_STRING(description)
                with nogil:
                    st = lcs_vocab_describe(model, data, n, &n)
                check(st)
            finally:
                self.leave()
            self._tokenizer_digest = hashlib.sha256(description).hexdigest()
        self.require_open()
        return self._tokenizer_digest

    @property
    def n_params(self):
        """Number of weights."""
        self.require_open()
        return self._info.n_params

    @property
    def n_bytes(self):
        """Bytes of all tensors."""
        self.require_open()
        return self._info.n_bytes

    @property
    def n_vocab(self):
        """Tokens of the vocabulary; columns of an array of logits."""
        self.require_open()
        return self._info.n_vocab

    @property
    def n_ctx_train(self):
        """Context length the model was trained for, in tokens."""
        self.require_open()
        return self._info.n_ctx_train

    @property
    def n_embd(self):
        """Width of the model."""
        self.require_open()
        return self._info.n_embd

    @property
    def n_embd_out(self):
        """Columns of an array of embeddings."""
        self.require_open()
        return self._info.n_embd_out

    @property
    def n_layer(self):
        """Layers, without those of multi-token prediction."""
        self.require_open()
        return self._info.n_layer

    @property
    def n_layer_nextn(self):
        """Layers of multi-token prediction."""
        self.require_open()
        return self._info.n_layer_nextn

    @property
    def n_head(self):
        """Attention heads of the first layer."""
        self.require_open()
        return self._info.n_head

    @property
    def n_head_kv(self):
        """Heads of K and V of the first layer."""
        self.require_open()
        return self._info.n_head_kv

    @property
    def n_swa(self):
        """Sliding window in tokens; 0: none."""
        self.require_open()
        return self._info.n_swa

    @property
    def memory_kind(self):
        """What a context keeps: "attention", "swa", "recurrent", "hybrid" or "none"."""
        self.require_open()
        return name_of(self._info.memory_kind, MEMORY_KINDS)

    @property
    def vocab_type(self):
        """"none", "spm", "bpe", "wpm", "ugm", "rwkv" or "plamo2"."""
        self.require_open()
        return name_of(self._info.vocab_type, VOCAB_TYPES)

    @property
    def rope_type(self):
        """llama_rope_type; -1: none."""
        self.require_open()
        return self._info.rope_type

    @property
    def ftype(self):
        """llama_ftype: the number of the quantisation mix."""
        self.require_open()
        return self._info.ftype

    @property
    def has_encoder(self):
        """Whether it has an encoder."""
        self.require_open()
        return <bint>self._info.has_encoder

    @property
    def has_decoder(self):
        """Whether it has a decoder."""
        self.require_open()
        return <bint>self._info.has_decoder

    @property
    def is_diffusion(self):
        """Whether it is a diffusion model."""
        self.require_open()
        return <bint>self._info.is_diffusion

    @property
    def vocab_only(self):
        """Whether only tokenizer and metadata were loaded."""
        self.require_open()
        return <bint>self._info.vocab_only

    @property
    def rope_freq_scale_train(self):
        """RoPE frequency scale it was trained with."""
        self.require_open()
        return self._info.rope_freq_scale_train

    cdef object special(self, int32_t token):
        self.require_open()
        return None if token < 0 else token

    @property
    def bos(self):
        """Beginning of text; None where the model has none, as for all of these."""
        return self.special(self._specials.bos)

    @property
    def eos(self):
        """End of text."""
        return self.special(self._specials.eos)

    @property
    def eot(self):
        """End of turn."""
        return self.special(self._specials.eot)

    @property
    def sep(self):
        """Separator of sentences."""
        return self.special(self._specials.sep)

    @property
    def nl(self):
        """New line."""
        return self.special(self._specials.nl)

    @property
    def pad(self):
        """Padding."""
        return self.special(self._specials.pad)

    @property
    def mask(self):
        """Mask of masked models."""
        return self.special(self._specials.mask)

    @property
    def fim_pre(self):
        """Fill in the middle: prefix."""
        return self.special(self._specials.fim_pre)

    @property
    def fim_suf(self):
        """Fill in the middle: suffix."""
        return self.special(self._specials.fim_suf)

    @property
    def fim_mid(self):
        """Fill in the middle: middle."""
        return self.special(self._specials.fim_mid)

    @property
    def fim_pad(self):
        """Fill in the middle: padding."""
        return self.special(self._specials.fim_pad)

    @property
    def fim_rep(self):
        """Fill in the middle: repository."""
        return self.special(self._specials.fim_rep)

    @property
    def fim_sep(self):
        """Fill in the middle: file separator."""
        return self.special(self._specials.fim_sep)

    @property
    def add_bos(self):
        """Whether add_special puts BOS in front."""
        self.require_open()
        return <bint>self._specials.add_bos

    @property
    def add_eos(self):
        """Whether add_special appends EOS."""
        self.require_open()
        return <bint>self._specials.add_eos

    @property
    def add_sep(self):
        """Whether add_special appends a separator."""
        self.require_open()
        return <bint>self._specials.add_sep

    def tokenize(self, text, *, add_special, parse_special):
        """Text to tokens.

        Parameters
        ----------
        text
            str, or bytes that need not be UTF-8.
        add_special
            Add BOS, EOS or SEP as the model wants; can append, so only for a text that does not go on.
        parse_special
            Let control tokens written in the text become those tokens.

        Returns
        -------
        int32, one-dimensional.

        Raises
        ------
        InvalidArgumentError     a lone surrogate; or add_special on a model that wants a token it does not have
        UnsupportedFeatureError  the model has no vocabulary
        """
        cdef bytes raw = as_text(text, "text")
        cdef const char* data = PyBytes_AS_STRING(raw)
        cdef size_t n_bytes = <size_t>len(raw)
        cdef bint special = add_special
        cdef bint parse = parse_special
        cdef int32_t few[256]
        cdef int32_t* tokens = few
        cdef size_t capacity = 256
        cdef size_t n = 0
        cdef lcs_status st
        cdef lcs_model* model = self.enter()
        try:
            if n_bytes + 16 > capacity:
                capacity = n_bytes + 16  # a token is at least one byte, but for what is added
                tokens = <int32_t*>malloc(capacity * sizeof(int32_t))
                if tokens is NULL:
                    raise errors.OutOfMemoryError(f"no memory for {capacity} tokens")
            if n_bytes < LONG_TEXT_BYTES:
                st = lcs_vocab_tokenize(model, data, n_bytes, special, parse, tokens, capacity, &n)
            else:
                with nogil:
                    st = lcs_vocab_tokenize(model, data, n_bytes, special, parse, tokens, capacity, &n)
            if st == LCS_STATUS_BUFFER:
                if tokens != few:
                    free(tokens)
                capacity = n
                tokens = <int32_t*>malloc(capacity * sizeof(int32_t))
                if tokens is NULL:
                    raise errors.OutOfMemoryError(f"no memory for {capacity} tokens")
                with nogil:
                    st = lcs_vocab_tokenize(model, data, n_bytes, special, parse, tokens, capacity, &n)
            check(st)
            array = new_array(n, INT32)
            if n > 0:
                memcpy(data_of(array), tokens, n * sizeof(int32_t))
            return array
        finally:
            if tokens != few:
                free(tokens)
            self.leave()

    def detokenize(self, tokens, *, remove_special=False, unparse_special=True):
        """Tokens to bytes, which may begin and end inside a UTF-8 character.

        Parameters
        ----------
        tokens
            Any sequence or array of integers.
        remove_special
            Drop the BOS and EOS that add_special would have added.
        unparse_special
            Give control tokens as their text.

        Raises
        ------
        OutOfRangeError          a token outside ``[0, n_vocab)``
        UnsupportedFeatureError  the model has no vocabulary
        """
        cdef Ints ids
        cdef bint remove = remove_special
        cdef bint unparse = unparse_special
        cdef size_t capacity, n = 0
        cdef char* data
        cdef bytes text
        cdef lcs_status st
        memset(&ids, 0, sizeof(ids))
        cdef lcs_model* model = self.enter()
        try:
            ints_fill(&ids, tokens, "token")
            capacity = 8 * ids.n + 64
            while True:
                text = new_bytes(capacity)
                data = PyBytes_AS_STRING(text)
                with nogil:
                    st = lcs_vocab_detokenize(model, ids.data, ids.n, remove, unparse, data, capacity, &n)
                if st != LCS_STATUS_BUFFER:
                    break
                capacity = n
            check(st)
            return text if n == capacity else text[:n]
        finally:
            free(ids.data)
            self.leave()

    def token_piece(self, token, *, special=True):
        """The bytes of one token; ``special=False`` gives control tokens as nothing."""
        cdef char few[64]
        cdef size_t n = 0
        cdef bytes text
        cdef int32_t id = as_int32(token, "token")
        self.require_open()
        cdef lcs_status st = lcs_vocab_piece(self._model, id, special, few, sizeof(few), &n)
        if st == LCS_STATUS_BUFFER:
            text = new_bytes(n)
            check(lcs_vocab_piece(self._model, id, special, PyBytes_AS_STRING(text), n, &n))
            return text
        check(st)
        return few[:n]

    cdef int token_info(self, object token, lcs_token_info* info) except -1:
        cdef int32_t id = as_int32(token, "token")
        self.require_open()
        return check(lcs_vocab_token(self._model, id, info))

    def token_text(self, token):
        """A token as the vocabulary file writes it."""
        cdef lcs_token_info info
        self.token_info(token, &info)
        return text_of(info.text)

    def token_score(self, token):
        """A token's score; the meaning depends on the type of the vocabulary."""
        cdef lcs_token_info info
        self.token_info(token, &info)
        return info.score

    def token_attr(self, token):
        """A token's llama_token_attr bits."""
        cdef lcs_token_info info
        self.token_info(token, &info)
        return info.attr

    def is_eog(self, token):
        """Whether a token ends a generation."""
        cdef lcs_token_info info
        self.token_info(token, &info)
        return <bint>info.is_eog

    def is_control(self, token):
        """Whether a token is a control token."""
        cdef lcs_token_info info
        self.token_info(token, &info)
        return <bint>info.is_control
