# Owns the way of Python values into C ones: integers, numbers, choices, texts and arrays. What Python can judge is a
# TypeError or a typed ValueError here, before C is called; nothing is cut to fit silently.

cdef str shown(object value):
    try:
        return str(value)
    except ValueError:  # Python refuses to write out an int of thousands of digits
        return f"a number of {value.bit_length()} bits"


cdef object out_of_range(str what, object value, object low, object high):
    limits = f"{low}..{high}"
    text = shown(value)
    return errors.OutOfRangeError(f"{what} {text} is outside {limits}", field=what, expected=limits, actual=text)


cdef int64_t as_int(object value, str what, int64_t low, int64_t high) except? -1:
    cdef int overflow = 0
    cdef long long number
    if not PyLong_CheckExact(value):
        try:
            value = value.__index__()
        except AttributeError:
            raise TypeError(f"{what} must be an integer, not {type(value).__name__}") from None
        if not isinstance(value, int):
            raise TypeError(f"{what} must be an integer, not {type(value).__name__}")
    number = PyLong_AsLongLongAndOverflow(value, &overflow)
    if overflow != 0 or number < low or number > high:
        raise out_of_range(what, value, low, high)
    return number


cdef inline int32_t as_int32(object value, str what) except? -1:
    return <int32_t>as_int(value, what, INT32_MIN, INT32_MAX)


cdef inline uint32_t as_uint32(object value, str what) except? 0:
    return <uint32_t>as_int(value, what, 0, UINT32_MAX)


cdef float as_float(object value, str what) except? -1:
    try:
        return <float><double>value
    except OverflowError:
        raise errors.InvalidArgumentError(f"{what} {shown(value)} is too large", field=what) from None
    except TypeError:
        raise TypeError(f"{what} must be a number, not {type(value).__name__}") from None


cdef int32_t as_choice(object value, dict choices, str what) except? -1000:
    if isinstance(value, str):
        number = choices.get(value)
        if number is not None:
            return number
    names = " ".join([name for name in choices if isinstance(name, str)])
    raise errors.InvalidArgumentError(
        f"{what} {value!r} is none of: {names}", field=what, expected=names, actual=str(value))


cdef str name_of(int32_t number, dict choices):
    for name, value in choices.items():
        if value == number:
            return name
    return str(number)


cdef bytes as_text(object text, str what):
    """UTF-8 of a str, or the bytes themselves. A lone surrogate has no UTF-8."""
    if isinstance(text, str):
        try:
            return (<str>text).encode("utf-8")
        except UnicodeEncodeError as e:
            raise errors.InvalidArgumentError(
                f"{what} has a lone surrogate at index {e.start}", field=what, actual=e.start) from None
    if isinstance(text, bytes):
        return text
    if isinstance(text, (bytearray, memoryview)):
        return bytes(text)
    raise TypeError(f"{what} must be str or bytes, not {type(text).__name__}")


cdef bytes as_c_text(object text, str what):
    """As as_text, for what C takes up to its NUL."""
    cdef bytes raw = as_text(text, what)
    if b"\0" in raw:
        raise errors.InvalidArgumentError(f"{what} has a NUL at byte {raw.index(0)}", field=what)
    return raw


cdef class _CTexts:
    """An array of C strings for the time of one call."""

    cdef const char** data
    cdef size_t n
    cdef list _owned

    def __cinit__(self, texts, str what):
        if isinstance(texts, (str, bytes)):
            raise TypeError(f"{what} must be a sequence of texts, not one")
        self._owned = [as_c_text(text, what) for text in texts]
        self.n = <size_t>len(self._owned)
        self.data = <const char**>malloc(max(self.n, 1) * sizeof(char*))
        if self.data is NULL:
            raise errors.OutOfMemoryError("out of memory")
        for i in range(self.n):
            self.data[i] = PyBytes_AS_STRING(self._owned[i])

    def __dealloc__(self):
        free(self.data)


cdef struct Ints:
    int32_t* data
    size_t n
    size_t capacity


