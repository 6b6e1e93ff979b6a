/* The operations of pack.h with AVX2, FMA and F16C; pack_avx512.h says what they do. */
#if defined(PC_ISA) && PC_WIDTH == 8

PC_VECTOR void V(put_halves)(const vf *x, uint8_t *to) {
    for (int i = 0; i < 4; i++) {
        const __m128i halves = _mm256_cvtps_ph((__m256)x[i], _MM_FROUND_TO_NEAREST_INT);
        _mm_storeu_si128((__m128i *)(void *)(to + 16 * i), halves);
    }
}

PC_VECTOR void V(put_four_halves)(pc_4f x, uint8_t *to) {
    _mm_storel_epi64((__m128i *)(void *)to, _mm_cvtps_ph((__m128)x, _MM_FROUND_TO_NEAREST_INT));
}

PC_VECTOR void V(put_words)(const vi *x, uint8_t *to) {
    for (int i = 0; i < 2; i++) {
        const __m256i mixed = _mm256_packus_epi32((__m256i)x[2 * i], (__m256i)x[2 * i + 1]);
        _mm256_storeu_si256((__m256i *)(void *)(to + 32 * i),
                            _mm256_permute4x64_epi64(mixed, 0xD8));
    }
}

/* The lanes of one group as 32 bytes. */
PC_VECTOR __m256i V(as_bytes)(const vi *x) {
    const __m256i a = _mm256_packs_epi32((__m256i)x[0], (__m256i)x[1]);
    const __m256i b = _mm256_packs_epi32((__m256i)x[2], (__m256i)x[3]);
    const __m256i order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
    return _mm256_permutevar8x32_epi32(_mm256_packs_epi16(a, b), order);
}

PC_VECTOR void V(put_bytes)(const vi *x, uint8_t *to, int64_t step) {
    for (int g = 0; g < 2; g++) {
        _mm256_storeu_si256((__m256i *)(void *)(to + g * step), V(as_bytes)(x + 4 * g));
    }
}

PC_VECTOR void V(put_pairs)(const vi *x, uint8_t *to, int64_t step) {
    const __m256i factors = _mm256_set1_epi16(0x1001);
    const __m256i a = _mm256_maddubs_epi16(V(as_bytes)(x), factors);
    const __m256i b = _mm256_maddubs_epi16(V(as_bytes)(x + 4), factors);
    const __m256i bytes = _mm256_permute4x64_epi64(_mm256_packus_epi16(a, b), 0xD8);
    _mm_storeu_si128((__m128i *)(void *)to, _mm256_castsi256_si128(bytes));
    _mm_storeu_si128((__m128i *)(void *)(to + step), _mm256_extracti128_si256(bytes, 1));
}

PC_VECTOR void V(put_split)(const vi *x, uint8_t *to, int64_t step) {
    vi both[4];
    for (int i = 0; i < 4; i++) {
        const int low = i / 2 * 4 + i % 2;
        both[i] = x[low] | x[low + 2] << 4;
    }
    const __m256i a = _mm256_packus_epi32((__m256i)both[0], (__m256i)both[1]);
    const __m256i b = _mm256_packus_epi32((__m256i)both[2], (__m256i)both[3]);
    const __m256i order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
    const __m256i bytes = _mm256_permutevar8x32_epi32(_mm256_packus_epi16(a, b), order);
    _mm_storeu_si128((__m128i *)(void *)to, _mm256_castsi256_si128(bytes));
    _mm_storeu_si128((__m128i *)(void *)(to + step), _mm256_extracti128_si256(bytes, 1));
}

PC_VECTOR void V(get_pairs)(const uint8_t *from, vi *x) {
    const __m256i wide = _mm256_cvtepu8_epi16(_mm_loadu_si128((const __m128i *)(const void *)from));
    const __m256i bytes =
        _mm256_and_si256(_mm256_or_si256(wide, _mm256_slli_epi16(wide, 4)), _mm256_set1_epi8(15));
    const __m128i low = _mm256_castsi256_si128(bytes), high = _mm256_extracti128_si256(bytes, 1);
    x[0] = (vi)_mm256_cvtepu8_epi32(low);
    x[1] = (vi)_mm256_cvtepu8_epi32(_mm_srli_si128(low, 8));
    x[2] = (vi)_mm256_cvtepu8_epi32(high);
    x[3] = (vi)_mm256_cvtepu8_epi32(_mm_srli_si128(high, 8));
}

PC_VECTOR void V(get_split)(const uint8_t *from, vi *x) {
    for (int i = 0; i < 2; i++) {
        const __m256i wide =
            _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)(const void *)(from + 8 * i)));
        x[i] = (vi)_mm256_and_si256(wide, _mm256_set1_epi32(15));
        x[i + 2] = (vi)_mm256_srli_epi32(wide, 4);
    }
}

PC_VECTOR vf V(all_half)(const uint8_t *from) {
    int16_t half;
    memcpy(&half, from, sizeof half);
    return (vf)_mm256_cvtph_ps(_mm_set1_epi16(half));
}

PC_VECTOR vf V(min)(vf a, vf b) {
    return (vf)_mm256_min_ps((__m256)a, (__m256)b);
}

PC_VECTOR vf V(with_sign)(vf x, float magnitude) {
    return (vf)_mm256_or_ps(_mm256_and_ps((__m256)x, _mm256_set1_ps(-0.0f)),
                            _mm256_set1_ps(magnitude));
}

PC_VECTOR vf V(to_floats)(vi x) {
    return (vf)_mm256_cvtepi32_ps((__m256i)x);
}

PC_VECTOR vi V(cut)(vf x) {
    return (vi)_mm256_cvttps_epi32((__m256)x);
}

PC_VECTOR int V(any_nan)(vf a, vf b) {
    return _mm256_movemask_ps(_mm256_cmp_ps((__m256)a, (__m256)b, _CMP_UNORD_Q)) != 0;
}

PC_VECTOR vi V(higher)(vi a, vi b) {
    return (vi)_mm256_max_epi32((__m256i)a, (__m256i)b);
}

PC_VECTOR vi V(lower)(vi a, vi b) {
    return (vi)_mm256_min_epi32((__m256i)a, (__m256i)b);
}

PC_VECTOR __m256i V(greater)(const int floats, __m256i a, __m256i b) {
    return floats
               ? _mm256_castps_si256(_mm256_max_ps(_mm256_castsi256_ps(a), _mm256_castsi256_ps(b)))
               : _mm256_max_epi32(a, b);
}

PC_VECTOR pc_4i V(highest_of_each)(const int floats, const vi *v) {
    const __m256i a = (__m256i)v[0], b = (__m256i)v[1], c = (__m256i)v[2], d = (__m256i)v[3];
    const __m256i ab = V(greater)(floats, _mm256_permute2x128_si256(a, b, 0x20),
                                  _mm256_permute2x128_si256(a, b, 0x31));
    const __m256i cd = V(greater)(floats, _mm256_permute2x128_si256(c, d, 0x20),
                                  _mm256_permute2x128_si256(c, d, 0x31));
    /* in the lower half a, a, c, c, in the upper one b, b, d, d */
    __m256i x = V(greater)(floats, _mm256_unpacklo_epi64(ab, cd), _mm256_unpackhi_epi64(ab, cd));
    x = V(greater)(floats, x, _mm256_shuffle_epi32(x, 0xB1));
    const __m256i firsts = _mm256_setr_epi32(0, 4, 2, 6, 0, 4, 2, 6);
    return (pc_4i)_mm256_castsi256_si128(_mm256_permutevar8x32_epi32(x, firsts));
}

#endif
