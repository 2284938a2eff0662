/* Text to tokens and back: round trips, the buffer protocol, bytes that are no text, and sizes that overflow stacks.
 * Oracles: the text itself, and the same text in pieces short enough for llama.cpp's own path. */
#include "damage.h"

static size_t count(const lcs_model * model, const char * text, size_t n, bool special, bool parse) {
    size_t           n_tokens = 0;
    const lcs_status status = lcs_vocab_tokenize(model, text, n, special, parse, NULL, 0, &n_tokens);
    if (status != LCS_STATUS_OK || n_tokens != 0) {
        CHECK_STATUS(status, LCS_STATUS_BUFFER);
        CHECK(n_tokens != 0);
    }
    return n_tokens;
}

/* Owned by the caller. */
static int32_t * tokens_of(
        const lcs_model * model, const char * text, size_t n, bool special, bool parse, size_t * n_out) {
    const size_t n_tokens = count(model, text, n, special, parse);
    int32_t *    tokens = malloc((n_tokens + 1) * sizeof *tokens);
    CHECK(tokens != NULL);
    CHECK_OK(lcs_vocab_tokenize(model, text, n, special, parse, tokens, n_tokens, n_out));
    CHECK(*n_out == n_tokens);
    return tokens;
}

static char * text_of(
        const lcs_model * model, const int32_t * tokens, size_t n, bool remove, bool unparse, size_t * n_out) {
    const lcs_status status = lcs_vocab_detokenize(model, tokens, n, remove, unparse, NULL, 0, n_out);
    CHECK(status == (*n_out == 0 ? LCS_STATUS_OK : LCS_STATUS_BUFFER));
    const size_t needed = *n_out;
    char *       text = malloc(needed + 1);
    CHECK(text != NULL);
    text[needed] = '#';
    CHECK_OK(lcs_vocab_detokenize(model, tokens, n, remove, unparse, text, needed, n_out));
    CHECK(*n_out == needed && text[needed] == '#');
    return text;
}

static void check_round_trip(const lcs_model * model, const char * text, size_t n) {
    size_t    n_tokens = 0;
    size_t    n_back = 0;
    int32_t * tokens = tokens_of(model, text, n, false, false, &n_tokens);
    char *    back = text_of(model, tokens, n_tokens, false, true, &n_back);
    CHECK(n_back == n && memcmp(back, text, n) == 0);
    free(back);
    free(tokens);
}

static char * repeat(const char * unit, size_t n_unit, size_t times) {
    char * text = malloc(n_unit * times + 1);
    CHECK(text != NULL);
    for (size_t i = 0; i < times; ++i) {
        memcpy(text + i * n_unit, unit, n_unit);
    }
    return text;
}

static void test_text_comes_back(const lcs_model * model) {
    static const char * const TEXTS[] = {
        "", "a", "Hello, world!", "  two  spaces ", "line\nline\r\n\n\ttab",
        "w\xc3\xb6rld \xe4\xb8\xad\xe6\x96\x87 \xf0\x9f\x98\x80",
        "def f(x):\n    return x ** 2  # 12345678901234567890\n", "it's I'll we've",
        "<|im_start|>no special<|im_end|>"};
    for (size_t i = 0; i < sizeof TEXTS / sizeof *TEXTS; ++i) {
        check_round_trip(model, TEXTS[i], strlen(TEXTS[i]));
    }
    check_round_trip(model, "nul\0inside", 10);
}

