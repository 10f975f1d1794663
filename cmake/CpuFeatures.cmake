# Chooses ggml's x86 instruction sets by running one instruction of each on this machine. What a
# processor announces is not proof: on some virtual machines announced sets fault when used. AMX is
# never chosen for that reason. Sets GGML_<SET> for ggml and SPECEE_CPU_FEATURES_USED for the build info.

set(SPECEE_CPU_FEATURES "probe" CACHE STRING
    "x86 instruction sets, e.g. \"sse42;avx;f16c;fma;bmi2;avx2\"; \"probe\": what this machine can run")

# set;gcc and clang flags;the sets without which it is not tried
set(_specee_features
    "SSE42|-msse4.2|"
    "AVX|-mavx|SSE42"
    "F16C|-mf16c|AVX"
    "FMA|-mfma|AVX"
    "BMI2|-mbmi2|"
    "AVX2|-mavx2|AVX"
    "AVX_VNNI|-mavx2 -mavxvnni|AVX2"
    "AVX512|-mavx512f -mavx512cd -mavx512vl -mavx512dq -mavx512bw|AVX2"
    "AVX512_VBMI|-mavx512f -mavx512bw -mavx512vbmi|AVX512"
    "AVX512_VNNI|-mavx512f -mavx512bw -mavx512vnni|AVX512"
    "AVX512_BF16|-mavx512f -mavx512bw -mavx512bf16|AVX512")

# Runs the probe of one set; the answer is cached as SPECEE_CAN_RUN_<set>.
function(specee_probe name flags)
    if(DEFINED SPECEE_CAN_RUN_${name})
        return()
    endif()
    if(MSVC)
        set(flags "") # its intrinsics need none
    endif()
    separate_arguments(flags NATIVE_COMMAND "${flags}")
    try_run(ran compiled
        "${CMAKE_CURRENT_BINARY_DIR}/cpu_probe/${name}" "${CMAKE_CURRENT_SOURCE_DIR}/cmake/cpu_probe.c"
        COMPILE_DEFINITIONS -DPROBE_${name} ${flags})
    set(can_run OFF)
    if(compiled AND ran EQUAL 0)
        set(can_run ON)
    endif()
    unset(ran CACHE)
    unset(compiled CACHE)
    set(SPECEE_CAN_RUN_${name} ${can_run} CACHE INTERNAL "this machine runs ${name}")
endfunction()

set(GGML_NATIVE OFF CACHE BOOL "off: the instruction sets are probed instead" FORCE)
set(SPECEE_CPU_FEATURES_USED "")
if(CMAKE_SYSTEM_PROCESSOR MATCHES "^(x86_64|AMD64|amd64|i686)$" AND NOT CMAKE_OSX_ARCHITECTURES MATCHES "arm64")
    string(TOUPPER "${SPECEE_CPU_FEATURES}" _specee_wanted)
    string(REPLACE "," ";" _specee_wanted "${_specee_wanted}")
    if(_specee_wanted STREQUAL "PROBE" AND CMAKE_CROSSCOMPILING)
        message(FATAL_ERROR "cross compiling: name the instruction sets, -DSPECEE_CPU_FEATURES=\"sse42;avx;...\"")
    endif()
    set(_specee_known "")
    foreach(feature IN LISTS _specee_features)
        string(REPLACE "|" ";" feature "${feature}")
        list(GET feature 0 name)
        list(GET feature 1 flags)
        list(GET feature 2 needs)
        list(APPEND _specee_known ${name})
        set(use OFF)
        if(NOT _specee_wanted STREQUAL "PROBE")
            if(name IN_LIST _specee_wanted)
                set(use ON)
            endif()
        elseif(NOT needs OR needs IN_LIST SPECEE_CPU_FEATURES_USED)
            specee_probe(${name} "${flags}")
            set(use ${SPECEE_CAN_RUN_${name}})
        endif()
        if(use)
            list(APPEND SPECEE_CPU_FEATURES_USED ${name})
        endif()
        set(GGML_${name} ${use} CACHE BOOL "chosen by SPECEE_CPU_FEATURES" FORCE)
    endforeach()
    if(NOT _specee_wanted STREQUAL "PROBE")
        list(REMOVE_ITEM _specee_wanted ${_specee_known})
        if(_specee_wanted)
            message(FATAL_ERROR "SPECEE_CPU_FEATURES: unknown ${_specee_wanted}; known: ${_specee_known}")
        endif()
    endif()
    foreach(name AMX_TILE AMX_INT8 AMX_BF16)
        set(GGML_${name} OFF CACHE BOOL "never: faults on some machines that announce it" FORCE)
    endforeach()
endif()
message(STATUS "CPU instruction sets: ${SPECEE_CPU_FEATURES_USED}")
