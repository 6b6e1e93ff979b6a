/* The operations of vector.h with AVX-512 (F, BW, DQ, VL). What they do is said here. */
#if defined(PC_ISA) && PC_WIDTH == 16

PC_VECTOR vf V(all)(float x) {
    return (vf)_mm512_set1_ps(x);
}

/* a * b + c, in one rounding where the machine can. */
PC_VECTOR vf V(fma)(vf a, vf b, vf c) {
    return (vf)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
}

/* The greater; b where one is NaN. */
PC_VECTOR vf V(max)(vf a, vf b) {
    return (vf)_mm512_max_ps((__m512)a, (__m512)b);
}

/* All bits of the lanes in which a < b. */
PC_VECTOR vi V(below)(vf a, vf b) {
    return (vi)(a < b);
}

PC_VECTOR vf V(half)(const uint8_t *from) {
    return (vf)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)(const void *)from));
}

PC_VECTOR vf V(int8)(const uint8_t *from) {
    const __m128i bytes = _mm_loadu_si128((const __m128i *)(const void *)from);
    return (vf)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(bytes));
}

/* What the low and the high halves of PC_WIDTH bytes stand for. */
PC_VECTOR void V(look_up)(const uint8_t *from, __m512 meaning, vf *low, vf *high) {
    const __m512i x = _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)(const void *)from));
    *low = (vf)_mm512_permutexvar_ps(x, meaning); /* by the lowest 4 bits */
    *high = (vf)_mm512_permutexvar_ps(_mm512_srli_epi32(x, 4), meaning);
}

PC_VECTOR __m512 V(numbers)(void) {
    return _mm512_setr_ps(-8, -7, -6, -5, -4, -3, -2, -1, 0, 1, 2, 3, 4, 5, 6, 7);
}

/* The low and the high halves of PC_WIDTH bytes, less 8: numbers -8 … 7. */
PC_VECTOR void V(nibbles)(const uint8_t *from, vf *low, vf *high) {
    V(look_up)(from, V(numbers)(), low, high);
}

/* The same, times scale, plus offset: each of the 16 is worked out once. */
PC_VECTOR void V(scaled_nibbles)(const uint8_t *from, vf scale, vf offset, vf *low, vf *high) {
    V(look_up)(from, _mm512_fmadd_ps(V(numbers)(), (__m512)scale, (__m512)offset), low, high);
}

/* PC_WIDTH bfloat16 in their order. */
PC_VECTOR vf V(bfloat)(const uint8_t *from) {
    const __m256i x = _mm256_loadu_si256((const __m256i *)(const void *)from);
    return (vf)_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(x), 16));
}

/* 2 * PC_WIDTH pairs of float16: the first and the second ones of the even and of the odd pairs. */
PC_VECTOR void V(half_pairs)(const uint8_t *from, vf *first, vf *second) {
    const __m512i x = _mm512_loadu_si512(from), y = _mm512_loadu_si512(from + 64);
    const __m512i even =
        _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
    for (int i = 0; i < 2; i++) {
        const __m512i pairs =
            _mm512_permutex2var_epi32(x, _mm512_add_epi32(even, _mm512_set1_epi32(i)), y);
        first[i] = (vf)_mm512_cvtph_ps(_mm512_cvtepi32_epi16(pairs));
        second[i] = (vf)_mm512_cvtph_ps(_mm512_cvtepi32_epi16(_mm512_srli_epi32(pairs, 16)));
    }
}

/* PC_WIDTH pairs of float16: the first and the second ones. */
PC_VECTOR void V(split_halves)(const uint8_t *from, vf *first, vf *second) {
    const __m512i pairs = _mm512_loadu_si512(from);
    *first = (vf)_mm512_cvtph_ps(_mm512_cvtepi32_epi16(pairs));
    *second = (vf)_mm512_cvtph_ps(_mm512_cvtepi32_epi16(_mm512_srli_epi32(pairs, 16)));
}

/* Four rows of four float32, byte `skip` of each on, into columns `stride` apart. */
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

/* Of four rows, the 4 bytes at byte `skip` and 20, 40 and 60 behind it, into columns `stride` bytes
 * apart. Rows have 64 bytes from there on. */
#define PC_TURNS_PAIRS 1
PC_VECTOR void V(turn_pairs)(const uint8_t *const *rows, int64_t skip, uint8_t *to,
                             int64_t stride) {
    const __m512i fifths =
        _mm512_setr_epi32(0, 5, 10, 15, 0, 5, 10, 15, 0, 5, 10, 15, 0, 5, 10, 15);
    __m128 x[4];
    for (int i = 0; i < 4; i++) {
        const __m512i row = _mm512_loadu_si512(rows[i] + skip);
        x[i] = _mm_castsi128_ps(_mm512_castsi512_si128(_mm512_permutexvar_epi32(fifths, row)));
    }
    _MM_TRANSPOSE4_PS(x[0], x[1], x[2], x[3]);
    for (int i = 0; i < 4; i++) {
        _mm_storeu_ps((float *)(void *)(to + i * stride), x[i]);
    }
}

/* out[i] is the sum over the lanes of sums[i]. */
PC_VECTOR void V(add_up)(const vf *sums, float *out) {
    __m512 a[8], b[4], c[2];
    for (int i = 0; i < 8; i++) {
        const __m512 x = (__m512)sums[i], y = (__m512)sums[i + 8];
        a[i] = _mm512_add_ps(_mm512_shuffle_f32x4(x, y, 0x44), _mm512_shuffle_f32x4(x, y, 0xEE));
    }
    for (int i = 0; i < 4; i++) {
        b[i] = _mm512_add_ps(_mm512_shuffle_f32x4(a[i], a[i + 4], 0x88),
                             _mm512_shuffle_f32x4(a[i], a[i + 4], 0xDD));
    }
    for (int i = 0; i < 2; i++) {
        c[i] = _mm512_add_ps(_mm512_unpacklo_ps(b[2 * i], b[2 * i + 1]),
                             _mm512_unpackhi_ps(b[2 * i], b[2 * i + 1]));
    }
    const __m512 low = _mm512_shuffle_ps(c[0], c[1], 0x44);
    const __m512 high = _mm512_shuffle_ps(c[0], c[1], 0xEE);
    const __m512 all = _mm512_add_ps(low, high); /* quarters: sums 0-3, 8-11, 4-7, 12-15 */
    _mm512_storeu_ps(out, _mm512_shuffle_f32x4(all, all, 0xD8));
}

#endif