static void test_any_bytes_are_text(const lcs_model * model) {
    static const struct {
        const char * bytes;
        size_t       n;
    } TEXTS[] = {{"\xff", 1}, {"\x80\x80", 2}, {"a\xe2\x82", 3}, {"\xed\xa0\x80", 3}, {"\xf7\xbf\xbf\xbf", 4},
                 {"\xf4\x90\x80\x80", 4}, {"\xc0\x80", 2}, {"\0\0\0", 3}, {"\xf0\x9f\x98", 3},
                 {"\xe2\x82 \xff\xfe x", 8}};
    for (size_t i = 0; i < sizeof TEXTS / sizeof *TEXTS; ++i) {
        for (int flags = 0; flags < 4; ++flags) {
            size_t    n_tokens = 0;
            size_t    n_back = 0;
            int32_t * tokens =
                    tokens_of(model, TEXTS[i].bytes, TEXTS[i].n, (flags & 1) != 0, (flags & 2) != 0, &n_tokens);
            free(text_of(model, tokens, n_tokens, false, true, &n_back));
            free(tokens);
        }
    }
}

/* A byte that is no UTF-8 is read as U+FFFD by tokenizers that decode. */
static void test_bad_bytes_are_read_as_the_replacement_character(const lcs_model * model) {
    size_t    n_a = 0;
    size_t    n_b = 0;
    int32_t * a = tokens_of(model, "x\xff\xf7\xbf\xbf\xbfy", 7, false, false, &n_a);
    int32_t * b =
            tokens_of(model, "x\xef\xbf\xbd\xef\xbf\xbd\xef\xbf\xbd\xef\xbf\xbd\xef\xbf\xbdy", 17, false, false, &n_b);
    CHECK(n_a == n_b && memcmp(a, b, n_a * sizeof *a) == 0);
    free(a);
    free(b);
}

static void test_buffers_are_filled_whole_or_not_at_all(const lcs_model * model) {
    const char * text = "one two three four";
    const size_t n = strlen(text);
    size_t       needed = count(model, text, n, false, false);
    int32_t      tokens[32];
    CHECK(needed > 2 && needed < 32);
    for (size_t capacity = 0; capacity <= needed + 1; ++capacity) {
        size_t n_out = 99;
        memset(tokens, 0x55, sizeof tokens);
        CHECK_STATUS(lcs_vocab_tokenize(model, text, n, false, false, tokens, capacity, &n_out),
                     capacity < needed ? LCS_STATUS_BUFFER : LCS_STATUS_OK);
        CHECK(n_out == needed);
        CHECK(tokens[capacity < needed ? 0 : needed] == 0x55555555);
    }
    CHECK_OK(lcs_vocab_tokenize(model, text, n, false, false, tokens, 32, &needed));
    for (size_t capacity = 0; capacity <= n + 1; ++capacity) {
        char   buf[64];
        size_t n_out = 99;
        memset(buf, 0x55, sizeof buf);
        CHECK_STATUS(lcs_vocab_detokenize(model, tokens, needed, false, false, buf, capacity, &n_out),
                     capacity < n ? LCS_STATUS_BUFFER : LCS_STATUS_OK);
        CHECK(n_out == n && buf[capacity < n ? 0 : n] == 0x55);
    }
    for (size_t i = 0; i < needed; ++i) {
        char   buf[64];
        size_t n_piece = 0;
        CHECK_STATUS(lcs_vocab_piece(model, tokens[i], true, NULL, 0, &n_piece), LCS_STATUS_BUFFER);
        memset(buf, 0x55, sizeof buf);
        CHECK_STATUS(lcs_vocab_piece(model, tokens[i], true, buf, n_piece - 1, &n_piece), LCS_STATUS_BUFFER);
        CHECK(buf[0] == 0x55);
        CHECK_OK(lcs_vocab_piece(model, tokens[i], true, buf, n_piece, &n_piece));
        CHECK(buf[n_piece] == 0x55);
    }
}

static void test_the_pieces_of_the_tokens_are_the_text(const lcs_model * model) {
    const char * text = "The pieces, joined: \xe4\xb8\xad 42\n";
    size_t       n = 0;
    size_t       at = 0;
    int32_t *    tokens = tokens_of(model, text, strlen(text), false, false, &n);
    for (size_t i = 0; i < n; ++i) {
        char   piece[64];
        size_t n_piece = 0;
        CHECK_OK(lcs_vocab_piece(model, tokens[i], false, piece, sizeof piece, &n_piece));
        CHECK(memcmp(text + at, piece, n_piece) == 0);
        at += n_piece;
    }
    CHECK(at == strlen(text));
    free(tokens);
}