cdef int ints_reserve(Ints* to, size_t n) except -1:
    cdef int32_t* grown
    if n > to.capacity:
        n = max(n, 2 * to.capacity, <size_t>64)
        grown = <int32_t*>realloc(to.data, n * sizeof(int32_t))
        if grown is NULL:
            raise errors.OutOfMemoryError(f"no memory for {n} integers")
        to.data = grown
        to.capacity = n
    return 0


cdef int ints_fill(Ints* to, object values, str what) except -1:
    """Copies integers from any sequence, buffer or array. A copy, since another thread could change an array after the
    shim has judged it."""
    cdef Py_buffer view
    cdef size_t n, i
    to.n = 0
    if type(values) is not list and type(values) is not tuple:
        if isinstance(values, (str, bytes, bytearray)):
            raise TypeError(f"{what}s must be integers, not {type(values).__name__}")
        if PyObject_CheckBuffer(values):
            values = int32_array(values, what)
            PyObject_GetBuffer(values, &view, PyBUF_SIMPLE)
            try:
                n = <size_t>view.len // sizeof(int32_t)
                ints_reserve(to, n)
                if n > 0:
                    memcpy(to.data, view.buf, n * sizeof(int32_t))
            finally:
                PyBuffer_Release(&view)
            to.n = n
            return 0
    # A tuple of our own: an element's __index__ may change the caller's list.
    cdef tuple items = tuple(values)
    n = <size_t>len(items)
    ints_reserve(to, n)
    for i in range(n):
        to.data[i] = as_int32(items[i], what)
    to.n = n
    return 0


cdef object int32_array(object values, str what):
    """A contiguous one-dimensional int32 array of the values; the object itself where it is one."""
    if type(values) is not np.ndarray:
        values = np.asarray(values)
    if values.ndim != 1:
        raise errors.InvalidArgumentError(f"{what} has {values.ndim} dimensions, not 1", field=what)
    if values.dtype == INT32 and values.flags.c_contiguous:
        return values
    if values.size == 0:
        return np.empty(0, INT32)
    if values.dtype.kind not in "iu":
        raise TypeError(f"{what}s must be integers, not {values.dtype}")
    low, high = int(values.min()), int(values.max())
    if low < INT32_MIN or high > INT32_MAX:
        raise out_of_range(what, low if low < INT32_MIN else high, INT32_MIN, INT32_MAX)
    return np.ascontiguousarray(values, INT32)


cdef object INT32 = np.dtype(np.int32)
cdef object FLOAT32 = np.dtype(np.float32)


cdef object new_array(object shape, object dtype):
    try:
        return np.empty(shape, dtype)
    except MemoryError:
        raise errors.OutOfMemoryError(f"no memory for an array of {shape}") from None


cdef void* data_of(object array) except? NULL:
    """Where a new array of ours keeps its numbers: nobody else can resize it yet, so the export may end at once."""
    cdef Py_buffer view
    PyObject_GetBuffer(array, &view, PyBUF_SIMPLE)
    cdef void* data = view.buf
    PyBuffer_Release(&view)
    return data


cdef int lend_bytes(object data, Py_buffer* view, str what) except -1:
    """The bytes of any contiguous buffer; PyBuffer_Release is the caller's."""
    try:
        PyObject_GetBuffer(data, view, PyBUF_SIMPLE)
    except (BufferError, ValueError):
        raise errors.InvalidArgumentError(f"{what} is no contiguous buffer", field=what) from None
    return 0


cdef bytes new_bytes(size_t n):
    try:
        return PyBytes_FromStringAndSize(NULL, <Py_ssize_t>n)
    except MemoryError:
        raise errors.OutOfMemoryError(f"no memory for {n} bytes") from None


cdef object json_of(lcs_string* text):
    """The value of a JSON text of the shim's; frees it."""
    try:
        return json.loads(lcs_string_data(text)[:lcs_string_bytes(text)].decode("utf-8", "replace"))
    finally:
        lcs_string_free(text)


cdef object refuse_copy(object handle, str verb):
    raise TypeError(f"a {type(handle).__name__} cannot be {verb}: it owns memory of this process")
