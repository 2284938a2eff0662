# Owns the LoRA adapter handle.

@cython.final
@cython.no_gc
cdef class Adapter:
    """A LoRA adapter for one model; `Context.set_adapters` puts it to use.

    Raises
    ------
    ModelLoadError  the file is missing, damaged, no adapter, or one for another architecture or shape
    """

    cdef lcs_adapter* _adapter
    cdef int _pid
    cdef str _path
    cdef tuple _files
    cdef readonly Model model
    cdef object __weakref__

    def __cinit__(self, Model model not None, path):
        cdef lcs_status st
        self._pid = getpid()
        self._path = file_path(path)
        cdef bytes raw = file_path_bytes(self._path)
        cdef const char* c_path = PyBytes_AS_STRING(raw)
        sync_log_level()
        cdef lcs_model* owner = model.enter()
        try:
            with nogil:
                st = lcs_adapter_load(owner, c_path, &self._adapter)
            if st != LCS_STATUS_OK:
                raise_for(st, self._path)
        finally:
            model.leave()
        self.model = model
        try:
            self._files = (file_identity(self._path),)
        except OSError as e:
            raise errors.ModelLoadError(path=self._path, reason=e.strerror or str(e)) from None

    def __dealloc__(self):
        if self._adapter is not NULL:
            with nogil:
                lcs_adapter_free(self._adapter)

    cdef lcs_adapter* pointer(self) except NULL:
        if self._pid != getpid():
            raise errors.ForkedError("adapter was made before fork()")
        if self._adapter is NULL:
            raise errors.ClosedError("adapter is closed")
        return self._adapter

    def close(self):
        """Give up the handle. Safe to repeat. A context that uses the adapter goes on using it."""
        cdef lcs_adapter* adapter = self._adapter
        self._adapter = NULL
        if adapter is not NULL:
            with nogil:
                lcs_adapter_free(adapter)  # nothing in a forked child

    @property
    def closed(self):
        """Whether close() was called."""
        return self._adapter is NULL

    def __enter__(self):
        self.pointer()
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
        return f"<llamacppshim.Adapter {self._path!r}{', closed' if self._adapter is NULL else ''}>"

    @property
    def path(self):
        """As given."""
        self.pointer()
        return self._path

    @property
    def digest(self):
        """SHA-256 of the file, hex; kept as `Model.digest` is."""
        self.pointer()
        return digest_of(self._files)

    @property
    def metadata(self):
        """Scalar GGUF metadata, as text. A new dict."""
        cdef const char* key
        cdef const char* value
        cdef int32_t i
        cdef lcs_adapter* adapter = self.pointer()
        found = {}
        for i in range(lcs_adapter_meta_count(adapter)):
            check(lcs_adapter_meta_at(adapter, i, &key, &value))
            found[text_of(key)] = text_of(value)
        return found