static void test_special_tokens_are_parsed_only_when_asked(const lcs_model * model) {
    const char *   text = "<|im_start|>user\nhi<|im_end|>";
    const size_t   n = strlen(text);
    size_t         n_plain = 0;
    size_t         n_parsed = 0;
    int32_t *      plain = tokens_of(model, text, n, false, false, &n_plain);
    int32_t *      parsed = tokens_of(model, text, n, false, true, &n_parsed);
    lcs_token_info info;
    CHECK(n_parsed < n_plain);
    CHECK_OK(lcs_vocab_token(model, parsed[0], &info));
    CHECK(info.is_control && strcmp(info.text, "<|im_start|>") == 0);
    CHECK_OK(lcs_vocab_token(model, parsed[n_parsed - 1], &info));
    CHECK(info.is_control && info.is_eog && strcmp(info.text, "<|im_end|>") == 0);
    for (size_t i = 0; i < n_plain; ++i) {
        CHECK_OK(lcs_vocab_token(model, plain[i], &info));
        CHECK(!info.is_control);
    }
    size_t n_back = 0;
    char * shown = text_of(model, parsed, n_parsed, false, true, &n_back);
    CHECK(n_back == n && memcmp(shown, text, n) == 0);
    char * hidden = text_of(model, parsed, n_parsed, false, false, &n_back);
    CHECK(n_back == strlen("user\nhi") && memcmp(hidden, "user\nhi", n_back) == 0);
    free(shown);
    free(hidden);

    /* Far beyond what llama.cpp cuts by itself, and the same tokens over and over. */
    enum { TIMES = 20000 };
    size_t    n_long = 0;
    char *    longer = repeat(text, n, TIMES);
    int32_t * many = tokens_of(model, longer, n * TIMES, false, true, &n_long);
    CHECK(n_long == n_parsed * TIMES);
    for (size_t i = 0; i < TIMES; ++i) {
        CHECK(memcmp(many + i * n_parsed, parsed, n_parsed * sizeof *parsed) == 0);
    }
    free(many);
    free(longer);
    free(plain);
    free(parsed);
}

/* Oracle: what each piece gives alone, where a word starts anew. */
static void test_a_long_text_is_its_paragraphs(const lcs_model * model, size_t times) {
    const char * unit = "Paragraph of 12 words, with \xc3\xa9\xff\xe2\x82 bytes; it's long.\n";
    const size_t n = strlen(unit);
    size_t       n_one = 0;
    size_t       n_many = 0;
    int32_t *    one = tokens_of(model, unit, n, false, false, &n_one);
    char *       text = repeat(unit, n, times);
    int32_t *    many = tokens_of(model, text, n * times, false, false, &n_many);
    CHECK(n_many == n_one * times);
    for (size_t i = 0; i < times; ++i) {
        CHECK(memcmp(many + i * n_one, one, n_one * sizeof *one) == 0);
    }
    free(one);
    free(many);
    free(text);
}

static void test_words_of_200000_characters(const lcs_model * model) {
    static const struct {
        const char * unit;
        size_t       n;
    } UNITS[] = {{"a", 1}, {"7", 1}, {" ", 1}, {"\n", 1}, {"!", 1}, {"\xc3\xa9", 2},
                 {"\xe4\xb8\xad", 3}, {"\xff", 1}, {"", 1}};
    for (size_t i = 0; i < sizeof UNITS / sizeof *UNITS; ++i) {
        const size_t n_bytes = UNITS[i].n * 200000;
        const size_t capacity = n_bytes * 3 + 8;
        char *       text = repeat(UNITS[i].unit, UNITS[i].n, 200000);
        int32_t *    tokens = malloc(capacity * sizeof *tokens);
        size_t       n = 0;
        CHECK(tokens != NULL);
        CHECK_OK(lcs_vocab_tokenize(model, text, n_bytes, false, false, tokens, capacity, &n));
        CHECK(n <= capacity);
        free(tokens);
        free(text);
    }
}

