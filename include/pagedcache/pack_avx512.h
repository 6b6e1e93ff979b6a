/* The operations of pack.h with AVX-512 (F, BW, DQ, VL). What they do is said here; "a group" is 32
 * lanes in V(per_group) vectors. */
#if defined(PC_ISA) && PC_WIDTH == 16

/* Store a group as float16, rounded to nearest even; not for NaN. */
PC_VECTOR void V(put_halves)(const vf *x, uint8_t *to) {
    for (int i = 0; i < 2; i++) {
        const __m256i halves = _mm512_cvtps_ph((__m512)x[i], _MM_FROUND_TO_NEAREST_INT);
        _mm256_storeu_si256((__m256i *)(void *)(to + 32 * i), halves);
    }
}

/* Four finite float32 as float16. */
PC_VECTOR void V(put_four_halves)(pc_4f x, uint8_t *to) {
    _mm_storel_epi64((__m128i *)(void *)to, _mm_cvtps_ph((__m128)x, _MM_FROUND_TO_NEAREST_INT));
}

/* Store the low 16 bits of every lane of a group. */
PC_VECTOR void V(put_words)(const vi *x, uint8_t *to) {
    for (int i = 0; i < 2; i++) {
        _mm256_storeu_si256((__m256i *)(void *)(to + 32 * i), _mm512_cvtepi32_epi16((__m512i)x[i]));
    }
}

/* The low 8 bits of the lanes of two groups, in their order. */
PC_VECTOR __m512i V(as_bytes)(const vi *x) {
    const __m512i a = _mm512_packs_epi32((__m512i)x[0], (__m512i)x[1]);
    const __m512i b = _mm512_packs_epi32((__m512i)x[2], (__m512i)x[3]);
    const __m512i order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
    return _mm512_permutexvar_epi32(order, _mm512_packs_epi16(a, b));
}

/* Store two groups of numbers -128 … 127 as 32 bytes each, `step` apart. */
PC_VECTOR void V(put_bytes)(const vi *x, uint8_t *to, int64_t step) {
    const __m512i bytes = V(as_bytes)(x);
    _mm256_storeu_si256((__m256i *)(void *)to, _mm512_castsi512_si256(bytes));
    _mm256_storeu_si256((__m256i *)(void *)(to + step), _mm512_extracti64x4_epi64(bytes, 1));
}

/* Store two groups of numbers 0 … 15 as 16 bytes each, `step` apart: 2i in the low and 2i + 1 in
 * the high half of byte i. */
PC_VECTOR void V(put_pairs)(const vi *x, uint8_t *to, int64_t step) {
    const __m512i words = _mm512_maddubs_epi16(V(as_bytes)(x), _mm512_set1_epi16(0x1001));
    const __m256i bytes = _mm512_cvtepi16_epi8(words);
    _mm_storeu_si128((__m128i *)(void *)to, _mm256_castsi256_si128(bytes));
    _mm_storeu_si128((__m128i *)(void *)(to + step), _mm256_extracti128_si256(bytes, 1));
}

/* The same with i in the low and i + 16 in the high half of byte i. */
PC_VECTOR void V(put_split)(const vi *x, uint8_t *to, int64_t step) {
    for (int g = 0; g < 2; g++) {
        const __m512i high = _mm512_slli_epi32((__m512i)x[2 * g + 1], 4);
        _mm_storeu_si128((__m128i *)(void *)(to + g * step),
                         _mm512_cvtepi32_epi8(_mm512_or_si512((__m512i)x[2 * g], high)));
    }
}

/* A group that put_pairs stored. */
PC_VECTOR void V(get_pairs)(const uint8_t *from, vi *x) {
    const __m256i wide = _mm256_cvtepu8_epi16(_mm_loadu_si128((const __m128i *)(const void *)from));
    const __m256i bytes =
        _mm256_and_si256(_mm256_or_si256(wide, _mm256_slli_epi16(wide, 4)), _mm256_set1_epi8(15));
    x[0] = (vi)_mm512_cvtepu8_epi32(_mm256_castsi256_si128(bytes));
    x[1] = (vi)_mm512_cvtepu8_epi32(_mm256_extracti128_si256(bytes, 1));
}

/* A group that put_split stored. */
PC_VECTOR void V(get_split)(const uint8_t *from, vi *x) {
    const __m512i wide = _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)(const void *)from));
    x[0] = (vi)_mm512_and_si512(wide, _mm512_set1_epi32(15));
    x[1] = (vi)_mm512_srli_epi32(wide, 4);
}

