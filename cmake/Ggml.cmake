# ggml with upstream's own build, as static libraries whose objects go into both of ours. Backends are
# chosen with upstream's switches: GGML_CUDA, GGML_VULKAN, GGML_METAL, GGML_HIP, GGML_OPENMP, ...

# The defaults that llama.cpp's own CMakeLists.txt sets for ggml.
set(GGML_LLAMAFILE_DEFAULT ON)
set(GGML_CUDA_GRAPHS_DEFAULT ON)
set(GGML_METAL_EMBED_LIBRARY ON CACHE BOOL "one file: the Metal kernels go into the library")

set(BUILD_SHARED_LIBS OFF)
# ggml asks git for its commit, and would find that of the repository around the build tree.
set(GIT_EXE OFF CACHE INTERNAL "ggml: do not ask git")
string(SUBSTRING "${SPECEE_LLAMA_CPP_COMMIT}" 0 9 GGML_BUILD_COMMIT)

add_subdirectory("${SPECEE_STOCK_SOURCE}/ggml" "${CMAKE_CURRENT_BINARY_DIR}/ggml" EXCLUDE_FROM_ALL)

set(SPECEE_GGML_TARGETS "")
foreach(target ggml ggml-base ${GGML_AVAILABLE_BACKENDS})
    if(TARGET ${target})
        list(APPEND SPECEE_GGML_TARGETS ${target})
        if(WIN32) # export ggml's functions from the DLL that these objects end up in
            target_compile_definitions(${target} PRIVATE
                GGML_SHARED GGML_BUILD GGML_BACKEND_SHARED GGML_BACKEND_BUILD)
        endif()
    endif()
endforeach()