/* "gpt-2" in the fixture's metadata becomes another pre-tokenizer: one that runs on regular expressions. */
static lcs_model * with_pre_tokenizer(const char * path, const char * name) {
    bytes          b = read_bytes(path);
    bytes          grown = {malloc(b.n + 32), b.n + 32};
    const size_t   at = find_key(b, "tokenizer.ggml.pre");
    const size_t   old = 8 + 18 + 4 + 8 + 5;
    const uint64_t n_name = strlen(name);
    unsigned char * p = grown.data + at;
    CHECK(grown.data != NULL && n_name < 16);
    memcpy(grown.data, b.data, at + 30);
    put_u64(p + 30, n_name);
    memcpy(p + 38, name, n_name);
    /* What is left becomes a text under a key of its own. */
    unsigned char * q = p + 38 + n_name;
    const size_t    left = old + 32 - 38 - n_name;
    uint64_t        n_keys;
    put_u64(q, 1);
    q[8] = 'f';
    put_u32(q + 9, GGUF_TEXT);
    put_u64(q + 13, left - 21);
    memset(q + 21, 'x', left - 21);
    memcpy(p + old + 32, b.data + at + old, b.n - at - old);
    memcpy(&n_keys, grown.data + HEADER_KEYS, sizeof n_keys);
    put_u64(grown.data + HEADER_KEYS, n_keys + 1);
    lcs_model * model = load_model(write_bytes("pre.gguf", grown.data, grown.n));
    free(b.data);
    free(grown.data);
    return model;
}

static void test_regular_expressions_do_not_overflow_the_stack(const char * path) {
    static const char * const NAMES[] = {"default", "tekken", "deepseek-v3", "exaone-moe"};
    for (size_t i = 0; i < sizeof NAMES / sizeof *NAMES; ++i) {
        lcs_model * model = with_pre_tokenizer(path, NAMES[i]);
        test_any_bytes_are_text(model);
        test_words_of_200000_characters(model);
        lcs_model_free(model);
    }
}

static void test_a_word_beyond_the_limit_is_a_range_error(const char * path) {
    lcs_model *    model = with_pre_tokenizer(path, "default");
    const size_t   limit = (size_t) 1 << 20;
    char *         text = repeat("a", 1, limit + 8);
    size_t         n = 0;
    lcs_error_info error;
    CHECK_STATUS(lcs_vocab_tokenize(model, text, limit + 8, false, false, NULL, 0, &n), LCS_STATUS_RANGE);
    lcs_last_error(&error);
    CHECK(strcmp(error.expected, "1048576") == 0);
    CHECK_STATUS(lcs_vocab_tokenize(model, text, limit - 8, false, false, NULL, 0, &n), LCS_STATUS_BUFFER);
    text[limit / 2] = ' ';
    CHECK_STATUS(lcs_vocab_tokenize(model, text, limit + 8, false, false, NULL, 0, &n), LCS_STATUS_BUFFER);
    lcs_model_free(model);
    model = with_pre_tokenizer(path, "deepseek-llm"); /* whose time is quadratic in white space */
    memset(text, ' ', 1000);
    CHECK_STATUS(lcs_vocab_tokenize(model, text, 1000, false, false, NULL, 0, &n), LCS_STATUS_BUFFER);
    memset(text, ' ', 1001);
    CHECK_STATUS(lcs_vocab_tokenize(model, text, 1001, false, false, NULL, 0, &n), LCS_STATUS_RANGE);
    lcs_model_free(model);
    model = with_pre_tokenizer(path, "superbpe"); /* and in digits */
    memset(text, '7', 1001);
    CHECK_STATUS(lcs_vocab_tokenize(model, text, 1001, false, false, NULL, 0, &n), LCS_STATUS_RANGE);
    CHECK_STATUS(lcs_vocab_tokenize(model, text, 999, false, false, NULL, 0, &n), LCS_STATUS_BUFFER);
    lcs_model_free(model);
    free(text);
}

