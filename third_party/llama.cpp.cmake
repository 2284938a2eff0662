# Owns the pin, and how llama.cpp is built. Gives the static target `llama_cpp`: llama, ggml with one backend, and the
# chat part of llama-common. A new pin is one commit: these values, golden files re-read, benches before and after.

set(LCS_LLAMA_COMMIT 0c1e57098)
set(LCS_LLAMA_RELEASE 0.3.36) # the llama-cpp-python source distribution that vendors the commit
set(LCS_LLAMA_SDIST_SHA256 832db0699007f1be95a7e41ef12e88926b02ba836461e36a36372db2760c1a2e)
set(LCS_LLAMA_TREE_SHA256 f50a4e23aaf081556efd9c19af4605b9bbbff890cb249baa5352d6ca33c7ecf6)

set(LLAMACPPSHIM_LLAMA_CPP "" CACHE PATH "Build from this llama.cpp tree instead of fetching the pinned one")

set(_fetch "${Python_EXECUTABLE}" "${CMAKE_CURRENT_LIST_DIR}/fetch.py")
if(LLAMACPPSHIM_LLAMA_CPP)
    list(APPEND _fetch --source "${LLAMACPPSHIM_LLAMA_CPP}")
endif()
execute_process(COMMAND ${_fetch} OUTPUT_VARIABLE LCS_LLAMA_DIR ERROR_VARIABLE _fetch_error RESULT_VARIABLE _fetch_failed
                OUTPUT_STRIP_TRAILING_WHITESPACE ECHO_ERROR_VARIABLE)
if(_fetch_failed)
    string(STRIP "${_fetch_error}" _fetch_error)
    message(FATAL_ERROR "${_fetch_error}")
endif()
set_property(DIRECTORY APPEND PROPERTY CMAKE_CONFIGURE_DEPENDS
             "${CMAKE_CURRENT_LIST_DIR}/fetch.py" "${CMAKE_CURRENT_LIST_DIR}/llama.cpp.cmake")
message(STATUS "llama.cpp ${LCS_LLAMA_COMMIT}: ${LCS_LLAMA_DIR}")

# Upstream's options. Normal variables win over option() (CMP0077), so nothing is written to the cache.
set(CMAKE_POLICY_DEFAULT_CMP0077 NEW)
set(BUILD_SHARED_LIBS OFF)
set(LLAMA_BUILD_COMMON OFF) # llama_chat below takes the part that chat templates need
set(LLAMA_BUILD_TESTS OFF)
set(LLAMA_BUILD_TOOLS OFF)
set(LLAMA_BUILD_EXAMPLES OFF)
set(LLAMA_BUILD_SERVER OFF)
set(LLAMA_BUILD_APP OFF)
set(LLAMA_OPENSSL OFF)
set(LLAMA_SUBPROCESS OFF)
set(LLAMA_ALL_WARNINGS OFF)
# Stated, since upstream would ask git, and git would answer for whatever repository encloses the tree.
set(LLAMA_BUILD_COMMIT ${LCS_LLAMA_COMMIT})
set(LLAMA_BUILD_NUMBER 0)
set(GGML_CCACHE OFF) # it sets a launch rule for every target of ours too
set(GGML_OPENMP ${LLAMACPPSHIM_OPENMP})

foreach(_backend CUDA METAL VULKAN)
    string(TOLOWER ${_backend} _name)
    if(LLAMACPPSHIM_BACKEND STREQUAL _name)
        set(GGML_${_backend} ON)
    else()
        set(GGML_${_backend} OFF)
    endif()
endforeach()

set(GGML_NATIVE ${LLAMACPPSHIM_NATIVE})
if(NOT LLAMACPPSHIM_NATIVE AND CMAKE_SYSTEM_PROCESSOR MATCHES "x86_64|AMD64")
    # x86-64-v3. Each stated: upstream turns them all off when SOURCE_DATE_EPOCH is set.
    foreach(_feature SSE42 AVX AVX2 BMI2 FMA F16C)
        set(GGML_${_feature} ON)
    endforeach()
endif()

add_subdirectory("${LCS_LLAMA_DIR}" llama.cpp EXCLUDE_FROM_ALL SYSTEM)

# What chat templates, reply parsing and JSON-schema grammars need of llama-common. The argument parser, downloads, HTTP,
# the console and subprocesses stay out. The second list is only there because common.cpp refers to it.
include("${LCS_LLAMA_DIR}/common/parsers/sources.cmake")
set(_common_sources
    chat.cpp chat-auto-parser-generator.cpp chat-auto-parser-helpers.cpp chat-diff-analyzer.cpp chat-peg-parser.cpp
    peg-parser.cpp json.cpp json-schema.cpp json-schema-to-grammar.cpp log.cpp trie.cpp unicode.cpp common.cpp
    jinja/caps.cpp jinja/lexer.cpp jinja/parser.cpp jinja/runtime.cpp jinja/string.cpp jinja/value.cpp)
list(APPEND _common_sources
    fit.cpp llguidance.cpp ngram-cache.cpp ngram-map.cpp ngram-mod.cpp reasoning-budget.cpp sampling.cpp speculative.cpp)
list(TRANSFORM _common_sources PREPEND "${LCS_LLAMA_DIR}/common/")
set(BUILD_COMPILER "${CMAKE_CXX_COMPILER_ID} ${CMAKE_CXX_COMPILER_VERSION}")
set(BUILD_TARGET "${CMAKE_SYSTEM_NAME} ${CMAKE_SYSTEM_PROCESSOR}")
configure_file("${LCS_LLAMA_DIR}/common/build-info.cpp.in" llama-build-info.cpp)
add_library(llama_chat STATIC ${LLAMA_CHAT_PARSERS_SOURCES} ${_common_sources}
            "${CMAKE_CURRENT_BINARY_DIR}/llama-build-info.cpp")
target_include_directories(llama_chat PUBLIC "${LCS_LLAMA_DIR}/common" PRIVATE "${LCS_LLAMA_DIR}/vendor")
target_compile_features(llama_chat PUBLIC cxx_std_17)
target_link_libraries(llama_chat PUBLIC llama Threads::Threads)
set_target_properties(llama_chat PROPERTIES SYSTEM TRUE)

add_library(llama_cpp INTERFACE)
# src: the staging header llama-ext.h, for the memory breakdown.
target_include_directories(llama_cpp SYSTEM INTERFACE "${LCS_LLAMA_DIR}/src" "${LCS_LLAMA_DIR}/vendor")
target_link_libraries(llama_cpp INTERFACE llama_chat llama ggml)
