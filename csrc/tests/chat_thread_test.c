/* Chat templates under threads: a second caller, many templates and replies at once, and a fork beside a render. */
#define _POSIX_C_SOURCE 200809L
#include "check.h"

#include <pthread.h>
#include <stdatomic.h>
#include <sys/wait.h>
#include <unistd.h>

/* Renders for a while. The date keeps a render from being remembered. */
static const char * SLOW = "{% for i in range(300) %}{% set x = i %}{% endfor %}{{ messages[0].content }}"
                           "{% if add_generation_prompt %}<a>{% endif %}{# date_string #}";
static const char * HI = "{\"messages\":[{\"role\":\"user\",\"content\":\"hi\"}]}";

static lcs_chat_template * compile(const char * source) {
    lcs_chat_template * tmpl = NULL;
    CHECK_OK(lcs_chat_template_init(NULL, source, strlen(source), &tmpl));
    return tmpl;
}

typedef struct shared {
    lcs_chat_template * tmpl;
    atomic_int          running;
    atomic_int          stop;
} shared;

static void * render_until_stopped(void * data) {
    shared * s = data;
    while (!atomic_load(&s->stop)) {
        lcs_string *     json = NULL;
        const lcs_status status = lcs_chat_template_render(s->tmpl, HI, strlen(HI), &json);
        CHECK(status == LCS_STATUS_OK || status == LCS_STATUS_BUSY);
        lcs_string_free(json);
        atomic_store(&s->running, 1);
    }
    return NULL;
}

static void test_a_second_caller_is_told_that_the_template_is_busy(void) {
    shared    s = {.tmpl = compile(SLOW)};
    pthread_t thread;
    CHECK(pthread_create(&thread, NULL, render_until_stopped, &s) == 0);
    while (!atomic_load(&s.running)) {
    }
    lcs_status status = LCS_STATUS_OK;
    while (status != LCS_STATUS_BUSY) {
        lcs_string * json = NULL;
        status = lcs_chat_template_info(s.tmpl, &json);
        CHECK(status == LCS_STATUS_OK || status == LCS_STATUS_BUSY);
        lcs_string_free(json);
    }
    atomic_store(&s.stop, 1);
    CHECK(pthread_join(thread, NULL) == 0);
    lcs_chat_template_free(s.tmpl);
}

static char * syntax_of(const lcs_string * json) {
    const char * from = strstr(lcs_string_data(json), "\"syntax\":\"");
    CHECK(from != NULL);
    char * syntax = strdup(from + 10);
    CHECK(syntax != NULL);
    char * at = syntax;
    const char * c = syntax;
    for (; *c != '"'; ++c) {
        if (*c == '\\') {
            ++c;
            *at++ = *c == 'n' ? '\n' : *c;
        } else {
            *at++ = *c;
        }
    }
    *at = '\0';
    return syntax;
}

static void * render_and_parse(void * data) {
    const char * content = data;
    for (int i = 0; i < 4; ++i) {
        char                request[256];
        lcs_string *        json = NULL;
        lcs_chat_template * tmpl = compile(i % 2 == 0 ? "" : SLOW);
        snprintf(request, sizeof request, "{\"messages\":[{\"role\":\"user\",\"content\":\"%s %d\"}]}", content, i);
        CHECK_OK(lcs_chat_template_render(tmpl, request, strlen(request), &json));
        snprintf(request, sizeof request, "[\"%s %d\",true]", content, i);
        CHECK(strstr(lcs_string_data(json), request) != NULL);
        char * syntax = syntax_of(json);
        lcs_string_free(json);
        CHECK_OK(lcs_chat_parse(syntax, strlen(syntax), content, strlen(content), false, &json));
        CHECK(strstr(lcs_string_data(json), content) != NULL);
        lcs_string_free(json);
        const char * schema = "{\"type\":\"object\",\"properties\":{\"a\":{\"type\":\"integer\"}}}";
        CHECK_OK(lcs_json_schema_to_grammar(schema, strlen(schema), &json));
        lcs_string_free(json);
        free(syntax);
        lcs_chat_template_free(tmpl);
    }
    return NULL;
}

static void test_many_threads_render_and_parse_at_once(void) {
    static char contents[4][16] = {"one", "two", "three", "four"};
    pthread_t   threads[4];
    for (int i = 0; i < 4; ++i) {
        CHECK(pthread_create(&threads[i], NULL, render_and_parse, contents[i]) == 0);
    }
    for (int i = 0; i < 4; ++i) {
        CHECK(pthread_join(threads[i], NULL) == 0);
    }
}

#if !defined(__SANITIZE_THREAD__)
static void test_a_child_forked_beside_a_render_makes_its_own_templates(void) {
    shared    s = {.tmpl = compile(SLOW)};
    pthread_t thread;
    CHECK(pthread_create(&thread, NULL, render_until_stopped, &s) == 0);
    while (!atomic_load(&s.running)) {
    }
    for (int i = 0; i < 5; ++i) {
        fflush(NULL);
        const pid_t child = fork();
        CHECK(child >= 0);
        if (child == 0) {
            alarm(120); /* a lock that nobody holds any more would be waited for without end */
            lcs_string *        json = NULL;
            lcs_chat_template * tmpl = compile("");
            CHECK_OK(lcs_chat_template_render(tmpl, HI, strlen(HI), &json));
            lcs_string_free(json);
            lcs_chat_template_free(tmpl);
            _exit(0);
        }
        int status = 0;
        CHECK(waitpid(child, &status, 0) == child);
        CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0);
    }
    atomic_store(&s.stop, 1);
    CHECK(pthread_join(thread, NULL) == 0);
    lcs_chat_template_free(s.tmpl);
}
#endif

int main(void) {
    test_a_second_caller_is_told_that_the_template_is_busy();
    test_many_threads_render_and_parse_at_once();
#if !defined(__SANITIZE_THREAD__) /* which ends a child that starts threads */
    test_a_child_forked_beside_a_render_makes_its_own_templates();
#endif
    check_nothing_alive();
    return 0;
}