static void test_bos_and_eos_are_added_and_removed(const lcs_model * spm, const lcs_model * bert) {
    lcs_vocab_specials s;
    size_t             n = 0;
    CHECK_OK(lcs_vocab_get_specials(spm, &s));
    CHECK(s.bos == 1 && s.eos == 2 && s.add_bos && !s.add_eos && s.sep == -1 && s.mask == -1 && s.fim_pre == -1);
    int32_t * tokens = tokens_of(spm, "hi", 2, true, false, &n);
    CHECK(n > 1 && tokens[0] == s.bos && tokens[n - 1] != s.eos);
    char * text = text_of(spm, tokens, n, true, true, &n);
    free(text);
    free(tokens);
    tokens = tokens_of(spm, "", 0, true, false, &n);
    CHECK(n == 1 && tokens[0] == s.bos);
    free(tokens);
    CHECK(count(spm, NULL, 0, false, false) == 0);

    CHECK_OK(lcs_vocab_get_specials(bert, &s));
    CHECK(s.bos == 101 && s.sep == 102 && s.mask == 103);
    tokens = tokens_of(bert, "hello", 5, true, false, &n);
    CHECK(n == 3 && tokens[0] == 101 && tokens[2] == 102);
    free(tokens);
    CHECK(count(bert, "hello", 5, false, false) == 1);
}

static void test_adding_a_token_that_the_model_lacks_is_an_argument_error(const char * spm) {
    bytes          b = read_bytes(spm);
    lcs_error_info error;
    size_t         n = 0;
    value_of(b, "tokenizer.ggml.add_eos_token")[0] = 1;
    lcs_model * model = load_model(write_bytes("eos.gguf", b.data, b.n));
    int32_t *   tokens = tokens_of(model, "hi", 2, true, false, &n);
    CHECK(tokens[n - 1] == 2);
    free(tokens);
    lcs_model_free(model);
    free(b.data);
    static const char EMPTY_VOCABULARY[] =
        "GGUF\3\0\0\0\0\0\0\0\0\0\0\0\4\0\0\0\0\0\0\0"
        "\24\0\0\0\0\0\0\0general.architecture\10\0\0\0\5\0\0\0\0\0\0\0llama"
        "\24\0\0\0\0\0\0\0tokenizer.ggml.model\10\0\0\0\5\0\0\0\0\0\0\0llama"
        "\25\0\0\0\0\0\0\0tokenizer.ggml.tokens\11\0\0\0\10\0\0\0\1\0\0\0\0\0\0\0\1\0\0\0\0\0\0\0a"
        "\33\0\0\0\0\0\0\0tokenizer.ggml.add_bos_toke\7\0\0\0\1";
    lcs_model_params p;
    lcs_model_params_init(&p);
    p.vocab_only = true;
    model = NULL;
    CHECK_OK(lcs_model_load(write_bytes("one.gguf", EMPTY_VOCABULARY, sizeof EMPTY_VOCABULARY - 1), &p, &model));
    CHECK_STATUS(lcs_vocab_tokenize(model, "a", 1, false, false, NULL, 0, &n), LCS_STATUS_UNSUPPORTED); /* no space */
    CHECK_STATUS(lcs_vocab_tokenize(model, "a", 1, true, false, NULL, 0, &n), LCS_STATUS_ARG);
    lcs_last_error(&error);
    CHECK(strcmp(error.field, "bos") == 0);
    lcs_model_free(model);
}

static void test_tokens_say_what_they_are(const lcs_model * model) {
    lcs_token_info info;
    lcs_model_info shape;
    CHECK_OK(lcs_model_get_info(model, &shape));
    int32_t n_eog = 0;
    for (int32_t token = 0; token < shape.n_vocab; ++token) {
        CHECK_OK(lcs_vocab_token(model, token, &info));
        CHECK(info.text != NULL && info.text[0] != '\0');
        n_eog += info.is_eog;
    }
    CHECK(n_eog >= 1);
}

