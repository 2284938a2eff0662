# Owns the way of llama.cpp's log lines to the logger "llamacppshim". Nothing is printed here.

cdef object logger = logging.getLogger("llamacppshim")
logger.addHandler(logging.NullHandler())


cdef int sync_log_level() except -1:
    """Lines that the logger would drop are not worth keeping. At the entry of calls that talk."""
    cdef int level = min(max((<int>logger.getEffectiveLevel() + 9) // 10, 1), 5)
    lcs_log_set_level(<lcs_log_level>level)
    return 0


cdef int drain_logs() except -1:
    cdef lcs_log_level level
    cdef lcs_string* line = NULL
    cdef int64_t left = lcs_log_pending()
    while left > 0:
        left -= 1
        if lcs_log_next(&level, &line) != LCS_STATUS_OK or line is NULL:
            break
        try:
            text = text_of(lcs_string_data(line))
        finally:
            lcs_string_free(line)
        logger.log(10 * <int>level, "%s", text)
    return 0
