# The capsule _C_API: the table by which other extensions call lcs.h without linking it.
from cpython.pycapsule cimport PyCapsule_New

cdef extern from *:
    """
    #define LCS_CAPI_OWNER
    #include "lcs_capi.h"
    """
    const char* LCS_CAPI_NAME
    ctypedef struct lcs_capi:
        pass
    const lcs_capi lcs_capi_table

_C_API = PyCapsule_New(<void*> &lcs_capi_table, LCS_CAPI_NAME, NULL)