static void test_what_is_out_of_range_is_refused(const lcs_model * model) {
    static const int32_t BAD[] = {-1, 50259, INT32_MAX, INT32_MIN};
    lcs_token_info       info;
    size_t               n = 0;
    char                 buf[8];
    for (size_t i = 0; i < sizeof BAD / sizeof *BAD; ++i) {
        const int32_t tokens[] = {0, BAD[i]};
        CHECK_STATUS(lcs_vocab_token(model, BAD[i], &info), LCS_STATUS_RANGE);
        CHECK_STATUS(lcs_vocab_piece(model, BAD[i], true, buf, sizeof buf, &n), LCS_STATUS_RANGE);
        CHECK_STATUS(lcs_vocab_detokenize(model, tokens, 2, false, false, buf, sizeof buf, &n), LCS_STATUS_RANGE);
    }
    CHECK_STATUS(lcs_vocab_tokenize(model, "", (size_t) INT32_MAX + 1, false, false, NULL, 0, &n), LCS_STATUS_RANGE);
    CHECK_STATUS(lcs_vocab_tokenize(model, "", SIZE_MAX, false, false, NULL, 0, &n), LCS_STATUS_RANGE);
    CHECK_STATUS(lcs_vocab_detokenize(model, BAD, SIZE_MAX, false, false, buf, sizeof buf, &n), LCS_STATUS_RANGE);
}

static char * description_of(const lcs_model * model, size_t * n_out) {
    CHECK_STATUS(lcs_vocab_describe(model, NULL, 0, n_out), LCS_STATUS_BUFFER);
    char * text = malloc(*n_out);
    CHECK_STATUS(lcs_vocab_describe(model, text, *n_out - 1, n_out), LCS_STATUS_BUFFER);
    CHECK_OK(lcs_vocab_describe(model, text, *n_out, n_out));
    return text;
}

static void test_a_description_tells_vocabularies_apart(
        const lcs_model * model, const char * path, const lcs_model * other) {
    lcs_model * again = load_model(path);
    size_t      n[3];
    char *      text[3] = {description_of(model, &n[0]), description_of(again, &n[1]), description_of(other, &n[2])};
    CHECK(n[0] == n[1] && memcmp(text[0], text[1], n[0]) == 0);
    CHECK(n[0] != n[2] || memcmp(text[0], text[2], n[0]) != 0);
    size_t size = 0;
    lcs_fault_arm(1);
    CHECK_STATUS(lcs_vocab_describe(model, text[0], n[0], &size), LCS_STATUS_NOMEM);
    lcs_fault_arm(0);
    CHECK_STATUS(lcs_vocab_describe(NULL, text[0], n[0], &size), LCS_STATUS_ARG);
    CHECK_STATUS(lcs_vocab_describe(model, NULL, n[0], &size), LCS_STATUS_ARG);
    CHECK_STATUS(lcs_vocab_describe(model, text[0], n[0], NULL), LCS_STATUS_ARG);
    for (int i = 0; i < 3; ++i) {
        free(text[i]);
    }
    lcs_model_free(again);
}

