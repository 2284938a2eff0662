// Owns what the process does once before the first model, and what the build says of itself.
#include "lcs_internal.hpp"

#include "log.h" // llama-common's own log

#include "ggml-cpu.h"

namespace lcs {

void log_callback(ggml_log_level level, const char * text, void * data); // log.cpp

namespace {

struct cpu_feature {
    const char * name;
    bool         compiled;
    bool         found;
};

// ggml_cpu_has_* answer for the flags ggml was compiled with; __builtin_cpu_supports for the machine.
std::vector<cpu_feature> cpu_features() {
#if defined(__x86_64__) && defined(__GNUC__)
    __builtin_cpu_init();
    return {
        {"sse3", ggml_cpu_has_sse3() != 0, __builtin_cpu_supports("sse3") != 0},
        {"ssse3", ggml_cpu_has_ssse3() != 0, __builtin_cpu_supports("ssse3") != 0},
        {"avx", ggml_cpu_has_avx() != 0, __builtin_cpu_supports("avx") != 0},
        {"avx2", ggml_cpu_has_avx2() != 0, __builtin_cpu_supports("avx2") != 0},
        {"bmi2", ggml_cpu_has_bmi2() != 0, __builtin_cpu_supports("bmi2") != 0},
        {"fma", ggml_cpu_has_fma() != 0, __builtin_cpu_supports("fma") != 0},
        {"f16c", ggml_cpu_has_f16c() != 0, __builtin_cpu_supports("f16c") != 0},
        {"avx_vnni", ggml_cpu_has_avx_vnni() != 0, __builtin_cpu_supports("avxvnni") != 0},
        {"avx512", ggml_cpu_has_avx512() != 0, __builtin_cpu_supports("avx512f") != 0},
        {"avx512_vbmi", ggml_cpu_has_avx512_vbmi() != 0, __builtin_cpu_supports("avx512vbmi") != 0},
        {"avx512_vnni", ggml_cpu_has_avx512_vnni() != 0, __builtin_cpu_supports("avx512vnni") != 0},
        {"avx512_bf16", ggml_cpu_has_avx512_bf16() != 0, __builtin_cpu_supports("avx512bf16") != 0},
        {"amx_int8", ggml_cpu_has_amx_int8() != 0, __builtin_cpu_supports("amx-int8") != 0},
    };
#else
    return {
        {"neon", ggml_cpu_has_neon() != 0, ggml_cpu_has_neon() != 0},
        {"dotprod", ggml_cpu_has_dotprod() != 0, ggml_cpu_has_dotprod() != 0},
        {"matmul_int8", ggml_cpu_has_matmul_int8() != 0, ggml_cpu_has_matmul_int8() != 0},
        {"sve", ggml_cpu_has_sve() != 0, ggml_cpu_has_sve() != 0},
    };
#endif
}

void require_cpu() {
    for (const cpu_feature & feature : cpu_features()) {
        if (feature.compiled && !feature.found) {
            fail(LCS_STATUS_UNSUPPORTED,
                 std::string("this build needs the CPU feature ") + feature.name + ", which this machine lacks",
                 feature.name);
        }
    }
}

std::string feature_names(bool found) {
    std::string names;
    for (const cpu_feature & feature : cpu_features()) {
        if (feature.compiled && (!found || feature.found)) {
            names += (names.empty() ? "" : " ") + std::string(feature.name);
        }
    }
    return names;
}

} // namespace

void init_once() {
    static std::once_flag once;
    std::call_once(once, [] { // a throwing call leaves the flag unset: the next one tries, and fails, again
        require_cpu();
        llama_log_set(log_callback, nullptr);
        // llama-common writes to stderr through a worker thread of its own, past the callback.
        common_log_set_verbosity_thold(-1);
        llama_backend_init();
    });
}

} // namespace lcs

extern "C" {

lcs_status lcs_build_info(lcs_build * build_out) {
    return lcs::guard([&] {
        lcs::require(build_out, "build_out");
        static const std::string compiled = lcs::feature_names(false);
        static const std::string found = lcs::feature_names(true);
        lcs_build build{};
        build.version = LCS_VERSION;
        build.pin = LCS_PIN;
        build.backend = LCS_BACKEND;
        build.options = LCS_BUILD_OPTIONS;
        build.cpu_compiled = compiled.c_str();
        build.cpu_found = found.c_str();
        build.llama_version = llama_version();
        build.ggml_version = ggml_version();
        build.system_info = "";
#if defined(LCS_OPENMP)
        build.openmp = true;
#endif
        *build_out = build;
        lcs::init_once();
        // Upstream builds this text in one static buffer: once, under the static's lock.
        static const std::string system_info = llama_print_system_info();
        build.system_info = system_info.c_str();
        build.gpu_offload = llama_supports_gpu_offload();
        build.mmap = llama_supports_mmap();
        build.mlock = llama_supports_mlock();
        *build_out = build;
    });
}

} // extern "C"
