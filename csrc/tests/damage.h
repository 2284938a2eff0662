/* Damaged GGUF files for tests: a fixture in memory, its values found by name and changed in place, written to a folder
 * of the test's own. */
#ifndef LCS_TESTS_DAMAGE_H
#define LCS_TESTS_DAMAGE_H

#include "check.h"

#include <stdint.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

enum { MOST_HEADER = 3 << 20 }; /* of every fixture */

typedef struct bytes {
    unsigned char * data;
    size_t          n;
} bytes;

static inline bytes read_bytes(const char * path) {
    bytes  b = {NULL, 0};
    FILE * f = fopen(path, "rb");
    CHECK(f != NULL);
    CHECK(fseek(f, 0, SEEK_END) == 0);
    b.n = (size_t) ftell(f);
    rewind(f);
    b.data = malloc(b.n);
    CHECK(b.data != NULL && fread(b.data, 1, b.n, f) == b.n);
    fclose(f);
    return b;
}

static inline bytes copy_bytes(bytes from) {
    bytes b = {malloc(from.n), from.n};
    CHECK(b.data != NULL);
    memcpy(b.data, from.data, from.n);
    return b;
}

/* A file in this process's own folder. */
static inline const char * scratch(const char * name) {
    static char folder[64];
    static char paths[8][256];
    static int  next = 0;
    char *      path = paths[next++ % 8];
    if (folder[0] == '\0') {
        snprintf(folder, sizeof folder, "/tmp/lcs_test_%ld", (long) getpid());
        mkdir(folder, 0700);
    }
    snprintf(path, sizeof paths[0], "%s/%s", folder, name);
    return path;
}

static inline const char * write_bytes(const char * name, const void * data, size_t n) {
    const char * path = scratch(name);
    FILE *       f = fopen(path, "wb");
    CHECK(f != NULL);
    CHECK(n == 0 || fwrite(data, 1, n, f) == n);
    CHECK(fclose(f) == 0);
    return path;
}

/* The same size, but beyond the header only zeros, which take no room: for files that are refused by their header. */
static inline const char * write_header(const char * name, bytes b) {
    const char * path = write_bytes(name, b.data, b.n < MOST_HEADER ? b.n : MOST_HEADER);
    CHECK(truncate(path, (off_t) b.n) == 0);
    return path;
}

static inline void remove_scratch(void) {
    char command[128];
    snprintf(command, sizeof command, "rm -rf /tmp/lcs_test_%ld", (long) getpid());
    CHECK(system(command) == 0);
}

/* Where the key's own length field begins. */
static inline size_t find_key(bytes b, const char * key) {
    const uint64_t n = strlen(key);
    for (size_t i = 0; i + sizeof n + n <= b.n && i < MOST_HEADER; ++i) {
        if (memcmp(b.data + i, &n, sizeof n) == 0 && memcmp(b.data + i + sizeof n, key, n) == 0) {
            return i;
        }
    }
    fprintf(stderr, "no key %s\n", key);
    exit(1);
}

/* Its type field. */
static inline unsigned char * type_of(bytes b, const char * key) {
    return b.data + find_key(b, key) + sizeof(uint64_t) + strlen(key);
}

/* Its value: behind the type, or behind an array's element type and length. */
static inline unsigned char * value_of(bytes b, const char * key) {
    return type_of(b, key) + 4;
}

static inline unsigned char * elements_of(bytes b, const char * key) {
    return type_of(b, key) + 16;
}

static inline void put_u32(unsigned char * at, uint32_t value) {
    memcpy(at, &value, sizeof value);
}

static inline void put_u64(unsigned char * at, uint64_t value) {
    memcpy(at, &value, sizeof value);
}

/* Same number of bytes, everywhere in the header. */
static inline void replace_all(bytes b, const char * from, const char * to) {
    const size_t n = strlen(from);
    CHECK(n == strlen(to));
    for (size_t i = 0; i + n <= b.n && i < MOST_HEADER; ++i) {
        if (memcmp(b.data + i, from, n) == 0) {
            memcpy(b.data + i, to, n);
        }
    }
}

enum { HEADER_KEYS = 16, HEADER_FIRST = 24, GGUF_U32 = 4, GGUF_TEXT = 8 };

/* A u32 key in front of all others. The data stays aligned, since a text fills up a multiple of 32 bytes. */
static inline void insert_u32(bytes * b, const char * key, uint32_t value) {
    static int     n_fillers = 0;
    char           filler[96];
    const uint64_t n_key = strlen(key);
    uint64_t       n_filler;
    uint64_t       n_text = 0;
    uint64_t       n_keys;
    snprintf(filler, sizeof filler, "filler.%d", n_fillers++);
    n_filler = strlen(filler);
    while ((8 + n_key + 4 + 4 + 8 + n_filler + 4 + 8 + n_text) % 32 != 0) {
        ++n_text;
    }
    const size_t    n = 8 + n_key + 4 + 4 + 8 + n_filler + 4 + 8 + n_text;
    unsigned char * grown = malloc(b->n + n);
    CHECK(grown != NULL);
    memcpy(grown, b->data, HEADER_FIRST);
    unsigned char * at = grown + HEADER_FIRST;
    put_u64(at, n_key);
    memcpy(at += 8, key, n_key);
    put_u32(at += n_key, GGUF_U32);
    put_u32(at += 4, value);
    put_u64(at += 4, n_filler);
    memcpy(at += 8, filler, n_filler);
    put_u32(at += n_filler, GGUF_TEXT);
    put_u64(at += 4, n_text);
    memset(at += 8, 'x', n_text);
    memcpy(at + n_text, b->data + HEADER_FIRST, b->n - HEADER_FIRST);
    memcpy(&n_keys, grown + HEADER_KEYS, sizeof n_keys);
    put_u64(grown + HEADER_KEYS, n_keys + 2);
    free(b->data);
    b->data = grown;
    b->n += n;
}

/* Runs a test in a child process: 0 where it ended as it should. */
#define IN_CHILD(call)                                    \
    do {                                                  \
        fflush(stderr);                                   \
        const pid_t in_child_ = fork();                   \
        CHECK(in_child_ >= 0);                            \
        if (in_child_ == 0) {                             \
            alarm(600);                                   \
            call;                                         \
            _exit(0);                                     \
        }                                                 \
        int in_child_status_ = 0;                         \
        CHECK(waitpid(in_child_, &in_child_status_, 0) == in_child_); \
        CHECK(in_child_status_ == 0);                     \
    } while (0)

#endif
