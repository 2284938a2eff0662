// The configuration of AMX tiles, kept where llama.cpp relies on it. Included before everything else in its amx/mmq.cpp.
//
// gcc 12's _tile_loadconfig tells the compiler of 8 of the 64 bytes that the instruction reads. The stores to the others
// are dropped, and the first product of a quantised matrix ends the process: an illegal instruction or a segmentation
// fault, as the stack happens to be.
//
// llama.cpp configures the tiles of a thread once. Another library on that thread (oneDNN, say) releases them or gives
// them other shapes, and the next product ends the process too, or is wrong. Here they are looked at before each.
//
// No file of llama.cpp is changed: a macro tells the function's definition from its calls by what stands in brackets, so
// that a pin which does either in another way does not compile.
#pragma once

#include <immintrin.h>

#if defined(__AMX_TILE__)

#    include <cstring>

namespace lcs_amx {

struct alignas(64) config {
    unsigned char bytes[64];
};

inline thread_local config wanted;

inline void load(const config & c) {
    __asm__ volatile("ldtilecfg %0" : : "m"(c));
}

inline void load_first(const void * bytes) {
    std::memcpy(&wanted, bytes, sizeof(wanted));
    load(wanted);
}

} // namespace lcs_amx

#    define _tile_loadconfig(bytes) lcs_amx::load_first(bytes)

#    define LCS_AMX_void lcs_amx_config_once()
#    define LCS_AMX_                                                                                                   \
        lcs_amx_config_once();                                                                                         \
        lcs_amx::config now;                                                                                           \
        __asm__ volatile("sttilecfg %0" : "=m"(now));                                                                  \
        if (std::memcmp(&now, &lcs_amx::wanted, sizeof(now)) != 0) {                                                   \
            lcs_amx::load(lcs_amx::wanted);                                                                            \
        }                                                                                                              \
        static_cast<void>(0)
#    define ggml_tile_config_init(what) LCS_AMX_##what

#endif
