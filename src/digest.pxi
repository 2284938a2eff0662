# Owns the SHA-256 of model files: read in bounded memory, and once a process as long as the files stay the same.

cdef dict known_digests = {}
cdef Py_ssize_t CHUNK_BYTES = 1 << 20


cdef tuple file_identity(str path):
    found = os.stat(path)
    return (path, found.st_size, found.st_mtime_ns, found.st_dev, found.st_ino)


cdef list split_paths(str path, object count):
    """All parts of a split model, given its first."""
    match = re.fullmatch(r"(.*)-00001-of-(\d{5})\.gguf", path, re.DOTALL)
    if match is None or int(match[2]) != count:
        return [path]
    return [f"{match[1]}-{i:05d}-of-{count:05d}.gguf" for i in range(1, count + 1)]


cdef str digest_of(tuple files):
    """Of the bytes of the files, one after the other. ``files``: what file_identity gave when they were loaded."""
    digest = known_digests.get(files)
    if digest is not None:
        return digest
    sha = hashlib.sha256()
    chunk = bytearray(CHUNK_BYTES)
    view = memoryview(chunk)
    path = None
    try:
        for identity in files:
            path = identity[0]
            with open(path, "rb", buffering=0) as file:
                while True:
                    n = file.readinto(chunk)
                    if not n:
                        break
                    sha.update(view[:n])  # without the GIL
                    PyErr_CheckSignals()
            if file_identity(path) != identity:
                raise errors.ModelLoadError(path=path, reason="the file has changed since it was loaded")
    except OSError as e:
        if isinstance(e, errors.ModelLoadError):
            raise
        raise errors.ModelLoadError(path=path, reason=e.strerror or str(e)) from None
    digest = sha.hexdigest()
    known_digests[files] = digest
    return digest


cdef str file_path(object path):
    """The path as text. What no file can be called is a ModelLoadError."""
    path = os.fsdecode(path)
    if "\0" in path:
        raise errors.ModelLoadError(path=path.replace("\0", "\\0"), reason="the path has a NUL")
    return path


cdef bytes file_path_bytes(str path):
    try:
        return os.fsencode(path)
    except UnicodeEncodeError:
        raise errors.ModelLoadError(path=ascii(path), reason="the path is no text of this system") from None
