/* lcs.h alone, as C99, twice: it needs nothing before it and may be included again. */
#include "lcs.h"
#include "lcs.h"

int lcs_header_compiles(void);
int lcs_header_compiles(void) {
    return LCS_STATUS_OK;
}
