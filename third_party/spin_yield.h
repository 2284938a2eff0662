/*
 * What ggml's own threads do while they wait for each other: spin, and give up the core now and then. Included before
 * everything else in its ggml-cpu.c, whose barrier would spin for ever on a core that the thread it waits for needs: on a
 * machine with other work a token then takes many times as long.
 *
 * No file of llama.cpp is changed: its pause instruction becomes this function.
 */
#pragma once

#if defined(__x86_64__) && defined(__linux__)

#    include <immintrin.h>
#    include <sched.h>

/* About 40 us of pauses before the system call, which takes a fraction of one where nobody waits for the core. */
#    define LCS_SPINS_BEFORE_YIELD 1024u

static inline void lcs_spin(void) {
    static _Thread_local unsigned spins;
    _mm_pause();
    if (++spins % LCS_SPINS_BEFORE_YIELD == 0) {
        sched_yield();
    }
}

#    define _mm_pause() lcs_spin()

#endif
