# Owns what is known of a model without loading it: its header, and the dry runs that tell what it would need.

cdef class _Header:
    """The C handle for the time of one call."""

    cdef lcs_header* header

    def __dealloc__(self):
        if self.header is not NULL:
            lcs_header_free(self.header)


def read_header(path, contexts=(), load=None):
    """A model's facts and what contexts of it would need, from the header of its file alone.

    Parameters
    ----------
    path
        As for `Model`.
    contexts
        The parameters of each `Context` that is to be measured: dicts; or a function that chooses them by the facts.
    load
        The parameters of `Model` that say where weights go: a dict.

    Returns
    -------
    (facts, uses): a dict; and for each context what its ``memory_use()`` would be, or the error that making it, or
    measuring it, would raise.

    Raises
    ------
    ModelLoadError  as `Model`; InvalidArgumentError, OutOfRangeError, OutOfMemoryError, UnsupportedFeatureError
    """
    cdef str text = file_path(path)
    cdef bytes raw = file_path_bytes(text)
    cdef const char* c_path = PyBytes_AS_STRING(raw)
    cdef _LoadParams params = _LoadParams(dict(load or ()))
    cdef _Header handle = _Header()
    cdef lcs_status st
    sync_log_level()
    begin_inside()
    try:
        with nogil:
            st = lcs_header_read(c_path, &params.params, &handle.header)
        if st != LCS_STATUS_OK:
            raise_for(st, text)
        facts = header_facts(handle)
        uses = []
        for given in contexts(facts) if callable(contexts) else contexts:
            try:
                uses.append(measure_context(handle, dict(given)))
            except errors.LlamaCppShimError as error:
                uses.append(error)
        return facts, uses
    finally:
        end_inside()


cdef dict measure_context(_Header handle, dict given):
    cdef lcs_context_params p
    cdef lcs_memory_use entries[64]
    cdef lcs_header* header = handle.header
    cdef size_t n = 0
    cdef lcs_status st
    fill_context_params(&p, given)
    with nogil:
        st = lcs_header_measure(header, &p, entries, 64, &n)
    check(st)
    return uses_of(entries, n)


cdef dict uses_of(const lcs_memory_use* entries, size_t n):
    cdef size_t i
    return {
        text_of(entries[i].name): {
            "model": entries[i].model, "context": entries[i].context, "compute": entries[i].compute}
        for i in range(n)
    }


cdef dict header_facts(_Header handle):
    cdef lcs_header* header = handle.header
    cdef lcs_header_info info
    cdef lcs_header_layer layer
    cdef lcs_header_type kind
    cdef const char* key
    cdef const char* value
    cdef int32_t i
    check(lcs_header_get_info(header, &info))
    layers = []
    for i in range(info.n_layer_all):
        check(lcs_header_layer_at(header, i, &layer))
        layers.append({
            "n_head": layer.n_head, "n_head_kv": layer.n_head_kv, "n_embd_k": layer.n_embd_k,
            "n_embd_v": layer.n_embd_v, "n_state": layer.n_state, "windowed": <bint>layer.windowed,
            "prediction": <bint>layer.prediction})
    tensors = {}
    for i in range(info.n_types):
        check(lcs_header_type_at(header, i, &kind))
        tensors[text_of(kind.name)] = {"n_tensors": kind.n_tensors, "n_bytes": kind.n_bytes}
    metadata = {}
    for i in range(lcs_header_meta_count(header)):
        check(lcs_header_meta_at(header, i, &key, &value))
        metadata[text_of(key)] = text_of(value)
    return {
        "architecture": text_of(lcs_header_architecture(header)),
        "tokenizer": text_of(info.tokenizer),
        "version": info.version,
        "n_parts": info.n_parts,
        "n_file_bytes": info.n_file_bytes,
        "n_header_bytes": info.n_header_bytes,
        "n_params": info.model.n_params,
        "n_bytes": info.model.n_bytes,
        "n_vocab": info.model.n_vocab,
        "n_ctx_train": info.model.n_ctx_train,
        "n_embd": info.model.n_embd,
        "n_embd_out": info.model.n_embd_out,
        "n_layer": info.model.n_layer,
        "n_layer_nextn": info.model.n_layer_nextn,
        "n_head": info.model.n_head,
        "n_head_kv": info.model.n_head_kv,
        "n_swa": info.model.n_swa,
        "n_expert": info.n_expert,
        "n_expert_used": info.n_expert_used,
        "memory_kind": name_of(info.model.memory_kind, MEMORY_KINDS),
        "vocab_type": name_of(info.model.vocab_type, VOCAB_TYPES),
        "generates": info.model.memory_kind != LCS_MEMORY_KIND_NONE and not info.model.has_encoder,
        "layers": layers,
        "tensors": tensors,
        "metadata": metadata,
    }


def available_memory():
    """Bytes that this process can still have: free memory and swap, within the limits of its cgroups. None: unknown."""
    return lcs_available_memory() or None
