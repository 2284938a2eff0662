# Owns the pin, and finds its source: gives LCS_LLAMA_COMMIT and LCS_LLAMA_DIR. How it is built is CMakeLists.txt's.
# A new pin is one commit: these values, golden files re-read, benches before and after.

set(LCS_LLAMA_COMMIT 0c1e57098)
set(LCS_LLAMA_RELEASE 0.3.36) # the llama-cpp-python source distribution that vendors the commit
set(LCS_LLAMA_SDIST_SHA256 832db0699007f1be95a7e41ef12e88926b02ba836461e36a36372db2760c1a2e)
set(LCS_LLAMA_TREE_SHA256 f50a4e23aaf081556efd9c19af4605b9bbbff890cb249baa5352d6ca33c7ecf6)

set(LLAMACPPSHIM_LLAMA_CPP "" CACHE PATH "Build from this llama.cpp tree instead of fetching the pinned one")

message(CHECK_START "Finding llama.cpp ${LCS_LLAMA_COMMIT} (the first time, 77 MB are downloaded)")
set(_fetch "${Python_EXECUTABLE}" "${CMAKE_CURRENT_LIST_DIR}/fetch.py")
if(LLAMACPPSHIM_LLAMA_CPP)
    list(APPEND _fetch --source "${LLAMACPPSHIM_LLAMA_CPP}")
endif()
execute_process(COMMAND ${_fetch} WORKING_DIRECTORY "${PROJECT_SOURCE_DIR}" RESULT_VARIABLE _fetch_failed
                OUTPUT_VARIABLE LCS_LLAMA_DIR OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_VARIABLE _fetch_error)
if(_fetch_failed)
    message(CHECK_FAIL "failed")
    string(STRIP "${_fetch_error}" _fetch_error)
    message(FATAL_ERROR "${_fetch_error}")
endif()
message(CHECK_PASS "${LCS_LLAMA_DIR}")
set_property(DIRECTORY APPEND PROPERTY CMAKE_CONFIGURE_DEPENDS
             "${CMAKE_CURRENT_LIST_DIR}/fetch.py" "${CMAKE_CURRENT_LIST_DIR}/llama.cpp.cmake")
