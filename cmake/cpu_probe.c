// Runs one instruction of the set that PROBE_<NAME> names and exits with 0 when its result is
// right. Where the processor, the hypervisor or the kernel lacks the set, the program dies instead.
#include <immintrin.h>

// Volatile, so that no compiler computes the answer itself.
static volatile int one = 1;

int main(void) {
#if defined(PROBE_SSE42)
    return _mm_crc32_u32(0, (unsigned)one) == 0 ? 1 : 0;
#elif defined(PROBE_AVX)
    const __m256 sum = _mm256_add_ps(_mm256_set1_ps((float)one), _mm256_set1_ps((float)one));
    return _mm256_movemask_ps(_mm256_cmp_ps(sum, _mm256_set1_ps(2.0f), _CMP_EQ_OQ)) == 0xff ? 0 : 1;
#elif defined(PROBE_F16C)
    const __m128 back = _mm_cvtph_ps(_mm_cvtps_ph(_mm_set1_ps((float)one), 0));
    return _mm_cvtss_f32(back) == 1.0f ? 0 : 1;
#elif defined(PROBE_FMA)
    const __m256 x = _mm256_set1_ps((float)one);
    return _mm256_cvtss_f32(_mm256_fmadd_ps(x, x, x)) == 2.0f ? 0 : 1;
#elif defined(PROBE_BMI2)
    return _pext_u32((unsigned)one << 4, 0x10u) == 1u ? 0 : 1;
#elif defined(PROBE_AVX2)
    const __m256i sum = _mm256_add_epi32(_mm256_set1_epi32(one), _mm256_set1_epi32(one));
    return _mm256_movemask_epi8(_mm256_cmpeq_epi32(sum, _mm256_set1_epi32(2))) == -1 ? 0 : 1;
#elif defined(PROBE_AVX_VNNI)
    const __m256i dot =
        _mm256_dpbusd_avx_epi32(_mm256_setzero_si256(), _mm256_set1_epi8((char)one), _mm256_set1_epi8((char)one));
    return _mm256_extract_epi32(dot, 0) == 4 ? 0 : 1;
#elif defined(PROBE_AVX512)
    // One instruction of each of F, CD, VL, DQ and BW.
    const __m512i f  = _mm512_add_epi32(_mm512_set1_epi32(one), _mm512_set1_epi32(one));
    const __m512i cd = _mm512_lzcnt_epi32(_mm512_set1_epi32(one));
    const __m256i vl =
        _mm256_ternarylogic_epi32(_mm256_set1_epi32(one), _mm256_setzero_si256(), _mm256_setzero_si256(), 0xf0);
    const __m512i dq = _mm512_mullo_epi64(_mm512_set1_epi64(one), _mm512_set1_epi64(one));
    const __m512i bw = _mm512_add_epi8(_mm512_set1_epi8((char)one), _mm512_set1_epi8((char)one));
    const int     ok = _mm512_cmpeq_epi32_mask(f, _mm512_set1_epi32(2)) == 0xffff &&
                   _mm512_cmpeq_epi32_mask(cd, _mm512_set1_epi32(31)) == 0xffff && _mm256_extract_epi32(vl, 0) == 1 &&
                   _mm512_cmpeq_epi64_mask(dq, _mm512_set1_epi64(1)) == 0xff &&
                   _mm512_cmpeq_epi8_mask(bw, _mm512_set1_epi8(2)) == ~0ull;
    return ok ? 0 : 1;
#elif defined(PROBE_AVX512_VBMI)
    const __m512i picked = _mm512_permutexvar_epi8(_mm512_setzero_si512(), _mm512_set1_epi8((char)one));
    return _mm512_cmpeq_epi8_mask(picked, _mm512_set1_epi8(1)) == ~0ull ? 0 : 1;
#elif defined(PROBE_AVX512_VNNI)
    const __m512i dot =
        _mm512_dpbusd_epi32(_mm512_setzero_si512(), _mm512_set1_epi8((char)one), _mm512_set1_epi8((char)one));
    return _mm512_cmpeq_epi32_mask(dot, _mm512_set1_epi32(4)) == 0xffff ? 0 : 1;
#elif defined(PROBE_AVX512_BF16)
    const __m512bh x   = _mm512_cvtne2ps_pbh(_mm512_set1_ps((float)one), _mm512_set1_ps((float)one));
    const __m512   dot = _mm512_dpbf16_ps(_mm512_setzero_ps(), x, x);
    return _mm512_cmp_ps_mask(dot, _mm512_set1_ps(2.0f), _CMP_EQ_OQ) == 0xffff ? 0 : 1;
#else
#error "define PROBE_<NAME>"
#endif
}
