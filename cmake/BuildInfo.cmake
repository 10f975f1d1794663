# What a library was built from and with. bench compares the two files and refuses libraries of
# different commits or flags.

string(TOUPPER "${CMAKE_BUILD_TYPE}" _type)
set(SPECEE_FLAGS "${CMAKE_BUILD_TYPE} ${CMAKE_CXX_FLAGS} ${CMAKE_CXX_FLAGS_${_type}}")
foreach(option OPENMP LLAMAFILE CPU_REPACK BLAS CUDA HIP METAL VULKAN)
    if(GGML_${option})
        string(APPEND SPECEE_FLAGS " ${option}")
    endif()
endforeach()
if(SPECEE_SANITIZE)
    string(APPEND SPECEE_FLAGS " sanitize=${SPECEE_SANITIZE}")
endif()
string(REGEX REPLACE "[ \\\\\"]+" " " SPECEE_FLAGS "${SPECEE_FLAGS}")
string(STRIP "${SPECEE_FLAGS}" SPECEE_FLAGS)
set(SPECEE_COMPILER "${CMAKE_CXX_COMPILER_ID} ${CMAKE_CXX_COMPILER_VERSION}")
string(REPLACE ";" " " _features "${SPECEE_CPU_FEATURES_USED}")

# Writes FILE (below the build tree) and sets <name>_BUILD_INFO to the same JSON text.
function(specee_build_info name patch_series file)
    set(SPECEE_CPU_FEATURES_USED "${_features}")
    configure_file(cmake/build_info.json.in "${file}" @ONLY)
    get_filename_component(folder "${file}" DIRECTORY)
    install(FILES "${CMAKE_CURRENT_BINARY_DIR}/${file}" DESTINATION "specee_pc/${folder}")
    file(READ "${CMAKE_CURRENT_BINARY_DIR}/${file}" text)
    string(STRIP "${text}" text)
    set(${name}_BUILD_INFO "${text}" PARENT_SCOPE)
endfunction()
