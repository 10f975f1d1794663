# Upstream's src/ compiled our way: object files, so that the patched and the plain llama.cpp can live in
# one build tree (upstream's own target names would clash) and each end up in one shared library.

# Compiles a llama.cpp source tree into the object library NAME; NAME-headers has its include paths.
function(specee_llama_objects name tree)
    file(GLOB core CONFIGURE_DEPENDS "${tree}/src/*.cpp")
    file(GLOB models CONFIGURE_DEPENDS "${tree}/src/models/*.cpp")
    add_library(${name}-headers INTERFACE)
    target_include_directories(${name}-headers SYSTEM INTERFACE
        "${tree}/include" "${tree}/src" "${tree}/ggml/include" "${tree}/vendor")

    add_library(${name} OBJECT ${core} ${models})
    # As upstream does: the many small model builders are compiled in groups.
    set_target_properties(${name} PROPERTIES UNITY_BUILD ON UNITY_BUILD_BATCH_SIZE 16)
    set_source_files_properties(${core} PROPERTIES SKIP_UNITY_BUILD_INCLUSION ON)
    set(LLAMA_VERSION "${SPECEE_LLAMA_CPP_VERSION}")
    set(LLAMA_BUILD_COMMIT "${GGML_BUILD_COMMIT}")
    configure_file("${tree}/src/llama-version.h.in" "${name}/llama-version.h" @ONLY)
    target_include_directories(${name} PRIVATE
        "${tree}/src" "${tree}/include" "${CMAKE_CURRENT_BINARY_DIR}/${name}")
    target_link_libraries(${name} PRIVATE ggml)
    if(WIN32)
        target_compile_definitions(${name} PRIVATE LLAMA_SHARED LLAMA_BUILD _CRT_SECURE_NO_WARNINGS)
    endif()
    if(MSVC)
        target_compile_options(${name} PRIVATE /utf-8 /bigobj)
    endif()
endfunction()

# Links ggml and the given object libraries into the shared library "llama" in FOLDER.
function(specee_llama_library name folder)
    set(objects "")
    foreach(target ${SPECEE_GGML_TARGETS} ${ARGN})
        list(APPEND objects $<TARGET_OBJECTS:${target}>)
    endforeach()
    add_library(${name} SHARED ${objects})
    set(output "${CMAKE_CURRENT_BINARY_DIR}/${folder}")
    set_target_properties(${name} PROPERTIES
        OUTPUT_NAME llama
        LINKER_LANGUAGE CXX
        LIBRARY_OUTPUT_DIRECTORY "${output}"
        RUNTIME_OUTPUT_DIRECTORY "${output}"
        ARCHIVE_OUTPUT_DIRECTORY "${CMAKE_CURRENT_BINARY_DIR}/import/${name}")
    # For what ggml itself needs (threads, OpenMP, CUDA); all its objects are in already.
    target_link_libraries(${name} PRIVATE ${SPECEE_GGML_TARGETS} ${CMAKE_DL_LIBS})
    if(SPECEE_HAS_BSYMBOLIC)
        target_link_options(${name} PRIVATE -Wl,-Bsymbolic)
    endif()
    install(TARGETS ${name}
        LIBRARY DESTINATION "specee_pc/${folder}"
        RUNTIME DESTINATION "specee_pc/${folder}"
        ARCHIVE EXCLUDE_FROM_ALL DESTINATION "import")
endfunction()

# Warnings for our own C++.
function(specee_warnings name)
    if(MSVC)
        target_compile_options(${name} PRIVATE /W4 /utf-8 $<$<BOOL:${SPECEE_WERROR}>:/WX>)
    else()
        target_compile_options(${name} PRIVATE -Wall -Wextra $<$<BOOL:${SPECEE_WERROR}>:-Werror>)
    endif()
endfunction()
