# For extensions that link nothing: import_llamacppshim() once, then the functions of lcs.pxd.
# Compile with llamacppshim.get_include().
cdef extern from "lcs_capi.h":
    int import_llamacppshim() except -1
