"""Writes lcs_capi.h from lcs.h: the table of all its functions, by which extensions call them without linking them.

Usage: make_capi.py lcs.h lcs_capi.h. The table is generated, so that no function can be left out of it.
"""

from __future__ import annotations

import hashlib
import re
import sys
from pathlib import Path

HEADER = """\
/*
 * lcs_capi.h - lcs.h for extension modules that link nothing: its functions, called through the table that
 * llamacppshim._native holds. Generated from lcs.h.
 *
 * After import_llamacppshim() has returned 0, the functions are called by their own names. It is to be called with the
 * GIL, once in each C file, before any of them; -1: an exception is set.
 */
#ifndef LCS_CAPI_H
#define LCS_CAPI_H

#include <Python.h>

#include "lcs.h"

#define LCS_CAPI_NAME "llamacppshim._native._C_API"

/* Of the declarations in lcs.h. Another signature means other functions or structs: the extension must be rebuilt. */
#define LCS_CAPI_SIGNATURE UINT64_C(0x{signature})

typedef struct lcs_capi {{
    uint64_t signature;
    size_t   n_functions;
{members}
}} lcs_capi;

#ifdef LCS_CAPI_OWNER

/* In _native, which links the functions. */
static const lcs_capi lcs_capi_table = {{
    LCS_CAPI_SIGNATURE, {count},
{entries}
}};

#else

static const lcs_capi * lcs_capi_table = NULL;

static inline int import_llamacppshim(void) {{
    const lcs_capi * table = (const lcs_capi *) PyCapsule_Import(LCS_CAPI_NAME, 0);
    if (table == NULL) {{
        return -1;
    }}
    if (table->signature != LCS_CAPI_SIGNATURE) {{
        PyErr_SetString(PyExc_ImportError, "compiled against another lcs.h than the installed llamacppshim's: rebuild");
        return -1;
    }}
    lcs_capi_table = table;
    return 0;
}}

{macros}

#endif

#endif
"""


def declarations(text: str) -> str:
    """The header without comments, preprocessor lines and needless white space: what callers are compiled against."""
    text = re.sub(r"/\*.*?\*/", " ", text, flags=re.DOTALL)
    text = re.sub(r"^\s*#.*$", "", text, flags=re.MULTILINE)
    return " ".join(text.split())


def functions(text: str) -> list[tuple[str, str, str]]:
    """(return type, name, parameters) of every function of the header."""
    return re.findall(r"LCS_API ([^;]*?)\b(lcs_\w+)\s*\(([^;]*)\);", declarations(text))


def make_capi(text: str) -> str:
    found = functions(text)
    return HEADER.format(
        signature=hashlib.sha256(declarations(text).encode()).hexdigest()[:16],
        count=len(found),
        members="\n".join(f"    {kind.strip()} (*{name})({parameters});" for kind, name, parameters in found),
        entries="\n".join(f"    {name}," for _, name, _ in found),
        macros="\n".join(f"#define {name} (lcs_capi_table->{name})" for _, name, _ in found),
    )


if __name__ == "__main__":
    source, target = map(Path, sys.argv[1:])
    target.write_text(make_capi(source.read_text("utf-8")), "utf-8")