static void test_null_is_an_argument_error(const lcs_model * model) {
    lcs_vocab_specials specials;
    lcs_token_info     info;
    int32_t            token = 0;
    char               buf[8];
    size_t             n = 0;
    CHECK_STATUS(lcs_vocab_get_specials(NULL, &specials), LCS_STATUS_ARG);
    CHECK_STATUS(lcs_vocab_get_specials(model, NULL), LCS_STATUS_ARG);
    CHECK_STATUS(lcs_vocab_tokenize(NULL, "a", 1, false, false, &token, 1, &n), LCS_STATUS_ARG);
    CHECK_STATUS(lcs_vocab_tokenize(model, NULL, 1, false, false, &token, 1, &n), LCS_STATUS_ARG);
    CHECK_STATUS(lcs_vocab_tokenize(model, "a", 1, false, false, NULL, 1, &n), LCS_STATUS_ARG);
    CHECK_STATUS(lcs_vocab_tokenize(model, "a", 1, false, false, &token, 1, NULL), LCS_STATUS_ARG);
    CHECK_STATUS(lcs_vocab_detokenize(NULL, &token, 1, false, false, buf, 8, &n), LCS_STATUS_ARG);
    CHECK_STATUS(lcs_vocab_detokenize(model, NULL, 1, false, false, buf, 8, &n), LCS_STATUS_ARG);
    CHECK_STATUS(lcs_vocab_detokenize(model, &token, 1, false, false, NULL, 8, &n), LCS_STATUS_ARG);
    CHECK_STATUS(lcs_vocab_detokenize(model, &token, 1, false, false, buf, 8, NULL), LCS_STATUS_ARG);
    CHECK_STATUS(lcs_vocab_piece(NULL, 0, false, buf, 8, &n), LCS_STATUS_ARG);
    CHECK_STATUS(lcs_vocab_piece(model, 0, false, NULL, 8, &n), LCS_STATUS_ARG);
    CHECK_STATUS(lcs_vocab_piece(model, 0, false, buf, 8, NULL), LCS_STATUS_ARG);
    CHECK_STATUS(lcs_vocab_token(NULL, 0, &info), LCS_STATUS_ARG);
    CHECK_STATUS(lcs_vocab_token(model, 0, NULL), LCS_STATUS_ARG);
    CHECK_OK(lcs_vocab_detokenize(model, NULL, 0, false, false, NULL, 0, &n));
    CHECK(n == 0);
}

static void test_a_model_without_a_vocabulary_is_unsupported(void) {
    static const char NONE[] =
        "GGUF\3\0\0\0\0\0\0\0\0\0\0\0\3\0\0\0\0\0\0\0"
        "\24\0\0\0\0\0\0\0general.architecture\10\0\0\0\5\0\0\0\0\0\0\0llama"
        "\24\0\0\0\0\0\0\0tokenizer.ggml.model\10\0\0\0\4\0\0\0\0\0\0\0none"
        "\20\0\0\0\0\0\0\0llama.vocab_size\4\0\0\0\7\0\0\0";
    const char *       path = write_bytes("none.gguf", NONE, sizeof NONE - 1);
    lcs_model *        model = NULL;
    lcs_vocab_specials specials;
    lcs_token_info     info;
    lcs_error_info     error;
    lcs_model_params   p;
    int32_t            token = 0;
    size_t             n = 0;
    lcs_model_params_init(&p);
    p.vocab_only = true;
    CHECK_OK(lcs_model_load(path, &p, &model));
    CHECK_STATUS(lcs_vocab_get_specials(model, &specials), LCS_STATUS_UNSUPPORTED);
    CHECK_STATUS(lcs_vocab_tokenize(model, "a", 1, true, true, &token, 1, &n), LCS_STATUS_UNSUPPORTED);
    CHECK_STATUS(lcs_vocab_detokenize(model, &token, 1, false, false, NULL, 0, &n), LCS_STATUS_UNSUPPORTED);
    CHECK_STATUS(lcs_vocab_piece(model, 0, false, NULL, 0, &n), LCS_STATUS_UNSUPPORTED);
    CHECK_STATUS(lcs_vocab_describe(model, NULL, 0, &n), LCS_STATUS_UNSUPPORTED);
    CHECK_STATUS(lcs_vocab_token(model, 0, &info), LCS_STATUS_UNSUPPORTED);
    lcs_last_error(&error);
    CHECK(strcmp(error.field, "vocab") == 0);
    lcs_model_free(model);
}