/* What a group of numbers 0 … 15 stands for: (number + offset) * scale, plus minimum if there is
 * one. Each of the 16 is worked out once. */
PC_VECTOR void V(number_values)(const vi *q, float offset, vf scale, const vf *minimum, vf *x) {
    const __m512 numbers =
        _mm512_add_ps(_mm512_setr_ps(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15),
                      _mm512_set1_ps(offset));
    __m512 values = _mm512_mul_ps(numbers, (__m512)scale);
    if (minimum != NULL) {
        values = _mm512_add_ps(values, (__m512)*minimum);
    }
    for (int i = 0; i < 2; i++) {
        x[i] = (vf)_mm512_permutexvar_ps((__m512i)q[i], values);
    }
}

/* Signed integers as floats. */
PC_VECTOR vf V(to_floats)(vi x) {
    return (vf)_mm512_cvtepi32_ps((__m512i)x);
}

/* A float16 in every lane; NaN may be quieted. */
PC_VECTOR vf V(all_half)(const uint8_t *from) {
    int16_t half;
    memcpy(&half, from, sizeof half);
    return (vf)_mm512_cvtph_ps(_mm256_set1_epi16(half));
}

/* The lesser; b where one is NaN. */
PC_VECTOR vf V(min)(vf a, vf b) {
    return (vf)_mm512_min_ps((__m512)a, (__m512)b);
}

/* The sign of x with the bits of a magnitude. */
PC_VECTOR vf V(with_sign)(vf x, float magnitude) {
    return (vf)_mm512_castsi512_ps(_mm512_ternarylogic_epi32(
        _mm512_castps_si512((__m512)x), _mm512_set1_epi32(INT32_MIN),
        _mm512_castps_si512(_mm512_set1_ps(magnitude)), 0xEA)); /* x & sign | magnitude */
}

/* Floats inside -2^31 … 2^31 cut to signed integers. */
PC_VECTOR vi V(cut)(vf x) {
    return (vi)_mm512_cvttps_epi32((__m512)x);
}

/* Whether a lane of either is NaN. */
PC_VECTOR int V(any_nan)(vf a, vf b) {
    return _mm512_cmp_ps_mask((__m512)a, (__m512)b, _CMP_UNORD_Q) != 0;
}

/* The greater and the lesser as signed integers. */
PC_VECTOR vi V(higher)(vi a, vi b) {
    return (vi)_mm512_max_epi32((__m512i)a, (__m512i)b);
}

PC_VECTOR vi V(lower)(vi a, vi b) {
    return (vi)_mm512_min_epi32((__m512i)a, (__m512i)b);
}

/* Of each of four vectors the greatest lane: as signed integers, or as floats that are no NaN. */
PC_VECTOR __m512i V(greater)(const int floats, __m512i a, __m512i b) {
    return floats
               ? _mm512_castps_si512(_mm512_max_ps(_mm512_castsi512_ps(a), _mm512_castsi512_ps(b)))
               : _mm512_max_epi32(a, b);
}

PC_VECTOR pc_4i V(highest_of_each)(const int floats, const vi *v) {
    const __m512i a = (__m512i)v[0], b = (__m512i)v[1], c = (__m512i)v[2], d = (__m512i)v[3];
    const __m512i ab =
        V(greater)(floats, _mm512_shuffle_i32x4(a, b, 0x44), _mm512_shuffle_i32x4(a, b, 0xEE));
    const __m512i cd =
        V(greater)(floats, _mm512_shuffle_i32x4(c, d, 0x44), _mm512_shuffle_i32x4(c, d, 0xEE));
    __m512i x =
        V(greater)(floats, _mm512_shuffle_i32x4(ab, cd, 0x88), _mm512_shuffle_i32x4(ab, cd, 0xDD));
    x = V(greater)(floats, x, _mm512_shuffle_epi32(x, _MM_PERM_BADC));
    x = V(greater)(floats, x, _mm512_shuffle_epi32(x, _MM_PERM_CDAB));
    const __m512i firsts = _mm512_setr_epi32(0, 4, 8, 12, 0, 4, 8, 12, 0, 4, 8, 12, 0, 4, 8, 12);
    return (pc_4i)_mm512_castsi512_si128(_mm512_permutexvar_epi32(firsts, x));
}

#endif
