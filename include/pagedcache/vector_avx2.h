/* The operations of vector.h with AVX2, FMA and F16C; vector_avx512.h says what they
 * do. */
#if defined(PC_ISA) && PC_WIDTH == 8

PC_VECTOR vf V(all)(float x) {
    return (vf)_mm256_set1_ps(x);
}

PC_VECTOR vf V(fma)(vf a, vf b, vf c) {
    return (vf)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
}

PC_VECTOR vf V(max)(vf a, vf b) {
    return (vf)_mm256_max_ps((__m256)a, (__m256)b);
}

PC_VECTOR vi V(below)(vf a, vf b) {
    return (vi)(a < b);
}

PC_VECTOR vf V(half)(const uint8_t *from) {
    return (vf)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(const void *)from));
}

PC_VECTOR vf V(int8)(const uint8_t *from) {
    const __m128i bytes = _mm_loadl_epi64((const __m128i *)(const void *)from);
    return (vf)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(bytes));
}

PC_VECTOR void V(nibbles)(const uint8_t *from, vf *low, vf *high) {
    const __m256i x = _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)(const void *)from));
    const __m256i eight = _mm256_set1_epi32(8);
    const __m256i low4 = _mm256_and_si256(x, _mm256_set1_epi32(15));
    *low = (vf)_mm256_cvtepi32_ps(_mm256_sub_epi32(low4, eight));
    *high = (vf)_mm256_cvtepi32_ps(_mm256_sub_epi32(_mm256_srli_epi32(x, 4), eight));
}

PC_VECTOR vf V(bfloat)(const uint8_t *from) {
    const __m128i x = _mm_loadu_si128((const __m128i *)(const void *)from);
    return (vf)_mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(x), 16));
}

PC_VECTOR void V(half_pairs)(const uint8_t *from, vf *first, vf *second) {
    uint8_t low[2][16], high[2][16];
    for (int i = 0; i < 8; i++) {
        for (int j = 0; j < 2; j++) {
            memcpy(low[j] + 2 * i, from + 8 * i + 4 * j, 2);
            memcpy(high[j] + 2 * i, from + 8 * i + 4 * j + 2, 2);
        }
    }
    for (int j = 0; j < 2; j++) {
        first[j] = V(half)(low[j]);
        second[j] = V(half)(high[j]);
    }
}

PC_VECTOR void V(split_halves)(const uint8_t *from, vf *first, vf *second) {
    const __m256i pairs = _mm256_loadu_si256((const __m256i *)(const void *)from);
    const __m256i low = _mm256_and_si256(pairs, _mm256_set1_epi32(0xFFFF));
    const __m256i high = _mm256_srli_epi32(pairs, 16);
    /* 4 + 4 words of each in every half; the middle quarters change places */
    const __m256i both = _mm256_permute4x64_epi64(_mm256_packus_epi32(low, high), 0xD8);
    *first = (vf)_mm256_cvtph_ps(_mm256_castsi256_si128(both));
    *second = (vf)_mm256_cvtph_ps(_mm256_extracti128_si256(both, 1));
}

PC_VECTOR void V(transpose)(const uint8_t *const *rows, int64_t skip, float *to, int64_t stride) {
    __m128 a = _mm_loadu_ps((const float *)(const void *)(rows[0] + skip));
    __m128 b = _mm_loadu_ps((const float *)(const void *)(rows[1] + skip));
    __m128 c = _mm_loadu_ps((const float *)(const void *)(rows[2] + skip));
    __m128 d = _mm_loadu_ps((const float *)(const void *)(rows[3] + skip));
    _MM_TRANSPOSE4_PS(a, b, c, d);
    _mm_storeu_ps(to, a);
    _mm_storeu_ps(to + stride, b);
    _mm_storeu_ps(to + 2 * stride, c);
    _mm_storeu_ps(to + 3 * stride, d);
}

PC_VECTOR void V(add_up)(const vf *sums, float *out) {
    __m256 a[4], b[2];
    for (int i = 0; i < 4; i++) {
        const __m256 x = (__m256)sums[i], y = (__m256)sums[i + 4];
        a[i] =
            _mm256_add_ps(_mm256_permute2f128_ps(x, y, 0x20), _mm256_permute2f128_ps(x, y, 0x31));
    }
    for (int i = 0; i < 2; i++) {
        b[i] = _mm256_add_ps(_mm256_unpacklo_ps(a[2 * i], a[2 * i + 1]),
                             _mm256_unpackhi_ps(a[2 * i], a[2 * i + 1]));
    }
    _mm256_storeu_ps(out, _mm256_add_ps(_mm256_shuffle_ps(b[0], b[1], 0x44),
                                        _mm256_shuffle_ps(b[0], b[1], 0xEE)));
}

#endif