static void use_in_the_child(const lcs_model * model) {
    lcs_vocab_specials specials;
    lcs_token_info     info;
    int32_t            token = 0;
    size_t             n = 0;
    CHECK_STATUS(lcs_vocab_get_specials(model, &specials), LCS_STATUS_FORKED);
    CHECK_STATUS(lcs_vocab_tokenize(model, "a", 1, false, false, &token, 1, &n), LCS_STATUS_FORKED);
    CHECK_STATUS(lcs_vocab_detokenize(model, &token, 1, false, false, NULL, 0, &n), LCS_STATUS_FORKED);
    CHECK_STATUS(lcs_vocab_piece(model, 0, false, NULL, 0, &n), LCS_STATUS_FORKED);
    CHECK_STATUS(lcs_vocab_token(model, 0, &info), LCS_STATUS_FORKED);
}

static void test_each_failing_step_is_clean(const lcs_model * model) {
    char * text = repeat("a", 1, 5000);
    size_t expected = count(model, text, 5000, false, false);
    bool   fired = true;
    int    n_steps = 0;
    for (int64_t k = 1; fired; ++k) {
        size_t n = 0;
        lcs_fault_arm(k);
        const lcs_status status = lcs_vocab_tokenize(model, text, 5000, false, false, NULL, 0, &n);
        fired = lcs_fault_fired();
        lcs_fault_arm(0);
        CHECK(status == (fired ? LCS_STATUS_NOMEM : LCS_STATUS_BUFFER));
        CHECK(n == (fired ? 0 : expected));
        n_steps += fired;
    }
    CHECK(n_steps >= 1);
    const int32_t token = 0;
    size_t        n = 0;
    lcs_fault_arm(1);
    CHECK_STATUS(lcs_vocab_detokenize(model, &token, 1, false, false, NULL, 0, &n), LCS_STATUS_NOMEM);
    lcs_fault_arm(0);
    CHECK_STATUS(lcs_vocab_detokenize(model, &token, 1, false, false, NULL, 0, &n), LCS_STATUS_BUFFER);
    free(text);
}

int main(int argc, char ** argv) {
    char *      llama_path = strdup(fixture(argc, argv, "tiny-llama.gguf"));
    char *      spm_path = strdup(fixture(argc, argv, "tiny-spm.gguf"));
    lcs_model * llama = load_model(llama_path);
    lcs_model * spm = load_model(spm_path);
    lcs_model * bert = load_model(fixture(argc, argv, "tiny-bert.gguf"));
    test_text_comes_back(llama);
    test_text_comes_back(spm);
    test_any_bytes_are_text(llama);
    test_any_bytes_are_text(spm);
    test_any_bytes_are_text(bert);
    test_bad_bytes_are_read_as_the_replacement_character(llama);
    test_buffers_are_filled_whole_or_not_at_all(llama);
    test_the_pieces_of_the_tokens_are_the_text(llama);
    test_special_tokens_are_parsed_only_when_asked(llama);
    test_a_long_text_is_its_paragraphs(llama, 20000);
    test_words_of_200000_characters(llama);
    test_words_of_200000_characters(spm);
    test_words_of_200000_characters(bert);
    test_regular_expressions_do_not_overflow_the_stack(llama_path);
    test_a_word_beyond_the_limit_is_a_range_error(llama_path);
    test_bos_and_eos_are_added_and_removed(spm, bert);
    test_adding_a_token_that_the_model_lacks_is_an_argument_error(spm_path);
    test_tokens_say_what_they_are(llama);
    test_tokens_say_what_they_are(spm);
    test_what_is_out_of_range_is_refused(llama);
    test_a_description_tells_vocabularies_apart(llama, llama_path, spm);
    test_a_description_tells_vocabularies_apart(spm, spm_path, bert);
    test_null_is_an_argument_error(llama);
    test_a_model_without_a_vocabulary_is_unsupported();
    IN_CHILD(use_in_the_child(llama));
    test_each_failing_step_is_clean(llama);
    lcs_model_free(llama);
    lcs_model_free(spm);
    lcs_model_free(bert);
    check_nothing_alive();
    remove_scratch();
    free(llama_path);
    free(spm_path);
    return 0;
}
