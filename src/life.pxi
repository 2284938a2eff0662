# Owns what outlives a call: which threads are inside C, the end of the interpreter, the fork, and Ctrl-C during a call.
#
# Handles hold only texts, numbers and other handles that cannot hold them back, so none can be part of a reference
# cycle; they are @cython.no_gc, and so never meet a half cleared neighbour.

cdef extern from *:
    """
    #include <errno.h>
    #include <time.h>

    static void lcsn_nap(void) {
    #if !defined(_WIN32)
        struct timespec t = {0, 1000000};
        nanosleep(&t, NULL);
    #endif
    }

    #if defined(_WIN32)
    static int lcsn_sigint_seen = 0;
    static int  lcsn_sigint_arm(lcs_context * ctx) { (void) ctx; return 0; }
    static int  lcsn_sigint_disarm(void) { return 0; }
    static int  lcsn_sigint_take(void) { return 0; }
    #else
    #include <sched.h>
    #include <signal.h>

    /* Python's own handler only leaves a note that no one reads while a call runs. Ours goes in front of it for the time
     * of the call, stops the call, and lets Python's run too. Only the main thread arms it, one call at a time; the
     * signal may arrive on any thread. */
    static lcs_context *    lcsn_sigint_ctx;
    static int              lcsn_sigint_seen;
    static int              lcsn_sigint_inside;
    static struct sigaction lcsn_sigint_old;

    static void lcsn_on_sigint(int number, siginfo_t * info, void * machine) {
        const int    saved_errno = errno;
        lcs_context *ctx;
        __atomic_add_fetch(&lcsn_sigint_inside, 1, __ATOMIC_SEQ_CST);
        ctx = __atomic_load_n(&lcsn_sigint_ctx, __ATOMIC_SEQ_CST);
        if (ctx != NULL) {
            lcs_context_cancel_signal(ctx);
        }
        __atomic_store_n(&lcsn_sigint_seen, 1, __ATOMIC_SEQ_CST);
        if (lcsn_sigint_old.sa_flags & SA_SIGINFO) {
            lcsn_sigint_old.sa_sigaction(number, info, machine);
        } else {
            lcsn_sigint_old.sa_handler(number);
        }
        __atomic_sub_fetch(&lcsn_sigint_inside, 1, __ATOMIC_SEQ_CST);
        errno = saved_errno;
    }

    /* 0: nobody handles SIGINT (or all ignore it), and so do we. */
    static int lcsn_sigint_arm(lcs_context * ctx) {
        struct sigaction ours;
        if (sigaction(SIGINT, NULL, &ours) != 0) {
            return 0;
        }
        if (!(ours.sa_flags & SA_SIGINFO) && (ours.sa_handler == SIG_DFL || ours.sa_handler == SIG_IGN)) {
            return 0;
        }
        lcsn_sigint_old = ours;
        __atomic_store_n(&lcsn_sigint_seen, 0, __ATOMIC_SEQ_CST);
        __atomic_store_n(&lcsn_sigint_ctx, ctx, __ATOMIC_SEQ_CST);
        ours.sa_sigaction = lcsn_on_sigint;
        ours.sa_flags |= SA_SIGINFO;
        return sigaction(SIGINT, &ours, NULL) == 0;
    }

    static int lcsn_sigint_take(void) {
        return __atomic_exchange_n(&lcsn_sigint_seen, 0, __ATOMIC_SEQ_CST);
    }

    /* Whether SIGINT came. No handler uses the context once this has returned. */
    static int lcsn_sigint_disarm(void) {
        sigaction(SIGINT, &lcsn_sigint_old, NULL);
        __atomic_store_n(&lcsn_sigint_ctx, NULL, __ATOMIC_SEQ_CST);
        while (__atomic_load_n(&lcsn_sigint_inside, __ATOMIC_SEQ_CST) != 0) {
            sched_yield();
        }
        return lcsn_sigint_take();
    }
    #endif
    """
    void lcsn_nap() noexcept nogil
    int lcsn_sigint_arm(lcs_context* ctx) noexcept nogil
    int lcsn_sigint_disarm() noexcept nogil
    int lcsn_sigint_take() noexcept nogil
    int lcsn_sigint_seen

cdef extern from "Python.h":
    unsigned long PyThread_get_thread_ident() noexcept nogil


cdef unsigned long main_thread = threading.main_thread().ident
cdef bint exiting = False
cdef int threads_inside = 0   # counted with the GIL held
cdef object open_contexts = weakref.WeakSet()  # and those that were closed, until they are gone


def _after_fork():
    """The child has one thread: the main one, whichever it was; and no call is running."""
    global main_thread, threads_inside
    main_thread = PyThread_get_thread_ident()
    threads_inside = 0


def _at_exit():
    """Stop what daemon threads are still computing: static destructors of C++ must not run beside a graph."""
    global exiting
    cdef int i
    exiting = True
    for context in list(open_contexts):
        (<Context>context).stop()
    for i in range(10000):
        if threads_inside <= 0:  # below: a fork in the middle of a load went on with it
            break
        with nogil:
            lcsn_nap()


os.register_at_fork(after_in_child=_after_fork)
atexit.register(_at_exit)


cdef inline bint on_main_thread() noexcept:
    return PyThread_get_thread_ident() == main_thread


cdef void park() noexcept:
    """A daemon thread at the end of the interpreter: it may neither compute, nor print how it ended."""
    with nogil:
        while True:
            lcsn_nap()


cdef inline void begin_inside() noexcept:
    global threads_inside
    if exiting and not on_main_thread():
        park()
    threads_inside += 1


cdef inline int end_inside() except -1:
    """After every call of a handle, whatever it gave."""
    global threads_inside
    threads_inside -= 1
    if exiting and not on_main_thread():
        park()
    if lcs_log_pending() != 0:
        drain_logs()
    return 0


cdef inline bint arm_sigint(lcs_context* ctx) except -1:
    """Let Ctrl-C end the call that follows. False where this thread is not told of signals."""
    if not on_main_thread() or lcsn_sigint_arm(ctx) == 0:
        return False
    try:
        PyErr_CheckSignals()  # what came before the handler was in place
    except BaseException:
        disarm_sigint(ctx)
        raise
    return True


cdef inline bint disarm_sigint(lcs_context* ctx) noexcept:
    cdef bint seen = lcsn_sigint_disarm() != 0
    if seen and ctx is not NULL:
        lcs_context_cancel_clear(ctx)  # it may have come too late for this call, and is not meant for the next
    return seen
