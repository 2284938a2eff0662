# Owns the way from an lcs_status to a Python exception: one check() for the fast road, one error_from() for the slow.

cdef str text_of(const char* text):
    return PyUnicode_DecodeUTF8(text, <Py_ssize_t>strlen(text), "replace")


cdef object error_from(lcs_status st, str path=None, const lcs_decode_result* result=NULL):
    """The exception for this thread's last failure. To be called before any other lcs call of the thread."""
    cdef lcs_error_info info
    cdef int s
    lcs_last_error(&info)
    facts = {}
    if result is not NULL:
        facts["raw_status"] = result.raw_status
        facts["committed"] = result.committed
        facts["dirty"] = dirty_of(result)
    return errors.error_for(
        text_of(lcs_status_name(st)), text_of(info.message), log=text_of(info.log), field=text_of(info.field),
        expected=text_of(info.expected), actual=text_of(info.actual), path=path, **facts)


cdef frozenset NO_SEQUENCES = frozenset()


cdef frozenset dirty_of(const lcs_decode_result* result):
    cdef int s
    if result.n_dirty == 0:
        return NO_SEQUENCES
    return frozenset([s for s in range(256) if (result.dirty[s // 64] >> (s % 64)) & 1])


cdef int raise_for(lcs_status st, str path=None) except -1:
    raise error_from(st, path)


cdef inline int check(lcs_status st) except -1:
    if st != LCS_STATUS_OK:
        raise_for(st)
    return 0
