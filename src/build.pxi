# Owns what the build says of itself, the counts of living handles, the faults that tests inject, and small functions that
# need no handle.

def build_info():
    """What this build is: pin, backend, options, CPU features compiled in and found.

    Returns
    -------
    dict: ``version pin llama_version ggml_version backend`` (str), ``options`` (dict of str), ``cpu_compiled cpu_found``
    (lists of str), ``system_info`` (str), ``openmp gpu_offload mmap mlock`` (bool), and ``cpu_missing``: the feature this
    machine lacks and the build needs, or None. Nothing can be loaded while it is not None.
    """
    cdef lcs_build build
    cdef lcs_status st
    missing = None
    st = lcs_build_info(&build)
    if st == LCS_STATUS_UNSUPPORTED:
        missing = error_from(st).feature
    else:
        check(st)
    return {
        "version": text_of(build.version),
        "pin": text_of(build.pin),
        "llama_version": text_of(build.llama_version),
        "ggml_version": text_of(build.ggml_version),
        "backend": text_of(build.backend),
        "options": dict([word.partition("=")[::2] for word in text_of(build.options).split()]),
        "cpu_compiled": text_of(build.cpu_compiled).split(),
        "cpu_found": text_of(build.cpu_found).split(),
        "cpu_missing": missing,
        "system_info": text_of(build.system_info),
        "openmp": <bint>build.openmp,
        "gpu_offload": <bint>build.gpu_offload,
        "mmap": <bint>build.mmap,
        "mlock": <bint>build.mlock,
    }


cdef bint cpu_only() except -1:
    cdef lcs_build build
    check(lcs_build_info(&build))
    return text_of(build.backend) == "cpu"


def live_counts():
    """How many C handles of each kind are alive in this process."""
    cdef lcs_live_counts counts
    lcs_live(&counts)
    return {
        "models": counts.models,
        "headers": counts.headers,
        "contexts": counts.contexts,
        "samplers": counts.samplers,
        "adapters": counts.adapters,
        "chat_templates": counts.chat_templates,
        "strings": counts.strings,
    }


def status_names():
    """Every name of ``lcs_status``, in its order."""
    return [text_of(lcs_status_name(<lcs_status>i)) for i in range(LCS_STATUS_COUNT)]


def argmax(values):
    """Index of the largest value, the first of equals; NaNs are passed over. -1 where there is none.

    Parameters
    ----------
    values
        One-dimensional float32; anything else is converted.
    """
    cdef Py_buffer view
    cdef int32_t best
    array = float_row(values, "values")
    if len(array) > INT32_MAX:
        raise out_of_range("len(values)", len(array), 0, INT32_MAX)
    PyObject_GetBuffer(array, &view, PyBUF_SIMPLE)
    try:
        best = lcs_argmax(<const float*>view.buf, <int32_t>(view.len // 4))
    finally:
        PyBuffer_Release(&view)
    return best


cdef object float_row(object values, str what):
    if type(values) is not np.ndarray or values.dtype != FLOAT32 or not values.flags.c_contiguous:
        try:
            values = np.ascontiguousarray(values, FLOAT32)
        except ValueError:
            raise errors.InvalidArgumentError(f"{what} is not an array of numbers", field=what) from None
    if values.ndim != 1:
        raise errors.InvalidArgumentError(f"{what} has {values.ndim} dimensions, not 1", field=what)
    return values


def hash_bytes(data):
    """XXH3-64 (seed 0) of any contiguous buffer: the hash of state blobs. Finds damage, not forgery."""
    cdef Py_buffer view
    cdef uint64_t digest
    lend_bytes(data, &view, "data")
    try:
        with nogil:
            digest = lcs_hash(view.buf, <size_t>view.len)
    finally:
        PyBuffer_Release(&view)
    return digest


def json_schema_to_grammar(schema):
    """A JSON schema (a dict, or its JSON text) as a GBNF grammar. GrammarError where it cannot be expressed."""
    cdef lcs_string* text = NULL
    cdef lcs_status st
    cdef bytes raw = as_text(schema, "schema") if isinstance(schema, (str, bytes)) else dump_json(schema, "schema")
    cdef const char* data = PyBytes_AS_STRING(raw)
    cdef size_t n = <size_t>len(raw)
    with nogil:
        st = lcs_json_schema_to_grammar(data, n, &text)
    check(st)
    try:
        return lcs_string_data(text)[:lcs_string_bytes(text)].decode("utf-8", "replace")
    finally:
        lcs_string_free(text)


cdef bytes dump_json(object value, str what):
    try:
        return json.dumps(value, ensure_ascii=False, allow_nan=False).encode("utf-8")
    except UnicodeEncodeError as e:
        raise errors.InvalidArgumentError(f"{what} has a lone surrogate", field=what) from None
    except RecursionError:
        raise errors.InvalidArgumentError(f"{what} nests too deeply", field=what) from None
    except ValueError as e:
        raise errors.InvalidArgumentError(f"{what} is not JSON: {e}", field=what) from None


def _fault_arm(n):
    """Make the n-th fallible step of this thread from now fail; 0 disarms. For tests."""
    lcs_fault_arm(as_int(n, "n", 0, INT32_MAX))


def _fault_fired():
    """Whether the armed step has failed. For tests."""
    return <bint>lcs_fault_fired()


def _fault_arm_decode(raw_status, n_nodes):
    """Replace llama_decode's status after n_nodes more graph nodes of this thread; 0 disarms. For tests."""
    lcs_fault_arm_decode(as_int32(raw_status, "raw_status"), as_int(n_nodes, "n_nodes", 0, INT32_MAX))
