# cython: language_level=3, binding=True, auto_pickle=False, autotestdict=False
# cython: boundscheck=False, wraparound=False, initializedcheck=False
"""Owned handles over the C shim: the one extension, and the only place where Python meets lcs.h.

Every handle is closed by `close()`, by `with`, or by the last reference; a second thread inside one gets `BusyError`, a
forked child `ForkedError`; none can be copied or pickled. Calls that take long run without the GIL.
"""
cimport cython
from cpython.buffer cimport (
    PyBUF_C_CONTIGUOUS, PyBUF_FORMAT, PyBUF_ND, PyBUF_SIMPLE, PyBUF_STRIDES, PyBUF_WRITABLE, PyBuffer_IsContiguous,
    PyBuffer_Release, PyObject_CheckBuffer, PyObject_GetBuffer,
)
from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize
from cpython.exc cimport PyErr_CheckSignals
from cpython.long cimport PyLong_AsLongLongAndOverflow, PyLong_CheckExact
from cpython.object cimport PyObject
from cpython.ref cimport Py_DECREF, Py_INCREF
from cpython.unicode cimport PyUnicode_DecodeUTF8
from libc.stddef cimport size_t
from libc.stdint cimport INT32_MAX, INT32_MIN, UINT32_MAX, int32_t, int64_t, uint8_t, uint32_t, uint64_t
from libc.stdlib cimport free, malloc, realloc
from libc.string cimport memcpy, memset, strlen
from libcpp cimport bool as c_bool
from posix.unistd cimport getpid

from lcs cimport *

import atexit
import hashlib
import json
import logging
import os
import re
import threading
import weakref
from dataclasses import dataclass

import numpy as np

from llamacppshim import errors
from llamacppshim.errors import DecodeStatus

include "errors.pxi"
include "values.pxi"
include "life.pxi"
include "logs.pxi"
include "build.pxi"
include "digest.pxi"
include "model.pxi"
include "adapter.pxi"
include "batch.pxi"
include "context.pxi"
include "header.pxi"
include "sampler.pxi"
include "chat.pxi"
include "capi.pxi"
