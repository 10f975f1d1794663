# Brings the pinned llama.cpp (native/patches/PIN) into the build tree, once plain and once patched.
# All of the work is in scripts/patches.py.

find_package(Python3 3.10 COMPONENTS Interpreter REQUIRED)
set(_upstream "${CMAKE_CURRENT_BINARY_DIR}/upstream")
set(_prepare "${Python3_EXECUTABLE}" "${CMAKE_CURRENT_SOURCE_DIR}/scripts/patches.py" prepare "${_upstream}")
if(SPECEE_LLAMA_CPP_DIR)
    list(APPEND _prepare --source "${SPECEE_LLAMA_CPP_DIR}")
endif()
execute_process(COMMAND ${_prepare} RESULT_VARIABLE _result)
if(NOT _result EQUAL 0)
    message(FATAL_ERROR "the pinned llama.cpp source could not be prepared; the reason stands above")
endif()
file(READ "${_upstream}/upstream.json" _json)
string(JSON SPECEE_LLAMA_CPP_COMMIT GET "${_json}" llama_cpp_commit)
string(JSON SPECEE_PATCH_SERIES GET "${_json}" patch_series)
set(SPECEE_STOCK_SOURCE "${_upstream}/stock")
set(SPECEE_PATCHED_SOURCE "${_upstream}/patched")
if(SPECEE_PATCHED_DIR)
    set(SPECEE_PATCHED_SOURCE "${SPECEE_PATCHED_DIR}")
    set(SPECEE_PATCH_SERIES "work tree")
endif()

# llama_version() as upstream's own build would name it.
file(STRINGS "${SPECEE_STOCK_SOURCE}/CMakeLists.txt" _version REGEX "^set\\(LLAMA_VERSION_(MAJOR|MINOR|PATCH) ")
string(REGEX REPLACE "[^0-9;]" "" _version "${_version}")
string(REPLACE ";" "." SPECEE_LLAMA_CPP_VERSION "${_version}")
string(APPEND SPECEE_LLAMA_CPP_VERSION "-dev")

# A changed pin or series configures again; scripts/patches.py rewrites only what differs.
file(GLOB _patches CONFIGURE_DEPENDS native/patches/*.patch)
set_property(DIRECTORY APPEND PROPERTY CMAKE_CONFIGURE_DEPENDS
    native/patches/PIN scripts/patches.py ${_patches})
